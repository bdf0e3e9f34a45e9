# The workflow: which script makes what out of what. No logic here; every script has its own --help.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# Model and run
CONFIG ?= configs/tiny.yaml
# Text to convert: files, folders or globs; empty: Python's own sources and documentation
INPUT ?=
# Where the token shards go
DATA ?= data/$(basename $(notdir $(CONFIG)))
# Folder of the run; empty: runs/<config>-<time>
RUN ?=
# Degrees of data, tensor, pipeline and expert parallelism
DP ?= 1
TP ?= 1
PP ?= 1
EP ?= 1
# auto, CPU or Ascend
DEVICE ?= auto
# The interpreter that .venv is made with: CPython 3.11 or 3.12
PYTHON ?= python3
# More arguments for the script, as in ARGS="--set training.max_steps=50"
ARGS ?=

VENV := .venv/bin/python
LAYOUT = --dp_size $(DP) --tp_size $(TP) --pp_size $(PP) --ep_size $(EP)

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  variables: CONFIG=$(CONFIG) INPUT=$(INPUT) DATA=$(DATA) RUN=$(RUN) DP=$(DP) TP=$(TP) PP=$(PP) EP=$(EP) DEVICE=$(DEVICE) PYTHON=$(PYTHON) ARGS=$(ARGS)'

setup: .venv/.installed ## make .venv from the pinned requirements

check: setup ## is this machine fit to train?
	$(VENV) env_check.py --device $(DEVICE) $(ARGS)

data: $(DATA)/manifest.json ## text -> verified token shards in DATA

train: setup $(DATA)/manifest.json ## train CONFIG on DATA with DP x TP ranks
	$(VENV) pretrain.py --config $(CONFIG) --data $(DATA) $(LAYOUT) --device $(DEVICE) $(if $(RUN),--run_dir $(RUN)) $(ARGS)

test: .venv/.dev-installed ## run the tests
	$(VENV) -m pytest $(ARGS)

test-all: .venv/.dev-installed ## run the tests and the long matrices
	$(VENV) -m pytest -m "full or not full" $(ARGS)

lint: .venv/.dev-installed ## check style
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .

format: .venv/.dev-installed ## apply style
	$(VENV) -m ruff check --fix .
	$(VENV) -m ruff format .

golden: .venv/.dev-installed ## write the golden losses anew; say why in the commit
	$(VENV) tests/golden/make_golden.py

clean: ## remove .venv and caches; data and runs stay
	rm -rf .venv .pytest_cache .ruff_cache

.venv/.installed: requirements.txt constraints.txt
	$(PYTHON) -m venv .venv
	$(VENV) -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@

.venv/.dev-installed: requirements-dev.txt .venv/.installed
	$(VENV) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -c constraints.txt
	touch $@

$(DATA)/manifest.json: | .venv/.installed
	$(VENV) make_mindrecord.py --config $(CONFIG) $(if $(INPUT),--input $(INPUT)) --output $(DATA)

.PHONY: help setup check data train test test-all lint format golden clean

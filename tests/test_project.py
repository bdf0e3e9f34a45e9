"""What the project promises of itself: scripts can be copied, commands are explained, both READMEs agree."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small import ROOT, make_data

SCRIPTS = ["env_check.py", "make_mindrecord.py", "pretrain.py"]
NOUNS = sorted(path.stem for path in (ROOT / "picospore").glob("*.py") if path.stem != "__init__")
READMES = ["README.md", "README.zh-CN.md"]


def imported(path: Path) -> set[str]:
    """The modules of this project that a file imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def nouns_behind(path: Path) -> set[str]:
    """The nouns that a file needs, directly or through other nouns."""
    found, to_visit = set(), [path]
    while to_visit:
        for name in imported(to_visit.pop()):
            noun = name.removeprefix("picospore.")
            if name.startswith("picospore.") and noun not in found:
                found.add(noun)
                to_visit.append(ROOT / "picospore" / f"{noun}.py")
    return found


def copied_with(script: str) -> set[str]:
    text = " ".join(ast.get_docstring(ast.parse((ROOT / script).read_text())).split())
    return set(re.findall(r"picospore/(\w+)\.py", text.partition("Copy with: ")[2]))


# ---- scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_what_to_copy_with_it_and_that_is_enough(script, tmp_path):
    assert copied_with(script) == nouns_behind(ROOT / script)
    (tmp_path / "picospore").mkdir()
    for file in [script, "picospore/__init__.py", *(f"picospore/{noun}.py" for noun in copied_with(script))]:
        shutil.copy(ROOT / file, tmp_path / file)
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_answers_without_loading_mindspore(script):
    code = f"import sys, {script[:-3]}; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("noun", NOUNS)
def test_nouns_never_import_verbs(noun):
    verbs = {script.removesuffix(".py") for script in SCRIPTS}
    assert not imported(ROOT / "picospore" / f"{noun}.py") & verbs


def test_no_private_part_of_mindspore_or_mindformers_is_imported():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("picospore/*.py"), *ROOT.glob("benchmarks/*.py")]:
        for name in imported(path):
            assert not (name.startswith(("mindspore", "mindformers")) and "._" in name), f"{path}: {name}"


# ---- requirements -----------------------------------------------------------------------------------------


def test_every_requirement_is_pinned_exactly():
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        for line in (ROOT / name).read_text().splitlines():
            requirement = line.partition("#")[0].strip()
            assert not requirement or requirement.startswith("-r ") or "==" in requirement, f"{name}: {line}"


# ---- make and README --------------------------------------------------------------------------------------


def make(*arguments: str, cwd: Path = ROOT) -> str:
    """Standard output of make, which must succeed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", *arguments], cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands_of(readme: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def test_every_target_is_explained_by_make_help():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    explained = re.findall(r"^  make ([\w-]+) +\S", make("help"), re.MULTILINE)
    assert sorted(explained) == sorted(targets)
    assert make("-n") == make("-n", "help")


def test_make_train_prints_one_command_that_can_be_pasted():
    printed = make("-n", "train", "DP=2", "TP=4", "RUN=runs/x", "ARGS=--set training.max_steps=5")
    assert (
        "pretrain.py --config configs/tiny.yaml --data data/tiny --dp_size 2 --tp_size 4 --pp_size 1 "
        "--ep_size 1 --device auto --run_dir runs/x --set training.max_steps=5"
    ) in " ".join(printed.split())


def test_both_readmes_list_the_same_commands_and_tables():
    english, chinese = (commands_of(readme) for readme in READMES)
    assert english == chinese and "make train" in english and "make test" in english
    rows = [len(re.findall(r"^\|", (ROOT / readme).read_text(), re.MULTILINE)) for readme in READMES]
    assert rows[0] == rows[1]


def test_every_readme_command_names_things_that_exist():
    for command in commands_of(READMES[0]):
        if command.startswith("make "):
            subprocess.run(
                ["bash", "-c", f"make -n {command[5:]}"], cwd=ROOT, check=True, capture_output=True
            )
        for file in re.findall(r"[\w./-]+\.(?:py|yaml|txt)", command):
            assert (ROOT / file).exists(), command


@pytest.fixture
def clone(tmp_path):
    """A copy of the working tree that uses this environment instead of making its own."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv*", "data", "runs", ".*cache"))
    (clone / ".venv" / "bin").mkdir(parents=True)
    python = clone / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for stamp in (".installed", ".dev-installed"):
        (clone / ".venv" / stamp).touch()
    return clone


@pytest.mark.slow
def test_the_readmes_commands_take_a_fresh_clone_to_a_trained_model(clone, tmp_path):
    assert make("check", cwd=clone).splitlines()[-1] == "ready"
    short = "ARGS=--set training.max_steps=12 --set training.eval_samples=8 --set training.log_steps=6"
    printed = make("train", short, cwd=clone)
    assert "PSF License Agreement" in printed  # no text was given: it took Python's own and said whose it is
    assert "8 x gradient_accumulation_steps 1 x dp 1 = 8 samples = 2,048 tokens a step" in printed
    losses = [float(loss) for loss in re.findall(r"step +(?:6|12)/12 .* loss +([\d.]+)", printed)]
    assert 8.4 > losses[0] > losses[1] > 4
    assert "make_mindrecord" not in make("-n", "train", cwd=clone)  # a second run trains at once
    (run,) = (clone / "runs").iterdir()
    assert {path.name for path in run.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "tensorboard",
    }


@pytest.mark.slow
def test_make_data_and_train_take_ones_own_text_and_layout(clone, tmp_path):
    documents = make_data(tmp_path).parent / "documents.jsonl"
    own = ["CONFIG=tests/small.yaml", f"INPUT={documents}", "DATA=data/mine"]
    assert "documents   600 read: 600 written" in make("data", *own, cwd=clone)
    printed = make("train", *own, "DP=2", "RUN=runs/mine", cwd=clone)
    assert "dp 2 x tp 1 x pp 1 = 2 ranks on CPU" in printed and "done: step 20" in printed
    assert (clone / "runs" / "mine" / "checkpoints" / "step_00000020" / "COMPLETE").exists()


@pytest.mark.slow
def test_the_benchmark_reports_ours_beside_mindformers(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--rounds", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for contender in ("explicit", "mindformers"):
        row = re.search(rf"^{contender} +([\d,]+) +([\d,]+) ", done.stdout, re.MULTILINE)
        tokens_per_s, best = row.groups()
        assert 0 < int(tokens_per_s.replace(",", "")) <= int(best.replace(",", ""))

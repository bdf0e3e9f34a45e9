"""Each check is given what it would find, so that every failure can be had on a healthy machine."""

import subprocess
import sys
from pathlib import Path

import pytest

import env_check

REPO = Path(__file__).parents[1]
VERSION_MAP = {"mf": {"1.9.0": {"prefer": "2.9.0", "support": ["2.9.0"]}}}


@pytest.mark.slow
def test_this_machine_is_ready():
    argv = [sys.executable, "env_check.py", "--ranks", "2"]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "ready"
    names = [line.split()[1] for line in lines[:-1]]
    assert names == ["python", "numpy", "mindspore", "packages", "disk", "device", "all-reduce"]


def test_a_numpy_that_is_too_new_is_named_with_the_command_that_fixes_it():
    check = env_check.check_numpy("2.1.0")
    assert (check.status, check.fix) == ("fail", 'pip install "numpy<2"')
    assert "2.1.0" in check.detail
    assert env_check.check_numpy("1.26.4").status == "ok"
    assert env_check.check_numpy(None).status == "fail"


@pytest.mark.parametrize(("version", "status"), [((3, 10), "fail"), ((3, 12), "ok"), ((3, 13), "fail")])
def test_a_python_that_mindspore_is_not_built_for_fails(version, status):
    check = env_check.check_python(version)
    assert check.status == status
    assert bool(check.fix) == (status == "fail")


def test_a_pair_that_mindformers_does_not_support_fails_with_the_version_to_take():
    check = env_check.check_pair("2.8.0", "1.9.0", VERSION_MAP)
    assert (check.status, check.fix) == ("fail", 'pip install "mindspore==2.9.0"')
    assert env_check.check_pair("2.9.0", "1.9.0", VERSION_MAP).status == "ok"
    assert env_check.check_pair("2.9.0", "9.9.9", VERSION_MAP).status == "warn"
    assert env_check.check_pair("2.9.0", None, None).fix == env_check.INSTALL
    assert env_check.check_pair(None, "1.9.0", VERSION_MAP).fix == env_check.INSTALL


def test_the_installed_mindformers_says_what_it_supports():
    assert "1.9.0" in env_check.read_version_map()["mf"]


def test_a_missing_package_fails_and_another_version_warns():
    requirements = "# reasons\nnumpy==1.26.4       # a comment\nsafetensors==0.8.0\n"
    installed = {"numpy": "1.26.4", "safetensors": "0.8.0"}
    assert env_check.check_packages(requirements, installed.get).status == "ok"
    check = env_check.check_packages(requirements, {"numpy": "1.26.4"}.get)
    assert (check.status, check.fix) == ("fail", env_check.INSTALL)
    assert "safetensors" in check.detail
    check = env_check.check_packages(requirements, {**installed, "safetensors": "0.7.0"}.get)
    assert check.status == "warn"
    assert "safetensors 0.7.0 instead of 0.8.0" in check.detail


def test_a_full_disk_fails():
    assert env_check.check_disk(100.0, REPO).status == "ok"
    check = env_check.check_disk(0.5, REPO)
    assert check.status == "fail"
    assert "0.5 GiB" in check.detail and check.fix


def test_a_wrong_product_or_an_absent_card_fails():
    assert env_check.check_device("CPU", [7, 10, 15, 22], 0).status == "ok"
    check = env_check.check_device("CPU", [7, 10, 15, 21], 0)
    assert check.status == "fail" and check.fix
    check = env_check.check_device("Ascend", [], 0)
    assert check.status == "fail" and "npu-smi" in check.fix


def test_a_wrong_sum_fails_even_when_every_rank_was_content():
    assert env_check.check_all_reduce(2, 0, [1, 2], REPO).status == "ok"
    check = env_check.check_all_reduce(2, 0, [1, 0], REPO)
    assert check.status == "fail" and check.fix
    assert "[1, 0] instead of [1, 2]" in check.detail
    assert env_check.check_all_reduce(2, 1, None, REPO).status == "fail"
    assert env_check.check_all_reduce(2, 1, [1, 2], REPO).status == "fail"


def test_one_failed_check_fails_the_whole_and_lists_the_fix(monkeypatch, capsys):
    monkeypatch.setattr(env_check, "installed_version", lambda package: "2.1.0")
    assert env_check.main([]) == 1
    out = capsys.readouterr().out
    assert "ready" not in out
    assert 'numpy: pip install "numpy<2"' in out.split("to fix:")[1]

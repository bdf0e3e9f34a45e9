"""Training as users start it: every layout is the same run, wrong uses say what to do, nothing survives."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from small import CONFIG, ROOT, make_data, pretrain, run, steps

from picospore.checkpoint import read_checkpoint

# Losses are means over the same tokens, but layouts add them, and the terms of every product, in another
# order: fp32 rounding of some 1e-7 a sum, which 20 steps of training amplify. Measured: 1e-7 for losses, 1e-5
# for norms and moments.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def single(data, tmp_path_factory):
    """One process, global batch 8: what every other layout has to equal."""
    run_dir = tmp_path_factory.mktemp("single")
    return pretrain(data, run_dir), read_checkpoint(run_dir / "checkpoints" / "step_00000020")


def assert_same_run(records, checkpoint, single):
    """Losses, gradient norms, validation loss, and all that was learned: weights and both Adam moments."""
    expected_records, (_, expected) = single
    for key, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", GRADIENT_TOLERANCE)):
        np.testing.assert_allclose(steps(records, key), steps(expected_records, key), rtol=tolerance)
    val_loss, expected_val_loss = (
        [record["val_loss"] for record in of if record.get("kind") == "eval"]
        for of in (records, expected_records)
    )
    np.testing.assert_allclose(val_loss, expected_val_loss, rtol=LOSS_TOLERANCE)
    _, arrays = read_checkpoint(checkpoint)
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():  # exp_avg is the moving average of the gradients
        assert np.linalg.norm(arrays[name] - array) <= GRADIENT_TOLERANCE * np.linalg.norm(array), name


# ---- every layout is the same run ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (1, 4), (2, 2), (2, 4)])
def test_a_layout_gives_the_losses_gradients_and_weights_of_one_process(data, single, tmp_path, dp, tp):
    records = pretrain(
        data, tmp_path, "--dp_size", dp, "--tp_size", tp, "--set", f"training.batch_size={8 // dp}"
    )
    assert_same_run(records, tmp_path / "checkpoints" / "step_00000020", single)


@pytest.mark.slow
def test_accumulating_four_micro_batches_is_the_big_batch(data, single, tmp_path):
    records = pretrain(data, tmp_path, "--set", "training.batch_size=2",
                       "--set", "training.gradient_accumulation_steps=4")  # fmt: skip
    assert_same_run(records, tmp_path / "checkpoints" / "step_00000020", single)


@pytest.mark.slow
def test_compiled_and_operator_by_operator_are_the_same_run(data, single, tmp_path):
    records = pretrain(data, tmp_path, "--set", "training.jit=false")
    assert_same_run(records, tmp_path / "checkpoints" / "step_00000020", single)


def test_losses_are_the_golden_ones(single):
    golden = [
        float(line.split()[1]) for line in (ROOT / "tests/golden/small.losses").read_text().splitlines()
    ]
    np.testing.assert_allclose(steps(single[0], "loss"), golden, rtol=1e-4)


@pytest.mark.slow
def test_fp16_with_loss_scaling_follows_fp32(data, single, tmp_path):
    records = pretrain(data, tmp_path, "--set", "training.mixed_precision=fp16")
    np.testing.assert_allclose(steps(records, "loss"), steps(single[0], "loss"), rtol=5e-3)
    assert steps(records, "loss") != steps(single[0], "loss")


def test_the_warm_up_and_the_schedule_are_what_the_log_says(single):
    rates = [record["learning_rate"] for record in single[0] if "kind" not in record]
    assert rates[:4] == pytest.approx([3e-3 * step / 5 for step in (2, 3, 4, 5)])
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(
        0, abs=1e-9
    )


def test_a_record_tells_throughput_mfu_memory_and_data_wait(single):
    record = single[0][-4]
    for key in ("step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s",
                "step_time_s", "tokens_per_s_per_device", "samples_per_s", "data_wait_s", "comm_time_s",
                "mfu_pct", "memory_used_gib", "memory_peak_gib"):  # fmt: skip
        assert isinstance(record[key], int | float), key
    assert record["tokens"] == 20 * 8 * 32
    assert record["tokens_per_s"] * record["step_time_s"] == pytest.approx(8 * 32)
    assert 0 < record["mfu_pct"] < 100
    assert 0 <= record["data_wait_s"] < record["step_time_s"]


# ---- continuing ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit_and_a_cold_start_is_not(data, single, tmp_path):
    pretrain(data, tmp_path / "first", "--set", "checkpoint.save_steps=10")
    saved = tmp_path / "first" / "checkpoints" / "step_00000010"
    resumed = pretrain(data, tmp_path / "second", "--resume_from_ckpt", saved)
    for key in ("loss", "grad_norm"):
        assert steps(resumed, key) == steps(single[0], key)[10:]
        assert steps(resumed, key) != steps(single[0], key)[:10]


@pytest.mark.slow
def test_a_run_of_two_tensor_parallel_ranks_is_continued_by_one_process(data, single, tmp_path):
    pretrain(data, tmp_path / "first", "--tp_size", 2, "--set", "checkpoint.save_steps=10")
    saved = tmp_path / "first" / "checkpoints" / "step_00000010"
    resumed = pretrain(data, tmp_path / "second", "--resume_from_ckpt", saved)
    np.testing.assert_allclose(steps(resumed, "loss"), steps(single[0], "loss")[10:], rtol=LOSS_TOLERANCE)


def test_another_global_batch_or_model_is_refused_on_resume(data, single, tmp_path):
    saved = max((tmp_path.parent).glob("single*/checkpoints/step_*"))
    for override, sentence in (
        ("training.batch_size=4", "the global batch is 4"),
        ("model.rope_theta=5e5", "model.rope_theta is 500000.0"),
    ):
        done = run("pretrain.py", "--config", CONFIG, "--data", data, "--run_dir", tmp_path / "run",
                   "--resume_from_ckpt", saved, "--set", override)  # fmt: skip
        assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr


# ---- wrong uses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--tp_size", "3"],
            "num_attention_heads 8 is not divisible by parallel.tp 3: choose tp from 1, 2, 4",
        ),
        (["--set", "model.vocab_size=300"], "set model.vocab_size to 400 or more"),
        (["--set", "model.seq_length=64"], "records of 32 + 1, model.seq_length is 64"),
        (["--set", "training.learning_rte=1"], "did you mean training.learning_rate?"),
        (["--set", "training.mixed_precision=bf16"], "--set training.mixed_precision=fp32"),
        (["--data", "no/such/folder"], "no data folder no/such/folder: run `make data`"),
        (["--config", "no.yaml"], "no.yaml can't be read"),
        (["--dp_size", "two"], "got 'two', expected a whole number"),
        (["--nnodes", "2", "--run_dir", "r", "--dp_size", "3"], "3 ranks on 2 nodes"),
        (["--nnodes", "2", "--run_dir", "r", "--tp_size", "4"], "has to stay inside a node"),
        (["--nnodes", "2"], "--run_dir is needed"),
        (["--resume_from_ckpt", "no/step_00000001"], "is not a complete checkpoint"),
    ],
)
def test_a_wrong_use_exits_2_with_one_clear_message(data, tmp_path, arguments, sentence):
    run_dir = [] if "--nnodes" in arguments else ["--run_dir", tmp_path / "run"]
    done = run("pretrain.py", "--config", CONFIG, "--data", data, *run_dir, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_learning_rate_of_3e_4_is_a_number(data, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.read_text().replace("3.0e-3", "3e-4"))
    records = pretrain(data, tmp_path / "run", "--set", "training.max_steps=6", config=config)
    assert records[-4]["learning_rate"] < 3e-4 and records[-5]["learning_rate"] == 3e-4


def test_a_flipped_bit_in_the_data_is_refused_before_anything_is_trained(data, tmp_path):
    flipped = shutil.copytree(data, tmp_path / "data")
    shard = next(flipped.glob("train/*.mindrecord"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    done = run("pretrain.py", "--config", CONFIG, "--data", flipped, "--run_dir", tmp_path / "run")
    assert done.returncode == 2 and f"{shard} changed since it was written" in done.stderr


def test_ranks_that_do_not_match_the_layout_are_refused(data, tmp_path):
    """As msrun started by hand with another number of workers would do it."""
    env = {**os.environ, "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "3", "MS_SCHED_PORT": "1", "RANK_ID": "0"}
    command = [sys.executable, str(ROOT / "pretrain.py"), "--config", str(CONFIG), "--data", str(data),
               "--dp_size", "2", "--run_dir", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "dp 2 x tp 1 x pp 1 = 2 ranks, but msrun started 3" in done.stderr


def test_a_damaged_checkpoint_is_named_and_nothing_is_trained(data, single, tmp_path):
    saved = max(tmp_path.parent.glob("single*/checkpoints/step_*"))
    damaged = shutil.copytree(saved, tmp_path / saved.name)
    os.truncate(damaged / "rank_0000.safetensors", 100)
    done = run("pretrain.py", "--config", CONFIG, "--data", data, "--run_dir", tmp_path / "run",
               "--set", "training.max_steps=30", "--resume_from_ckpt", damaged)  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{damaged / 'rank_0000.safetensors'} is missing or damaged" in done.stderr


def test_a_folder_that_holds_checkpoints_is_not_started_over(data, single, tmp_path):
    saved = max(tmp_path.parent.glob("single*/checkpoints/step_*"))
    done = run("pretrain.py", "--config", CONFIG, "--data", data, "--run_dir", saved.parent.parent)
    assert done.returncode == 2
    assert "already holds checkpoints, the newest of step 20" in done.stderr
    assert f"--resume_from_ckpt {saved}" in done.stderr


def test_a_text_of_one_document_trains_without_validation_and_says_so(tmp_path):
    documents = make_data(tmp_path).parent / "documents.jsonl"
    (tmp_path / "book.txt").write_text(documents.read_text())
    made = run("make_mindrecord.py", "--config", CONFIG, "--input", tmp_path / "book.txt",
               "--output", tmp_path / "book")  # fmt: skip
    assert made.returncode == 0 and "validation is empty" in made.stderr
    done = run("pretrain.py", "--config", CONFIG, "--data", tmp_path / "book", "--run_dir", tmp_path / "run",
               "--set", "training.max_steps=3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no validation records" in done.stdout and "validation loss" not in done.stdout


# ---- ends ------------------------------------------------------------------------------------------------


def started(data: Path, run_dir: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A long dp2 run that has logged its first step, and all its processes."""
    command = [sys.executable, str(ROOT / "pretrain.py"), "--config", str(CONFIG), "--data", str(data),
               "--dp_size", "2", "--run_dir", str(run_dir), "--set", "training.max_steps=100000"]  # fmt: skip
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and any('"step": 5' in line for line in metrics.open())):
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
        time.sleep(0.2)
    return launcher, psutil.Process(launcher.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill -9 of a rank", "Ctrl-C"])
def test_a_run_that_is_killed_ends_at_once_and_leaves_no_process(data, tmp_path, how):
    launcher, processes = started(data, tmp_path / "run")
    if how == "Ctrl-C":
        launcher.send_signal(signal.SIGINT)
    else:
        next(
            p for p in processes if p.environ().get("RANK_ID") == "1" and "MS_WORKER" in p.environ().values()
        ).kill()
    output, _ = launcher.communicate(timeout=30)
    if how == "Ctrl-C":
        assert launcher.returncode == 130
    else:
        assert launcher.returncode == 1 and "rank 1 of 2" in output and "SIGKILL" in output
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert all(json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open())

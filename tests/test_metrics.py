"""What is logged is what was measured, and the three places that keep it agree."""

import json

import pytest

from picospore.metrics import Metrics, log_line, measured_gemm_flops_per_s, training_record


def record(**changes) -> dict:
    arguments = {
        "step": 20, "samples_per_epoch": 1000, "global_batch": 16, "seq_length": 32, "steps": 10,
        "seconds": 4.0, "data_wait_s": 0.1, "comm_time_s": 0.2, "devices": 2, "flops_per_token": 1000,
        "peak_flops_per_s": 1.6e6, "device": "CPU", "loss": 3.25, "learning_rate": 1e-3, "grad_norm": 0.5,
    }  # fmt: skip
    return training_record(**(arguments | changes))


def test_rates_follow_from_steps_and_seconds():
    r = record()
    assert (r["tokens_per_s"], r["tokens_per_s_per_device"]) == (1280, 640)  # 10 x 16 x 32 tokens in 4 s on 2
    assert (r["samples_per_s"], r["step_time_s"], r["tokens"]) == (40, 0.4, 10240)
    assert r["epoch"] == 0.32
    assert r["mfu_pct"] == pytest.approx(40)  # 640 tokens/s x 1000 FLOPs of 1.6 MFLOP/s
    assert (r["data_wait_s"], r["comm_time_s"]) == pytest.approx((0.01, 0.02))
    assert 0 < r["memory_used_gib"] <= r["memory_peak_gib"] < 100


def test_without_a_peak_there_is_no_mfu():
    r = record(peak_flops_per_s=None)
    assert r["mfu_pct"] is None and "MFU     -%" in log_line(r, 100)


def test_lines_of_one_run_are_equally_wide():
    assert len(log_line(record(), 10000)) == len(
        log_line(record(step=9999, loss=12.5, grad_norm=99.0), 10000)
    )


def test_terminal_file_and_tensorboard_get_the_same(tmp_path, capsys):
    metrics = Metrics(tmp_path, 100, first_step=0, progress=False)
    metrics.log(record())
    metrics.event("eval", "step 20: validation loss 3.0", step=20, val_loss=3.0, val_perplexity=20.1)
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == 3.25 and "kind" not in lines[0] and lines[1]["kind"] == "eval"
    assert "loss  3.25000" in capsys.readouterr().out
    (events,) = (tmp_path / "tensorboard").iterdir()
    raw = events.read_bytes()
    for tag in (
        b"train/loss",
        b"train/tokens_per_s",
        b"train/mfu_pct",
        b"eval/val_loss",
        b"eval/val_perplexity",
    ):
        assert tag in raw


def test_a_loss_that_is_not_a_number_is_null_in_the_file(tmp_path):
    metrics = Metrics(tmp_path, 100, first_step=0, progress=False)
    metrics.log(record(loss=float("nan"), grad_norm=float("inf")))
    metrics.event("eval", step=20, val_loss=float("nan"), val_perplexity=float("inf"))
    metrics.close()
    training, evaluation = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (training["loss"], training["grad_norm"], evaluation["val_loss"]) == (None, None, None)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_measured_rate_is_one_that_a_machine_can_have():
    assert 1e9 < measured_gemm_flops_per_s(size=512, repeats=3) < 1e15

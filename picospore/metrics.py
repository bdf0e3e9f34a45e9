"""What a run tells: one line per interval on the terminal, the same record in metrics.jsonl and TensorBoard.

Programs read metrics.jsonl: a line with a `kind` is an event (start, compile, eval, save, skip, end), a
line without is a training record. Unknown values are null, never 0.
"""

import json
import math
import resource
import sys
import time
from pathlib import Path

import mindspore as ms
import psutil
from tensorboardX import SummaryWriter
from tqdm import tqdm

GIB = 2**30


def memory_gib(device: str) -> tuple[float, float]:
    """(used, peak) memory in GiB: of the device on Ascend, of this process on CPU."""
    if device == "Ascend":
        return ms.runtime.memory_allocated() / GIB, ms.runtime.max_memory_allocated() / GIB
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
    used_bytes = psutil.Process().memory_info().rss
    return used_bytes / GIB, max(used_bytes, peak_kib * 1024) / GIB


def measured_gemm_flops_per_s(size: int = 1024, repeats: int = 8) -> float:
    """The best rate of compiled fp32 products of size x size matrices here: a stand-in for a CPU's peak.

    Compiled, because outside of jit MindSpore's products reach only half of it.
    """
    products = 4
    matmul = ms.ops.MatMul()

    def chain(x, weight):
        for _ in range(products):
            x = matmul(x, weight)
        return x

    compiled, eye, best_s = ms.jit(chain), ms.ops.eye(size, size, ms.float32), float("inf")
    for _ in range(repeats + 1):  # the first one compiles
        start = time.perf_counter()
        compiled(eye, eye).asnumpy()
        best_s = min(best_s, time.perf_counter() - start)
    return products * 2 * size**3 / best_s


class Metrics:
    """The run's record. Made on rank 0 only; `run_dir` gets metrics.jsonl and tensorboard/."""

    def __init__(self, run_dir: Path, max_steps: int, *, first_step: int, progress: bool):
        self.max_steps = max_steps
        run_dir.mkdir(parents=True, exist_ok=True)
        self.file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self.board = SummaryWriter(str(run_dir / "tensorboard"))
        self.bar = tqdm(total=max_steps, initial=first_step, unit="step", dynamic_ncols=True,
                        disable=not progress, leave=False, file=sys.stderr)  # fmt: skip

    def step_done(self) -> None:
        self.bar.update()

    def say(self, text: str) -> None:
        """A line for people, above the progress bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def log(self, record: dict) -> None:
        """A training record (see `training_record`): to the terminal, the file and TensorBoard."""
        self.say(log_line(record, self.max_steps))
        for key, value in self._write(record).items():
            if key not in ("step", "tokens") and value is not None:
                self.board.add_scalar(f"train/{key}", value, record["step"])

    def event(self, kind: str, text: str | None = None, **fields) -> None:
        """Something that happened once, as a line of its own; numbers of an evaluation go to TensorBoard."""
        if text:
            self.say(text)
        written = self._write({"kind": kind, **fields})
        if kind == "eval":
            for key in ("val_loss", "val_perplexity"):
                if written[key] is not None:
                    self.board.add_scalar(f"eval/{key}", written[key], fields["step"])

    def close(self) -> None:
        self.bar.close()
        self.board.close()
        self.file.close()

    def _write(self, record: dict) -> dict:
        """Append a line; JSON has no NaN or infinity, so they become null. Returns what was written."""
        known = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self.file.write(json.dumps(known, allow_nan=False) + "\n")
        self.file.flush()
        return known


def training_record(
    *, step, samples_per_epoch, global_batch, seq_length, steps, seconds, data_wait_s, comm_time_s,
    devices, flops_per_token, peak_flops_per_s, device, loss, learning_rate, grad_norm,
) -> dict:  # fmt: skip
    """The record of an interval of `steps` steps that took `seconds`, ending at `step`.

    Times and rates are means over the interval; loss, learning_rate and grad_norm are the last step's.
    MFU = tokens/s per device x FLOPs per token / peak FLOP/s per device, null without a peak.
    """
    tokens_per_s = global_batch * seq_length * steps / seconds
    per_device = tokens_per_s / devices
    used_gib, peak_gib = memory_gib(device)
    return {
        "step": step,
        "epoch": step * global_batch / samples_per_epoch,
        "loss": loss,
        "learning_rate": learning_rate,
        "grad_norm": grad_norm,
        "tokens": step * global_batch * seq_length,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": per_device,
        "samples_per_s": global_batch * steps / seconds,
        "step_time_s": seconds / steps,
        "data_wait_s": data_wait_s / steps,
        "comm_time_s": comm_time_s / steps,
        "mfu_pct": 100 * per_device * flops_per_token / peak_flops_per_s if peak_flops_per_s else None,
        "memory_used_gib": used_gib,
        "memory_peak_gib": peak_gib,
    }


def log_line(record: dict, max_steps: int) -> str:
    """The record as one line of fixed width."""
    width = len(str(max_steps))
    mfu = "    -" if record["mfu_pct"] is None else f"{record['mfu_pct']:5.1f}"
    wait_pct = 100 * record["data_wait_s"] / record["step_time_s"]
    return (
        f"step {record['step']:{width}d}/{max_steps}  epoch {record['epoch']:7.3f}  "
        f"loss {record['loss']:8.5f}  lr {record['learning_rate']:.2e}  "
        f"grad_norm {record['grad_norm']:7.3f}  "
        f"{record['tokens_per_s']:9,.0f} tok/s  MFU {mfu}%  mem {record['memory_used_gib']:5.2f} GiB  "
        f"data_wait {wait_pct:4.1f}%"
    )

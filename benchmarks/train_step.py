"""How fast is one train step: ours, MindFormers' Llama, and optionally a plain PyTorch eager Llama.

    python benchmarks/train_step.py [--torch_python .venv-torch/bin/python]

Prints tokens/s, achieved FLOP/s and their share of a measured matrix product's rate for each, and how many
times faster ours is. Each contender is a process of its own that takes steps when told, in turn (A B C A B
C), so a machine whose speed drifts is as slow for one as for the other. PyTorch wants its own environment:

    python -m venv .venv-torch && .venv-torch/bin/pip install -r benchmarks/requirements-torch.txt

Copy with: benchmarks/torch_llama.py and all of picospore/
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from picospore.config import ModelConfig, TrainingConfig  # noqa: E402
from picospore.estimate import flops_per_token  # noqa: E402

MODEL = ModelConfig(vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
                    intermediate_size=688, seq_length=256)  # fmt: skip
BATCH = 8
TRAINING = TrainingConfig(batch_size=BATCH, learning_rate=3e-4, max_steps=10**6)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender (15)")
    parser.add_argument("--torch_python", help="an interpreter that has torch")
    parser.add_argument("--contender", choices=["explicit", "mindformers"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.contender:
        return serve(args.contender)

    itself = [sys.executable, __file__, "--contender"]
    commands = {"explicit": [*itself, "explicit"], "mindformers": [*itself, "mindformers"]}
    if args.torch_python:
        commands["pytorch eager"] = [args.torch_python, str(HERE / "torch_llama.py")]
    workers = {"explicit": start(commands.pop("explicit"))}
    peak = float(workers["explicit"].stdout.readline().split()[1])  # measured before the others are there
    workers |= {name: start(command) for name, command in commands.items()}
    for name, worker in workers.items():
        if worker.stdout.readline().strip() != "ready":
            print(
                f"{name} did not start: run it alone to see why: {' '.join(commands[name])}", file=sys.stderr
            )
            return 1
    times_s = {name: [] for name in workers}
    for _ in range(args.rounds):
        for name, worker in workers.items():
            worker.stdin.write("step\n")
            worker.stdin.flush()
            times_s[name].append(float(worker.stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    report(times_s, peak)
    return 0


def report(times_s: dict[str, list[float]], peak_flops_per_s: float) -> None:
    tokens = BATCH * MODEL.seq_length
    m = MODEL
    shape = f"V {m.vocab_size} H {m.hidden_size} L {m.num_hidden_layers} S {m.seq_length} B {BATCH}"
    print(f"{shape} fp32, {os.cpu_count()} cores; plain products run at {peak_flops_per_s / 1e9:.0f} GFLOP/s")
    print(f"{'':14}{'tokens/s':>10}{'best':>8}{'GFLOP/s':>9}{'of product':>12}{'ours is':>10}")
    ours = times_s["explicit"]
    for name, seconds in times_s.items():
        median = tokens / statistics.median(seconds)
        flops_per_s = median * flops_per_token(MODEL)
        ratio = statistics.median(this / our for our, this in zip(ours, seconds, strict=True))
        best = tokens / min(seconds)
        print(f"{name:14}{median:10,.0f}{best:8,.0f}{flops_per_s / 1e9:9.1f}"
              f"{flops_per_s / peak_flops_per_s:12.0%}{ratio:9.2f}x")  # fmt: skip


# ---- a contender -----------------------------------------------------------------------------------------


def start(command: list[str]) -> subprocess.Popen:
    env = {**os.environ, "GLOG_v": "3"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    )


def serve(contender: str) -> int:
    """Compile, say `ready`, then take a step and print its seconds for each line that comes in."""
    import mindspore as ms
    import numpy as np

    from picospore.metrics import measured_gemm_flops_per_s
    from picospore.model import placements
    from picospore.optimizer import TrainStep
    from picospore.parallel import Mesh, ParallelDims

    answers = os.fdopen(os.dup(1), "w")  # MindFormers logs to standard output
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    mesh = Mesh(ParallelDims())
    net = explicit(ms, mesh) if contender == "explicit" else mindformers(ms)
    step = TrainStep(net, TRAINING, mesh, placements(net, MODEL, mesh))
    ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, (BATCH, MODEL.seq_length + 1), np.int32)
    batch = [(ids[:, :-1].copy(), ids[:, 1:].copy())]
    if contender == "explicit":
        print("peak", measured_gemm_flops_per_s(), file=answers, flush=True)
    for _ in range(3):
        step(batch, TRAINING.learning_rate)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        step(batch, TRAINING.learning_rate)
        print(time.perf_counter() - begin, file=answers, flush=True)
    return 0


def explicit(ms, mesh):
    from picospore.model import Llama, initialize

    net = Llama(MODEL, mesh, "CPU", ms.float32)
    initialize(net, MODEL, mesh, seed=0)
    return net


def mindformers(ms):
    """MindFormers' model under our optimizer step, so that the models are what is compared."""
    from mindformers import LlamaConfig, LlamaForCausalLM
    from mindspore import nn, ops

    float32 = {f"{kind}_type": "float32" for kind in ("param_init", "layernorm_compute", "softmax_compute",
                                                      "embedding_init")}  # fmt: skip
    config = LlamaConfig(
        batch_size=BATCH, seq_length=MODEL.seq_length, hidden_size=MODEL.hidden_size,
        num_layers=MODEL.num_hidden_layers, num_heads=MODEL.num_attention_heads, vocab_size=MODEL.vocab_size,
        intermediate_size=MODEL.intermediate_size, rms_norm_eps=MODEL.rms_norm_eps, pad_token_id=-1,
        use_flash_attention=False, fused_rms_norm=False, use_rope_slice=True,  # what runs on CPU
        compute_dtype="float32", rotary_dtype="float32", **float32,
    )  # fmt: skip

    class SummedLoss(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.llama = LlamaForCausalLM(config=config)

        def construct(self, inputs_BS, labels_BS):
            records = ops.concat((inputs_BS, labels_BS[:, -1:]), 1)  # it cuts inputs and labels out itself
            return self.llama(records).reshape(()) * labels_BS.size

    net = SummedLoss()
    net.set_train()
    return net


if __name__ == "__main__":
    sys.exit(main())

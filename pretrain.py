#!/usr/bin/env python3
"""Pretrain a Llama from token shards, on one process or on dp x tp ranks.

    python pretrain.py --config configs/tiny.yaml --data data/tiny --dp_size 2 --tp_size 4

starts its own ranks through msrun and prints the batch arithmetic, then one line per interval:

    batch      batch_size 8 x gradient_accumulation_steps 1 x dp 2 = 16 samples = 4,096 tokens a step
    ...
    step  20/300  epoch 0.012  loss  6.10313  lr 1.00e-03  grad_norm   1.214  2,950 tok/s  MFU  51.2% ...

The same record goes to RUN/metrics.jsonl and RUN/tensorboard, checkpoints to RUN/checkpoints. Exit codes: 0
done, 1 failed, 2 bad config or arguments.

Copy with: picospore/checkpoint.py, picospore/config.py, picospore/dataset.py, picospore/estimate.py,
picospore/kernels.py, picospore/launch.py, picospore/metrics.py, picospore/model.py, picospore/optimizer.py,
picospore/parallel.py
"""

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from picospore.checkpoint import (
    CheckpointError,
    complete_steps,
    read_checkpoint,
    read_state,
    save_checkpoint,
    step_folder,
)
from picospore.config import Config, ConfigError, dump_config, load_config
from picospore.dataset import DataError, Manifest, inputs_and_labels, train_batches, val_batches
from picospore.estimate import flops_per_token, parameter_count
from picospore.launch import is_rank, is_scheduler, on_terminal, rank_main, run_ranks

if TYPE_CHECKING:
    from picospore.metrics import Metrics
    from picospore.optimizer import TrainStep
    from picospore.parallel import Mesh

# MindSpore takes seconds to import, so what needs it is imported in the ranks: the launcher answers at once.


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if is_scheduler():
        return rank_main(lambda: 0)
    try:
        config = load_config(args.config, overrides_of(args))
        manifest = check(config, args)
    except ConfigError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2
    if is_rank():
        return rank_main(lambda: train(config, manifest, args))
    if config.world_size == 1:
        return train_alone(config, manifest, args)
    return run_ranks(
        [__file__, *(sys.argv[1:] if argv is None else argv), "--run_dir", args.run_dir],
        config.world_size,
        Path(args.run_dir) / "logs",
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
    )


# ---- arguments -------------------------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain a Llama from token shards, on one process or on dp x tp ranks.",
        epilog="Every key of the config can be set, as in --set training.learning_rate=1e-3",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="YAML", help="model and run, see configs/")
    add("--data", metavar="DIR", help="token shards of make_mindrecord.py (data.path)")
    add("--run_dir", metavar="DIR", help="where logs and results go (runs/<config>-<time>)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    for axis in ("dp", "tp", "pp", "ep"):
        add(f"--{axis}_size", metavar="N", help=f"short for --set parallel.{axis}=N")
    add("--device", choices=["auto", "CPU", "Ascend"], help="short for --set hardware.device=...")
    add("--resume_from_ckpt", metavar="DIR", type=Path, help="continue from this step_... folder")
    nodes = parser.add_argument_group("several nodes", "the same command on each, only node_rank differs")
    nodes.add_argument("--nnodes", type=int, default=1)
    nodes.add_argument("--node_rank", type=int, default=0)
    nodes.add_argument("--master_addr", default="127.0.0.1")
    nodes.add_argument("--master_port", type=int)
    args = parser.parse_args(argv)
    if args.run_dir is None:
        args.run_dir = f"runs/{Path(args.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        if args.nnodes > 1:
            parser.error("--run_dir is needed with --nnodes: all nodes must write to the same shared folder")
    return args


def overrides_of(args: argparse.Namespace) -> list[str]:
    """The short forms as overrides, before --set, so that the last word on a key wins."""
    short = {f"parallel.{axis}": getattr(args, f"{axis}_size") for axis in ("dp", "tp", "pp", "ep")}
    short |= {"hardware.device": args.device, "data.path": args.data}
    return [f"{key}={value}" for key, value in short.items() if value is not None] + args.overrides


def device_of(config: Config) -> str:
    """CPU or Ascend; auto means Ascend where its driver shows a card."""
    if config.hardware.device != "auto":
        return config.hardware.device
    return "Ascend" if Path("/dev/davinci_manager").exists() else "CPU"


def checkpoint_root(config: Config, args: argparse.Namespace) -> Path:
    return Path(config.checkpoint.save_path or Path(args.run_dir) / "checkpoints")


# ---- what can be known before a rank is started ----------------------------------------------------------


def check(config: Config, args: argparse.Namespace) -> Manifest:
    """The data to train on; raises ConfigError with everything that stands in the run's way."""
    problems, manifest = layout_problems(config, args), None
    if device_of(config) == "CPU" and config.training.mixed_precision == "bf16":
        problems.append(
            "training.mixed_precision is bf16, which MindSpore has on Ascend only: "
            "add --set training.mixed_precision=fp32"
        )
    if config.data.path is None:
        problems.append("no data: name the folder of make_mindrecord.py with --data, or as data.path")
    else:
        try:
            verify = config.data.verify_hashes and not is_rank()  # once, by the launcher
            manifest = Manifest.load(config.data.path, verify_hashes=verify)
            problems += data_problems(config, manifest)
        except DataError as error:
            problems.append(str(error))
    root = checkpoint_root(config, args)
    if args.resume_from_ckpt and manifest:
        problems += resume_problems(args.resume_from_ckpt, config, manifest)
    elif saved := complete_steps(root):
        problems.append(
            f"{root} already holds checkpoints, the newest of step {saved[-1]}: continue with "
            f"--resume_from_ckpt {step_folder(root, saved[-1])}, or name another --run_dir or save_path"
        )
    if problems:
        raise ConfigError(problems)
    return manifest


def layout_problems(config: Config, args: argparse.Namespace) -> list[str]:
    """What does not fit between the layout, the ranks that msrun started, and the nodes."""
    p, ranks, found = config.parallel, config.world_size, []
    started = int(os.environ["MS_WORKER_NUM"]) if is_rank() else ranks
    if started != ranks:
        found.append(
            f"dp {p.dp} x tp {p.tp} x pp {p.pp} = {ranks} ranks, but msrun started {started}: "
            f"change --dp_size or --tp_size, or msrun's --worker_num"
        )
    if args.nnodes < 1 or ranks % args.nnodes or ranks // args.nnodes % p.tp:
        found.append(
            f"{ranks} ranks on {args.nnodes} nodes with tp {p.tp}: every node needs equally many ranks, "
            f"a multiple of tp, because tp talks in every layer and has to stay inside a node"
        )
    return found


def data_problems(config: Config, manifest: Manifest) -> list[str]:
    """What does not fit between the data and the model or the batch."""
    found = manifest.problems(config.model.vocab_size, config.model.seq_length)
    if manifest.records("train") < config.training.batch_size:
        found.append(
            f"training.batch_size {config.training.batch_size} is more than the "
            f"{manifest.records('train')} train records of {manifest.folder}"
        )
    return found


def resume_problems(folder: Path, config: Config, manifest: Manifest) -> list[str]:
    """Why a run of this config and data would not be the continuation of that checkpoint's."""
    try:
        state = read_state(folder)
    except CheckpointError as error:
        return [str(error)]
    now, then = asdict(config), state["config"]
    fixed = [("model", key) for key in now["model"]] + [("training", "seed")]
    found = [
        f"{section}.{key} is {now[section][key]}, but {folder} was trained with {then[section].get(key)}"
        for section, key in fixed
        if now[section][key] != then[section].get(key)
    ]
    if state["consumed_samples"] != state["step"] * config.global_batch_size:
        found.append(
            f"the global batch is {config.global_batch_size}, but {folder} consumed "
            f"{state['consumed_samples']} samples in {state['step']} steps: "
            f"keep batch_size x gradient_accumulation_steps x dp"
        )
    if state["data_manifest_sha256"] != manifest.sha256:
        found.append(f"{manifest.folder} is not the data that {folder} was trained on: its manifest differs")
    return found


# ---- the run ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One rank's part of the run. `metrics` is there on rank 0 only, which speaks for all."""

    config: Config
    manifest: Manifest
    mesh: "Mesh"
    train_step: "TrainStep"
    metrics: "Metrics | None"
    checkpoints: Path


@dataclass
class Interval:
    """What has passed since the last log line."""

    steps: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    comm_time_s: float = 0.0


def train(config: Config, manifest: Manifest, args: argparse.Namespace) -> int:
    """One rank, from the first weights to the last checkpoint."""
    from picospore.metrics import Metrics, training_record
    from picospore.model import initialize
    from picospore.optimizer import learning_rate

    t = config.training
    device, mesh = device_of(config), make_mesh(config)
    train_step = make_train_step(config, mesh, device)
    if args.resume_from_ckpt:
        first_step = restore(args.resume_from_ckpt, train_step)
    else:
        first_step = 0
        initialize(train_step.net, config.model, mesh, t.seed)
    peak = peak_flops_per_s(config, device, mesh, args.nnodes)
    metrics = None
    if mesh.rank == 0:
        metrics = Metrics(Path(args.run_dir), t.max_steps, first_step=first_step, progress=on_terminal())
        (Path(args.run_dir) / "config.yaml").write_text(dump_config(config))
        introduce(metrics, config, manifest, device, *peak)
    run = Run(config, manifest, mesh, train_step, metrics, checkpoint_root(config, args))
    batches = train_batches(
        manifest,
        position=first_step * config.global_batch_size,
        batch_per_dp_rank=t.batch_size,
        dp=mesh.dp.size,
        dp_rank=mesh.dp.index,
        seed=t.seed,
    )

    interval = Interval()
    for step in range(first_step + 1, t.max_steps + 1):
        # ---- batch
        start = time.perf_counter()
        micro_batches = [
            inputs_and_labels(next(batches).tokens, manifest.pad_id)
            for _ in range(t.gradient_accumulation_steps)
        ]
        data_wait_s = time.perf_counter() - start

        # ---- step
        rate = learning_rate(step, t)
        result = train_step(micro_batches, rate)
        seconds = time.perf_counter() - start

        # ---- log
        if metrics:
            metrics.step_done()
            if not result.finite:
                tell_skipped(metrics, step, train_step.loss_scale.scale)
            if step == first_step + 1:
                tell_compiled(metrics, step, seconds, result, config.model.vocab_size)
            else:  # compilation would spoil the rates of the first step
                interval.steps += 1
                interval.seconds += seconds
                interval.data_wait_s += data_wait_s
                interval.comm_time_s += result.comm_time_s
            if interval.steps and (step % t.log_steps == 0 or step == t.max_steps):
                metrics.log(
                    training_record(
                        **asdict(interval),
                        step=step,
                        loss=result.loss,
                        learning_rate=rate,
                        grad_norm=result.grad_norm,
                        global_batch=config.global_batch_size,
                        seq_length=config.model.seq_length,
                        samples_per_epoch=manifest.records("train"),
                        flops_per_token=flops_per_token(config.model),
                        devices=config.world_size,
                        peak_flops_per_s=peak[0],
                        device=device,
                    )
                )
                interval = Interval()

        # ---- evaluate and save
        last = step == t.max_steps
        if manifest.records("validation") and (last or (t.eval_steps and step % t.eval_steps == 0)):
            evaluate(run, step)
        if last or (config.checkpoint.save_steps and step % config.checkpoint.save_steps == 0):
            save(run, step)

    if metrics:
        metrics.event("end", f"done: step {t.max_steps}, everything is in {args.run_dir}", step=t.max_steps)
        metrics.close()
    return 0


def train_alone(config: Config, manifest: Manifest, args: argparse.Namespace) -> int:
    """The run on one process: what a launcher would say of a rank that fails, it says itself."""
    try:
        return rank_main(lambda: train(config, manifest, args))
    except (CheckpointError, DataError, FloatingPointError, OSError) as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pretrain: interrupted", file=sys.stderr)
        return 130


def make_mesh(config: Config) -> "Mesh":
    """This process's place among the ranks; builds MindSpore's cluster when there are several."""
    import mindspore as ms

    from picospore.parallel import Mesh, ParallelDims

    p = config.parallel
    dims = ParallelDims(p.dp, p.tp, p.pp, p.ep)
    ms.set_device(device_of(config))
    if dims.world_size == 1:
        return Mesh(dims)
    ms.communication.init()
    return Mesh(dims, ms.communication.get_rank())


def make_train_step(config: Config, mesh: "Mesh", device: str) -> "TrainStep":
    """The model, still without weights, in what trains it."""
    import mindspore as ms

    from picospore.model import Llama, placements
    from picospore.optimizer import LossScale, TrainStep

    precision = config.training.mixed_precision
    dtype = {"fp32": ms.float32, "bf16": ms.bfloat16, "fp16": ms.float16}[precision]
    net = Llama(config.model, mesh, device, dtype)
    loss_scale = LossScale(2.0**16, dynamic=True) if precision == "fp16" else LossScale()
    return TrainStep(net, config.training, mesh, placements(net, config.model, mesh), loss_scale)


def peak_flops_per_s(
    config: Config, device: str, mesh: "Mesh", nnodes: int
) -> tuple[float | None, str | None]:
    """What MFU is measured against, per device, and where the number is from.

    A CPU has no number on a datasheet that its matrix products come near, so theirs is measured: by rank 0,
    which MindSpore gives all cores of the node, and divided by the ranks that share them.
    """
    from picospore.metrics import measured_gemm_flops_per_s

    if config.hardware.peak_tflops:
        return config.hardware.peak_tflops * 1e12, config.hardware.peak_source
    if device != "CPU":
        return None, None
    mesh.barrier()
    if mesh.rank == 0:
        node_flops_per_s = measured_gemm_flops_per_s()
    else:
        node_flops_per_s = 0.0
        time.sleep(1.0)  # not in a collective: waiting there takes cores
    mesh.barrier()
    return node_flops_per_s * nnodes / config.world_size, "measured fp32 GEMM rate / ranks on the node"


def introduce(metrics: "Metrics", config: Config, manifest: Manifest, device: str, peak, peak_source) -> None:
    """Say what is about to run, with the arithmetic that people get wrong."""
    t, p, m = config.training, config.parallel, config.model
    samples, records = config.global_batch_size, manifest.records("train")
    epochs = t.max_steps * samples / records
    metrics.say(f"model   {m.type}, {parameter_count(m):,} parameters, {t.mixed_precision}")
    metrics.say(
        f"batch   batch_size {t.batch_size} x gradient_accumulation_steps {t.gradient_accumulation_steps} "
        f"x dp {p.dp} = {samples} samples = {samples * m.seq_length:,} tokens a step"
    )
    metrics.say(
        f"data    {manifest.folder}, {records:,} samples: {t.max_steps:,} steps are {epochs:.2f} epochs"
    )
    if epochs > 4:
        metrics.say("        note: beyond 4 epochs repeated data teaches little (Muennighoff et al. 2023)")
    if not manifest.records("validation"):
        metrics.say("        note: no validation records, so the loss on unseen text is not measured")
    if t.warmup_steps >= t.max_steps:
        metrics.say(f"        note: the run ends inside its warm-up of {t.warmup_steps:,} steps")
    metrics.say(f"layout  dp {p.dp} x tp {p.tp} x pp {p.pp} = {config.world_size} ranks on {device}")
    if peak:
        metrics.say(f"peak    {peak / 1e9:,.0f} GFLOP/s per device ({peak_source})")
    else:
        metrics.say("peak    unknown, so no MFU: set hardware.peak_tflops and hardware.peak_source")
    metrics.event(
        "start",
        parameters=parameter_count(m),
        global_batch_size=samples,
        epochs=epochs,
        world_size=config.world_size,
        device=device,
        peak_flops_per_s=peak,
        peak_source=peak_source,
    )


def tell_compiled(metrics: "Metrics", step: int, seconds: float, result, vocab_size: int) -> None:
    text = f"step {step}: {seconds:.1f} s with compilation, loss {result.loss:.5f}"
    text += f" (a uniform guess: {math.log(vocab_size):.5f})"
    metrics.event("compile", text, step=step, seconds=seconds, loss=result.loss, grad_norm=result.grad_norm)


def tell_skipped(metrics: "Metrics", step: int, loss_scale: float) -> None:
    text = f"step {step}: gradients are not finite, step skipped; loss scale is now {loss_scale:g}"
    metrics.event("skip", text, step=step, loss_scale=loss_scale)


def evaluate(run: Run, step: int) -> None:
    """The mean loss over the first eval_samples validation samples: the same under every layout."""
    start = time.perf_counter()
    batches = val_batches(
        run.manifest,
        batch_per_dp_rank=run.config.training.batch_size,
        dp=run.mesh.dp.size,
        dp_rank=run.mesh.dp.index,
        limit=run.config.training.eval_samples,
    )
    loss = run.train_step.evaluate(inputs_and_labels(batch.tokens, run.manifest.pad_id) for batch in batches)
    if run.metrics:
        gain = math.log(run.config.model.vocab_size) - loss
        perplexity = math.exp(loss) if loss < 700 else math.inf
        text = f"step {step}: validation loss {loss:.4f}, perplexity {perplexity:.1f}, "
        run.metrics.event(
            "eval",
            text + f"{gain:.2f} nats better than a uniform guess",
            step=step,
            val_loss=loss,
            val_perplexity=perplexity,
            seconds=time.perf_counter() - start,
        )


def save(run: Run, step: int) -> None:
    """Write a checkpoint: of replicas the first writes, so nothing is written twice."""
    start, train_step, mesh = time.perf_counter(), run.train_step, run.mesh
    parts = {
        array.name: (place.strip(array.asnumpy()), place.shape, place.start)
        for array, place in train_step.state()
        if place.writer
    }
    state = {
        "step": step,
        "optimizer_steps": train_step.step,
        "consumed_samples": step * run.config.global_batch_size,
        "loss_scale": asdict(train_step.loss_scale),
        "config": asdict(run.config),
        "data_manifest_sha256": run.manifest.sha256,
    }
    keep_last = run.config.checkpoint.keep_last
    folder = save_checkpoint(
        run.checkpoints, step, parts, state, rank=mesh.rank, barrier=mesh.barrier, keep_last=keep_last
    )
    if run.metrics:
        seconds = time.perf_counter() - start
        run.metrics.event(
            "save", f"step {step}: saved {folder} in {seconds:.1f} s", step=step, seconds=seconds
        )


def restore(folder: Path, train_step: "TrainStep") -> int:
    """Load a checkpoint of any layout into this rank's parts; returns its step."""
    from mindspore import Tensor

    from picospore.optimizer import LossScale

    state, wholes = read_checkpoint(folder)
    for array, place in train_step.state():
        array.set_data(Tensor(place.cut(wholes[array.name])))
    train_step.step, train_step.loss_scale = state["optimizer_steps"], LossScale(**state["loss_scale"])
    return state["step"]


if __name__ == "__main__":
    sys.exit(main())

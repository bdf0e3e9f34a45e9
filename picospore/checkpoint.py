"""Checkpoints: one folder a step, written by all ranks, valid only when complete.

    step_00001000/
        rank_0000.safetensors   this rank's parts; metadata gives each one's shape and offset in the whole
        state.json              step, consumed samples, seed, loss scale, layout, config, data
        COMPLETE                the sha256 of every file above, written last, after fsync

A folder without COMPLETE, or with a file that does not match it, is no checkpoint. Parts carry their place in
the whole, so any layout can read what any other wrote.
"""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from picospore.dataset import file_sha256


class CheckpointError(ValueError):
    """A folder that can't be used as a checkpoint, and why."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def complete_steps(root: Path) -> list[int]:
    """The steps that were saved whole under `root`, in order of number (never of name or time)."""
    found = (re.fullmatch(r"step_(\d+)", path.parent.name) for path in root.glob("step_*/COMPLETE"))
    return sorted(int(match[1]) for match in found if match)


def save_checkpoint(
    root: Path, step: int, parts: dict, state: dict, *, rank: int, barrier, keep_last: int
) -> Path:
    """Write one checkpoint; every rank calls this. Returns its folder.

    `parts`: {name: (fp32 array, shape of the whole, offset in it)}, only what this rank has to write: of
    replicas one does. `barrier()` returns when all ranks have called it. Older checkpoints beyond `keep_last`
    are removed once this one is complete.
    """
    folder = step_folder(root, step)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # left behind by a save that was interrupted
        folder.mkdir(parents=True)
    barrier()
    if parts:
        arrays = {name: np.ascontiguousarray(array) for name, (array, _, _) in parts.items()}
        places = {name: json.dumps({"shape": s, "offset": o}) for name, (_, s, o) in parts.items()}
        path = folder / f"rank_{rank:04d}.safetensors"
        save_file(arrays, path, metadata=places)
        _fsync(path)
    barrier()
    if rank == 0:
        _write(folder / "state.json", json.dumps(state, indent=2))
        hashes = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
        _write(folder / "COMPLETE", json.dumps(hashes, indent=2))
        _fsync(folder)
        _fsync(root)
        for old in complete_steps(root)[:-keep_last]:
            shutil.rmtree(step_folder(root, old))
    barrier()
    return folder


def read_state(folder: Path) -> dict:
    """The state.json of a checkpoint; raises CheckpointError when the folder is not a complete one."""
    _check(folder, ["state.json"])
    return json.loads((folder / "state.json").read_text(encoding="utf-8"))


def read_checkpoint(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """(state, {name: whole fp32 array}) of a checkpoint, after checking every file's hash.

    Raises CheckpointError when the folder is not complete or a file is not what was written.
    """
    _check(folder)
    wholes: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                place = json.loads(file.metadata()[name])
                part = file.get_tensor(name)
                whole = wholes.setdefault(name, np.zeros(place["shape"], part.dtype))
                whole[tuple(slice(o, o + n) for o, n in zip(place["offset"], part.shape, strict=True))] = part
    return read_state(folder), wholes


def _check(folder: Path, names: list[str] | None = None) -> None:
    """That these files (all of them by default) are as they were written."""
    if not (folder / "COMPLETE").is_file():
        steps = ", ".join(map(str, complete_steps(folder.parent))) or "none"
        raise CheckpointError(f"{folder} is not a complete checkpoint; complete steps beside it: {steps}")
    hashes = json.loads((folder / "COMPLETE").read_text(encoding="utf-8"))
    for name in names or hashes:
        if not (folder / name).is_file() or file_sha256(folder / name) != hashes[name]:
            raise CheckpointError(f"{folder / name} is missing or damaged: take an older checkpoint")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

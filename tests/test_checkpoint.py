"""A checkpoint is whole and as it was written, or it does not exist."""

import json

import numpy as np
import pytest

from picospore.checkpoint import (
    CheckpointError,
    complete_steps,
    read_checkpoint,
    save_checkpoint,
    step_folder,
)


def save(root, step, keep_last=2, fill=1.0):
    """One rank's checkpoint with one whole array and one part of two."""
    parts = {
        "whole": (np.full((2, 3), fill, np.float32), (2, 3), (0, 0)),
        "part": (np.arange(4, dtype=np.float32).reshape(2, 2) + fill, (4, 2), (2, 0)),
    }
    return save_checkpoint(
        root, step, parts, {"step": step}, rank=0, barrier=lambda: None, keep_last=keep_last
    )


def test_parts_come_back_at_their_place_in_the_whole(tmp_path):
    state, arrays = read_checkpoint(save(tmp_path, 7))
    assert state == {"step": 7}
    np.testing.assert_array_equal(arrays["whole"], np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(arrays["part"], [[0, 0], [0, 0], [1, 2], [3, 4]])


def test_only_the_newest_by_number_are_kept(tmp_path):
    for step in (9, 10, 100, 9900, 10000):
        save(tmp_path, step)
    assert complete_steps(tmp_path) == [9900, 10000]


def test_an_interrupted_save_does_not_count_and_is_replaced(tmp_path):
    folder = save(tmp_path, 5)
    (folder / "COMPLETE").unlink()
    (folder / "left_behind.safetensors").write_bytes(b"half")
    assert complete_steps(tmp_path) == []
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_checkpoint(folder)
    state, _ = read_checkpoint(save(tmp_path, 5, fill=2.0))
    assert state["step"] == 5 and not (folder / "left_behind.safetensors").exists()


def test_an_older_checkpoint_stays_when_a_newer_save_was_interrupted(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "COMPLETE").unlink()
    assert complete_steps(tmp_path) == [1]
    with pytest.raises(CheckpointError, match="complete steps beside it: 1"):
        read_checkpoint(step_folder(tmp_path, 2))


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "empty", "missing"])
@pytest.mark.parametrize("name", ["rank_0000.safetensors", "state.json"])
def test_a_damaged_file_is_named(tmp_path, damage, name):
    folder = save(tmp_path, 3)
    path = folder / name
    raw = bytearray(path.read_bytes())
    if damage == "flipped bit":
        raw[-1] ^= 1
    path.write_bytes(raw if damage == "flipped bit" else raw[:-1] if damage == "truncated" else b"")
    if damage == "missing":
        path.unlink()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(folder)


def test_every_file_is_hashed(tmp_path):
    folder = save(tmp_path, 3)
    hashed = json.loads((folder / "COMPLETE").read_text())
    assert sorted(hashed) == sorted(path.name for path in folder.iterdir() if path.name != "COMPLETE")

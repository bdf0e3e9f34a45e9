"""Token shards on disk: their manifest, the order in which training sees them, and the batches.

A data folder holds `manifest.json`, the tokenizer, and MindRecord shards in `train/` and `validation/`.
A record is seq_length + 1 tokens, so every one of its seq_length inputs has its label in the same record.

The order is a pure function of (seed, epoch, index): a run's whole data state is one number, the samples
consumed so far, and it means the same under any layout.

Shapes: B micro-batch of one dp rank, S seq_length, T = S + 1 tokens of a record, N records asked for.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

FORMAT_VERSION = 1
IGNORE = -1  # a label that does not count, and a filler token that the model never sees
WINDOW_TOKENS = 2**21  # asked of MindRecord in one go: to begin costs some 10 to 50 ms, so it must be rare


class DataError(ValueError):
    """Data that cannot be used, with what to do about it."""


@dataclass(frozen=True)
class Shard:
    file: str  # relative to the data folder; MindRecord keeps an index beside it, named file + ".db"
    split: str
    records: int
    tokens: int  # every slot of its records, padding included
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    format_version: int
    corpus: str
    licence: str | None
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int | None
    seq_length: int
    shards: tuple[Shard, ...]
    totals: dict[str, int]
    broken: tuple[str, ...]  # the first broken documents, "file:line: why"
    command: str
    versions: dict[str, str]
    folder: Path

    @classmethod
    def load(cls, folder: str | Path, *, verify_hashes: bool = False) -> "Manifest":
        """Read manifest.json; check that its files are there, whole (size) and unchanged (hashes)."""
        folder = Path(folder)
        path = folder / "manifest.json"
        if not folder.is_dir():
            raise DataError(
                f"no data folder {folder}: run `make data`, or make_mindrecord.py --output {folder}"
            )
        if not path.is_file():
            raise DataError(
                f"{folder} has no manifest.json, so it is not a finished conversion: run `make data`"
            )
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            version = fields["format_version"]
            if version != FORMAT_VERSION:
                raise DataError(
                    f"{path}: format version {version}, expected {FORMAT_VERSION}: convert the data again"
                )
            shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
            broken = tuple(fields.pop("broken"))
            manifest = cls(**fields, shards=shards, broken=broken, folder=folder)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is damaged ({error}): convert the data again") from error
        manifest._check_files(verify_hashes)
        return manifest

    def save(self) -> None:
        fields = asdict(self)
        del fields["folder"]
        text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
        (self.folder / "manifest.json").write_text(text, encoding="utf-8")

    def _check_files(self, verify_hashes: bool) -> None:
        expected = {self.tokenizer: self.tokenizer_sha256}
        for shard in self.shards:
            expected |= {shard.file: shard.sha256, shard.file + ".db": shard.index_sha256}
        for name in expected:
            if not (self.folder / name).is_file():
                raise DataError(f"{self.folder / name} is missing: copy it back, or convert the data again")
        for shard in self.shards:
            size = (self.folder / shard.file).stat().st_size
            if size != shard.bytes:
                raise DataError(
                    f"{self.folder / shard.file} has {size:,} bytes, the manifest says {shard.bytes:,}: "
                    "copy it again, or convert the data again"
                )
        for name, sha256 in expected.items() if verify_hashes else ():
            if file_sha256(self.folder / name) != sha256:
                raise DataError(
                    f"{self.folder / name} changed since it was written (its sha256 is not the manifest's): "
                    "copy it again, or convert the data again"
                )

    @property
    def sha256(self) -> str:
        """Identity of the data: the manifest names the hash of every other file."""
        return file_sha256(self.folder / "manifest.json")

    def files(self, split: str) -> list[str]:
        return [str(self.folder / shard.file) for shard in self.shards if shard.split == split]

    def records(self, split: str) -> int:
        return sum(shard.records for shard in self.shards if shard.split == split)

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)

    def problems(self, vocab_size: int, seq_length: int) -> list[str]:
        """What keeps a model of this shape from training on this data; empty if nothing does."""
        found = []
        if self.vocab_size > vocab_size:
            found.append(
                f"{self.folder / self.tokenizer} has {self.vocab_size} ids, model.vocab_size {vocab_size}: "
                f"set model.vocab_size to {self.vocab_size} or more, or convert with a smaller tokenizer"
            )
        if self.seq_length != seq_length:
            found.append(
                f"{self.folder} has records of {self.seq_length} + 1, model.seq_length is {seq_length}: "
                f"set model.seq_length to {self.seq_length}, or convert with --seq_length {seq_length}"
            )
        return found


def file_sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


# ---- order: which sample stands at which position ---------------------------------------------------------


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit flips every output bit with probability about one half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(k: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """A bijection of [0, n) chosen by `key`, in O(1) memory; `key` is one uint64, or one for each k.

    A Feistel network permutes [0, 4^h), the smallest such range that holds n, whatever its round function.
    Values that land at n or above go through again until they fall inside (cycle walking, under four times
    on average).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def feistel(x: np.ndarray, key: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for turn in range(8):
            left, right = right, left ^ (_mix(right ^ _mix(key + np.uint64(turn))) & mask)
        return left << half | right

    k, key = np.broadcast_arrays(np.asarray(k, np.uint64), np.asarray(key, np.uint64))
    x = feistel(k, key)
    while (outside := x >= n).any():
        x[outside] = feistel(x[outside], key[outside])
    return x.astype(np.int64)


def sample_ids(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Global ids, in [0, n), of the samples at these positions; every epoch of n has an order of its own."""
    epoch, k = np.divmod(np.asarray(positions, np.uint64), np.uint64(n))
    key = _mix(_mix(np.full(1, seed % 2**64, np.uint64)) + epoch)
    return permute(k, n, key)


# ---- reading ----------------------------------------------------------------------------------------------


class Reader:
    """Records of one split by their global ids: 0 is the first record of the first shard in the manifest."""

    def __init__(self, manifest: Manifest, split: str):
        self.files = manifest.files(split)
        self.records = manifest.records(split)
        if not self.records:
            raise DataError(
                f"{manifest.folder} has no {split} records: convert more data, or change --val_fraction"
            )
        with self._errors_explained():
            found = self._dataset().get_dataset_size()
        if found != self.records:
            raise DataError(
                f"the {split} shards in {manifest.folder} hold {found:,} records, the manifest says "
                f"{self.records:,}: convert the data again"
            )

    def _dataset(self, sampler=None):
        # Imported late: who only asks the manifest should not wait seconds for MindSpore.
        import mindspore.dataset as ds

        return ds.MindDataset(
            self.files, ["input_ids"], num_parallel_workers=1, sampler=sampler, shuffle=None
        )

    def batches(self, ids: np.ndarray, batch: int) -> Iterator[np.ndarray]:
        """These records, in this order, `batch` at a time (the last may be shorter): int32 [B, T].

        MindSpore's own threads read ahead of the caller. Call it from the main thread: elsewhere an error
        inside MindSpore ends the process instead of being raised. It takes at most as many ids as records.
        """
        import mindspore.dataset as ds

        assert len(ids) <= self.records and min(ids) >= 0 and max(ids) < self.records, "ids outside the split"
        with self._errors_explained():
            dataset = self._dataset(ds.SubsetSampler(ids.tolist())).batch(batch, num_parallel_workers=1)
            for (tokens_BT,) in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
                yield tokens_BT

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"MindRecord cannot read {Path(self.files[0]).parent}: verify the hashes to find the "
                f"damaged file, and copy it again. {error}"
            ) from error


class Batch(NamedTuple):
    tokens: np.ndarray  # int32 [B, T]; rows of IGNORE fill up the last validation batch
    sample_ids: np.ndarray  # int64 [B]; IGNORE for such a row


def train_batches(
    manifest: Manifest, *, position: int, batch_per_dp_rank: int, dp: int, dp_rank: int, seed: int
) -> Iterator[Batch]:
    """Endless micro-batches of this dp rank, beginning with the sample at `position`.

    Positions go to the ranks B at a time, in turn: micro-step m of rank r takes the B positions from
    position + (m * dp + r) * B. So a step of A micro-steps consumes B * dp * A consecutive positions, the
    same ones however that product is split, and nothing here needs to know where a step ends.
    """
    reader, B = Reader(manifest, "train"), batch_per_dp_rank
    if reader.records < B:
        raise DataError(
            f"a batch of {B} is more than the {reader.records} train records: lower it, or convert more"
        )
    micro_steps = max(1, min(WINDOW_TOKENS // (manifest.seq_length + 1), reader.records) // B)
    own = (np.arange(micro_steps)[:, None] * dp + dp_rank) * B + np.arange(B)
    for at in itertools.count(position, micro_steps * dp * B):
        ids = sample_ids(at + own, reader.records, seed)
        for tokens_BT, ids_B in zip(reader.batches(ids.reshape(-1), B), ids, strict=True):
            yield Batch(tokens_BT, ids_B)


def val_batches(
    manifest: Manifest, *, batch_per_dp_rank: int, dp: int, dp_rank: int, limit: int | None = None
) -> Iterator[Batch]:
    """The validation records, at most `limit` of them, once each and in fixed order.

    Every rank gets equally many batches of one shape (a rank short of one would leave the others waiting);
    rows of IGNORE fill what is missing. `limit` counts records over all ranks, so the loss is the same under
    any layout.
    """
    reader, B = Reader(manifest, "validation"), batch_per_dp_rank
    n = reader.records if limit is None else min(reader.records, limit)
    steps = -(-n // (dp * B))
    ids = np.full(steps * dp * B, IGNORE, np.int64)
    ids[:n] = np.arange(n)
    ids = ids.reshape(steps, dp, B)[:, dp_rank]
    real = ids[ids != IGNORE]
    found = reader.batches(real, B) if len(real) else iter(())
    for ids_B in ids:
        tokens_BT = np.full((B, manifest.seq_length + 1), IGNORE, np.int32)
        for tokens_NT in itertools.islice(found, 1):
            tokens_BT[: len(tokens_NT)] = tokens_NT
        yield Batch(tokens_BT, ids_B)


def inputs_and_labels(tokens_BT: np.ndarray, pad_id: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and next-token labels, int32 [B, S] each.

    Labels are IGNORE where nothing is to be predicted (padding, filler rows); inputs are always valid ids.
    """
    inputs_BS = np.maximum(tokens_BT[:, :-1], 0)
    labels_BS = tokens_BT[:, 1:].copy()
    if pad_id is not None:
        labels_BS[labels_BS == pad_id] = IGNORE
    return inputs_BS, labels_BS

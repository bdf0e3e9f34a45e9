import itertools
import json

import numpy as np
import pytest

from make_mindrecord import RecordWriter
from picospore.dataset import (
    FORMAT_VERSION,
    IGNORE,
    DataError,
    Manifest,
    Reader,
    file_sha256,
    inputs_and_labels,
    permute,
    sample_ids,
    train_batches,
    val_batches,
)

T = 5  # tokens per record
TRAIN, VALIDATION = 103, 11


def rows(split: str) -> np.ndarray:
    """Records that tell where they come from: the first token is the row's number in the whole split."""
    n = {"train": TRAIN, "validation": VALIDATION}[split]
    return 70_000 * np.arange(n, dtype=np.int32)[:, None] + np.arange(T, dtype=np.int32)


def write_data(folder, shards=3) -> Manifest:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    written = []
    for split, files in (("train", shards), ("validation", 1)):
        writer = RecordWriter(folder, split, files, T, expected_bytes=1000)
        writer.write(rows(split))
        written += writer.close()
    Manifest(
        format_version=FORMAT_VERSION,
        corpus="numbers",
        licence=None,
        tokenizer="tokenizer.model",
        tokenizer_sha256=file_sha256(folder / "tokenizer.model"),
        vocab_size=8_000_000,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        seq_length=T - 1,
        shards=tuple(written),
        totals={},
        broken=(),
        command="",
        versions={},
        folder=folder,
    ).save()
    return Manifest.load(folder)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    return write_data(tmp_path_factory.mktemp("data") / "numbers")


@pytest.fixture
def fresh(tmp_path) -> Manifest:
    return write_data(tmp_path / "numbers")


def read(manifest, split, ids) -> np.ndarray:
    return next(Reader(manifest, split).batches(np.array(ids), len(ids)))


def take(batches, count):
    return list(itertools.islice(batches, count))


def ids_of(batches, count) -> list[int]:
    return np.concatenate([batch.sample_ids for batch in take(batches, count)]).tolist()


# ---- order ----------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_permute_is_a_bijection_of_any_size(n, key):
    assert sorted(permute(np.arange(n), n, key)) == list(range(n))


def test_permute_leaves_little_of_the_order_it_was_given():
    n = 4097
    x = permute(np.arange(n), n, 7)
    assert np.sum(x == np.arange(n)) < 10
    assert np.sum(np.diff(x) == 1) < 10
    assert abs(np.corrcoef(x, np.arange(n))[0, 1]) < 0.05


def test_an_order_of_a_trillion_samples_costs_nothing():
    ids = sample_ids(5 * 10**12 + np.arange(1000), 10**12, seed=0)
    assert len(set(ids.tolist())) == 1000 and ids.min() >= 0 and ids.max() < 10**12


def test_every_epoch_holds_all_samples_in_an_order_of_its_own():
    n = 1000
    first, second = sample_ids(np.arange(n), n, seed=0), sample_ids(n + np.arange(n), n, seed=0)
    assert sorted(first) == sorted(second) == list(range(n))
    assert np.sum(first == second) < 10
    assert np.sum(first == sample_ids(np.arange(n), n, seed=1)) < 10


def test_the_sample_at_a_position_does_not_depend_on_what_is_asked_with_it():
    n = 17
    whole = sample_ids(np.arange(200), n, seed=3)
    for start in (0, 1, 16, 17, 18, 50, 199):
        assert np.array_equal(sample_ids(np.arange(start, 200), n, seed=3), whole[start:])


# ---- reading ----------------------------------------------------------


def test_records_come_in_the_order_asked_from_all_shards(manifest):
    everything = read(manifest, "train", range(TRAIN))
    assert everything.dtype == np.int32 and everything.shape == (TRAIN, T)
    assert np.array_equal(everything[np.argsort(everything[:, 0])], rows("train"))
    ids = np.random.default_rng(0).permutation(TRAIN)[:40]
    assert np.array_equal(read(manifest, "train", ids), everything[ids])
    assert np.array_equal(read(manifest, "train", [7, 7, 0]), everything[[7, 7, 0]])


def test_ids_above_65535_survive(manifest):
    tokens = read(manifest, "train", range(TRAIN))
    assert tokens.max() == 70_000 * (TRAIN - 1) + T - 1


def test_batches_hold_the_records_of_their_sample_ids_across_windows_and_epochs(manifest, monkeypatch):
    monkeypatch.setattr("picospore.dataset.WINDOW_TOKENS", 4 * T * 3)  # windows of three micro-batches
    everything = read(manifest, "train", range(TRAIN))
    batches = train_batches(manifest, position=0, batch_per_dp_rank=4, dp=1, dp_rank=0, seed=5)
    seen = take(batches, 60)  # 240 samples: more than two epochs
    assert all(batch.tokens.shape == (4, T) and batch.tokens.dtype == np.int32 for batch in seen)
    for batch in seen:
        assert np.array_equal(batch.tokens, everything[batch.sample_ids])
    ids = np.concatenate([batch.sample_ids for batch in seen])
    assert np.array_equal(ids, sample_ids(np.arange(240), TRAIN, seed=5))
    assert sorted(ids[:TRAIN]) == sorted(ids[TRAIN : 2 * TRAIN]) == list(range(TRAIN))


@pytest.mark.parametrize("position", [8, 96, 104, 1000])
def test_training_resumed_at_any_position_sees_what_the_whole_run_saw(manifest, position):
    layout = {"batch_per_dp_rank": 2, "dp": 2, "dp_rank": 1, "seed": 5}
    whole = ids_of(train_batches(manifest, position=0, **layout), position // 4 + 10)
    assert ids_of(train_batches(manifest, position=position, **layout), 10) == whole[position // 2 :]


def test_a_step_has_the_same_samples_under_any_split_of_the_global_batch(manifest):
    def step(number, dp, accumulation):
        """The samples of one step, by rank."""
        position = 16 * number
        return [
            ids_of(
                train_batches(manifest, position=position, batch_per_dp_rank=4, dp=dp, dp_rank=rank, seed=0),
                accumulation,
            )
            for rank in range(dp)
        ]

    for number in (0, 6):  # the second one crosses the end of the epoch
        expected = sorted(sample_ids(16 * number + np.arange(16), TRAIN, seed=0))
        for dp, accumulation in ((1, 4), (2, 2), (4, 1)):
            ranks = step(number, dp, accumulation)
            assert sorted(sum(ranks, [])) == expected, f"dp {dp}, accumulation {accumulation}"


def test_ranks_share_no_sample_within_an_epoch(manifest):
    ranks = [
        set(ids_of(train_batches(manifest, position=0, batch_per_dp_rank=3, dp=4, dp_rank=rank, seed=0), 8))
        for rank in range(4)
    ]
    assert all(len(rank) == 24 for rank in ranks)
    assert len(set.union(*ranks)) == 96


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [None, 7, 1000])
def test_validation_gives_each_record_once_and_each_rank_equally_many_full_batches(manifest, dp, limit):
    ranks = [
        list(val_batches(manifest, batch_per_dp_rank=2, dp=dp, dp_rank=rank, limit=limit))
        for rank in range(dp)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = sum(ranks, [])
    assert {batch.tokens.shape for batch in batches} == {(2, T)}
    tokens = np.concatenate([batch.tokens for batch in batches])
    real = tokens[(tokens != IGNORE).all(axis=1)]
    expected = rows("validation")[: min(VALIDATION, limit or VALIDATION)]
    assert np.array_equal(real[np.argsort(real[:, 0])], expected)
    assert (tokens[(tokens == IGNORE).any(axis=1)] == IGNORE).all()


def test_a_batch_larger_than_the_data_is_refused(manifest):
    with pytest.raises(DataError, match="a batch of 200 is more than the 103 train records"):
        next(train_batches(manifest, position=0, batch_per_dp_rank=200, dp=1, dp_rank=0, seed=0))


def test_labels_are_the_next_token_and_ignore_padding_and_filler_rows():
    tokens = np.array([[5, 6, 7, 2], [5, 2, 3, 3], [IGNORE] * 4], np.int32)
    inputs, labels = inputs_and_labels(tokens, pad_id=3)
    assert inputs.dtype == labels.dtype == np.int32
    assert labels.tolist() == [[6, 7, 2], [2, IGNORE, IGNORE], [IGNORE] * 3]
    assert inputs[:2].tolist() == [[5, 6, 7], [5, 2, 3]]
    assert inputs.min() >= 0
    assert inputs_and_labels(tokens, pad_id=None)[1][1].tolist() == [2, 3, 3]


# ---- manifest ----------------------------------------------------------


def test_a_manifest_says_how_much_there_is(manifest):
    assert manifest.records("train") == TRAIN and manifest.tokens("train") == TRAIN * T
    assert manifest.records("validation") == VALIDATION and manifest.tokens("validation") == VALIDATION * T
    assert manifest.sha256 == file_sha256(manifest.folder / "manifest.json")


def test_shards_differ_by_one_record_at_most(manifest):
    sizes = [shard.records for shard in manifest.shards if shard.split == "train"]
    assert len(sizes) == 3 and max(sizes) - min(sizes) <= 1


def test_more_shards_than_records_makes_a_shard_per_record(tmp_path):
    writer = RecordWriter(tmp_path, "train", 4, T, expected_bytes=1000)
    writer.write(rows("train")[:3])
    assert [shard.records for shard in writer.close()] == [1, 1, 1]


def test_a_model_that_does_not_fit_the_data_is_told_why(manifest):
    assert manifest.problems(vocab_size=8_000_000, seq_length=T - 1) == []
    assert manifest.problems(vocab_size=9_000_000, seq_length=T - 1) == []
    small, long = manifest.problems(vocab_size=100, seq_length=4096)
    assert "8000000" in small and "100" in small and "4096" in long


def test_a_missing_folder_and_a_folder_without_manifest_say_what_to_run(tmp_path):
    with pytest.raises(DataError, match="no data folder .*make data"):
        Manifest.load(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no manifest.json.*make data"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["train/shard_00001.mindrecord", "train/shard_00002.mindrecord.db", "tokenizer.model"],
)
def test_a_missing_file_is_named(fresh, name):
    (fresh.folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Manifest.load(fresh.folder)


def test_a_truncated_shard_is_named(fresh):
    shard = fresh.folder / "train/shard_00001.mindrecord"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match="shard_00001.mindrecord has .* bytes, the manifest says"):
        Manifest.load(fresh.folder)


@pytest.mark.parametrize(
    "name",
    ["train/shard_00001.mindrecord", "train/shard_00001.mindrecord.db", "tokenizer.model"],
)
def test_a_flipped_bit_is_named_when_hashes_are_verified(fresh, name):
    path = fresh.folder / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    Manifest.load(fresh.folder)  # sizes agree
    with pytest.raises(DataError, match=f"{name} changed"):
        Manifest.load(fresh.folder, verify_hashes=True)


@pytest.mark.parametrize("damage", ["gone", "header", "index"])
def test_a_shard_damaged_after_the_start_is_an_error_that_says_where(fresh, damage):
    shard = fresh.folder / "train/shard_00001.mindrecord"
    if damage == "gone":
        shard.unlink()
    elif damage == "header":
        shard.write_bytes(b"x" * shard.stat().st_size)
    else:
        shard.with_name(shard.name + ".db").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="MindRecord cannot read .*/train"):
        take(train_batches(fresh, position=0, batch_per_dp_rank=4, dp=1, dp_rank=0, seed=0), 30)


def test_reading_does_not_change_the_files(fresh):
    read(fresh, "train", range(TRAIN))
    Manifest.load(fresh.folder, verify_hashes=True)


def test_a_manifest_that_disagrees_with_its_shards_is_refused(fresh):
    edit(fresh, lambda fields: fields["shards"][0].update(records=1000))
    with pytest.raises(DataError, match="hold 103 records, the manifest says"):
        Reader(Manifest.load(fresh.folder), "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.update(format_version=99), "format version 99, expected 1"),
        (lambda fields: fields.pop("eos_id"), "damaged"),
        (lambda fields: fields["shards"][0].pop("sha256"), "damaged"),
    ],
)
def test_a_manifest_of_another_format_is_refused(fresh, change, message):
    edit(fresh, change)
    with pytest.raises(DataError, match=message):
        Manifest.load(fresh.folder)


def edit(manifest, change):
    path = manifest.folder / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))

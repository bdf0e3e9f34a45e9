import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

import make_mindrecord
from picospore.dataset import Manifest, Reader

REPO = Path(__file__).parent.parent
PROSE = (
    "The shepherd counted his flock twice.\nRain came over the hill at noon, and nobody minded.\n\n"
    "def add(a, b):\n\treturn a + b  # 2024\n\n春眠不觉晓，处处闻啼鸟。\n夜来风雨声，花落知多少。\n"
)
HALF = ("--val_fraction", 0.5)
HARD = [
    "\tdef f():\r\n\t\treturn  1\n\n\n",
    "  spaces  at  both  ends  ",
    "中文，全角\u3000空格。",
    "👨\u200d👩\u200d👧 e\u0301 \ufb01 \u2028 </s>",
    "0123456789" * 9,
    "\n",
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    path.write_bytes(make_mindrecord.train_tokenizer(iter((PROSE * 5).splitlines()), 400))
    return path


def documents(count) -> list[str]:
    """Different texts of different lengths, made of what the tokenizer was trained on."""
    draw = random.Random(count)
    return [f"{n} " + " \n".join(draw.choices(PROSE.split(), k=n % 40)) for n in range(count)]


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    return path


def run(*args) -> int:
    return make_mindrecord.main([str(arg) for arg in args])


def convert(tokenizer, inputs, output, *args) -> Manifest:
    inputs = inputs if isinstance(inputs, list) else [inputs]
    small = ("--tokenizer", tokenizer, "--seq_length", 16, "--shards", 2)
    assert run("--input", *inputs, "--output", output, *small, *args) == 0
    return Manifest.load(output, verify_hashes=True)


def stream(manifest: Manifest, split: str) -> list[int]:
    """The split's tokens in the order they were written: record n went to shard n % shards."""
    n = manifest.records(split)
    records = next(Reader(manifest, split).batches(np.arange(n), n))
    shards = [shard.records for shard in manifest.shards if shard.split == split]
    parts = np.split(records, np.cumsum(shards)[:-1])
    order = [parts[n % len(parts)][n // len(parts)] for n in range(sum(shards))]
    return np.concatenate(order).tolist()


def texts_in(manifest: Manifest, split: str) -> list[str]:
    """The documents, found by the EOS behind each."""
    ids = [i for i in stream(manifest, split) if i != manifest.pad_id]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(manifest.folder / manifest.tokenizer))
    texts, start = [], 0
    for end in [at for at, i in enumerate(ids) if i == manifest.eos_id]:
        texts.append(processor.decode(ids[start:end]))
        start = end + 1
    assert start == len(ids), "the last document has no EOS"
    return texts


# ---- tokenizer ----------------------------------------------------------


@pytest.mark.parametrize("text", [*HARD, PROSE])
def test_the_tokenizer_gives_back_code_chinese_emoji_and_white_space(tokenizer, text):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    ids = processor.encode(text)
    assert processor.decode(ids) == text and processor.unk_id() not in ids
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, 3)


def test_a_text_begins_without_a_space_that_it_does_not_have(tokenizer):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    assert processor.encode("and", out_type=str)[0][0] == "a"


def test_a_trained_tokenizer_is_the_same_each_time_and_comes_with_the_data(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE * 5)
    for name in ("one", "two"):
        args = ("--train_tokenizer", "--vocab_size", 350, "--seq_length", 16, "--val_fraction", 0)
        assert run("--input", tmp_path / "a.txt", "--output", tmp_path / name, *args) == 0
    one, two = Manifest.load(tmp_path / "one"), Manifest.load(tmp_path / "two")
    assert one.vocab_size == 350 and one.tokenizer_sha256 == two.tokenizer_sha256
    assert one.shards == two.shards


def test_a_vocabulary_that_the_corpus_cannot_fill_or_fit_says_which_size_works(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(PROSE)
    for size, message in ((4096, "the corpus is too small"), (270, "--vocab_size 270 is too small")):
        args = ("--train_tokenizer", "--vocab_size", size)
        assert run("--input", tmp_path / "a.txt", "--output", tmp_path / "out", *args) == 1
        error = capsys.readouterr().err
        assert message in error and "; use " in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_the_tokenizer_is_trained_on_a_bounded_even_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(make_mindrecord, "SAMPLE_BYTES", 20_000)
    lines = [f"line {n:05d} of many" for n in range(10_000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("x" * 5000)
    corpus = make_mindrecord.find_corpus([str(tmp_path)])
    sample = list(make_mindrecord.sample_lines(corpus, "text", seed=0))
    assert 10_000 < sum(map(len, sample)) < 30_000 and max(map(len, sample)) <= 1000
    numbers = [int(line[5:10]) for line in sample if line.startswith("line")]
    assert 4000 < np.mean(numbers) < 6000
    assert sample == list(make_mindrecord.sample_lines(corpus, "text", seed=0))


# ---- nothing lost, nothing doubled --------------------------------------


def test_decoded_records_are_the_documents_with_an_eos_behind_each(tokenizer, tmp_path):
    texts = documents(60) + HARD[:4]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = convert(tokenizer, path, tmp_path / "out", "--val_fraction", 0.3)
    train, validation = texts_in(manifest, "train"), texts_in(manifest, "validation")
    assert train and validation
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in train], "documents keep their order"


def test_every_token_is_accounted_for(tokenizer, tmp_path):
    texts = documents(60)
    manifest = convert(tokenizer, write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", *HALF)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    total = manifest.totals
    assert total["tokens_text"] == sum(len(processor.encode(text)) for text in texts)
    assert total["tokens_special"] == len(texts) == total["documents_written"]
    slots = stream(manifest, "train") + stream(manifest, "validation")
    assert total["tokens_written"] == len(slots) == sum(shard.tokens for shard in manifest.shards)
    assert total["tokens_padded"] == slots.count(manifest.pad_id)
    assert total["tokens_dropped"] == 0
    assert total["tokens_text"] + total["tokens_special"] == total["tokens_written"] - total["tokens_padded"]


def test_a_tokenizer_without_pad_drops_the_tail_and_counts_it(tmp_path):
    model = tmp_path / "no_pad.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((PROSE * 5).splitlines()),
        model_prefix=str(model.with_suffix("")),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        minloglevel=2,
    )
    manifest = convert(model, write_jsonl(tmp_path / "a.jsonl", documents(60)), tmp_path / "out", *HALF)
    total = manifest.totals
    assert manifest.pad_id is None and total["tokens_padded"] == 0 and total["tokens_dropped"] > 0
    given = total["tokens_text"] + total["tokens_special"]
    assert given == total["tokens_written"] + total["tokens_dropped"]
    assert total["tokens_written"] == len(stream(manifest, "train") + stream(manifest, "validation"))


def test_bos_comes_first_when_asked_for_and_eos_stays(tokenizer, tmp_path):
    texts = documents(5)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = convert(tokenizer, path, tmp_path / "out", "--add_bos", "--val_fraction", 0)
    ids = stream(manifest, "train")
    assert ids.count(1) == ids.count(2) == 5 and ids[0] == 1
    assert all(ids[at + 1] in (1, manifest.pad_id) for at, i in enumerate(ids[:-1]) if i == 2)
    assert manifest.totals["tokens_special"] == 10


def test_a_record_that_mindrecord_leaves_out_is_noticed(tmp_path, monkeypatch):
    from mindspore.mindrecord import FileWriter

    write = FileWriter.write_raw_data
    monkeypatch.setattr(FileWriter, "write_raw_data", lambda self, rows: write(self, rows[1:]))
    writer = make_mindrecord.RecordWriter(tmp_path, "train", 1, 5, expected_bytes=100)
    writer.write(np.ones((7, 5), np.int32))
    with pytest.raises(make_mindrecord.DataError, match="7 records given, 6 written"):
        writer.close()


def test_a_document_longer_than_a_batch_of_records_is_whole(tokenizer, tmp_path):
    text = PROSE * 700
    (tmp_path / "a.txt").write_text(text)
    manifest = convert(tokenizer, tmp_path / "a.txt", tmp_path / "out", "--val_fraction", 0)
    assert manifest.records("train") > 2 * make_mindrecord.WRITE_ROWS
    assert texts_in(manifest, "train") == [text]


# ---- documents ----------------------------------------------------------


def test_the_split_of_a_document_does_not_change_when_data_is_added(tokenizer, tmp_path):
    texts = documents(80)
    before = write_jsonl(tmp_path / "before.jsonl", texts[:40])
    after = write_jsonl(tmp_path / "after.jsonl", texts[40:] + texts[:40])
    old = texts_in(convert(tokenizer, before, tmp_path / "old", "--val_fraction", 0.3), "validation")
    new = texts_in(convert(tokenizer, after, tmp_path / "new", "--val_fraction", 0.3), "validation")
    assert old and sorted(old) == sorted(set(new) & set(texts[:40]))


@pytest.mark.parametrize("empty", [[0], [2], [4], [0, 1, 3]])
def test_empty_documents_are_counted_wherever_they_stand(tokenizer, tmp_path, empty):
    texts = [" \n\t" if n % 2 else "" for n in range(5)]
    texts = [texts[n] if n in empty else f"document {n}" for n in range(5)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = convert(tokenizer, path, tmp_path / "out", "--val_fraction", 0)
    assert manifest.totals["documents_empty"] == len(empty)
    assert manifest.totals["documents_read"] == 5
    assert texts_in(manifest, "train") == [text for text in texts if text.strip()]


@pytest.mark.parametrize("given", [True, False], ids=["given tokenizer", "trained tokenizer"])
def test_only_empty_documents_fail_and_leave_nothing(tokenizer, tmp_path, capsys, given):
    write_jsonl(tmp_path / "a.jsonl", [" \n ", ""])
    args = ("--tokenizer", tokenizer) if given else ("--train_tokenizer",)
    assert run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", *args) == 1
    assert "empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_broken_documents_are_counted_and_named_by_file_and_line(tokenizer, tmp_path, capsys):
    lines = [
        b'{"text": "good"}',
        b'{"text": "half',
        b'{"body": "other key"}',
        b'{"text": 5}',
        b'"text"',
        b'{"text": "\xff"}',
        b'{"text": "hole\\u0000"}',
        b'{"text": "half a pair \\ud83d"}',
        b"[" * 100_000,
        b'{"text": "good too"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"fine\nfine\nnot \xe4 text\n")
    (tmp_path / "c.txt").write_bytes(b"fine\nho\0le\n")
    manifest = convert(tokenizer, tmp_path, tmp_path.with_name(tmp_path.name + "_out"), "--val_fraction", 0)
    assert texts_in(manifest, "train") == ["good", "good too"]
    assert manifest.totals["documents_broken"] == 10 and manifest.totals["documents_read"] == 12
    places = [line.removeprefix(f"{tmp_path}/").split(": ")[0] for line in manifest.broken]
    assert places == [f"a.jsonl:{n}" for n in range(2, 10)] + ["b.txt:3", "c.txt:2"]
    assert f"{tmp_path}/a.jsonl:3: no key 'text'; the keys are body" in capsys.readouterr().out


def test_a_broken_document_ends_the_run_when_told_to(tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    args = ("--tokenizer", tokenizer, "--on_error", "stop")
    assert run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "out", *args) == 1
    assert "a.jsonl:2: 'text' is int, expected a string" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_byte_order_mark_goes_and_line_ends_stay(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "three\\r\\n"}\r\n{"text": "four"}')
    manifest = convert(tokenizer, tmp_path, tmp_path.with_name(tmp_path.name + "_out"), "--val_fraction", 0)
    assert texts_in(manifest, "train") == ["one\r\ntwo", "three\r\n", "four"]


def test_folders_patterns_and_files_are_each_read_once_in_sorted_order(tmp_path):
    for name in ("b/2.md", "b/1.txt", "a.jsonl", "b/.hidden/3.txt", "b/image.png", "odd.xyz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    found = make_mindrecord.find_files([str(tmp_path / "b/*.txt"), str(tmp_path), str(tmp_path / "odd.xyz")])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b/1.txt", "a.jsonl", "b/2.md", "odd.xyz"]


def test_the_corpus_without_input_is_the_standard_library_without_its_tests():
    corpus = make_mindrecord.find_corpus([])
    assert "PSF" in corpus.licence and "standard library" in corpus.name
    assert 300 < len(corpus.files) < 2000 and 5e6 < corpus.bytes < 5e7 and len(corpus.texts) > 50
    assert not [path for path in corpus.files if {"test", "tests", "site-packages"} & set(path.parts)]


def test_an_empty_validation_split_is_said(tokenizer, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(PROSE)
    convert(tokenizer, tmp_path / "a.txt", tmp_path / "out", "--val_fraction", 0.0001)
    assert "validation is empty" in capsys.readouterr().err


# ---- what is refused ----------------------------------------------------


def test_an_output_that_exists_is_refused_and_replaced_only_when_told_to(tokenizer, tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])
    first = convert(tokenizer, path, tmp_path / "out", "--val_fraction", 0)
    write_jsonl(path, ["two"])
    args = ("--input", path, "--output", tmp_path / "out", "--tokenizer", tokenizer)
    assert run(*args) == 2 and "--overwrite" in capsys.readouterr().err
    assert texts_in(first, "train") == ["one"]
    second = convert(tokenizer, path, tmp_path / "out", "--val_fraction", 0, "--overwrite")
    assert texts_in(second, "train") == ["two"]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_overwrite_spares_a_folder_that_is_no_conversion(tokenizer, tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "home").mkdir()
    (tmp_path / "home/diary.txt").write_text("dear")
    args = ("--input", path, "--tokenizer", tokenizer, "--overwrite")
    assert run("--output", tmp_path / "home", *args) == 2
    assert (tmp_path / "home/diary.txt").read_text() == "dear"


@pytest.mark.parametrize("output", ["in", "in/a.txt", "in/new", "tokens/small.model", "tokens", "."])
def test_an_output_that_touches_an_input_or_the_tokenizer_is_refused(tokenizer, tmp_path, capsys, output):
    for name in ("in", "tokens"):
        (tmp_path / name).mkdir()
    (tmp_path / "in/a.txt").write_text("text")
    (tmp_path / "tokens/small.model").write_bytes(tokenizer.read_bytes())
    before = sorted(tmp_path.rglob("*"))
    args = ("--input", tmp_path / "in", "--tokenizer", tmp_path / "tokens/small.model", "--overwrite")
    assert run("--output", tmp_path / output, *args) == 2
    assert "which is read" in (error := capsys.readouterr().err) or "is in the input folder" in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--input", "nowhere.txt"], "no such file"),
        (["--input", "{repo}", "--tokenizer", "nowhere.model"], "no such file"),
        (["--input", "{repo}", "--tokenizer", "{repo}/LICENSE"], "not a SentencePiece model"),
        (["--tokenizer", "{repo}/LICENSE", "--vocab_size", "10"], "--vocab_size belongs to"),
        (["--seq_length", "0", "--shards", "0", "--val_fraction", "1"], "--shards 0"),
        (["--seq_length", "0"], "--seq_length 0: expected 1 or more"),
    ],
)
def test_wrong_arguments_are_explained_and_exit_with_2(tmp_path, capsys, args, message):
    args = [arg.format(repo=REPO) for arg in args]
    assert run("--output", tmp_path / "out", *args) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_a_folder_without_text_fails(tokenizer, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    args = ("--input", tmp_path / "in", "--tokenizer", tokenizer)
    assert run("--output", tmp_path / "out", *args) == 1
    assert "no text in" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_is_explained_and_leaves_nothing(tokenizer, tmp_path, capsys, monkeypatch):
    from mindspore.mindrecord import FileWriter

    def fail(self):
        raise RuntimeError("[Errno] no space")

    monkeypatch.setattr(FileWriter, "commit", fail)
    path = write_jsonl(tmp_path / "a.jsonl", documents(5))
    assert run("--input", path, "--output", tmp_path / "out", "--tokenizer", tokenizer) == 1
    assert "is the disk full" in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["a.jsonl"]


# ---- interruptions ------------------------------------------------------


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_conversion_leaves_no_output_and_the_next_run_succeeds(tokenizer, tmp_path, sent):
    path = write_jsonl(tmp_path / "a.jsonl", documents(3000))
    command = [sys.executable, REPO / "make_mindrecord.py", "--input", path, "--output", tmp_path / "out"]
    command += ["--tokenizer", tokenizer, "--seq_length", "16"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    partial = tmp_path / ".out.partial"
    deadline = time.monotonic() + 30
    while not list(partial.glob("train/*.mindrecord")):
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)  # so that it is caught in the middle, however slow the machine
    assert run(*command[2:]) == 1, "two conversions to one place"
    process.send_signal(sent)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == -sent
    assert not (tmp_path / "out").exists()
    manifest = convert(tokenizer, path, tmp_path / "out")
    assert manifest.totals["documents_written"] == 3000
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_a_model_config_gives_vocab_size_and_seq_length(tmp_path):
    config = REPO / "tests" / "small.yaml"  # 401 ids, 32 positions
    source = write_jsonl(tmp_path / "texts.jsonl", documents(200))
    assert run("--config", config, "--input", source, "--output", tmp_path / "out") == 0
    manifest = Manifest.load(tmp_path / "out")
    assert (manifest.vocab_size, manifest.seq_length) == (401, 32)
    assert run("--config", tmp_path / "no.yaml", "--input", source, "--output", tmp_path / "other") == 2

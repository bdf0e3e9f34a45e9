"""Turn text into MindRecord shards of token ids that account for every token.

    python make_mindrecord.py --input corpus/ notes.jsonl --train_tokenizer --output data/mine

Without --input it takes a corpus that every machine has: the sources and documentation of Python's own
standard library. Prints what it reads, a progress bar with tokens/s, and at the end

    documents   812 read: 809 written, 3 empty, 0 broken
    tokens      3,995,420 of text + 809 special
    train       15,472 records of 257 tokens in 4 shards
    validation  79 records of 257 tokens in 1 shard
    tails       378 slots padded, 0 tokens dropped
    output      data/mine (20.0 MB, 14 s)
    next        make train DATA=data/mine

A text file is one document, a line of .jsonl is one, a folder is searched for both. A byte order mark is
removed; line ends stay as they are. After each document comes the tokenizer's end-of-sequence id; then all
are joined and cut into records of seq_length + 1 tokens. The folder gets its name when it is complete.

Exit code: 0 done, 1 failed (nothing is left behind), 2 wrong arguments.

Copy with: picospore/config.py, picospore/dataset.py
"""

import argparse
import codecs
import fcntl
import glob
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import random
import re
import shlex
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import sentencepiece
from tqdm import tqdm

from picospore.config import ConfigError, load_config
from picospore.dataset import FORMAT_VERSION, DataError, Manifest, Shard, file_sha256

JSONL_SUFFIXES = {".jsonl", ".ndjson"}
# What a folder is searched for; a file that is named, or matched by a pattern, is taken whatever its suffix.
TEXT_SUFFIX = re.compile(
    r"\.(jsonl|ndjson|txt|text|md|rst|tex|html|xml|json|ya?ml|toml|ini|csv|tsv|sql|css|sh|pyi?|[ch]|cc|[ch]pp"
    r"|cu|java|js|ts|go|rs|rb|php|cs|scala|kt|swift|lua|pl|r|jl)",
    re.IGNORECASE,
)
NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BROKEN_LISTED = 20
SAMPLE_BYTES = 10_000_000  # of text to train a tokenizer on: enough for tens of thousands of pieces
SAMPLE_LINE = 1000  # characters; the trainer skips lines above 4,192 bytes, so long ones are cut
WRITE_ROWS = 1000  # records handed to MindRecord at once; one by one is several times slower
HEADER_BYTES = 2**20  # MindRecord's own 16 MiB, with pages of 32 MiB, make a 50 MB file of one record
PAGES_PER_SHARD = 1000  # some 200 bytes each in the header
# tokens_text + tokens_special = tokens_written - tokens_padded + tokens_dropped; tokens_written is every
# slot of every record, and tokens_padded those of them that hold padding.
TOTALS = (
    *("documents_read", "documents_written", "documents_empty", "documents_broken"),
    *("tokens_text", "tokens_special", "tokens_written", "tokens_padded", "tokens_dropped"),
)


class UsageError(ValueError):
    """Arguments that cannot work; the message says what to change."""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", default=[], metavar="PATH", help="text files, .jsonl files, folders, patterns")
    add("--output", type=Path, required=True, help="folder to make")
    add("--overwrite", action="store_true", help="replace an earlier conversion of that name")
    add("--text_key", default="text", help="where a .jsonl line keeps its text (text)")
    add(
        "--on_error",
        choices=("skip", "stop"),
        default="skip",
        help="a broken document is counted, or ends the run",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--tokenizer", type=Path, help="a SentencePiece model")
    choice.add_argument("--train_tokenizer", action="store_true", help="train one on the input (the default)")
    add("--vocab_size", type=int, help="of the tokenizer that is trained (4096)")
    add("--config", metavar="YAML", help="take vocab_size and seq_length from this model's config")
    add("--add_bos", action="store_true", help="begin each document with the tokenizer's BOS as well")
    add("--seq_length", type=int, help="inputs per record; a record has one token more (256)")
    add("--shards", type=int, default=4, help="files of the train split (4)")
    add("--val_fraction", type=float, default=0.01, help="share of the documents kept for validation (0.01)")
    add("--seed", type=int, default=0, help="of the split and of the tokenizer's sample (0)")
    args = parser.parse_args(argv)
    model = load_config(args.config).model if args.config else None
    if args.seq_length is None:
        args.seq_length = model.seq_length if model else 256
    if args.vocab_size is None and not args.tokenizer:
        args.vocab_size = model.vocab_size if model else 4096
    return args


def check_arguments(args: argparse.Namespace) -> None:
    problems = []
    if args.seq_length < 1:
        problems.append(f"--seq_length {args.seq_length}: expected 1 or more")
    if not 1 <= args.shards <= 1000:
        problems.append(f"--shards {args.shards}: expected 1 to 1000, the most that MindRecord opens")
    if not 0 <= args.val_fraction < 1:
        problems.append(f"--val_fraction {args.val_fraction}: expected 0 or more, and below 1")
    if args.tokenizer and args.vocab_size is not None:
        problems.append(
            "--vocab_size belongs to --train_tokenizer; a given --tokenizer has its own: leave one out"
        )
    if args.tokenizer and not args.tokenizer.is_file():
        problems.append(f"--tokenizer {args.tokenizer}: no such file")
    if problems:
        raise UsageError("\n".join(problems))


# ---- documents --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    name: str
    licence: str | None
    files: list[Path]
    texts: dict[str, str] = field(default_factory=dict)  # documents that are not files, by name

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files) + sum(map(len, self.texts.values()))


@dataclass(frozen=True)
class Document:
    source: str  # file, or file:line
    bytes: int
    text: str = ""
    problem: str | None = None  # why it cannot be used


def find_corpus(inputs: list[str]) -> Corpus:
    if inputs:
        return Corpus(name=" ".join(inputs), licence=None, files=find_files(inputs))
    from pydoc_data.topics import topics

    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in stdlib.rglob("*.py")
        if not NOT_CORPUS & set(path.relative_to(stdlib).parts[:-1])
        and not path.name.startswith("_sysconfigdata")  # describes the machine, not the language
    )
    name = f"standard library and documentation topics of Python {platform.python_version()}"
    return Corpus(
        name, "PSF License Agreement", files, {f"topic {key}": topics[key] for key in sorted(topics)}
    )


def find_files(inputs: list[str]) -> list[Path]:
    files = {}  # by real path: a file that is reached in two ways is read once
    for item in inputs:
        # Path.glob would refuse an absolute pattern.
        matches = [item] if Path(item).exists() else sorted(glob.glob(item, recursive=True))  # noqa: PTH207
        if not matches:
            raise UsageError(f"--input {item}: no such file or folder, and no file matches it as a pattern")
        for path in map(Path, matches):
            for file in files_in(path) if path.is_dir() else [path]:
                files.setdefault(file.resolve(), file)
    if not files:
        raise DataError(
            f"no text in {' '.join(inputs)}: a folder is searched for .jsonl and text such as .txt and .py; "
            "name other files themselves"
        )
    return list(files.values())


def files_in(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if TEXT_SUFFIX.fullmatch(path.suffix)
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def read_documents(corpus: Corpus, text_key: str) -> Iterator[Document]:
    for path in corpus.files:
        if path.suffix.lower() in JSONL_SUFFIXES:
            yield from read_json_lines(path, text_key)
        else:
            yield read_text(path)
    for name, text in corpus.texts.items():
        yield Document(name, len(text), text)


def read_text(path: Path) -> Document:
    raw = path.read_bytes()
    text = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return Document(str(path), len(raw), decode(text))
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        return Document(f"{path}:{line}", len(raw), problem=str(error))


def read_json_lines(path: Path, text_key: str) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            source = f"{path}:{number}"
            try:
                yield Document(source, len(raw), text_of_json(raw.removeprefix(codecs.BOM_UTF8), text_key))
            except (ValueError, RecursionError) as error:
                yield Document(source, len(raw), problem=str(error))


def text_of_json(raw: bytes, text_key: str) -> str:
    if not raw.strip():
        return ""
    row = json.loads(decode(raw))
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    if text_key not in row:
        raise ValueError(f"no key {text_key!r}; the keys are {', '.join(row) or 'none'} (see --text_key)")
    text = row[text_key]
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} is {type(text).__name__}, expected a string")
    return decode(text.encode())  # an escape can still hold NUL or half of a surrogate pair


def decode(raw: bytes) -> str:
    # A NUL in text is damage (a hole in a file, or not text at all), though UTF-8 allows it.
    if (at := raw.find(b"\0")) >= 0:
        raise UnicodeDecodeError("utf-8", raw, at, at + 1, "NUL is not text")
    return raw.decode("utf-8")


# ---- tokenizer --------------------------------------------------------------------------------------------


def load_tokenizer(path: Path, add_bos: bool) -> sentencepiece.SentencePieceProcessor:
    try:
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except RuntimeError as error:
        raise UsageError(f"--tokenizer {path} is not a SentencePiece model ({error})") from error
    if tokenizer.eos_id() < 0:
        raise UsageError(
            f"--tokenizer {path} has no EOS id, so documents could not be told apart: use another"
        )
    if add_bos and tokenizer.bos_id() < 0:
        raise UsageError(f"--tokenizer {path} has no BOS id: leave out --add_bos")
    return tokenizer


def sample_lines(corpus: Corpus, text_key: str, seed: int) -> Iterator[str]:
    """Lines of the corpus, each with the same chance, about SAMPLE_BYTES in all."""
    chance = SAMPLE_BYTES / max(1, corpus.bytes)
    draw = random.Random(seed)
    for document in read_documents(corpus, text_key):
        for line in document.text.splitlines() if document.text.strip() else ():
            for start in range(0, len(line), SAMPLE_LINE):
                if chance >= 1 or draw.random() < chance:
                    yield line[start : start + SAMPLE_LINE]


def train_tokenizer(lines: Iterator[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE model under which decoding gives back the text.

    One character is the exception: U+2581 is SentencePiece's own sign for a space, and comes back as one.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,  # what has no piece becomes bytes, so nothing is unknown
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation
            split_digits=True,
            character_coverage=0.9995,  # its advice for Chinese and Japanese; the rest become bytes
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=os.cpu_count(),
            minloglevel=2,
        )
    except RuntimeError as error:
        raise explain_training_error(error, vocab_size) from error
    return model.getvalue()


def explain_training_error(error: RuntimeError, vocab_size: int) -> Exception:
    text = str(error)
    if most := re.search(r"set it to a value <= (\d+)", text):
        return DataError(
            f"the corpus is too small for --vocab_size {vocab_size}: it yields {most[1]} pieces; "
            f"use --vocab_size {most[1]} or less, or more text"
        )
    if least := re.search(r"\d+ vs (\d+)", text):
        return DataError(
            f"--vocab_size {vocab_size} is too small: 256 bytes, 4 special ids and the corpus's characters "
            f"need {least[1]}; use more than that"
        )
    if "sentences_.empty()" in text:
        return DataError("every document is empty or broken: there is nothing to train a tokenizer on")
    return DataError(f"SentencePiece could not train a tokenizer: {text}")


# ---- records ----------------------------------------------------------------------------------------------


def split_of(text: str, val_fraction: float, seed: int) -> str:
    """By the text alone: added data moves no document to the other split, and copies of one stay together."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return "validation" if int.from_bytes(digest, "big") < val_fraction * 2**64 else "train"


class RecordWriter:
    """Rows of ids into the MindRecord shards of one split, in turn: their sizes differ by one record at most.

    The field `input_ids` is an int32 array: what MindFormers' own dataset reads. (Bytes are written two or
    three times faster, which conversion would not notice: the tokenizer takes ten times as long as either.)
    """

    def __init__(self, folder: Path, split: str, shards: int, record_tokens: int, expected_bytes: float):
        self.folder, self.split, self.max_shards, self.record_tokens = folder, split, shards, record_tokens
        pages_bytes = 4 * expected_bytes / shards  # a byte of text makes one id of four bytes at most
        self.page_bytes = min(max(2**20, 2 ** int(pages_bytes / PAGES_PER_SHARD).bit_length()), 2**28)
        self.paths, self.writers, self.pending, self.records = [], [], [], 0
        (folder / split).mkdir()

    def write(self, rows_NT: np.ndarray) -> None:
        self.pending.extend(rows_NT.astype(np.int32, copy=False))
        whole = max(WRITE_ROWS // self.max_shards, 1) * self.max_shards
        while len(self.pending) >= whole:
            self._flush(self.pending[:whole])
            del self.pending[:whole]

    def _flush(self, rows: list[np.ndarray]) -> None:
        # Only the last flush is not a multiple of the shards, so each begins with shard 0.
        with self._errors_explained():
            for k in range(min(self.max_shards, len(rows))):
                if k == len(self.writers):
                    self._open_shard()
                self.writers[k].write_raw_data([{"input_ids": row} for row in rows[k :: self.max_shards]])
        self.records += len(rows)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DataError(
                f"MindRecord cannot write {self.folder / self.split}: is the disk full, or the limit "
                f"of open files (ulimit -n) below {2 * self.max_shards} and some? {error}"
            ) from error

    def _open_shard(self) -> None:
        # Imported late, so that --help and wrong arguments answer at once.
        from mindspore.mindrecord import FileWriter

        path = self.folder / self.split / f"shard_{len(self.paths):05d}.mindrecord"
        writer = FileWriter(str(path))
        writer.set_header_size(HEADER_BYTES)
        writer.set_page_size(self.page_bytes)
        writer.add_schema({"input_ids": {"type": "int32", "shape": [self.record_tokens]}}, "tokens")
        self.paths.append(path)
        self.writers.append(writer)

    def close(self) -> list[Shard]:
        if self.pending:
            self._flush(self.pending)
        with self._errors_explained():
            for writer in self.writers:
                writer.commit()
        shards = [self._describe(path) for path in self.paths]
        found = sum(shard.records for shard in shards)
        if found != self.records:  # MindRecord leaves out rows that it does not like, with a warning only
            raise DataError(f"{self.folder / self.split}: {self.records} records given, {found} written")
        return shards

    def _describe(self, path: Path) -> Shard:
        from mindspore.dataset import MindDataset

        records = MindDataset(str(path)).get_dataset_size()
        for file in (path, Path(f"{path}.db")):
            file.chmod(0o644)  # MindRecord lets only the owner read; a team trains on one copy
        return Shard(
            file=path.relative_to(self.folder).as_posix(),
            split=self.split,
            records=records,
            tokens=records * self.record_tokens,
            bytes=path.stat().st_size,
            sha256=file_sha256(path),
            index_sha256=file_sha256(f"{path}.db"),
        )


class Packer:
    """Documents of one split, joined and cut into records."""

    def __init__(self, writer: RecordWriter):
        self.writer = writer
        self.tail = np.empty(0, np.int32)
        self.padded = self.dropped = 0

    def add(self, ids: list[int]) -> None:
        joined = np.concatenate([self.tail, np.array(ids, np.int32)])
        whole = len(joined) // self.writer.record_tokens * self.writer.record_tokens
        self.writer.write(joined[:whole].reshape(-1, self.writer.record_tokens))
        self.tail = joined[whole:].copy()  # not a view, which would keep a long document in memory

    def close(self, pad_id: int | None) -> list[Shard]:
        if len(self.tail) and pad_id is None:
            self.dropped = len(self.tail)
        elif len(self.tail):
            self.padded = self.writer.record_tokens - len(self.tail)
            self.add([pad_id] * self.padded)
        return self.writer.close()


# ---- the conversion ---------------------------------------------------------------------------------------


def check_output(args: argparse.Namespace, corpus: Corpus) -> None:
    """The output must not touch what is read, and replaces nothing but an earlier conversion."""
    output = args.output.resolve()
    files = [*corpus.files, *([args.tokenizer] if args.tokenizer else [])]
    for path in {path.resolve() for path in files}:
        if output == path or output in path.parents:
            raise UsageError(
                f"--output {args.output} is or contains {path}, which is read: choose another folder"
            )
    for folder in {Path(item).resolve() for item in args.input if Path(item).is_dir()}:
        if output == folder or folder in output.parents:
            raise UsageError(
                f"--output {args.output} is in the input folder {folder}: choose a folder outside it"
            )
    if not args.output.exists():
        return
    if not args.overwrite:
        raise UsageError(
            f"--output {args.output} exists: choose another name, or pass --overwrite to replace it"
        )
    if not args.output.is_dir() or (
        any(args.output.iterdir()) and not (args.output / "manifest.json").is_file()
    ):
        raise UsageError(
            f"--output {args.output} is not a conversion (no manifest.json), so it stays as it is"
        )


@contextmanager
def folder_that_appears_whole(output: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `output` that takes its name at the end; after an error it is gone.

    A killed run leaves it behind, under a hidden name that the next run empties. (MindRecord refuses files
    that were renamed, but does not mind the folder.)
    """
    partial = output.parent / f".{output.name}.partial"
    replaced = output.parent / f".{output.name}.replaced"
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)  # the system lets go of it however the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise DataError(f"another conversion is writing {output}: let it finish, or end it") from error
    try:
        for stale in partial.iterdir():
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        yield partial
        shutil.rmtree(replaced, ignore_errors=True)
        if overwrite and output.exists():  # without, a folder made meanwhile stays, and the next line fails
            output.rename(replaced)
        partial.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


class Progress:
    """A bar on a terminal; elsewhere a plain line now and then."""

    def __init__(self, total_bytes: int):
        self.bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None)
        self.total_bytes, self.bytes, self.tokens = total_bytes, 0, 0
        self.started = time.perf_counter()
        self.line_due = self.started + 10

    def update(self, new_bytes: int, new_tokens: int) -> None:
        self.bytes += new_bytes
        self.tokens += new_tokens
        now = time.perf_counter()
        rate = f"{self.tokens / (now - self.started):,.0f} tokens/s"
        self.bar.set_postfix_str(rate, refresh=False)
        self.bar.update(new_bytes)
        if self.bar.disable and now >= self.line_due:
            self.line_due = now + 10
            print(f"{self.bytes / max(1, self.total_bytes):4.0%} {self.tokens:,} tokens, {rate}", flush=True)

    def close(self) -> None:
        self.bar.close()


def write_shards(
    args: argparse.Namespace, corpus: Corpus, tokenizer: sentencepiece.SentencePieceProcessor, folder: Path
) -> tuple[list[Shard], Counter, list[str]]:
    """The shards, what was counted, and the first broken documents."""
    record_tokens = args.seq_length + 1
    share = {"train": 1 - args.val_fraction, "validation": args.val_fraction}
    packers = {
        split: Packer(RecordWriter(folder, split, shards, record_tokens, share[split] * corpus.bytes))
        for split, shards in (("train", args.shards), ("validation", 1))
    }
    count, broken = Counter(), []
    progress = Progress(corpus.bytes)
    for document in read_documents(corpus, args.text_key):
        ids = []
        count["documents_read"] += 1
        if document.problem:
            count["documents_broken"] += 1
            note_broken(f"{document.source}: {document.problem}", broken, args.on_error)
        elif not document.text.strip():
            count["documents_empty"] += 1
        else:
            ids = tokenizer.encode(document.text, add_bos=args.add_bos, add_eos=True)
            packers[split_of(document.text, args.val_fraction, args.seed)].add(ids)
            count["documents_written"] += 1
            count["tokens_special"] += 1 + args.add_bos
            count["tokens_text"] += len(ids) - 1 - args.add_bos
        progress.update(document.bytes, len(ids))
    progress.close()
    shards = [shard for packer in packers.values() for shard in packer.close(pad_id_of(tokenizer))]
    count["tokens_written"] = sum(shard.tokens for shard in shards)
    count["tokens_padded"] = sum(packer.padded for packer in packers.values())
    count["tokens_dropped"] = sum(packer.dropped for packer in packers.values())
    return shards, count, broken


def note_broken(line: str, broken: list[str], on_error: str) -> None:
    if on_error == "stop":
        raise DataError(f"{line}: mend it, or pass --on_error skip to go on without such documents")
    if len(broken) < BROKEN_LISTED:
        broken.append(line)
        tqdm.write(f"skipped {line}")


def pad_id_of(tokenizer: sentencepiece.SentencePieceProcessor) -> int | None:
    """An id that stands for nothing else: padding with EOS, say, would hide every real EOS from the loss."""
    pad_id = tokenizer.pad_id()
    return None if pad_id in (-1, tokenizer.eos_id(), tokenizer.bos_id(), tokenizer.unk_id()) else pad_id


def check_counts(args: argparse.Namespace, shards: list[Shard], count: Counter) -> None:
    seen = (
        f"{count['documents_read']} documents read, {count['documents_empty']} empty, "
        f"{count['documents_broken']} broken"
    )
    if not count["documents_written"]:
        raise DataError(f"there is no text to convert: {seen}")
    if not any(shard.split == "train" for shard in shards):
        raise DataError(
            f"there is not one train record: {seen}; add text, or lower --val_fraction or --seq_length"
        )
    if args.val_fraction and not any(shard.split == "validation" for shard in shards):
        print(
            f"warning: validation is empty: none of {count['documents_written']} documents fell into "
            f"--val_fraction {args.val_fraction} (a document goes to one split whole); raise it, or cut the "
            "input into more documents",
            file=sys.stderr,
        )
    given = count["tokens_text"] + count["tokens_special"]
    kept = count["tokens_written"] + count["tokens_dropped"] - count["tokens_padded"]
    if given != kept:
        raise DataError(
            f"{given:,} tokens came from the documents, {kept:,} are accounted for: a bug, please report"
        )


def convert(args: argparse.Namespace, corpus: Corpus, command: str) -> None:
    started = time.perf_counter()
    print(f"corpus      {corpus.name}" + (f" ({corpus.licence})" if corpus.licence else ""))
    with folder_that_appears_whole(args.output, args.overwrite) as folder:
        model = folder / "tokenizer.model"
        if args.tokenizer:
            shutil.copyfile(args.tokenizer, model)
        else:
            lines = sample_lines(corpus, args.text_key, args.seed)
            model.write_bytes(train_tokenizer(lines, args.vocab_size))
        tokenizer = load_tokenizer(model, args.add_bos)
        how = "from " + str(args.tokenizer) if args.tokenizer else "trained on the corpus"
        print(f"tokenizer   {len(tokenizer)} ids, {how} ({time.perf_counter() - started:.1f} s)", flush=True)
        shards, count, broken = write_shards(args, corpus, tokenizer, folder)
        check_counts(args, shards, count)
        bos_id = tokenizer.bos_id()
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            corpus=corpus.name,
            licence=corpus.licence,
            tokenizer=model.name,
            tokenizer_sha256=file_sha256(model),
            vocab_size=len(tokenizer),
            bos_id=None if bos_id < 0 else bos_id,
            eos_id=tokenizer.eos_id(),
            pad_id=pad_id_of(tokenizer),
            seq_length=args.seq_length,
            shards=tuple(shards),
            totals={key: count[key] for key in TOTALS},
            broken=tuple(broken),
            command=command,
            versions={"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in ("mindspore", "sentencepiece", "numpy")},
            folder=folder,
        )
        manifest.save()
    print_summary(args.output, manifest, time.perf_counter() - started)


def print_summary(output: Path, manifest: Manifest, seconds: float) -> None:
    total = {key: f"{value:,}" for key, value in manifest.totals.items()}
    print(
        f"documents   {total['documents_read']} read: {total['documents_written']} written, "
        f"{total['documents_empty']} empty, {total['documents_broken']} broken"
    )
    print(f"tokens      {total['tokens_text']} of text + {total['tokens_special']} special")
    for split in ("train", "validation"):
        files = sum(shard.split == split for shard in manifest.shards)
        records = f"{manifest.records(split):,} records of {manifest.seq_length + 1} tokens"
        print(f"{split:11} {records} in {files} shard{'' if files == 1 else 's'}")
    print(f"tails       {total['tokens_padded']} slots padded, {total['tokens_dropped']} tokens dropped")
    size_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"output      {output} ({size_bytes / 1e6:.1f} MB, {seconds:.0f} s)")
    print(f"next        make train DATA={output}")


def main(argv: list[str] | None = None) -> int:
    command = shlex.join(["python", "make_mindrecord.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        args = parse_args(argv)
        check_arguments(args)
        corpus = find_corpus(args.input)
        check_output(args, corpus)
        if args.tokenizer:
            load_tokenizer(args.tokenizer, args.add_bos)
        convert(args, corpus, command)
    except (UsageError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DataError, OSError) as error:
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

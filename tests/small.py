"""A small corpus, and runs of pretrain.py on it, for the tests and the golden losses."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "tests" / "small.yaml"


def make_data(folder: Path) -> Path:
    """600 documents of made-up words, the same everywhere, as token shards in `folder`/data."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choice(letters) for _ in range(draw.randint(2, 7))) for _ in range(200)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 60))) for _ in range(600)]
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = run("make_mindrecord.py", "--input", documents, "--output", folder / "data", "--train_tokenizer",
               "--vocab_size", 400, "--seq_length", 32, "--val_fraction", 0.05)  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder / "data"


def run(script: str, *arguments, timeout_s: float = 600) -> subprocess.CompletedProcess:
    """A script of the repository as a program, its output as text."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    env = {**os.environ, "GLOG_v": "3"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)


def pretrain(data: Path, run_dir: Path, *arguments, config: Path = CONFIG) -> list[dict]:
    """A run of pretrain.py that must succeed; the records of its metrics.jsonl."""
    done = run("pretrain.py", "--config", config, "--data", data, "--run_dir", run_dir, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(records: list[dict], key: str) -> list[float]:
    """One value a step; the first step's stands in the event that tells of compilation."""
    return [record[key] for record in records if record.get("kind", "compile") == "compile"]

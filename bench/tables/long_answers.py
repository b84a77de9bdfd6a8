"""Tables of long answers: throughput and the running batch of each server."""

from __future__ import annotations

import json
from pathlib import Path

from bench.e2e import arms

from .text import lines, sha, short, titled, worded

POINT = ".c64"
OURS = {
    "leankv": "`leankv`",
    "leankv-sampled": "`leankv`, `--kvc-observe all/16`",
    "leankv-calibrated": "`leankv` at the thresholds calibrated by answers",
    "leankv-small-pages": "`leankv` at these thresholds, pages of 3776 bytes instead of 6464",
    "kv-compress-8x": "`kv-compress` in `k4v4`, budget 8x",
    "kv-compress-16x": "`kv-compress` in `k4v4`, budget 16x",
}
# Loads by the scores that their files have.
LOADS = {
    "papers.longgen": "An 8B Llama's shape, random weights:",
    "papers.longgen_text": "Qwen2.5-Coder-1.5B, prompts from a text:",
}
BASELINES = ("vs_bf16", "vs_fp8")
NOTE = """A server gets 64 requests with 512 prompt tokens and 8192 output tokens each. It has the KV memory of 120,000
bf16 tokens. *Running* is the number of requests that decode at the same time, from the server's log. Ratios are to
stock servers of the same run. Attention decides the size of `leankv`, so random weights say little about it. n = 1."""


def long_answers(board: dict[str, dict], results: Path) -> tuple[list[str], set[str]]:
    """A table for each load, with one row per server."""
    records = [json.loads(path.read_text()) for path in sorted((results / "e2e").glob("long_answers_*.json"))]
    out = []
    for prefix, title in LOADS.items():
        rows = [row for record in records if _has(record, prefix) for row in _rows(record, prefix)]
        head = ["server", "output tokens/s", "vs. stock bf16", "vs. stock fp8"]
        head += ["running, median", "running, most", "measured"]
        out += [title, "", *lines(head, rows)] if rows else []
    names = {n for n in board if n.startswith(tuple(f"{prefix}." for prefix in LOADS))}
    return titled("Long answers", [NOTE, "", *out] if out else []), names


def _has(record: dict, prefix: str) -> bool:
    return any(name.startswith(f"{prefix}.") for name in record["scores"])


def _rows(record: dict, prefix: str) -> list[list[str]]:
    rows = []
    for name, row in record["numbers"].items():
        server = name.removesuffix(POINT)
        ours = server.removeprefix("kvc_")
        stock = not server.startswith("kvc_")
        ratios = [record["scores"].get(f"{prefix}.{base}.{ours}") for base in BASELINES]
        origin = f"{short(record['device'])} at {sha(row.get('source', record['commit']))}"
        rows.append([
            worded(arms.describe(row["options"])) if stock else OURS.get(ours, f"`{ours}`"),
            f"{row['output_tok_s']:.0f}",
            *(f"{ratio['value']:.2f}x" if ratio and not stock else "" for ratio in ratios),
            f"{row['running_median']:.0f}",
            f"{row['running_most']:.0f}",
            origin + (", another host" if "another host" in row.get("source", "") else ""),
        ])  # fmt: skip
    return rows

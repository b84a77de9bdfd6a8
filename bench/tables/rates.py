"""Table of one-shot prompts by compression rate."""

from __future__ import annotations

import json
from pathlib import Path

from bench.e2e import arms

from .text import CARDS, lines, pictures, sha, titled

POINT = ".rate"


def rates(board: dict[str, dict], results: Path) -> tuple[list[str], set[str]]:
    """Tables of running requests, throughput and latency over the rate, for each GPU model."""
    out: list[str] = []
    for card, name in CARDS.items():
        path = results / "e2e" / f"rates_{card}.json"
        if path.exists():
            out += _table(json.loads(path.read_text()), name)
    out += pictures(results, "rates", "One-shot prompts by rate") if out else []
    return titled("One-shot prompts by rate", out), {n for n in board if n.startswith("papers.rate")}


def _table(record: dict, card_name: str) -> list[str]:
    numbers = record["numbers"]
    best = arms.fastest(numbers, arms.BF16, "rate1", lambda run: run["output_tok_s"])
    stock = numbers[best]
    columns = {"stock bf16": stock} | {
        f"{name.removeprefix('kvc' + POINT)}x": row for name, row in numbers.items() if name.startswith("kvc" + POINT)
    }
    figures = {
        "running requests, most": lambda row: f"{row['running_most']:.0f}",
        "output tokens/s": lambda row: f"{row['output_tok_s']:.0f}",
        "vs. stock bf16": lambda row: f"{row['output_tok_s'] / stock['output_tok_s']:.2f}x",
        "TTFT, median, s": lambda row: f"{row['ttft_ms_median'] / 1000:.1f}",
        "time between output tokens, median, ms": lambda row: f"{row['itl_ms_median']:.1f}",
    }
    text = (
        f"64 prompts of 4096 tokens arrive at once and get 512 output tokens each. They are sent with `one-shot:1x` to "
        f"`one-shot:64x` to one `k4v4` server on one {card_name}. The KV memory holds 30,000 bf16 tokens, which is six "
        f"of these prompts with their answers. The weights are random. Measured at {sha(record['commit'])}, n = 1."
    )
    rows = [[title, *(figure(row) for row in columns.values())] for title, figure in figures.items()]
    return [text, "", *lines(["", *columns], rows)]

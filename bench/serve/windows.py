"""Comparison of a model with sliding windows with stock SGLang: cold, warm, and appended to a cached prefix.

    python -m bench.serve.windows [--caches bf16,k4v4] [--head-dim 64] [--window 100] [--tokenizer FOLDER]

The model is a Gemma 3 with random weights and four layers, one of which attends without a window. *Drift* is the mean
difference from stock's log-probabilities up to the first token that differs, *gap* the margin between the two
candidates there. Stock itself drifts between a cold and a warm prompt (row `stock`), because its matrix products have
other shapes. On a GPU, KVC_STOCK_ATTENTION names stock's backend. With `triton`, stock's windows are one token short
during generation, see `bench.serve.windows_reference`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from bench import common
from bench.client import Answer
from bench.compare import match
from bench.tiny import tiny_windowed

NAME = "serve/windows"
BLOCK, ANSWER, TOP = 128, 48, 5
LENGTHS = (60, 99, 100, 101, 250, 385, 1000, 3000)


def prompt(tokens: int, more: int = 0) -> list[int]:
    """Random prompt of `tokens` tokens, followed by `more` appended tokens."""
    draw = random.Random(tokens)
    return [draw.randrange(1000, 40_000) for _ in range(tokens + more)]


def ask(server: common.Server, lengths: tuple[int, ...]) -> dict[str, list[Answer]]:
    """Answers of each kind to one prompt per length."""
    out: dict[str, list[Answer]] = {"cold": [], "warm": [], "appended": []}
    for n in lengths:
        ids = prompt(n, more=17)
        cold, warm = (server.client.generate(ids[:n], ANSWER, top=TOP) for _ in range(2))
        out["cold"].append(cold)
        out["warm"].append(warm)
        # The appended tokens are equal on all servers, unlike the answers.
        out["appended"].append(server.client.generate(ids, ANSWER, top=TOP))
    return out


def difference(a: Answer, b: Answer) -> dict:
    m = match(a, b)
    drifts = [abs(x - y) for x, y in zip(a.logprobs[: m.equal], b.logprobs)]
    drift = statistics.fmean(drifts) if drifts else 0.0
    return {"drift": drift, "equal": m.equal, "gap": m.gap, "cached": b.cached_tokens}


def compare(ours: dict[str, list[Answer]], stock: dict[str, list[Answer]]) -> dict:
    """Differences of cold and warm answers from stock's cold ones, and of appended answers from stock's appended ones;
    also the number of warm answers that equal the cold ones."""
    references = {"cold": stock["cold"], "warm": stock["cold"], "appended": stock["appended"]}
    rows = {kind: [difference(*pair) for pair in zip(references[kind], ours[kind])] for kind in ours}
    flat = [row for rows_of_kind in rows.values() for row in rows_of_kind]
    return {
        "drift": statistics.fmean(r["drift"] for r in flat),
        "drift_worst": max(r["drift"] for r in flat),
        "gap_worst": max((r["gap"] for r in flat if r["gap"] is not None), default=0.0),
        "warm_as_cold": sum(a.ids == b.ids for a, b in zip(ours["cold"], ours["warm"])),
        "answers": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", default="bf16,k4v4")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--tokenizer", type=Path, help="default: the demo model's")
    parser.add_argument("--name", default=NAME)
    args = parser.parse_args()
    model = tiny_windowed(
        Path(tempfile.mkdtemp(prefix="kvc-windowed-")), args.window, head_dim=args.head_dim, like=args.tokenizer
    )
    numbers: dict = {"window": args.window, "head_dim": args.head_dim, "lengths": LENGTHS, "caches": {}}
    extra = ["--chunked-prefill-size", str(8 * BLOCK), "--enable-fp32-lm-head"]
    stock = None
    for cache in ["stock", *args.caches.split(",")]:
        with common.Server(common.either(cache, *extra, block=BLOCK), model=model, env=common.STRICT) as server:
            answers = ask(server, LENGTHS)
            assert not server.errors(), server.errors()
        stock = stock or answers
        numbers["caches"][cache] = row = compare(answers, stock)
        print(cache, {k: v for k, v in row.items() if k != "answers"}, flush=True)
        common.write_result(args.name, numbers, quiet=True)


if __name__ == "__main__":
    main()

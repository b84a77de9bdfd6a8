"""A served model with sliding windows, compared with stock SGLang: cold, cached, and appended to a cached prefix.

    python -m bench.serve.windows [--caches bf16,k4v4] [--head-dim 64] [--window 100] [--tokenizer FOLDER]

The model is a Gemma 3 with random weights and four layers, one of which sees everything. *Drift*: the mean difference
of the tokens' log-probabilities to stock's, up to the first token that differs; *gap*: the margin between the two
candidates there. Stock itself drifts between a cold and a cached prompt (the row `stock`), because its matrix products
have other shapes. On a GPU, KVC_STOCK_ATTENTION names stock's backend; with `triton` stock's windows are one token
short while it generates, see `bench.serve.windows_reference`.
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
    """A prompt of this many tokens, and the text appended to it."""
    draw = random.Random(tokens)
    return [draw.randrange(1000, 40_000) for _ in range(tokens + more)]


def ask(server: common.Server, lengths: tuple[int, ...]) -> dict[str, list[Answer]]:
    """Answers to one prompt of each length, each kind of them in the order of the lengths."""
    out: dict[str, list[Answer]] = {"cold": [], "warm": [], "appended": []}
    for n in lengths:
        whole = prompt(n, more=17)
        cold, warm = (server.client.generate(whole[:n], ANSWER, top=TOP) for _ in range(2))
        out["cold"].append(cold)
        out["warm"].append(warm)
        # The same tokens for every server, which may have answered differently.
        out["appended"].append(server.client.generate(whole, ANSWER, top=TOP))
    return out


def apart(a: Answer, b: Answer) -> dict:
    found = match(a, b)
    differences = [abs(x - y) for x, y in zip(a.logprobs[: found.equal], b.logprobs)]
    return {
        "drift": statistics.fmean(differences) if differences else 0.0, "equal": found.equal, "gap": found.gap,
        "cached": b.cached_tokens,
    }  # fmt: skip


def compared(mine: dict[str, list[Answer]], stock: dict[str, list[Answer]]) -> dict:
    """Against stock's cold answers (its own appended ones for those), and whether warm is as cold."""
    rows = {kind: [apart(*x) for x in zip(stock["cold" if kind == "warm" else kind], mine[kind])] for kind in mine}
    flat = [r for some in rows.values() for r in some]
    return {
        "drift": statistics.fmean(r["drift"] for r in flat), "drift_worst": max(r["drift"] for r in flat),
        "gap_worst": max((r["gap"] for r in flat if r["gap"] is not None), default=0.0),
        "warm_as_cold": sum(a.ids == b.ids for a, b in zip(mine["cold"], mine["warm"])), "answers": rows,
    }  # fmt: skip


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
        numbers["caches"][cache] = row = compared(answers, stock)
        print(cache, {k: v for k, v in row.items() if k != "answers"}, flush=True)
        common.write_result(args.name, numbers, quiet=True)


if __name__ == "__main__":
    main()

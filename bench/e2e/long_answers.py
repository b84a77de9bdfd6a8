"""Long answers: 64 requests of 512 tokens that generate 8192 each, at equal KV memory (LeanKV's and KV-Compress' load).

    python -m bench.e2e.long_answers --model <folder> --load-format dummy [--only kvc_k4v4,kvc_leankv]

Options, result file and stock servers are those of `bench.e2e.serving`. The result file says how many requests decoded
at once. Random weights prove speed, never quality.
"""

from __future__ import annotations

import argparse
import sys

from bench.common import Score
from bench.e2e import arms, serving

# The budget counts 4-bit pages and pruning together. With a lag, an answer competes for it as a whole.
KV_COMPRESS = "--kvc-policy kv-compress --kvc-high k4v4 --kvc-lag 512 --kvc-budget"
OURS = {
    "leankv": "--kvc-policy leankv --kvc-lag 512 --kvc-window 0",
    "kv-compress-8x": f"{KV_COMPRESS} 8x",
    "kv-compress-16x": f"{KV_COMPRESS} 16x",
}


def scores(numbers: dict[str, dict], a: argparse.Namespace) -> dict[str, Score]:
    """Output tokens/s of each of our servers over those of the fastest stock bf16."""
    point = f"c{a.prompts}"
    best = arms.fastest(numbers, arms.BF16, point, lambda run: run["output_tok_s"])
    ours = [name for name in arms.servers_at(numbers, point) if name.startswith("kvc_")]
    if best is None:
        return {}
    return {
        f"papers.longgen.vs_bf16.{name.removeprefix('kvc_')}": serving.ratio(
            numbers[f"{name}.{point}"], numbers[best], "output_tok_s"
        )
        for name in ours
    }


def main() -> None:
    also = [text for name, options in OURS.items() for text in ("--also", f"{name}: {options}")]
    load = ["--input", "512", "--output", "8192", "--quick", "--name", serving.named("e2e/long_answers")]
    serving.main([*load, *also, *sys.argv[1:]], scores)


if __name__ == "__main__":
    main()

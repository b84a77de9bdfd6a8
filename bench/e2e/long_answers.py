"""Throughput of long answers in equal KV memory: 64 requests with 512 prompt tokens and 8192 output tokens.

    python -m bench.e2e.long_answers --model <folder> --load-format dummy [--only kvc_k4v4,kvc_leankv]
    python -m bench.e2e.long_answers --model <folder> --text <file>    # trained weights, prompts from a text

LeanKV and KV-Compress use this load. Options, result file and stock servers are those of `bench.e2e.serving`. The
result file also has the number of concurrently decoding requests. Random weights show speed, not quality. Attention
decides how much memory `leankv` takes, so trained weights and a text show its speed better.
"""

from __future__ import annotations

import argparse
import sys

from bench.common import Score
from bench.e2e import arms, serving

# The budget covers quantization and pruning together. With a lag, all tokens of an answer compete for it.
KV_COMPRESS = "--kvc-policy kv-compress --kvc-high k4v4 --kvc-lag 512 --kvc-budget"
OURS = {
    "leankv": "--kvc-policy leankv --kvc-lag 512 --kvc-window 0",
    "kv-compress-8x": f"{KV_COMPRESS} 8x",
    "kv-compress-16x": f"{KV_COMPRESS} 16x",
}


def scores(numbers: dict[str, dict], args: argparse.Namespace) -> dict[str, Score]:
    """Output tokens/s of each of our servers relative to the fastest stock bf16 and stock fp8 servers."""
    point, load = f"c{args.prompts}", "papers.longgen_text" if args.text else "papers.longgen"
    result = {}
    for name, dtype in (("vs_bf16", arms.BF16), ("vs_fp8", arms.FP8)):
        best = arms.fastest(numbers, dtype, point, lambda run: run["output_tok_s"])
        for server in arms.servers_at(numbers, point) if best else ():
            if server.startswith("kvc_"):
                score = serving.ratio(numbers[f"{server}.{point}"], numbers[best], "output_tok_s")
                result[f"{load}.{name}.{server.removeprefix('kvc_')}"] = score
    return result


def main() -> None:
    given, _ = serving.parser().parse_known_args()
    bench = "e2e/long_answers_text" if given.text else "e2e/long_answers"
    argv = ["--input", "512", "--output", "8192", "--quick", "--name", serving.result_name(bench)]
    for name, options in OURS.items():
        argv += ["--also", f"{name}: {options}"]
    serving.main([*argv, *sys.argv[1:]], scores)


if __name__ == "__main__":
    main()

"""Maximum number of concurrently running requests in equal KV memory.

    python -m bench.serve.resident [--formats k4v4,..] [--tokens 6144] [--share 0.4] [--prompts 10]

Every server has the KV memory of `--tokens` bf16 tokens and gets concurrent, distinct prompts of `--share` times as
many tokens. The figure is the maximum number of running requests in the server's log.
"""

from __future__ import annotations

import argparse
import random
import re
import time

from bench import common

NAME = "serve/resident"
SEED = 7


def measure(name: str, args: argparse.Namespace) -> dict:
    options = ["--max-total-tokens", str(args.tokens), "--chunked-prefill-size", str(args.chunk)]
    options += ["--decode-log-interval", "4"]
    if name == "stock":
        options = common.stock("--page-size", str(args.block), *options)
    else:
        options = common.kvc(name, *options, block=args.block, memory=None)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(1000, 40000) for _ in range(int(args.share * args.tokens))] for _ in range(args.prompts)]
    with common.Server(options) as server:
        fits = server.client.server_info()["max_total_num_tokens"]
        began = time.monotonic()
        answers = server.client.generate_many(
            prompts, args.answer, parallel=args.prompts, ignore_eos=False, sampling={"min_new_tokens": args.answer}
        )
        seconds = time.monotonic() - began
        log = server.log.read_text(errors="replace")
        assert [len(x.ids) for x in answers] == [args.answer] * args.prompts, "an answer is too short"
        assert not server.errors(), server.errors()
    return {
        "running": max(int(n) for n in re.findall(r"Decode batch.*#running-req: (\d+)", log)),
        "retractions": log.count("Retract requests"),
        "seconds": round(seconds, 1),
        "fit_uncompressed": fits,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--formats", default="k4v4")
    p.add_argument("--tokens", type=int, default=6144, help="KV memory of every server, in bf16 tokens")
    p.add_argument("--share", type=float, default=0.4, help="length of a prompt as a share of --tokens")
    p.add_argument("--prompts", type=int, default=10)
    p.add_argument("--answer", type=int, default=64)
    p.add_argument("--chunk", type=int, default=256)
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--name", default=NAME)
    args = p.parse_args()
    numbers, scores = {}, {}
    for name in ["stock", *args.formats.split(",")]:
        numbers[name] = measure(name, args)
        print(f"{name:12}" + ", ".join(f"{k} {v}" for k, v in numbers[name].items()), flush=True)
        if name != "stock":
            unit = f"x requests at a time, {numbers['stock']['running']} in stock bf16"
            ratio = numbers[name]["running"] / numbers["stock"]["running"]
            scores[f"serve.resident.{name}"] = (ratio, unit, "stock bf16 on the same CPU")
        common.write_result(args.name, numbers, scores=scores, quiet=True)
    print(common.RESULTS / f"{args.name}.json")


if __name__ == "__main__":
    main()

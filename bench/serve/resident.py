"""Number of requests that run at a time in equal KV memory.

    python -m bench.serve.resident [--formats k4v4,..] [--tokens 6144] [--share 0.4] [--prompts 10]

Every server gets the memory of `--tokens` bf16 tokens and concurrent, distinct prompts of `--share` of that. The figure
is the server's own number of running requests.
"""

from __future__ import annotations

import argparse
import random
import re
import time

from bench import common

NAME = "serve/resident"
SEED = 7


def measure(name: str, a: argparse.Namespace) -> dict:
    options = ["--max-total-tokens", str(a.tokens), "--chunked-prefill-size", str(a.chunk)]
    options += ["--decode-log-interval", "4"]
    if name == "stock":
        args = common.stock("--page-size", str(a.block), *options)
    else:
        args = common.kvc(name, *options, block=a.block, memory=None)
    draw = random.Random(SEED)
    prompts = [[draw.randrange(1000, 40000) for _ in range(int(a.share * a.tokens))] for _ in range(a.prompts)]
    with common.Server(args) as server:
        fits = server.client.server_info()["max_total_num_tokens"]
        began = time.monotonic()
        answers = server.client.generate_many(
            prompts, a.answer, parallel=a.prompts, ignore_eos=False, sampling={"min_new_tokens": a.answer}
        )
        seconds = time.monotonic() - began
        said = server.log.read_text(errors="replace")
        assert [len(x.ids) for x in answers] == [a.answer] * a.prompts, "an answer is not of full length"
        assert not server.errors(), server.errors()
    return {
        "running": max(int(n) for n in re.findall(r"Decode batch.*#running-req: (\d+)", said)),
        "retractions": said.count("Retract requests"),
        "seconds": round(seconds, 1),
        "fit_uncompressed": fits,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--formats", default="k4v4")
    p.add_argument("--tokens", type=int, default=6144, help="bf16 tokens whose memory every server gets")
    p.add_argument("--share", type=float, default=0.4, help="of these tokens, in a prompt")
    p.add_argument("--prompts", type=int, default=10)
    p.add_argument("--answer", type=int, default=64)
    p.add_argument("--chunk", type=int, default=256)
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--name", default=NAME)
    a = p.parse_args()
    numbers, scores = {}, {}
    for name in ["stock", *a.formats.split(",")]:
        numbers[name] = measure(name, a)
        print(f"{name:12}" + ", ".join(f"{k} {v}" for k, v in numbers[name].items()), flush=True)
        if name != "stock":
            unit = f"x requests at a time, {numbers['stock']['running']} in stock bf16"
            ratio = numbers[name]["running"] / numbers["stock"]["running"]
            scores[f"serve.resident.{name}"] = (ratio, unit, "stock bf16 on the same CPU")
        common.write_result(a.name, numbers, scores=scores, quiet=True)
    print(common.RESULTS / f"{a.name}.json")


if __name__ == "__main__":
    main()

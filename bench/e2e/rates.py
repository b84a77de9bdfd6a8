"""Tokens/s and running requests over the compression rate of one-shot prompts (KV-Compress' figures 7 and 8).

    python -m bench.e2e.rates --model <folder> --load-format dummy [--rates 1,2,4,8,16,32,64]

64 requests of 4096 tokens that generate 512 each. Memory for 30,000 bf16 tokens holds 6 of them uncompressed. One
server with this plug-in serves every rate, because requests choose it; stock bf16 is the baseline. Options and figures
are those of `bench.e2e.serving`. Random weights prove speed, never quality.
"""

from __future__ import annotations

import argparse

from bench.common import Score, Server, write_result
from bench.e2e import arms, serving


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = serving.parser()
    p.add_argument("--rates", default="1,2,4,8,16,32,64", help="separated by commas")
    p.set_defaults(tokens=30_000, quick=True, name=serving.named("e2e/rates"))
    a = serving.arguments(argv, p)
    a.rates = [int(rate) for rate in a.rates.split(",")]
    return a


def scores(numbers: dict[str, dict]) -> dict[str, Score]:
    """Output tokens/s of each rate over those of the fastest stock bf16."""
    best = arms.fastest(numbers, arms.BF16, "rate1", lambda run: run["output_tok_s"])
    if best is None:
        return {}
    return {
        name.replace("kvc.", "papers."): serving.ratio(run, numbers[best], "output_tok_s")
        for name, run in numbers.items()
        if name.startswith("kvc.")
    }


def measure(server: Server, a: argparse.Namespace, name: str, options: list[str], rates: list[int], numbers: dict):
    """One load at each rate, into `numbers` and the result file."""
    serving.load(server, a, 8, 8, 16)  # compile and warm up
    for rate in rates:
        quality = f"one-shot:{rate}x" if name == "kvc" else ""
        runs = []
        for i in range(a.repeat):
            server.client.flush()
            seed = 1000 * i
            runs.append(serving.load(server, a, a.prompts, a.prompts, a.output, seed=seed, quality=quality))
        numbers[f"{name}.rate{rate}"] = {"options": options, **serving.summary(runs)}
        print(f"{name}.rate{rate}: " + ", ".join(f"{k} {v:g}" for k, v in runs[-1].items()), flush=True)
        write_result(a.name, numbers, scores=scores(numbers), quiet=True)


def main() -> None:
    a = arguments()
    numbers = serving.earlier(a)
    for name, (options, _) in serving.servers(a).items():
        ours = name.startswith("kvc")
        if not ours and not arms.is_variant(name, arms.BF16):
            continue
        name = "kvc" if ours else name
        rates = [r for r in (a.rates if ours else [1]) if f"{name}.rate{r}" not in numbers]
        if rates:
            with Server(options, model=a.model) as server:
                measure(server, a, name, options, rates, numbers)
    print(serving.table(numbers))
    write_result(a.name, numbers, scores=scores(numbers))


if __name__ == "__main__":
    main()

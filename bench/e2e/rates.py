"""Throughput and running requests by compression rate of one-shot prompts, like figures 7 and 8 of KV-Compress.

    python -m bench.e2e.rates --model <folder> --load-format dummy [--rates 1,2,4,8,16,32,64]

The load is 64 requests with 4096 prompt tokens and 512 output tokens. Memory for 30,000 bf16 tokens holds 6 of them
uncompressed. Requests choose their rate, so one server serves all rates. `--kvc-one-shot` gives it the block tables
that budgets need. The baseline is stock bf16. Options and figures are those of `bench.e2e.serving`. Random weights show
speed, not quality.
"""

from __future__ import annotations

import argparse

from bench.common import Score, Server, write_result
from bench.e2e import arms, serving


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = serving.parser()
    p.add_argument("--rates", default="1,2,4,8,16,32,64", help="compression rates, separated by commas")
    p.set_defaults(tokens=30_000, quick=True, name=serving.result_name("e2e/rates"))
    args = serving.arguments(argv, p)
    args.rates = [int(rate) for rate in args.rates.split(",")]
    return args


def scores(numbers: dict[str, dict]) -> dict[str, Score]:
    """Output tokens/s at each rate relative to the fastest stock bf16 server."""
    best = arms.fastest(numbers, arms.BF16, "rate1", lambda run: run["output_tok_s"])
    if best is None:
        return {}
    return {
        name.replace("kvc.", "papers."): serving.ratio(run, numbers[best], "output_tok_s")
        for name, run in numbers.items()
        if name.startswith("kvc.")
    }


def measure(server: Server, args: argparse.Namespace, name: str, options: list[str], rates: list[int], numbers: dict):
    """Run the load at each rate; add the figures to `numbers` and the result file."""
    serving.load(server, args, 8, 8, 16)  # compile and warm up
    for rate in rates:
        quality = f"one-shot:{rate}x" if name == "kvc" else ""
        runs = []
        for seed in range(0, 1000 * args.repeat, 1000):
            server.client.flush()
            runs.append(serving.load(server, args, args.prompts, args.prompts, args.output, seed=seed, quality=quality))
        numbers[f"{name}.rate{rate}"] = {"options": options, **serving.summary(runs)}
        print(f"{name}.rate{rate}: " + ", ".join(f"{k} {v:g}" for k, v in runs[-1].items()), flush=True)
        write_result(args.name, numbers, scores=scores(numbers), quiet=True)


def main() -> None:
    args = arguments()
    numbers = serving.earlier_rows(args)
    for name, (options, _) in serving.servers(args).items():
        ours = name.startswith("kvc")
        if not ours and not arms.is_variant(name, arms.BF16):
            continue
        if ours:
            name, options = "kvc", [*options, "--kvc-one-shot", "8x"]
        rates = [r for r in (args.rates if ours else [1]) if f"{name}.rate{r}" not in numbers]
        if rates:
            with Server(options, model=args.model) as server:
                measure(server, args, name, options, rates, numbers)
    print(serving.table(numbers))
    write_result(args.name, numbers, scores=scores(numbers))


if __name__ == "__main__":
    main()

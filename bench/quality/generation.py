"""Effect of a cache on long generations: sampled texts, scored by stock SGLang.

    python -m bench.quality.generation --cells "stock;k4v4;prune+scorer=h2o+budget=4x" [--model smollm2] [--new 512]

Every cell continues the same prompts at temperature 1. A stock server then reads prompt and continuation, and the mean
of log p_cell - log p_stock over the sampled tokens is an unbiased estimate of KL(cell || stock) per token along the
cell's own path, including the effect of pruning during generation. `stock` shows the noise of its decode steps against
its prefill.
"""

from __future__ import annotations

import argparse
import math
import statistics

from bench import common, prompts
from bench.quality import fetch
from bench.quality.tasks import Maker

PARALLEL = 24  # texts at a time; with more, a client would time out on a CPU


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=fetch.MODELS, default="smollm2")
    p.add_argument("--cells", default="stock;k4v4", help="separated by ';', settings by '+'")
    p.add_argument("--texts", type=int, default=16)
    p.add_argument("--prompt", type=int, default=384)
    p.add_argument("--new", type=int, default=512)
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--name", default="quality/generation")
    a = p.parse_args(argv)
    a.folder = fetch.MODELS[a.model]().resolve()
    return a


def sampled(cell: str, begun: list[list[int]], args) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log-probabilities) of each continuation."""
    options = common.either(cell, "--enable-fp32-lm-head", block=args.block)
    with common.Server(options, model=args.folder) as server:
        answers = server.client.generate_many(begun, args.new, parallel=PARALLEL, temperature=1.0, logprobs=True)
        assert not server.errors(), server.errors()
    return [(a.ids, a.logprobs) for a in answers]


def judged(begun: list[list[int]], texts: dict[str, list], args) -> dict[str, list[list[float]]]:
    """Stock SGLang's log-probabilities of the same tokens, by cell and text."""
    out: dict[str, list[list[float]]] = {}
    with common.Server(common.either("stock", "--enable-fp32-lm-head", block=args.block), model=args.folder) as server:
        for cell, some in texts.items():
            out[cell] = []
            for prompt, (ids, _) in zip(begun, some):
                # The first requested token has no log-probability, so the request begins one position early.
                answer = server.client.generate(prompt + ids, 1, input_from=len(prompt) - 1)
                out[cell].append(answer.input_logprobs[-len(ids) :])
    return out


def summary(texts: list, reference: list[list[float]]) -> dict:
    """Nats a token: mean and standard error over texts, and of each quarter of the continuation."""
    gaps = [[a - b for a, b in zip(mine, theirs)] for (_, mine), theirs in zip(texts, reference)]
    means = [statistics.fmean(g) for g in gaps]
    quarter = len(gaps[0]) // 4
    parts = [statistics.fmean(x for g in gaps for x in g[i * quarter : (i + 1) * quarter]) for i in range(4)]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return {"nats": statistics.fmean(means), "standard_error": error, "quarters": parts, "tokens": sum(map(len, gaps))}


def main() -> None:
    args = arguments()
    maker = Maker(prompts.tokenizer(args.folder), fetch.essays().read_text())
    begun = [maker.passage(i, args.prompt) for i in range(args.texts)]
    texts = {cell: sampled(cell, begun, args) for cell in args.cells.split(";")}
    reference = judged(begun, texts, args)
    numbers = {cell: summary(texts[cell], reference[cell]) for cell in texts}
    for cell, n in numbers.items():
        quarters = ", ".join(f"{q:.4f}" for q in n["quarters"])
        print(f"{cell:50} {n['nats']:8.4f} +- {n['standard_error']:.4f} nats; quarters {quarters}")
    common.write_result(args.name, numbers)


if __name__ == "__main__":
    main()

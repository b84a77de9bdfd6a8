"""Effect of a cache on long generations, as the KL of sampled texts from stock SGLang.

    python -m bench.quality.generation --cells "stock;k4v4;prune+scorer=h2o+budget=4x" [--model smollm2] [--new 512]

Every cell continues the same prompts at temperature 1. A stock server then scores the continuations. The mean of
log p_cell - log p_stock over the sampled tokens is an unbiased estimate of KL(cell || stock) per token along the cell's
own continuation, and includes the effect of pruning during generation. The cell `stock` shows the noise between decode
steps and a prefill.
"""

from __future__ import annotations

import argparse
import math
import statistics

from bench import common, prompts
from bench.quality import fetch
from bench.quality.tasks import Maker

PARALLEL = 24  # concurrent requests; with more, the client would time out on a CPU


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", choices=fetch.MODELS, default="smollm2")
    p.add_argument("--cells", default="stock;k4v4", help="cells, separated by ';'; settings by '+'")
    p.add_argument("--texts", type=int, default=16)
    p.add_argument("--prompt", type=int, default=384)
    p.add_argument("--new", type=int, default=512)
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--name", default="quality/generation")
    args = p.parse_args(argv)
    args.folder = fetch.MODELS[args.model]().resolve()
    return args


def sample(cell: str, prompt_ids: list[list[int]], args) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities for each continuation."""
    options = common.either(cell, "--enable-fp32-lm-head", block=args.block)
    with common.Server(options, model=args.folder) as server:
        answers = server.client.generate_many(prompt_ids, args.new, parallel=PARALLEL, temperature=1.0, logprobs=True)
        assert not server.errors(), server.errors()
    return [(a.ids, a.logprobs) for a in answers]


def stock_logprobs(prompt_ids: list[list[int]], texts: dict[str, list], args) -> dict[str, list[list[float]]]:
    """Log-probabilities of the same tokens on stock SGLang, by cell and text."""
    out: dict[str, list[list[float]]] = {}
    with common.Server(common.either("stock", "--enable-fp32-lm-head", block=args.block), model=args.folder) as server:
        for cell, continuations in texts.items():
            out[cell] = []
            for prompt, (ids, _) in zip(prompt_ids, continuations):
                # The first requested token has no log-probability, so the request starts one position earlier.
                answer = server.client.generate(prompt + ids, 1, input_from=len(prompt) - 1)
                out[cell].append(answer.input_logprobs[-len(ids) :])
    return out


def summary(texts: list, reference: list[list[float]]) -> dict:
    """Nats per token: mean and standard error over texts, and the mean of each quarter of the continuation."""
    gaps = [[a - b for a, b in zip(sampled, stock)] for (_, sampled), stock in zip(texts, reference)]
    means = [statistics.fmean(g) for g in gaps]
    quarter = len(gaps[0]) // 4
    parts = [statistics.fmean(x for g in gaps for x in g[i * quarter : (i + 1) * quarter]) for i in range(4)]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return {"nats": statistics.fmean(means), "standard_error": error, "quarters": parts, "tokens": sum(map(len, gaps))}


def main() -> None:
    args = arguments()
    maker = Maker(prompts.tokenizer(args.folder), fetch.essays().read_text())
    prompt_ids = [maker.passage(i, args.prompt) for i in range(args.texts)]
    texts = {cell: sample(cell, prompt_ids, args) for cell in args.cells.split(";")}
    reference = stock_logprobs(prompt_ids, texts, args)
    numbers = {cell: summary(texts[cell], reference[cell]) for cell in texts}
    for cell, n in numbers.items():
        quarters = ", ".join(f"{q:.4f}" for q in n["quarters"])
        print(f"{cell:50} {n['nats']:8.4f} +- {n['standard_error']:.4f} nats; quarters {quarters}")
    common.write_result(args.name, numbers)


if __name__ == "__main__":
    main()

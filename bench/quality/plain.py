"""The check of the harness: likelihoods of the same passages by Hugging Face transformers, no server and no cache.

    python -m bench.quality.plain [--model smollm2|qwen-0.5b] [--contexts 16] [--length 1024]

Stock SGLang's figures of `bench.quality.run` must be these, up to rounding: `--against` names its result file, and
the largest difference of a passage is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from bench import common, prompts
from bench.quality import fetch
from bench.quality.run import SCORED
from bench.quality.tasks import Maker

ROUNDING = 0.02  # nats per token over a passage, between two bf16 implementations


def likelihood(model, ids: list[int]) -> float:
    """Nats per token of the last tokens of `ids`."""
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0, -SCORED - 1 : -1].float().log_softmax(-1)
    return -scores.gather(1, torch.tensor(ids[-SCORED:])[:, None]).mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--against", type=Path, help="result file of bench.quality.run with the format stock")
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    path = fetch.MODELS[args.model]()
    maker = Maker(prompts.tokenizer(path), fetch.essays().read_text())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    found = [likelihood(model, maker.passage(i, args.length + SCORED + 1)) for i in range(args.contexts)]
    numbers = {"model": args.model, "length": args.length, "nats": found, "mean": statistics.fmean(found)}
    if args.against:
        theirs = json.loads(args.against.read_text())["numbers"]["raw"]["stock"]["nll"]
        apart = [abs(a - b) for a, b in zip(found, theirs)]
        numbers |= {"server": theirs[: len(found)], "largest_difference": max(apart)}
        print(f"largest difference of a passage: {max(apart):.4f} nats per token")
    print(f"{args.model}: {numbers['mean']:.4f} nats per token over {len(found)} passages")
    common.write_result(f"quality/plain_{args.model}_{args.length}", numbers)
    return int(numbers.get("largest_difference", 0) > ROUNDING)


if __name__ == "__main__":
    raise SystemExit(main())

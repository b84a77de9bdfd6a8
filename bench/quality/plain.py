"""Check of the harness: likelihoods of the same passages in transformers, without a server or a cache.

    python -m bench.quality.plain [--model smollm2|qwen-0.5b] [--contexts 16] [--length 1024]

    python -m bench.quality.plain --model qwen-0.5b --tasks vt,cwe,multikey --contexts 1      # answers instead

The figures of stock SGLang in `bench.quality.run` must equal these up to rounding. With `--against` and its result
file, the largest difference of a passage is printed. With `--tasks`, the model answers the questions of these tasks of
`bench.quality.suite`. Context and question are one prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from bench import common, prompts
from bench.quality import fetch, suite
from bench.quality.run import SCORED
from bench.quality.tasks import Context, Maker, Question

ROUNDING = 0.02  # nats per token over a passage, between two bf16 implementations


def likelihood(model, ids: list[int]) -> float:
    """Nats per token of the last SCORED tokens of `ids`."""
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0, -SCORED - 1 : -1].float().log_softmax(-1)
    return -scores.gather(1, torch.tensor(ids[-SCORED:])[:, None]).mean().item()


def answers(model, tok, task: suite.Task, contexts: list[Context], tokens: int) -> list[list[bool]]:
    """Whether each greedy answer is right, by context."""

    def answered(context: Context, question: Question) -> bool:
        ids = torch.tensor([[*context.ids, *question.ask]])
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.tokens or tokens, **greedy)
        return task.right(question.answer, tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    return [[answered(context, question) for question in context.questions] for context in contexts]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tasks", help="tasks to answer instead of likelihoods, separated by commas")
    parser.add_argument("--first", type=int, default=0, help="number of the first context of a task")
    parser.add_argument("--answer-tokens", type=int, default=7)
    parser.add_argument("--against", type=Path, help="result file of bench.quality.run with format stock")
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    path = fetch.MODELS[args.model]()
    maker = Maker(prompts.tokenizer(path), fetch.essays().read_text())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if args.tasks:
        raw = {}
        for name in suite.select(args.tasks):
            task = suite.TASKS[name]
            raw[name] = answers(model, maker.tok, task, task.make(maker, args), args.answer_tokens)
            marks = [right for context in raw[name] for right in context]
            print(f"{name}: {sum(marks)} of {len(marks)} right", flush=True)
        common.write_result(f"quality/plain_{args.model}_{args.length}_tasks", {"model": args.model, "raw": raw})
        return 0
    nats = [likelihood(model, maker.passage(i, args.length + SCORED + 1)) for i in range(args.contexts)]
    numbers = {"model": args.model, "length": args.length, "nats": nats, "mean": statistics.fmean(nats)}
    if args.against:
        server = json.loads(args.against.read_text())["numbers"]["raw"]["stock"]["nll"]
        largest = max(abs(a - b) for a, b in zip(nats, server))
        numbers |= {"server": server[: len(nats)], "largest_difference": largest}
        print(f"largest difference of a passage: {largest:.4f} nats per token")
    print(f"{args.model}: {numbers['mean']:.4f} nats per token over {len(nats)} passages")
    common.write_result(f"quality/plain_{args.model}_{args.length}", numbers)
    return int(numbers.get("largest_difference", 0) > ROUNDING)


if __name__ == "__main__":
    raise SystemExit(main())

"""Figures of `sglang-kvc calibrate` for the models of the quality benchmarks.

    python -m bench.quality.calibrate [--model smollm2|qwen-0.5b] [--tokens 2048] [--answers-of niah,kv]

With `--answers-of`, the answers to questions about contexts choose LeanKV's thresholds. `bench.quality.policies` asks
other questions unless `--first` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from bench import common, prompts
from bench.quality import fetch, suite
from bench.quality.suite import Workload
from bench.quality.tasks import Maker
from sglang_kvc.calibration.measure import command

TASKS = ("niah", "kv")  # tasks whose answers are one text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="where to keep the calibration file; default: not kept")
    parser.add_argument("--plot", help="plot of the figures, a .png file")
    parser.add_argument("--answers-of", help=f"separated by commas: {', '.join(TASKS)}")
    parser.add_argument("--contexts", type=int, default=13, help="contexts per task, with 8 questions each")
    parser.add_argument("--first", type=int, default=500, help="number of the first context")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a context")
    args = parser.parse_args()
    args.tasks = suite.select(args.answers_of) if args.answers_of else []
    if not set(args.tasks) <= set(TASKS):
        parser.error(f"--answers-of {args.answers_of} has a task without one right answer; choose {', '.join(TASKS)}")
    model, text = str(fetch.MODELS[args.model]()), str(fetch.essays())
    wall, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        out = str(args.out or Path(folder) / "calibration.safetensors")
        answers = None
        if args.tasks:
            answers = str(Path(folder) / "answers.jsonl")
            Path(answers).write_text(items(prompts.tokenizer(model), Path(text).read_text(), args))
        options = {"tokens": args.tokens, "device": args.device, "picture": args.plot, "answers": answers}
        report = command.run(model, text, out, **options)
        tensors = shares(out)
    seconds = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
    print(command.table(report))
    numbers = {"model": args.model, **seconds, **asdict(report), **tensors}
    if args.tasks:
        numbers |= {key: getattr(args, key) for key in ("tasks", "contexts", "first", "length")}
    common.write_result(f"calibrate{'_answers' if args.tasks else ''}/{args.model}", numbers)


def items(tokenizer, essays: str, args) -> str:
    """JSON lines for `sglang-kvc calibrate --answers`: the questions of the benchmark's tasks as texts."""

    def text(ids) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    workload = Workload.create(Maker(tokenizer, essays), args)
    lines = [
        {"context": text(context.ids), "prompt": text(question.ask), "answer": f" {question.answer}"}
        for contexts in workload.contexts.values()
        for context in contexts
        for question in context.questions
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def shares(path: str) -> dict[str, list]:
    """XKV's share of each layer at several fractions of kept tokens, and the attention retained by a quarter of a
    prompt's tokens."""
    from safetensors import safe_open

    from kvc_kernels import ops

    with safe_open(path, framework="pt") as file:
        curves = file.get_tensor("importance_retention")
    layers, units = curves.shape
    layer_shares = []
    for fraction in (0.05, 0.25, 0.5):
        n = max(layers, round(fraction * layers * units))
        layer_shares.append([fraction, [x / n for x in ops.greedy_allocation(curves, n, 1)]])
    return {
        "layer_shares": layer_shares,
        "retained_by_a_quarter": curves[:, units // 4 - 1].tolist(),
    }


if __name__ == "__main__":
    main()

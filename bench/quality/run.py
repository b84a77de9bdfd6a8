"""Effect of compression on answers: several questions per context, through the server.

    python -m bench.quality.run [--model smollm2|qwen-0.5b] [--formats stock,bf16,k8v4,k4v4,leankv]
        [--tasks niah,kv,nll] [--contexts 16] [--length 1024]

*niah*: 8 magic numbers hidden in essays. *kv*: a dictionary that fills the context. *nll*: nats per token of the 255
tokens after a cached passage of an essay. A context is sent once. Every question must then hit the cached prefix.
Answers are greedy and compared exactly. Answers that changed from right to wrong or back are counted relative to stock
SGLang, whose figures also check this harness.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

from bench import common, prompts
from bench.quality import fetch
from bench.quality.findings import sign_test
from bench.quality.tasks import TITLES, Context, Maker, right

NAME = "quality"
FORMATS = ("stock", "bf16", "k8v4", "k4v4", "leankv")
TASKS = ("niah", "kv", "nll")
SCORED = 255  # tokens whose likelihood is measured


def ask(server: common.Server, context: Context, block: int, tokens: int) -> list[bool]:
    """Send the context, then each question; return whether each answer is right."""
    server.client.flush()
    server.client.generate(context.ids, 1)
    if server.client.stats():
        server.client.when_idle()
    out = []
    for q in context.questions:
        answer = server.client.generate([*context.ids, *q.ask], tokens)
        hit = len(context.ids) // block * block
        assert answer.cached_tokens >= hit, f"{context.name}: {answer.cached_tokens} tokens cached, not {hit}"
        out.append(right(q.answer, answer.text))
    return out


def likelihood(server: common.Server, ids: list[int], block: int) -> float:
    """Nats per token of the last 255 tokens, with all earlier tokens cached.

    The server returns log-probabilities of a prompt from a given position and recomputes the tokens from there. The
    first of them has no computed predecessor and does not count.
    """
    begin = len(ids) - SCORED - 1
    server.client.flush()
    server.client.generate(ids[:begin], 1)
    if server.client.stats():
        server.client.when_idle()
    answer = server.client.generate(ids, 1, input_from=begin)
    hit = begin // block * block
    # A hit ends at least one token before the first requested log-probability.
    assert hit - block <= answer.cached_tokens <= begin and answer.cached_tokens > 0, answer.cached_tokens
    assert len(answer.input_logprobs) == SCORED, len(answer.input_logprobs)
    return -statistics.fmean(answer.input_logprobs)


def measure(fmt: str, model, maker: Maker, args) -> dict:
    extra = ("--enable-fp32-lm-head",)
    options, block = common.either(fmt, *extra, block=args.block), args.block
    out: dict[str, object] = {}
    with common.Server(options, model=model) as server:
        for task, make in (("niah", maker.needles), ("kv", maker.dictionary)):
            if task in args.tasks.split(","):
                contexts = [make(i, args.length) for i in range(args.contexts)]
                out[task] = [ask(server, c, block, args.answer_tokens) for c in contexts]
        if "nll" in args.tasks.split(","):
            passages = [maker.passage(i, args.length + SCORED + 1) for i in range(args.contexts)]
            out["nll"] = [likelihood(server, p, block) for p in passages]
        out["ratio"] = server.client.stats().get("ratio_body")
        assert not server.errors(), server.errors()
    return out


def summary(raw: dict, reference: dict | None) -> dict:
    """Figures of one format or cell from its raw results, relative to `reference`."""
    out: dict[str, object] = {"ratio_body": raw["ratio"]}
    for task in TITLES:
        if task not in raw:
            continue
        marks = [x for row in raw[task] for x in row]
        out[task] = {"right": sum(marks), "of": len(marks), "em": statistics.fmean(marks)}
        if reference and task in reference:
            reference_marks = [x for row in reference[task] for x in row]
            lost = sum(a and not b for a, b in zip(reference_marks, marks))
            gained = sum(b and not a for a, b in zip(reference_marks, marks))
            out[task] |= {"right_to_wrong": lost, "wrong_to_right": gained, "sign_test_p": sign_test(lost, gained)}
        lengths = [_mean(run.get("lengths", {}).get(task)) for run in (raw, reference or {})]
        if all(lengths):
            out[task]["length_ratio"] = lengths[0] / lengths[1]
    if "nll" in raw:
        out["nll"] = {"nats": statistics.fmean(raw["nll"]), "passages": len(raw["nll"])}
        if reference and "nll" in reference:
            delta = [a - b for a, b in zip(raw["nll"], reference["nll"])]
            spread = statistics.stdev(delta) / math.sqrt(len(delta)) if len(delta) > 1 else math.nan
            out["nll"] |= {"delta": statistics.fmean(delta), "delta_standard_error": spread}
    return out


def _mean(rows: list[list[int]] | None) -> float | None:
    return statistics.fmean(n for row in rows for n in row) if rows else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=7)
    parser.add_argument("--resume", action="store_true", help="reuse the formats of the result file")
    args = parser.parse_args()
    model = fetch.MODELS[args.model]()
    maker = Maker(prompts.tokenizer(model), fetch.essays().read_text())
    settings = {k: getattr(args, k) for k in ("model", "contexts", "length", "block")}
    raw, rows, reference = {}, {}, None
    earlier = _earlier(args, settings) if args.resume else {}
    for fmt in args.formats.split(","):
        raw[fmt] = earlier.get(fmt) or {**measure(fmt, model, maker, args), "commit": common.commit()}
        reference = raw[fmt] if fmt == "stock" else reference
        rows[fmt] = summary(raw[fmt], None if fmt == "stock" else reference)
        print(fmt, rows[fmt], flush=True)
        # Written after each format, so that an interrupted run keeps its results.
        numbers = {**settings, "formats": rows, "raw": raw}
        common.write_result(f"{NAME}/{args.model}_{args.length}", numbers)


def _earlier(args, settings: dict) -> dict[str, dict]:
    """Raw results by format of an earlier run with the same settings. Greedy answers stay valid."""
    path = common.RESULTS / f"{NAME}/{args.model}_{args.length}.json"
    numbers = json.loads(path.read_text())["numbers"] if path.exists() else {}
    return numbers["raw"] if settings.items() <= numbers.items() else {}


if __name__ == "__main__":
    main()

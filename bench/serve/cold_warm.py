"""Comparison of warm answers (from the cache) with cold ones (computed), and with each other.

    python -m bench.serve.cold_warm [--formats stock,bf16,k8v4,k4v4,leankv] [--prompts 24] [--block 128] [--name NAME]

*Cold and warm*: every prompt is sent after a flush, and then again. The second request must hit the cache exactly up to
the last block boundary. *Agreement* is the share of equal tokens among the positions at which both runs had the same
context, which end with the first difference. `.answers` is the share of equal answers. *KL* is the divergence of the
warm from the cold distribution at these positions, over the ten best candidates of each. Rounding also changes tokens
of stock SGLang, so stock is a reference.

*Warm and warm*: prompts are repeated from the same cached state, each alone in its batch. Between the rounds there is
other traffic: prompts that share these prefixes, and unrelated ones.
"""

from __future__ import annotations

import argparse
import statistics

from bench import common, prompts
from bench.client import Answer
from bench.common import Score
from bench.compare import kl_top, match, percentile

NAME = "serve/cold_warm"
FORMATS = ("stock", "bf16", "k8v4", "k4v4", "leankv")
TOP = 10
UP_TO = "share of tokens up to the first difference"
ROUNDS = 3
# The blocks of these policies depend on the request that filled them, so warm answers may differ.
SEQUENCE_SCOPE = ("leankv",)


def texts(tok, block: int, count: int) -> list[list[int]]:
    """Token ids of passages of the Python reference. Their hits end at every block boundary up to 2400 tokens."""
    borders = range(block, 2400, block)
    lengths = [borders[i % len(borders)] + 20 + 29 * i % (block - 40) for i in range(count)]
    return [prompts.cut(tok, prompts.prose(), n, start=2900 * i) for i, n in enumerate(lengths)]


def compare(a: Answer, b: Answer) -> dict:
    """Compare answer `b` with the reference `a`."""
    m = match(a, b)
    compared = min(m.equal + 1, m.total)  # the first difference is the last position with a common context
    return {
        "equal": m.equal,
        "compared": compared,
        "gap": m.gap,
        "kl": kl_top(a.top[:compared], b.top[:compared]),
    }


def summary(rows: list[dict]) -> dict:
    kl = [x for r in rows for x in r["kl"]]
    compared = sum(r["compared"] for r in rows)
    return {
        "prompts": len(rows),
        "positions": compared,
        "agreement": sum(r["equal"] for r in rows) / compared,
        "same_answers": sum(r["equal"] == r["compared"] for r in rows) / len(rows),
        "kl_mean": statistics.fmean(kl),
        "kl_p50": percentile(kl, 0.5),
        "kl_p99": percentile(kl, 0.99),
        "kl_max": max(kl),
    }


def cold_warm(server: common.Server, prompt_ids: list[list[int]], block: int, tokens: int) -> tuple[list, list]:
    cold, warm = [], []
    for ids in prompt_ids:
        server.client.flush()
        cold.append(server.client.generate(ids, tokens, top=TOP))
        if server.client.stats():
            server.client.when_idle()
        warm.append(server.client.generate(ids, tokens, top=TOP))
        hits = (cold[-1].cached_tokens, warm[-1].cached_tokens)
        assert hits == (0, (len(ids) - 1) // block * block), hits
    return cold, warm


def warm_warm(server: common.Server, tok, prompt_ids: list[list[int]], block: int, tokens: int) -> dict:
    """Share of repeated prompts whose answer equals the first warm answer."""
    client = server.client
    client.flush()
    for ids in prompt_ids:
        client.generate(ids, 1)
    reference = {}
    same, different = 0, []
    for turn in range(ROUNDS + 1):
        for i, ids in enumerate(prompt_ids):
            answer = client.generate(ids, tokens, top=TOP)
            assert answer.cached_tokens == (len(ids) - 1) // block * block, "other traffic evicted the prefix"
            if turn == 0:
                reference[i] = answer
            elif answer.ids == reference[i].ids:
                same += 1
            else:
                different.append({"prompt": i, "round": turn, **match(reference[i], answer).to_dict()})
        # Concurrent prompts: some share these prefixes, others are unrelated.
        others = [ids[: -(7 + turn)] + prompts.cut(tok, "and then " * 40, 30 + turn) for ids in prompt_ids[:4]]
        others += [
            prompts.cut(tok, prompts.source("typing"), 300, start=300 * (4 * turn + k)) for k in range(4)
        ]
        client.generate_many(others, 8, parallel=4)
    total = ROUNDS * len(prompt_ids)
    return {
        "prompts": len(prompt_ids),
        "rounds": ROUNDS,
        "same": same,
        "of": total,
        "match": same / total,
        "parted": different,
    }


def measure(fmt: str, tok, args, prompt_ids: list[list[int]]) -> dict:
    extra = ("--enable-fp32-lm-head",)
    options, block = common.either(fmt, *extra, block=args.block), args.block
    with common.Server(options) as server:
        cold, warm = cold_warm(server, prompt_ids, block, args.tokens)
        repeated = prompt_ids[:: max(1, len(prompt_ids) // args.repeat)][: args.repeat]
        repetitions = warm_warm(server, tok, repeated, block, args.tokens)
        assert not server.errors(), server.errors()
    rows = [compare(a, b) for a, b in zip(cold, warm)]
    return {"cold": cold, "warm": warm, "warm_vs_cold": summary(rows), "warm_warm": repetitions, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5, help="number of prompts that are repeated")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--name", default=NAME, help="name of the result file")
    args = parser.parse_args()
    tok = prompts.tokenizer(common.demo_model())
    prompt_ids = texts(tok, args.block, args.prompts)
    formats, reference = {}, None
    for fmt in args.formats.split(","):
        answers = measure(fmt, tok, args, prompt_ids)
        if fmt == "stock":
            reference = answers["cold"]
        row = {k: answers[k] for k in ("warm_vs_cold", "warm_warm")}
        if reference:
            for state in ("cold", "warm"):
                row[f"{state}_vs_stock_cold"] = summary(
                    [compare(a, b) for a, b in zip(reference, answers[state])]
                )
        row["rows"] = [{**r, "kl": [round(x, 6) for x in r["kl"]]} for r in answers["rows"]]
        formats[fmt] = row
        print(fmt, {k: v for k, v in row.items() if k != "rows"}, flush=True)
        # Written after each format, so that an interrupted run keeps its results.
        lengths = [len(x) for x in prompt_ids]
        numbers = {"block": args.block, "answer_tokens": args.tokens, "lengths": lengths, "formats": formats}
        common.write_result(args.name, numbers, scores=scores(numbers, common.has_gpu()))


def agreement_scores(name: str, row: dict, tokens: int, baseline: str) -> dict[str, Score]:
    """Scores of one `summary`: agreement up to the first difference, and the share of equal answers."""
    unit, n = f"share of answers of {tokens} tokens", row["prompts"]
    return {
        name: Score(row["agreement"], UP_TO, baseline, n),
        f"{name}.answers": Score(row["same_answers"], unit, baseline, n),
    }


def scores(numbers: dict, gpu: bool) -> dict[str, Score]:
    """n is the number of prompts, or of repeated prompts for `warm_warm_match`."""
    result, formats, tokens = {}, numbers["formats"], numbers["answer_tokens"]
    for fmt, row in formats.items():
        name = f"serve.cold_warm_agreement{'_gpu' * gpu}.{fmt}"
        result |= agreement_scores(name, row["warm_vs_cold"], tokens, "the same server's computed answer")
        if "cold_vs_stock_cold" in row and fmt != "stock":
            name = f"serve.stock_agreement{'_gpu' * gpu}.{fmt}"
            result |= agreement_scores(name, row["cold_vs_stock_cold"], tokens, "stock's computed answer")
    block_scope = [row["warm_warm"] for fmt, row in formats.items() if fmt not in ("stock", *SEQUENCE_SCOPE)]
    if block_scope:
        total = sum(w["of"] for w in block_scope)
        share = sum(w["same"] for w in block_scope) / total
        baseline = "the first answer from the cache"
        result["serve.warm_warm_match"] = Score(share, "share of repeated prompts", baseline, n=total)
    return result


if __name__ == "__main__":
    main()

"""Compares answers from the cache with computed ones, and with each other.

    python -m bench.serve.cold_warm [--formats stock,bf16,k8v4,k4v4,leankv] [--prompts 24] [--block 128] [--name NAME]

Every prompt is asked cold (after a flush) and at once again, warm; the second request must hit the cache exactly up to
the last block boundary. *Agreement* is the share of equal tokens up to the first difference of an answer, which is
where both runs had the same past; `.answers` is the share of answers that are equal as a whole. *KL* is of the warm
from the cold distribution at these positions, from the ten best candidates of each. Stock SGLang also flips some tokens
by rounding, so it is measured, too.

*Warm against warm*: prompts are asked again from the same cached state, alone in the batch, in rounds with
other traffic in between: other questions behind the same text, and unrelated ones.
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
# Policies whose blocks depend on nothing but their own rows: their warm answers must repeat.
SEQUENCE_SCOPE = ("leankv",)


def texts(tok, block: int, count: int) -> list[list[int]]:
    """Passages spread over the reference, with lengths that put the end of the hit at every block boundary up to
    2400."""
    borders = range(block, 2400, block)
    lengths = [borders[i % len(borders)] + 20 + 29 * i % (block - 40) for i in range(count)]
    return [prompts.cut(tok, prompts.prose(), n, start=2900 * i) for i, n in enumerate(lengths)]


def compare(a: Answer, b: Answer) -> dict:
    """`a` cold or reference, `b` what is judged."""
    m = match(a, b)
    compared = min(m.equal + 1, m.total)  # the first difference is the last position with a common past
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


def cold_warm(server: common.Server, asked: list[list[int]], block: int, tokens: int) -> tuple[list, list]:
    cold, warm = [], []
    for ids in asked:
        server.client.flush()
        cold.append(server.client.generate(ids, tokens, top=TOP))
        if server.client.stats():
            server.client.when_idle()
        warm.append(server.client.generate(ids, tokens, top=TOP))
        hits = (cold[-1].cached_tokens, warm[-1].cached_tokens)
        assert hits == (0, (len(ids) - 1) // block * block), hits
    return cold, warm


def warm_warm(server: common.Server, tok, asked: list[list[int]], block: int, tokens: int) -> dict:
    """Share of repetitions, over prompts and rounds, with the same tokens as the first warm answer."""
    client = server.client
    client.flush()
    for ids in asked:
        client.generate(ids, 1)
    reference = {}
    same, parted = 0, []
    for turn in range(ROUNDS + 1):
        for i, ids in enumerate(asked):
            answer = client.generate(ids, tokens, top=TOP)
            assert answer.cached_tokens == (len(ids) - 1) // block * block, "other traffic evicted the prefix"
            if turn == 0:
                reference[i] = answer
            elif answer.ids == reference[i].ids:
                same += 1
            else:
                parted.append({"prompt": i, "round": turn, **match(reference[i], answer).to_dict()})
        # Branches of the same prefixes and unrelated prompts, several at a time.
        others = [ids[: -(7 + turn)] + prompts.cut(tok, "and then " * 40, 30 + turn) for ids in asked[:4]]
        others += [
            prompts.cut(tok, prompts.source("typing"), 300, start=300 * (4 * turn + k)) for k in range(4)
        ]
        client.generate_many(others, 8, parallel=4)
    total = ROUNDS * len(asked)
    return {
        "prompts": len(asked),
        "rounds": ROUNDS,
        "same": same,
        "of": total,
        "match": same / total,
        "parted": parted,
    }


def measure(fmt: str, tok, args, asked: list[list[int]]) -> dict:
    extra = ("--enable-fp32-lm-head",)
    options, block = common.either(fmt, *extra, block=args.block), args.block
    with common.Server(options) as server:
        cold, warm = cold_warm(server, asked, block, args.tokens)
        some = asked[:: max(1, len(asked) // args.repeat)][: args.repeat]
        again = warm_warm(server, tok, some, block, args.tokens)
        assert not server.errors(), server.errors()
    rows = [compare(a, b) for a, b in zip(cold, warm)]
    return {"cold": cold, "warm": warm, "warm_vs_cold": summary(rows), "warm_warm": again, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5, help="prompts that are asked again and again")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--name", default=NAME, help="of the result file")
    args = parser.parse_args()
    tok = prompts.tokenizer(common.demo_model())
    asked = texts(tok, args.block, args.prompts)
    out, reference = {}, None
    for fmt in args.formats.split(","):
        got = measure(fmt, tok, args, asked)
        if fmt == "stock":
            reference = got["cold"]
        row = {k: got[k] for k in ("warm_vs_cold", "warm_warm")}
        if reference:
            for state in ("cold", "warm"):
                row[f"{state}_vs_stock_cold"] = summary(
                    [compare(a, b) for a, b in zip(reference, got[state])]
                )
        row["rows"] = [{**r, "kl": [round(x, 6) for x in r["kl"]]} for r in got["rows"]]
        out[fmt] = row
        print(fmt, {k: v for k, v in row.items() if k != "rows"}, flush=True)
        # After each format, so that an interrupted run keeps its results.
        lengths = [len(x) for x in asked]
        numbers = {"block": args.block, "answer_tokens": args.tokens, "lengths": lengths, "formats": out}
        common.write_result(args.name, numbers, scores=scores(numbers, common.has_gpu()))


def shares(name: str, found: dict, tokens: int, baseline: str) -> dict[str, Score]:
    """The scores of one `summary`: tokens up to the first difference, and whole answers."""
    whole, n = f"share of answers of {tokens} tokens", found["prompts"]
    return {
        name: Score(found["agreement"], UP_TO, baseline, n),
        f"{name}.answers": Score(found["same_answers"], whole, baseline, n),
    }


def scores(numbers: dict, gpu: bool) -> dict[str, Score]:
    """n is the number of prompts; warm against warm, of repetitions."""
    result, out, tokens = {}, numbers["formats"], numbers["answer_tokens"]
    for fmt, row in out.items():
        name = f"serve.cold_warm_agreement{'_gpu' * gpu}.{fmt}"
        result |= shares(name, row["warm_vs_cold"], tokens, "the same server's computed answer")
        if "cold_vs_stock_cold" in row and fmt != "stock":
            name = f"serve.stock_agreement{'_gpu' * gpu}.{fmt}"
            result |= shares(name, row["cold_vs_stock_cold"], tokens, "stock's computed answer")
    pure = [row["warm_warm"] for fmt, row in out.items() if fmt not in ("stock", *SEQUENCE_SCOPE)]
    if pure:
        of = sum(w["of"] for w in pure)
        share = sum(w["same"] for w in pure) / of
        baseline = "the first answer from the cache"
        result["serve.warm_warm_match"] = Score(share, "share of repeated prompts", baseline, n=of)
    return result


if __name__ == "__main__":
    main()

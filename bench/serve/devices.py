"""Compares greedy answers of two devices, with the differences of stock SGLang by rounding as reference.

    python -m bench.serve.devices --record FILE                                      # on the one
    python -m bench.serve.devices --against bench/results/serve/devices_cpu.json.gz  # on the other
    ... [--caches stock,bf16,k8v4,k4v4,quota,kv-compress+budget=4x] [--parallel N] [--prompts 24] [--model smollm2]

Every prompt is asked cold, and every third one again, warm. Against a recording: the share of equal tokens where both
had the same past (up to and with the first difference), how little was between the tokens that differ first, and the KL
divergence from the ten best candidates. Devices multiply matrices in other orders, so that stock SGLang differs too;
rows that differ by rounding also round to other codes, and pruning may drop another one. So a cache's mean KL may be
FACTOR times stock's, plus SHARE of what the cache costs (its recorded mean KL against stock), plus SLACK; else exit 1.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import common, prompts
from bench.client import Answer
from bench.compare import TIE
from bench.quality import fetch
from bench.serve.cold_warm import compare, shares, summary, texts

NAME, SCORE = "serve/devices", "serve.devices_agreement"
CACHES = "stock,bf16,k8v4,k4v4,quota,kv-compress+budget=4x"
BLOCK, CHUNK, TOP, AGAIN = 128, 1024, 10, 3
DIGITS = 4  # of a log-probability in a recording
FACTOR, SHARE, SLACK = 3.0, 0.5, 0.0005  # the last in nats a token


def options(cache: str, args: argparse.Namespace) -> list[str]:
    out = ["--enable-fp32-lm-head", "--chunked-prefill-size", str(CHUNK), "--skip-server-warmup"]
    out += args.server_args.split()
    return common.either(cache, *out, block=BLOCK, memory="512MiB")


def pack(a: Answer) -> dict:
    """The part of an answer that a recording keeps."""
    top = [[x for t, lp in position.items() for x in (t, round(lp, DIGITS))] for position in a.top]
    return {"ids": a.ids, "logprobs": [round(x, DIGITS) for x in a.logprobs], "top": top}


def unpack(kept: dict) -> Answer:
    top = [dict(zip(position[::2], position[1::2])) for position in kept["top"]]
    return Answer("", kept["ids"], 0, 0, {}, logprobs=kept["logprobs"], top=top)


def ask(cache: str, args: argparse.Namespace, asked: list[list[int]]) -> dict[str, list]:
    """{"cold": an answer a prompt, "warm": one or None}, as `pack` makes them."""
    out: dict[str, list] = {"cold": [], "warm": []}
    with common.Server(options(cache, args), model=args.folder) as server:
        for i, ids in enumerate(asked):
            server.client.flush()
            answers = [server.client.generate(ids, args.tokens, top=TOP)]
            if i % AGAIN == 0:
                server.client.when_idle()
                answers.append(server.client.generate(ids, args.tokens, top=TOP))
            hits = [a.cached_tokens for a in answers]
            if hits != [0, (len(ids) - 1) // BLOCK * BLOCK][: len(hits)]:
                raise RuntimeError(f"a prompt of {len(ids)} tokens had hits of {hits}")
            for state, answer in zip(out, [*map(pack, answers), None]):
                out[state].append(answer)
        if server.errors():
            raise RuntimeError(f"the server wrote {server.errors()}")
    return out


def warm_same(caches: dict[str, list]) -> str:
    """Number of warm answers that equal the cold ones, on one device."""
    pairs = [(a["ids"], b["ids"]) for a, b in zip(caches["cold"], caches["warm"]) if b]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def agreement(reference: dict[str, list], here: dict[str, list]) -> dict:
    """One cache on both devices: the recorded one is the reference."""
    rows = {s: [compare(unpack(a), unpack(b)) for a, b in zip(reference[s], here[s]) if b] for s in here}
    every = [r for found in rows.values() for r in found]
    gaps = sorted(r["gap"] for r in every if r["gap"] is not None)
    out = {s: summary(found) for s, found in rows.items() if found} | summary(every)
    out |= {"parted": len(gaps), "ties": sum(g <= TIE for g in gaps)}
    out["gaps"] = [round(g, DIGITS) if math.isfinite(g) else "not among the best" for g in gaps]
    out["warm_as_cold"] = {"reference": warm_same(reference), "here": warm_same(here)}
    return out


def too_far(rows: dict[str, dict]) -> list[str]:
    """Caches that differ by more than is allowed; in a run without stock its own difference counts as none."""
    noise = FACTOR * rows.get("stock", {"kl_mean": 0.0})["kl_mean"] + SLACK
    limits = {c: noise + SHARE * r["cost"] for c, r in rows.items() if c != "stock"}
    bad = {c: limit for c, limit in limits.items() if not rows[c]["kl_mean"] <= limit}
    return [f"{c}: mean KL {rows[c]['kl_mean']:.5f}, allowed {limit:.5f}" for c, limit in bad.items()]


def scores(numbers: dict) -> dict[str, common.Score]:
    """Answers of both states, cold and warm; n is their number."""
    recorded, out = numbers["reference"], {}
    for cache, found in numbers["caches"].items():
        baseline = f"answers of {recorded['device']} at {recorded['commit']}"
        out |= shares(f"{SCORE}.{cache.split('+')[0]}", found, numbers["answer_tokens"], baseline)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--result", type=Path, help="of --against; default: bench/results/serve/devices.json")
    parser.add_argument("--caches", default=CACHES)
    parser.add_argument("--model", default="smollm2", choices=fetch.MODELS)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--parallel", type=int, help="servers at a time; default: all on a GPU, else 1")
    parser.add_argument("--server-args", default="", help="more options for every server")
    args = parser.parse_args()
    caches = args.caches.split(",")
    if args.against:  # its own prompts: the library's text is another in every version of Python
        reference = json.loads(gzip.decompress(args.against.read_bytes()))
        args.model, args.tokens = reference["model"], reference["tokens"]
        if missing := set(caches) - {*reference["caches"]}:
            parser.error(f"{args.against} has no {', '.join(missing)}")
    args.folder = fetch.MODELS[args.model]()
    asked = reference["asked"] if args.against else texts(prompts.tokenizer(args.folder), BLOCK, args.prompts)
    asked = asked[: args.prompts]
    told = {"command": common.command_line(), "commit": common.measured_commit(), "device": common.device_name()}
    told["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    told |= {"model": args.model, "tokens": args.tokens, "asked": asked, "caches": {}}
    rows, failures = {}, []
    with ThreadPoolExecutor(args.parallel or (len(caches) if common.has_gpu() else 1)) as pool:
        for cache, answers in {c: pool.submit(ask, c, args, asked) for c in caches}.items():
            if error := answers.exception():
                failures.append(f"{cache}: {error}")
                continue
            told["caches"][cache] = here = answers.result()
            print(cache, "warm as cold:", warm_same(here), flush=True)
            if args.record:  # after each, so that a run that is cut short leaves what it has
                args.record.write_bytes(gzip.compress(json.dumps(told, separators=(",", ":")).encode(), mtime=0))
            if args.against:
                rows[cache] = agreement((past := reference["caches"])[cache], here)
                rows[cache]["cost"] = agreement(past["stock"], past[cache])["kl_mean"] if "stock" in past else 0.0
                print({k: v for k, v in rows[cache].items() if k not in ("cold", "warm")}, flush=True)
                numbers = {"reference": {k: reference[k] for k in ("command", "commit", "device", "date")}}
                numbers |= {"model": args.model, "block": BLOCK, "answer_tokens": args.tokens}
                numbers |= {"lengths": [*map(len, asked)], "allowed": [FACTOR, SHARE, SLACK], "caches": rows}
                common.write_result(NAME, numbers, scores=scores(numbers), path=args.result, quiet=True)
    failures += too_far(rows)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Comparison of greedy answers on two devices, relative to how much stock SGLang differs between them.

    python -m bench.serve.devices --record FILE                                      # on the first device
    python -m bench.serve.devices --against bench/results/serve/devices_cpu.json.gz  # on the second device
    ... [--caches stock,bf16,k8v4,k4v4,quota,kv-compress+budget=4x] [--parallel N] [--prompts 24] [--model smollm2]

Every prompt is sent cold, and every third prompt again, warm. Compared with the recording are: the share of equal
tokens up to and including the first difference, the gap between the first tokens that differ, and the KL divergence
over the ten best candidates. Matrix products round differently on each device, so stock SGLang differs, too. Such a
difference can also change a quantized code or the choice of a pruned token. The mean KL of a cache may therefore be
FACTOR times that of stock, plus SHARE of the cache's own loss (its recorded mean KL against stock), plus SLACK.
Otherwise the exit status is 1.
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
from bench.serve.cold_warm import agreement_scores, compare, summary, texts

NAME, SCORE = "serve/devices", "serve.devices_agreement"
CACHES = "stock,bf16,k8v4,k4v4,quota,kv-compress+budget=4x"
BLOCK, CHUNK, TOP, AGAIN = 128, 1024, 10, 3
DIGITS = 4  # decimals of a log-probability in a recording
FACTOR, SHARE, SLACK = 3.0, 0.5, 0.0005  # SLACK in nats per token


def options(cache: str, args: argparse.Namespace) -> list[str]:
    out = ["--enable-fp32-lm-head", "--chunked-prefill-size", str(CHUNK), "--skip-server-warmup"]
    out += args.server_args.split()
    return common.either(cache, *out, block=BLOCK, memory="512MiB")


def pack(a: Answer) -> dict:
    """Fields of an answer that a recording stores."""
    top = [[x for t, lp in position.items() for x in (t, round(lp, DIGITS))] for position in a.top]
    return {"ids": a.ids, "logprobs": [round(x, DIGITS) for x in a.logprobs], "top": top}


def unpack(fields: dict) -> Answer:
    top = [dict(zip(position[::2], position[1::2])) for position in fields["top"]]
    return Answer("", fields["ids"], 0, 0, {}, logprobs=fields["logprobs"], top=top)


def ask(cache: str, args: argparse.Namespace, prompt_ids: list[list[int]]) -> dict[str, list]:
    """Packed answers to each prompt: {"cold": [answer, ..], "warm": [answer or None, ..]}."""
    out: dict[str, list] = {"cold": [], "warm": []}
    with common.Server(options(cache, args), model=args.folder) as server:
        for i, ids in enumerate(prompt_ids):
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
    """Number of warm answers that equal the cold ones on one device, like `7/8`."""
    pairs = [(a["ids"], b["ids"]) for a, b in zip(caches["cold"], caches["warm"]) if b]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def agreement(reference: dict[str, list], here: dict[str, list]) -> dict:
    """Compare the answers of one cache with the recorded ones."""
    by_state = {s: [compare(unpack(a), unpack(b)) for a, b in zip(reference[s], here[s]) if b] for s in here}
    all_rows = [r for rows in by_state.values() for r in rows]
    gaps = sorted(r["gap"] for r in all_rows if r["gap"] is not None)
    out = {s: summary(rows) for s, rows in by_state.items() if rows} | summary(all_rows)
    out |= {"parted": len(gaps), "ties": sum(g <= TIE for g in gaps)}
    out["gaps"] = [round(g, DIGITS) if math.isfinite(g) else "not among the best" for g in gaps]
    out["warm_as_cold"] = {"reference": warm_same(reference), "here": warm_same(here)}
    return out


def too_far(rows: dict[str, dict]) -> list[str]:
    """Messages for the caches that differ by more than the limit. Without a run of stock, its difference counts as
    0."""
    noise = FACTOR * rows.get("stock", {"kl_mean": 0.0})["kl_mean"] + SLACK
    limits = {c: noise + SHARE * r["cost"] for c, r in rows.items() if c != "stock"}
    means = {c: rows[c]["kl_mean"] for c in limits}
    return [f"{c}: mean KL {means[c]:.5f}, allowed {limits[c]:.5f}" for c in limits if not means[c] <= limits[c]]


def scores(numbers: dict) -> dict[str, common.Score]:
    """Scores over cold and warm answers together; n is their number."""
    reference, out = numbers["reference"], {}
    baseline = f"answers of {reference['device']} at {reference['commit']}"
    for cache, row in numbers["caches"].items():
        out |= agreement_scores(f"{SCORE}.{cache.split('+')[0]}", row, numbers["answer_tokens"], baseline)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write a recording to this file")
    parser.add_argument("--against", type=Path, help="compare with this recording")
    parser.add_argument("--result", type=Path, help="result file; default: bench/results/serve/devices.json")
    parser.add_argument("--caches", default=CACHES)
    parser.add_argument("--model", default="smollm2", choices=fetch.MODELS)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--parallel", type=int, help="concurrent servers; default: all on a GPU, else 1")
    parser.add_argument("--server-args", default="", help="additional options of every server")
    args = parser.parse_args()
    caches = args.caches.split(",")
    if args.against:  # use the recorded prompts, because the library's text depends on the version of Python
        reference = json.loads(gzip.decompress(args.against.read_bytes()))
        args.model, args.tokens = reference["model"], reference["tokens"]
        if missing := set(caches) - {*reference["caches"]}:
            parser.error(f"{args.against} has no {', '.join(missing)}")
    args.folder = fetch.MODELS[args.model]()
    prompt_ids = reference["asked"] if args.against else texts(prompts.tokenizer(args.folder), BLOCK, args.prompts)
    prompt_ids = prompt_ids[: args.prompts]
    recording = {"command": common.command_line(), "commit": common.measured_commit(), "device": common.device_name()}
    recording["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    recording |= {"model": args.model, "tokens": args.tokens, "asked": prompt_ids, "caches": {}}
    rows, failures = {}, []
    with ThreadPoolExecutor(args.parallel or (len(caches) if common.has_gpu() else 1)) as pool:
        for cache, answers in {c: pool.submit(ask, c, args, prompt_ids) for c in caches}.items():
            if error := answers.exception():
                failures.append(f"{cache}: {error}")
                continue
            recording["caches"][cache] = here = answers.result()
            print(cache, "warm as cold:", warm_same(here), flush=True)
            if args.record:  # after each cache, so that an interrupted run keeps its results
                args.record.write_bytes(gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0))
            if args.against:
                recorded = reference["caches"]
                rows[cache] = agreement(recorded[cache], here)
                rows[cache]["cost"] = (
                    agreement(recorded["stock"], recorded[cache])["kl_mean"] if "stock" in recorded else 0.0
                )
                print({k: v for k, v in rows[cache].items() if k not in ("cold", "warm")}, flush=True)
                numbers = {"reference": {k: reference[k] for k in ("command", "commit", "device", "date")}}
                numbers |= {"model": args.model, "block": BLOCK, "answer_tokens": args.tokens}
                numbers |= {"lengths": [*map(len, prompt_ids)], "allowed": [FACTOR, SHARE, SLACK], "caches": rows}
                common.write_result(NAME, numbers, scores=scores(numbers), path=args.result, quiet=True)
    failures += too_far(rows)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

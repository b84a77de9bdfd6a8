"""Effect on answers of demotion, and of round trips to host memory and disk.

    python -m bench.quality.round_trips [--model smollm2|qwen-0.5b] [--tasks niah,kv,calls] [--data FILE]

Three servers get the same questions about the same contexts. The first server stores contexts in `--high`. It gets the
questions without cached contexts (*cold*), with cached contexts (*warm*), after other prompts have evicted all blocks
to host memory (*host*), and after a restart that loads all blocks from disk (*disk*). The second server may demote
blocks to `--floor`. Its phases are *warm*, *demoted*, and a round trip of demoted blocks to host memory
(*demoted_host*). The third server stores contexts in `--floor` from the start (*floor*). Every prompt is sent once
before phase *warm*, so all later phases must hit the same tokens. The run fails if one does not.

`agents.round_trips_equal` is the share of answers after a host or disk round trip that equal those before it, token by
token. `agents.demoted_points` is the exact match with demoted contexts minus that with contexts stored in `--floor`, in
points; docs/quality.md has the cost of the latter. `agents.demoted_ttft_ratio`, measured only on a GPU, is the median
time to first token in phase *demoted* divided by that of the same prompts before demotion. Where contexts stay in the
pool, each prompt is sent `--repeats` times, and its fastest first token counts. Questions are sent one by one, because
rounding depends on the batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench import common, prompts
from bench.client import Answer
from bench.common import Score
from bench.quality import fetch, suite
from bench.quality.asking import CellError
from bench.quality.policies import load_texts
from bench.quality.suite import TASKS, Workload
from bench.quality.tasks import Maker
from sglang_kvc.calibration.model_fingerprint import identity_of

FILLER, MAX_ROUNDS = 768, 100  # tokens of a filler prompt; maximum rounds of filler prompts
Phase = dict[str, list[Answer]]  # answers of each task


def ask(
    server: common.Server, workload: Workload, args, tokens: int | None = None, *, cold: bool = False, repeats: int = 1
) -> Phase:
    """Ask all questions one by one, each `repeats` times. Returns their first answers, with the fastest time to the
    first token. With `cold`, each request computes its context."""
    out: Phase = {}
    for name, contexts in workload.contexts.items():
        task = TASKS[name]
        options = {"ignore_eos": not task.free, "sampling": {"stop": list(task.stop)} if task.free else {}}
        limit = tokens or task.tokens or args.answer_tokens
        out[name] = []
        for i, (context, question) in enumerate((c, q) for c in contexts for q in c.questions):
            namespace = {"extra_key": f"cold-{name}-{i}"} if cold else {}
            prompt_ids = [*context.ids, *question.ask]
            same = [server.client.generate_streamed(prompt_ids, limit, **options, **namespace) for _ in range(repeats)]
            out[name].append(replace(same[0], first_token_s=min(a.first_token_s for a in same)))
    return out


def warm(server: common.Server, workload: Workload, args) -> Phase:
    server.client.flush()
    ask(server, workload, args, tokens=1)
    server.client.when_idle()
    return ask(server, workload, args, repeats=args.repeats)


def send_filler(server: common.Server, done: Callable[[dict, dict], bool], tokens: int = 0) -> dict:
    """Send rounds of filler prompts, about `tokens` tokens each, until `done(before, now)` is true of the statistics;
    return the last statistics."""
    before, rng = server.client.when_idle(), random.Random(1)
    for _ in range(MAX_ROUNDS):
        prompt_ids = [rng.choices(range(1000, 9000), k=FILLER) for _ in range(max(4, tokens // FILLER))]
        server.client.generate_many(prompt_ids, 1, parallel=2)
        if done(before, now := server.client.when_idle()):
            return now
    raise CellError(f"filler prompts had no effect in {MAX_ROUNDS} rounds: {before} before, {now} after")


def evicted(before: dict, now: dict) -> bool:
    """Whether all earlier blocks have been evicted."""
    return now["evicted_blocks"] - before["evicted_blocks"] >= sum(before["blocks_by_format"].values())


def demoted(before: dict, now: dict) -> bool:
    """Whether all earlier blocks have been demoted.

    Raises:
        CellError: blocks were evicted.
    """
    if now["evicted_blocks"] > before["evicted_blocks"]:
        raise CellError("blocks were evicted before all blocks of the contexts were demoted")
    return now["demoted_blocks"] - before["demoted_blocks"] >= before["packed_tokens"] // before["block"]


def phases(workload: Workload, args, options: Callable[..., list[str]], folder: Path) -> dict[str, Phase]:
    out: dict[str, Phase] = {}
    host = ["--kvc-host-memory", f"{args.host_mib}MiB"]
    with common.Server(options(args.high, *host, "--kvc-disk", str(folder)), model=args.model_path) as server:
        out["cold"] = ask(server, workload, args, cold=True)
        out["warm"] = warm(server, workload, args)
        before = send_filler(server, evicted, args.pool_tokens // 4)
        out["host"] = ask(server, workload, args)
        if server.client.when_idle()["host_loaded_bytes"] == before["host_loaded_bytes"]:
            raise CellError("no block was loaded from host memory")
        server.stop()
        server.start()
        out["disk"] = ask(server, workload, args)
        if not server.client.when_idle()["disk_read_bytes"]:
            raise CellError("no block was read from disk")
    with common.Server(options(args.high, *host, "--kvc-floor", args.floor), model=args.model_path) as server:
        out["before_demotion"] = warm(server, workload, args)
        send_filler(server, lambda before, now: demoted({**before, "block": args.block}, now))
        out["demoted"] = ask(server, workload, args, repeats=args.repeats)
        before = send_filler(server, evicted, args.pool_tokens // 4)
        out["demoted_host"] = ask(server, workload, args)
        if server.client.when_idle()["host_loaded_bytes"] == before["host_loaded_bytes"]:
            raise CellError("no block was loaded from host memory")
    with common.Server(options(args.floor), model=args.model_path) as server:
        out["floor"] = warm(server, workload, args)
    return out


def compare(phase: Phase, before: Phase | None, workload: Workload) -> dict:
    """Exact match of each task, the numbers of answers that equal those of `before` and hit as many tokens, and
    (question, hits, hits before) of answers that hit fewer tokens."""
    out = {}
    for name, answers in phase.items():
        questions = [q for c in workload.contexts[name] for q in c.questions]
        marks = [TASKS[name].right(q.answer, a.text) for q, a in zip(questions, answers, strict=True)]
        out[name] = {"right": sum(marks), "of": len(marks), "marks": marks}
        if before is not None:
            pairs = list(zip(answers, before[name], strict=True))
            out[name]["equal"] = sum(a.ids == b.ids for a, b in pairs)
            out[name]["same_hits"] = sum(a.cached_tokens == b.cached_tokens for a, b in pairs)
            hits = [(i, a.cached_tokens, b.cached_tokens) for i, (a, b) in enumerate(pairs)]
            out[name]["fewer_hits"] = [(i, now, earlier) for i, now, earlier in hits if now < earlier]
    return out


BEFORE = {"warm": "cold", "host": "warm", "disk": "warm", "before_demotion": "warm", "demoted": "before_demotion",
          "demoted_host": "demoted", "floor": "demoted"}  # fmt: skip
TRIPS = ("host", "disk", "demoted_host")


def first_token_s(phase: Phase) -> float:
    """Median time to first token of all answers."""
    return statistics.median(a.first_token_s for answers in phase.values() for a in answers)


def scores(rows: dict[str, dict], first_token: dict[str, float]) -> dict[str, Score]:
    """Scores of all phases. `first_token`: phase -> median seconds to the first token; ignored without a GPU."""
    tasks = [task for phase in TRIPS for task in rows[phase].values()]
    n = sum(t["of"] for t in tasks)

    def points(phase: str) -> float:
        return statistics.fmean(100 * t["right"] / t["of"] for t in rows[phase].values())

    unit = "share of answers behind a round trip that are equal to those before it"
    difference = points("demoted") - points("floor")
    out = {
        "agents.round_trips_equal": Score(sum(t["equal"] for t in tasks) / n, unit, n=n),
        "agents.demoted_points": Score(difference, "points", "stored in the floor", n=n // len(TRIPS)),
    }
    if common.has_gpu():
        ratio = first_token["demoted"] / first_token["before_demotion"]
        answers = sum(t["of"] for t in rows["demoted"].values())
        baseline = "the same prompts before demotion"
        out["agents.demoted_ttft_ratio"] = Score(ratio, "of the time before", baseline, n=answers)
    return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    p.add_argument("--model-path", type=Path, help="folder of the model; default: in the cache folder")
    p.add_argument("--essays", type=Path, help="text file of the essays; default: in the cache folder")
    p.add_argument("--data", type=Path, help="output of `bench.quality.fetch tasks`; default: in the cache folder")
    p.add_argument("--tasks", default="niah,kv,calls", help=f"separated by commas: {', '.join(TASKS)}")
    p.add_argument("--contexts", type=int, default=13, help="contexts per task, with 8 questions each")
    p.add_argument("--calls", type=int, default=40, help="maximum tool calls")
    p.add_argument("--problems", type=int, default=40, help="maximum problems of HumanEval")
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--block", type=int, default=128)
    p.add_argument("--answer-tokens", type=int, default=7)
    p.add_argument("--repeats", type=int, default=5, help="times that a prompt is sent in these phases")
    p.add_argument("--high", default="k8v4")
    p.add_argument("--floor", default="k4v4")
    p.add_argument("--name", help="name of the result file")
    args = p.parse_args()
    args.tasks, args.model_path = suite.select(args.tasks), args.model_path or fetch.MODELS[args.model]()
    from transformers import AutoConfig

    identity = identity_of(AutoConfig.from_pretrained(args.model_path))
    workload = Workload.create(Maker(prompts.tokenizer(args.model_path), load_texts(args)), args)
    # Room for all prompts, packed, and for filler prompts.
    contexts = [c for task_contexts in workload.contexts.values() for c in task_contexts]
    prompt_tokens = suite.resident((c.ids for c in contexts), 1)
    prompt_tokens += sum(len(q.ask) + args.block for c in contexts for q in c.questions)
    args.pool_tokens = int(0.6 * prompt_tokens) + 4 * FILLER
    token_bytes = 4 * identity.layers * identity.kv_heads * identity.head_dim
    args.host_mib = 4 * args.pool_tokens * token_bytes >> 20  # four times the pool
    extra = ["--enable-fp32-lm-head", "--skip-server-warmup", "--max-total-tokens", str(args.pool_tokens)]
    extra += ["--chunked-prefill-size", "512", *(["--cuda-graph-backend-prefill=disabled"] if common.has_gpu() else [])]

    def options(name: str, *more: str) -> list[str]:
        return common.either(name, *extra, *more, block=args.block, memory="")

    with tempfile.TemporaryDirectory(prefix="kvc-trips-") as folder:
        answers = phases(workload, args, options, Path(folder))
    rows = {name: compare(phase, answers.get(BEFORE.get(name, "")), workload) for name, phase in answers.items()}
    for name, row in rows.items():
        print(name, {t: {k: v for k, v in r.items() if k != "marks"} for t, r in row.items()})
    keys = ("model", "contexts", "calls", "length", "block", "repeats", "high", "floor", "tasks", "pool_tokens",
            "host_mib")  # fmt: skip
    times = {name: first_token_s(phase) for name, phase in answers.items()}
    print("median s to first token", {name: round(seconds, 4) for name, seconds in times.items()})
    numbers = {k: getattr(args, k) for k in keys} | {"first_token_s": times, "phases": rows}
    common.write_result(args.name or f"quality/round_trips_{args.model}", numbers, scores=scores(rows, times))
    missed = [f"{n}: {t} {r['fewer_hits']}" for n in (*TRIPS, "demoted") for t, r in rows[n].items() if r["fewer_hits"]]
    if missed:
        print(f"error: prompts hit fewer tokens (question, hits, hits before): {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

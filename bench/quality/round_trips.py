"""Do answers change when cached contexts are demoted, or go to host memory or to disk and come back?

    python -m bench.quality.round_trips [--model smollm2|qwen-0.5b] [--tasks niah,kv,calls] [--data FILE]

Three servers are asked the same questions over the same contexts. The first one stores them in `--high`: the questions
are asked *cold* (each computes its context), *warm*, after other prompts have pushed everything to host memory
(*host*), and after a restart that finds everything on disk (*disk*). The second one may demote to `--floor`: *warm*,
*demoted*, and after that to host memory and back (*demoted_host*). The third one stores in `--floor` from the start
(*floor*). Behind *warm* each prompt has been asked before, so that every later phase hits the same tokens; the run
fails if one does not.

`agents.round_trips_equal`: share of the answers behind a host or disk round trip that are equal, token by token, to
those before it. `agents.demoted_points`: exact match of demoted contexts less that of contexts stored in `--floor`, in
points; the tables of docs/quality.md have what the latter costs. `agents.demoted_ttft_ratio`: median time to first
token of *demoted* over that of the same prompts before, on a GPU. Questions are asked one at a time, because rounding
depends on who else runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import common, prompts
from bench.client import Answer
from bench.common import Score
from bench.quality import fetch, suite
from bench.quality.asking import CellError
from bench.quality.policies import texts
from bench.quality.suite import ASKED, Work
from bench.quality.tasks import Maker
from sglang_kvc.calibration.model_fingerprint import identity_of

FILLER, ROUNDS = 768, 100  # tokens of a prompt that presses others out; rounds of such prompts at most
Phase = dict[str, list[Answer]]  # answers of each task


def ask(server: common.Server, work: Work, args, tokens: int | None = None, *, cold: bool = False) -> Phase:
    """All questions, one at a time; with `cold` each computes its context."""
    out: Phase = {}
    for name, contexts in work.contexts.items():
        task = ASKED[name]
        options = {"ignore_eos": not task.free, "sampling": {"stop": list(task.stop)} if task.free else {}}
        most = tokens or task.tokens or args.answer_tokens
        asked = [[*c.ids, *q.ask] for c in contexts for q in c.questions]
        apart = [{"extra_key": f"cold-{name}-{i}"} if cold else {} for i in range(len(asked))]
        out[name] = [server.client.generate_streamed(p, most, **options, **a) for p, a in zip(asked, apart)]
    return out


def warm(server: common.Server, work: Work, args) -> Phase:
    server.client.flush()
    ask(server, work, args, tokens=1)
    server.client.when_idle()
    return ask(server, work, args)


def press(server: common.Server, over: Callable[[dict, dict], bool], tokens: int = 0) -> dict:
    """Ask other prompts, some `tokens` tokens at a time, until `over` (the accounts before and now); returns the
    account."""
    begun, rng = server.client.when_idle(), random.Random(1)
    for _ in range(ROUNDS):
        others = [rng.choices(range(1000, 9000), k=FILLER) for _ in range(max(4, tokens // FILLER))]
        server.client.generate_many(others, 1, parallel=2)
        if over(begun, now := server.client.when_idle()):
            return now
    raise CellError(f"other prompts pressed nothing out: {begun} before, {now} after {ROUNDS} rounds")


def evicted(begun: dict, now: dict) -> bool:
    return now["evicted_blocks"] - begun["evicted_blocks"] >= sum(begun["blocks_by_format"].values())


def demoted(begun: dict, now: dict) -> bool:
    if now["evicted_blocks"] > begun["evicted_blocks"]:
        raise CellError("blocks were evicted before all of the contexts' were demoted")
    return now["demoted_blocks"] - begun["demoted_blocks"] >= begun["packed_tokens"] // begun["block"]


def phases(work: Work, args, options: Callable[..., list[str]], folder: Path) -> dict[str, Phase]:
    out: dict[str, Phase] = {}
    host = ["--kvc-host-memory", f"{args.host_mib}MiB"]
    with common.Server(options(args.high, *host, "--kvc-disk", str(folder)), model=args.model_path) as server:
        out["cold"] = ask(server, work, args, cold=True)
        out["warm"] = warm(server, work, args)
        begun = press(server, evicted, args.pool_tokens // 4)
        out["host"] = ask(server, work, args)
        if server.client.when_idle()["host_loaded_bytes"] == begun["host_loaded_bytes"]:
            raise CellError("nothing came back from host memory")
        server.stop()
        server.start()
        out["disk"] = ask(server, work, args)
        if not server.client.when_idle()["disk_read_bytes"]:
            raise CellError("nothing came back from disk")
    with common.Server(options(args.high, *host, "--kvc-floor", args.floor), model=args.model_path) as server:
        out["before_demotion"] = warm(server, work, args)
        press(server, lambda a, b: demoted({**a, "block": args.block}, b))
        out["demoted"] = ask(server, work, args)
        begun = press(server, evicted, args.pool_tokens // 4)
        out["demoted_host"] = ask(server, work, args)
        if server.client.when_idle()["host_loaded_bytes"] == begun["host_loaded_bytes"]:
            raise CellError("nothing came back from host memory")
    with common.Server(options(args.floor), model=args.model_path) as server:
        out["floor"] = warm(server, work, args)
    return out


def compared(phase: Phase, before: Phase | None, work: Work) -> dict:
    """Exact match of each task; against `before` also equal answers, and those that hit as many tokens."""
    out = {}
    for name, answers in phase.items():
        questions = [q for c in work.contexts[name] for q in c.questions]
        marks = [ASKED[name].right(q.answer, a.text) for q, a in zip(questions, answers, strict=True)]
        out[name] = {"right": sum(marks), "of": len(marks), "marks": marks}
        if before is not None:
            pairs = list(zip(answers, before[name], strict=True))
            out[name]["equal"] = sum(a.ids == b.ids for a, b in pairs)
            out[name]["same_hits"] = sum(a.cached_tokens == b.cached_tokens for a, b in pairs)
    return out


BEFORE = {"warm": "cold", "host": "warm", "disk": "warm", "before_demotion": "warm", "demoted": "before_demotion",
          "demoted_host": "demoted", "floor": "demoted"}  # fmt: skip
TRIPS = ("host", "disk", "demoted_host")


def first_token_s(phase: Phase) -> float:
    """Median time to first token of all answers."""
    return statistics.median(a.first_token_s for answers in phase.values() for a in answers)


def scores(rows: dict[str, dict], first_token: dict[str, float]) -> dict[str, Score]:
    """`first_token`: phase -> median seconds. There is no ratio of times on a CPU, which says nothing about a GPU."""
    trips = [task for phase in TRIPS for task in rows[phase].values()]
    n = sum(t["of"] for t in trips)

    def points(phase: str) -> float:
        return statistics.fmean(100 * t["right"] / t["of"] for t in rows[phase].values())

    unit = "share of answers behind a round trip that are equal to those before it"
    equal = Score(sum(t["equal"] for t in trips) / n, unit, n=n)
    beyond = Score(points("demoted") - points("floor"), "points", "stored in the floor", n=n // len(TRIPS))
    out = {"agents.round_trips_equal": equal, "agents.demoted_points": beyond}
    if common.has_gpu():
        ratio = first_token["demoted"] / first_token["before_demotion"]
        n_times = sum(t["of"] for t in rows["demoted"].values())
        out["agents.demoted_ttft_ratio"] = Score(
            ratio, "of the time before", "the same prompts before demotion", n=n_times
        )
    return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    p.add_argument("--model-path", type=Path, help="its folder, where it is not in the cache folder")
    p.add_argument("--essays", type=Path, help="text file of the essays, where it is not in the cache folder")
    p.add_argument("--data", type=Path, help="file of fetch tasks, which has the essays, too")
    p.add_argument("--tasks", default="niah,kv,calls", help=f"of {', '.join(ASKED)}")
    p.add_argument("--contexts", type=int, default=13, help="of each task; 8 questions each")
    p.add_argument("--calls", type=int, default=40)
    p.add_argument("--problems", type=int, default=40, help="of HumanEval")
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--block", type=int, default=128)
    p.add_argument("--answer-tokens", type=int, default=7)
    p.add_argument("--high", default="k8v4")
    p.add_argument("--floor", default="k4v4")
    p.add_argument("--name", help="of the result file")
    a = p.parse_args()
    a.tasks, a.model_path = suite.chosen(a.tasks), a.model_path or fetch.MODELS[a.model]()
    from transformers import AutoConfig

    it = identity_of(AutoConfig.from_pretrained(a.model_path))
    work = Work.of(Maker(prompts.tokenizer(a.model_path), texts(a)), a)
    # Prompts with all of their ends, packed, and room for two chunks of others.
    contexts = [c for cs in work.contexts.values() for c in cs]
    most = suite.resident((c.ids for c in contexts), 1)
    most += sum(len(q.ask) + a.block for c in contexts for q in c.questions)
    a.pool_tokens = int(0.6 * most) + 4 * FILLER
    a.host_mib = 16 * a.pool_tokens * it.layers * it.kv_heads * it.head_dim >> 20  # four times the pool
    extra = ["--enable-fp32-lm-head", "--skip-server-warmup", "--max-total-tokens", str(a.pool_tokens)]
    extra += ["--chunked-prefill-size", "512", *(["--cuda-graph-backend-prefill=disabled"] if common.has_gpu() else [])]

    def options(name: str, *more: str) -> list[str]:
        return common.either(name, *extra, *more, block=a.block, memory="")

    with tempfile.TemporaryDirectory(prefix="kvc-trips-") as folder:
        found = phases(work, a, options, Path(folder))
    rows = {name: compared(phase, found.get(BEFORE.get(name, "")), work) for name, phase in found.items()}
    for name, row in rows.items():
        print(name, {t: {k: v for k, v in r.items() if k != "marks"} for t, r in row.items()})
    keys = ("model", "contexts", "calls", "length", "block", "high", "floor", "tasks", "pool_tokens",
            "host_mib")  # fmt: skip
    times = {name: first_token_s(phase) for name, phase in found.items()}
    print("median s to first token", {name: round(seconds, 4) for name, seconds in times.items()})
    numbers = {k: getattr(a, k) for k in keys} | {"first_token_s": times, "phases": rows}
    common.write_result(a.name or f"quality/round_trips_{a.model}", numbers, scores=scores(rows, times))
    lost = [f"{n}: {t}" for n in (*TRIPS, "demoted") for t, r in rows[n].items() if r["same_hits"] < r["of"]]
    if lost:
        print(f"error: not all of the tokens were hit again: {', '.join(lost)}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())

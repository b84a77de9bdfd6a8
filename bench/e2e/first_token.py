"""Time to first token of a single request: cold, cached, and appended to a cached prefix.

    python -m bench.e2e.first_token --model <folder> --load-format dummy        # on a GPU: stock bf16 and ours
    python -m bench.e2e.first_token --times 8                                   # CPU engine, a tiny model
    ... --stock-backends fa3,fa3:128,flashinfer     # one stock server per backend; the fastest is the baseline
    ... --trace FOLDER      # also write a torch trace of five cached requests per server, and summarize it

One request of one new token runs at a time, either right after the previous one or after `--pause` idle seconds. All
servers run at the same time and take turns; the first server of a round is the last of the next. `--times` requests are
split into rounds.

Prompt lengths are chosen for prefill CUDA graphs. SGLang pads a prefill to the next captured size, so 4101 tokens take
as long as 4608. `computed` has 4096 tokens, a captured size. `computed_padded` has 4352, which is none. A cached prompt
has 4 tokens to compute after its cached blocks, an appended one 128. Random weights suffice.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import common
from bench.client import Client
from bench.common import Score
from bench.compare import percentile
from bench.e2e import arms, serving, small, trace

NAME, SEED = "e2e/first_token", 7
BLOCK = 128
REST = 4  # tokens of a cached prompt after its last full block; a block cache recomputes them
APPENDED = BLOCK - REST  # so that a block cache computes one full block
PADDED = 2 * BLOCK  # `--input` plus this many tokens is not a captured size
COMMON_IDS = range(1000, 40_000)
KINDS = ("computed", "computed_padded", "cached", "appended")
ROUNDS = 4
TRACED = 5


def prompts(kind: str, length: int, rng: random.Random) -> Iterator[list[int]]:
    """Endless prompts: always new (`computed`), always the same (`cached`), or the same with new ends (`appended`)."""
    same = rng.sample(COMMON_IDS, length + REST)
    while True:
        if kind.startswith("computed"):
            yield rng.sample(COMMON_IDS, length + (PADDED if kind == "computed_padded" else 0))
        else:
            yield same + (rng.sample(COMMON_IDS, APPENDED) if kind == "appended" else [])


def timed(client: Client, prompts: Iterator[list[int]], times: int, pause: float) -> dict:
    """Milliseconds of `times` requests of one new token, and the minimum number of cached tokens."""
    times_ms, cached = [], []
    for ids in (next(prompts) for _ in range(times)):
        time.sleep(pause)
        began = time.monotonic()
        answer = client.generate(ids, 1)
        times_ms.append(1000 * (time.monotonic() - began))
        cached.append(answer.cached_tokens)
    return {"ms": [round(t, 3) for t in times_ms], "cached_tokens": min(cached), "prompt_tokens": len(ids)}


def measure(clients: dict[str, Client], kind: str, args: argparse.Namespace) -> dict[str, dict]:
    """`server.kind.pause` -> times of the requests of this kind, by round.

    Not counted are a server's first three requests, which fill the cache and may compile, and the request before each
    round without pauses.
    """
    out: dict[str, dict] = {}
    streams = {name: prompts(kind, args.input, random.Random(f"{SEED} {kind}")) for name in clients}
    for name, client in clients.items():
        client.flush()
        timed(client, streams[name], 3, 0.0)
    names = list(clients)
    for turn in range(ROUNDS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for pause in (0.0, args.pause):
                if not pause:
                    timed(clients[name], streams[name], 1, 0.0)
                timing = timed(clients[name], streams[name], -(-args.times // ROUNDS), pause)
                row = out.setdefault(f"{name}.{kind}.{'pause' if pause else 'at_once'}", {"rounds": []})
                row["rounds"].append(timing.pop("ms"))
                row |= timing | {"cached_tokens": min(timing["cached_tokens"], row.get("cached_tokens", 1 << 30))}
    return {name: row | summary(row["rounds"]) for name, row in out.items()}


def summary(rounds: list[list[float]]) -> dict[str, float]:
    times = [ms for round_ms in rounds for ms in round_ms]
    return {"ms_median": statistics.median(times), "ms_p90": percentile(times, 0.9), "ms_max": max(times)}


def traced(server: common.Server, args: argparse.Namespace, name: str) -> dict:
    """Times of cached requests, and the summary of their trace."""
    folder, mark = Path(args.trace).resolve(), str(int(time.time()))
    stream = prompts("cached", args.input, random.Random(f"{SEED} traced"))
    timed(server.client, stream, 2, 0.0)
    body = {"output_dir": str(folder), "activities": ["CPU", "GPU"], "profile_prefix": name, "profile_id": mark}
    server.client.post("/start_profile", body | {"with_stack": False, "record_shapes": False}).raise_for_status()
    row = timed(server.client, stream, TRACED, 0.2)
    server.client.post("/stop_profile", {}).raise_for_status()
    until = time.monotonic() + 60
    while not (files := sorted(folder.glob(f"{name}-{mark}*.json.gz"))) and time.monotonic() < until:
        time.sleep(0.5)
    if not files:
        raise RuntimeError(f"the server wrote no trace to {folder}")
    time.sleep(1)
    return row | summary([row.pop("ms")]) | {"profile": trace.profile(files[0])}


def scores(numbers: dict[str, dict], args: argparse.Namespace) -> dict[str, Score]:
    """Time relative to the fastest stock server. Runs without prefill graphs (not the default) and on a CPU (where
    stock's attention is plain torch) give no scores."""
    ours, out = f"kvc_{args.formats.split(',')[0]}", {}
    if args.no_prefill_graphs or not common.has_gpu():
        return out
    for kind in KINDS:
        for when, name in (("pause", kind), ("at_once", f"{kind}_at_once")):
            best = arms.fastest(numbers, arms.BF16, f"{kind}.{when}", lambda row: -row["ms_median"])
            row = numbers.get(f"{ours}.{kind}.{when}")
            if best and row:
                out[f"e2e.first_token.{name}_vs_bf16"] = ratio(row, numbers[best])
    return out


def ratio(ours: dict, stock: dict) -> Score:
    """Ratio of medians; `low` and `high` are limits over single rounds."""
    rounds = [statistics.median(x) / statistics.median(y) for x, y in zip(ours["rounds"], stock["rounds"], strict=True)]
    unit = f"of stock's time, {ours['prompt_tokens']} tokens"
    requests = sum(map(len, ours["rounds"]))
    value = ours["ms_median"] / stock["ms_median"]
    return Score(value, unit, arms.describe(stock["options"]), n=requests, low=min(rounds), high=max(rounds))


def table(numbers: dict[str, dict]) -> str:
    columns = ("ms_median", "ms_p90", "ms_max", "cached_tokens", "prompt_tokens")
    lines = [f"{'server, kind':40}" + "".join(f"{c:>16}" for c in columns)]
    lines += [f"{n:40}" + "".join(f"{row[c]:16.5g}" for c in columns) for n, row in numbers.items()]
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--input", type=int, default=4096, help="tokens of a prompt, a multiple of the block size")
    p.add_argument("--times", type=int, default=40, help="requests of each kind, both with and without a pause")
    p.add_argument("--pause", type=float, default=0.5, help="idle seconds before a request")
    p.add_argument("--trace", default="", help="folder for traces of cached requests")
    args = small.arguments(p, argv, tokens=60_000, name=NAME)
    if args.input % BLOCK:
        p.error(f"--input {args.input} is not a multiple of {BLOCK} tokens; use {args.input // BLOCK * BLOCK}")
    return args


def main() -> None:
    args = arguments()
    args.model = small.model(args)
    numbers = serving.earlier_rows(args)
    chosen = {n: options for n, options in small.servers(args).items() if args.only or not n.startswith(arms.FP8)}

    def save(rows: dict[str, dict]) -> None:
        for name, row in rows.items():
            numbers[name] = row | {"command": common.command_line(), "options": chosen[name.split(".")[0]]}
        common.write_result(args.name, numbers, scores=scores(numbers, args), quiet=True)

    with contextlib.ExitStack() as running:
        servers = {name: common.Server(options, model=args.model) for name, options in chosen.items()}
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(running.enter_context, servers.values()))
        for kind in KINDS:
            if not all(f"{name}.{kind}.at_once" in numbers for name in servers):
                save(measure({name: server.client for name, server in servers.items()}, kind, args))
        for name, server in servers.items() if args.trace else ():
            try:
                save({f"{name}.traced": traced(server, args, name)})
            except Exception as e:
                print(f"{name}: no trace, {type(e).__name__} {str(e)[:300]}", flush=True)
        for name, server in servers.items():
            if errors := server.errors():
                raise RuntimeError(f"{name}: {errors}")
    print(table(numbers))
    common.write_result(args.name, numbers, scores=scores(numbers, args))


if __name__ == "__main__":
    main()

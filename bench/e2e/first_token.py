"""Time to first token of a single request: computed, from the cache, and appended to a cached prefix.

    python -m bench.e2e.first_token --model <folder> --load-format dummy        # on a GPU: stock bf16 and ours
    python -m bench.e2e.first_token --times 8                                   # CPU engine, a tiny model
    ... --stock-backends fa3,fa3:128,flashinfer     # stock servers with each; scores take the fastest of them
    ... --trace FOLDER      # also a torch trace of five cached requests of each server, and what it says in short

One request of one new token runs at a time, either right after the previous one or after `--pause` idle seconds. All
servers run at the same time and are asked in turns; the first server of a round is the last of the next. A round is a
share of `--times`.

Prompts are as long as prefill CUDA graphs: SGLang pads a prefill to the next size that it captured, so that 4101 tokens
take it as long as 4608. `computed` has 4096 tokens, which is a captured size; `computed_padded` has 4352, which is not.
A cached prompt leaves 4 tokens after its blocks to compute, an appended one 128. Random weights suffice.
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
REST = 4  # tokens after the last whole block of a cached prompt, which a cache of blocks computes again
APPENDED = BLOCK - REST  # with which a cache of blocks computes a block
PADDED = 2 * BLOCK  # tokens more than `--input`, which no server has a graph for
COMMON_IDS = range(1000, 40_000)
KINDS = ("computed", "computed_padded", "cached", "appended")
ROUNDS = 4
TRACED = 5


def prompts(kind: str, length: int, draw: random.Random) -> Iterator[list[int]]:
    """Endlessly: another prompt each time (`computed`), the same one (`cached`), it with other ends (`appended`)."""
    same = draw.sample(COMMON_IDS, length + REST)
    while True:
        if kind.startswith("computed"):
            yield draw.sample(COMMON_IDS, length + (PADDED if kind == "computed_padded" else 0))
        else:
            yield same + (draw.sample(COMMON_IDS, APPENDED) if kind == "appended" else [])


def timed(client: Client, asked: Iterator[list[int]], times: int, pause: float) -> dict:
    """Milliseconds of `times` requests of one new token, and what was cached of the prompt."""
    took, cached = [], []
    for ids in (next(asked) for _ in range(times)):
        time.sleep(pause)
        began = time.monotonic()
        answer = client.generate(ids, 1)
        took.append(1000 * (time.monotonic() - began))
        cached.append(answer.cached_tokens)
    return {"ms": [round(t, 3) for t in took], "cached_tokens": min(cached), "prompt_tokens": len(ids)}


def measure(clients: dict[str, Client], kind: str, a: argparse.Namespace) -> dict[str, dict]:
    """`server.kind.pause` -> what the requests of this kind took, round by round.

    Requests that are not counted: the first three of a server, one of which fills the cache and one of which may be the
    first of its size that it ever sees; and one ahead of each round of those that follow at once.
    """
    out: dict[str, dict] = {}
    asked = {name: prompts(kind, a.input, random.Random(f"{SEED} {kind}")) for name in clients}
    for name, client in clients.items():
        client.flush()
        timed(client, asked[name], 3, 0.0)
    for turn in range(ROUNDS):
        order = list(clients)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            for pause in (0.0, a.pause):
                if not pause:
                    timed(clients[name], asked[name], 1, 0.0)
                found = timed(clients[name], asked[name], -(-a.times // ROUNDS), pause)
                row = out.setdefault(f"{name}.{kind}.{'pause' if pause else 'at_once'}", {"rounds": []})
                row["rounds"].append(found.pop("ms"))
                row |= found | {"cached_tokens": min(found["cached_tokens"], row.get("cached_tokens", 1 << 30))}
    return {name: row | summary(row["rounds"]) for name, row in out.items()}


def summary(rounds: list[list[float]]) -> dict[str, float]:
    took = [ms for some in rounds for ms in some]
    return {"ms_median": statistics.median(took), "ms_p90": percentile(took, 0.9), "ms_max": max(took)}


def traced(server: common.Server, a: argparse.Namespace, name: str) -> dict:
    """A trace of cached requests, in short: kernels, and the calls of the host."""
    folder, mark = Path(a.trace).resolve(), str(int(time.time()))
    asked = prompts("cached", a.input, random.Random(f"{SEED} traced"))
    timed(server.client, asked, 2, 0.0)
    body = {"output_dir": str(folder), "activities": ["CPU", "GPU"], "profile_prefix": name, "profile_id": mark}
    server.client.post("/start_profile", body | {"with_stack": False, "record_shapes": False}).raise_for_status()
    row = timed(server.client, asked, TRACED, 0.2)
    server.client.post("/stop_profile", {}).raise_for_status()
    until = time.monotonic() + 60
    while not (files := sorted(folder.glob(f"{name}-{mark}*.json.gz"))) and time.monotonic() < until:
        time.sleep(0.5)
    if not files:
        raise RuntimeError(f"the server wrote no trace to {folder}")
    time.sleep(1)
    return row | summary([row.pop("ms")]) | {"profile": trace.profile(files[0])}


def scores(numbers: dict[str, dict], a: argparse.Namespace) -> dict[str, Score]:
    """Time over the fastest stock server's. None without prefill CUDA graphs, which is no server's default, and none on
    a CPU, where stock attends in plain torch."""
    mine, out = f"kvc_{a.formats.split(',')[0]}", {}
    if a.no_prefill_graphs or not common.has_gpu():
        return out
    for kind in KINDS:
        for when, name in (("pause", kind), ("at_once", f"{kind}_at_once")):
            best = arms.fastest(numbers, arms.BF16, f"{kind}.{when}", lambda row: -row["ms_median"])
            x = numbers.get(f"{mine}.{kind}.{when}")
            if best and x:
                out[f"e2e.first_token.{name}_vs_bf16"] = ratio(x, numbers[best])
    return out


def ratio(mine: dict, stock: dict) -> Score:
    """Median over median; `low` and `high` are those of single rounds."""
    rounds = [statistics.median(x) / statistics.median(y) for x, y in zip(mine["rounds"], stock["rounds"], strict=True)]
    unit = f"of stock's time, {mine['prompt_tokens']} tokens"
    requests = sum(map(len, mine["rounds"]))
    value = mine["ms_median"] / stock["ms_median"]
    return Score(value, unit, arms.described(stock["options"]), n=requests, low=min(rounds), high=max(rounds))


def table(numbers: dict[str, dict]) -> str:
    columns = ("ms_median", "ms_p90", "ms_max", "cached_tokens", "prompt_tokens")
    lines = [f"{'server, kind':40}" + "".join(f"{c:>16}" for c in columns)]
    lines += [f"{n:40}" + "".join(f"{row[c]:16.5g}" for c in columns) for n, row in numbers.items()]
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--input", type=int, default=4096, help="tokens of a prompt, whole blocks")
    p.add_argument("--times", type=int, default=40, help="requests of each kind, with and without a pause")
    p.add_argument("--pause", type=float, default=0.5, help="seconds of nothing to do ahead of a request")
    p.add_argument("--trace", default="", help="folder for traces of cached requests")
    a = small.arguments(p, argv, tokens=60_000, name=NAME)
    if a.input % BLOCK:
        p.error(f"--input {a.input} is no multiple of {BLOCK} tokens; take {a.input // BLOCK * BLOCK}")
    return a


def main() -> None:
    a = arguments()
    a.model = small.model(a)
    numbers = serving.earlier(a)
    chosen = {name: options for name, options in small.servers(a).items() if not name.startswith(arms.FP8) or a.only}

    def keep(rows: dict[str, dict]) -> None:
        said = {"command": common.command_line()}
        numbers.update({n: row | said | {"options": chosen[n.split(".")[0]]} for n, row in rows.items()})
        common.write_result(a.name, numbers, scores=scores(numbers, a), quiet=True)

    with contextlib.ExitStack() as running:
        servers = {name: common.Server(options, model=a.model) for name, options in chosen.items()}
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(running.enter_context, servers.values()))
        for kind in KINDS:
            if not all(f"{name}.{kind}.at_once" in numbers for name in servers):
                keep(measure({name: server.client for name, server in servers.items()}, kind, a))
        for name, server in servers.items() if a.trace else ():
            try:
                keep({f"{name}.traced": traced(server, a, name)})
            except Exception as e:
                print(f"{name}: no trace, {type(e).__name__} {str(e)[:300]}", flush=True)
        for name, server in servers.items():
            if errors := server.errors():
                raise RuntimeError(f"{name}: {errors}")
    print(table(numbers))
    common.write_result(a.name, numbers, scores=scores(numbers, a))


if __name__ == "__main__":
    main()

"""How long a single request waits for its first token: computed, from the cache, and appended to what is cached.

    python -m bench.e2e.first_token --model <folder> --load-format dummy --together     # on a GPU
    python -m bench.e2e.first_token --times 5 --only bf16,kvc_k4v4                      # CPU engine, a tiny model
    ... --trace FOLDER      # also a torch trace of five cached requests of each server, and what it says in short

One request at a time, of one new token, so that what is timed is the way from the client to the first token and back.
Each kind at once behind the one before, and after `--pause` seconds, in which a server has nothing to do. Servers are
those of `bench.e2e.serving`. Random weights do.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import common
from bench.client import Client
from bench.compare import percentile
from bench.e2e import small, trace

NAME, SEED = "e2e/first_token", 7
BLOCK = 128
REST = 5  # tokens behind the last whole block: what a repeated prompt has to compute in a cache of blocks
COMMON_IDS = range(1000, 40_000)
TRACED = 5


def prompts(kind: str, a: argparse.Namespace, draw: random.Random) -> Iterator[list[int]]:
    """Endlessly: the same prompt (`cached`), one that goes on differently (`appended`), another one (`computed`)."""
    same = draw.sample(COMMON_IDS, a.input // BLOCK * BLOCK + REST)
    while True:
        if kind == "computed":
            yield draw.sample(COMMON_IDS, len(same))
        else:
            yield same + (draw.sample(COMMON_IDS, a.append_tokens) if kind == "appended" else [])


def timed(client: Client, asked: Iterator[list[int]], times: int, pause: float) -> dict:
    """Milliseconds of `times` requests of one new token, and what was cached of the prompt."""
    took, cached = [], []
    for ids in (next(asked) for _ in range(times)):
        time.sleep(pause)
        began = time.monotonic()
        answer = client.generate(ids, 1)
        took.append(1000 * (time.monotonic() - began))
        cached.append(answer.cached_tokens)
    return {
        "ms_median": statistics.median(took),
        "ms_p90": percentile(took, 0.9),
        "ms_max": max(took),
        "cached_tokens": min(cached),
        "prompt_tokens": len(ids),
        "ms": [round(t, 2) for t in took],
    }


def measure(client: Client, a: argparse.Namespace, save: Callable[[str, dict], None]) -> None:
    """All kinds. The first requests of a kind stand apart: one fills the cache, and one may be the first of its size
    that the server ever sees, for which libraries load other kernels."""
    for kind in ("computed", "cached", "appended"):
        client.flush()
        asked = prompts(kind, a, random.Random(f"{SEED} {kind}"))
        save(f"{kind}.first", timed(client, asked, 3, 0.0))
        for pause in (0.0, a.pause):
            times = max(3, a.times // 4) if kind == "computed" else a.times
            save(f"{kind}.pause{pause:g}", timed(client, asked, times, pause))


def traced(server: common.Server, a: argparse.Namespace, name: str) -> dict:
    """A trace of cached requests, in short: kernels, and the calls of the host."""
    folder, mark = Path(a.trace).resolve(), str(int(time.time()))
    asked = prompts("cached", a, random.Random(f"{SEED} traced"))
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
    return row | {"profile": trace.profile(files[0])}


def scores(numbers: dict[str, dict], a: argparse.Namespace) -> dict[str, tuple[float, str]]:
    """Time over stock's, after a pause and at once behind the request before. None without graphs of prefills, which is
    no server's default, and none on a CPU, where stock attends in plain torch."""
    mine, out = f"kvc_{a.formats.split(',')[0]}", {}
    if a.no_prefill_graphs or not common.has_gpu():
        return out
    for kind in ("computed", "cached", "appended"):
        for pause, name in ((a.pause, kind), (0.0, f"{kind}_at_once")):
            x, y = (numbers.get(f"{n}.{kind}.pause{pause:g}") for n in (mine, "bf16"))
            if x and y:
                unit = f"of stock bf16's time, {x['prompt_tokens']} tokens"
                out[f"e2e.first_token.{name}_vs_bf16"] = (x["ms_median"] / y["ms_median"], unit)
    return out


def table(numbers: dict[str, dict]) -> str:
    columns = ("ms_median", "ms_p90", "ms_max", "cached_tokens", "prompt_tokens")
    lines = [f"{'server, kind':32}" + "".join(f"{c:>16}" for c in columns)]
    lines += [f"{n:32}" + "".join(f"{row[c]:16.5g}" for c in columns) for n, row in numbers.items()]
    return "\n".join(lines)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--input", type=int, default=4096, help="tokens of the prompt; whole blocks of it and a few more")
    p.add_argument("--append-tokens", type=int, default=120)
    p.add_argument("--times", type=int, default=20)
    p.add_argument("--pause", type=float, default=1.0, help="seconds of nothing to do ahead of a request")
    p.add_argument("--together", action="store_true", help="start all servers at once, ask them one by one")
    p.add_argument("--trace", default="", help="folder for traces of cached requests")
    p.add_argument("--name", default=NAME)
    return small.arguments(p, argv, tokens=60_000, only="bf16,kvc_k4v4")


def main() -> None:
    a = arguments()
    a.model = small.model(a)
    chosen, numbers = small.servers(a), {}
    with contextlib.ExitStack() as running:
        waiting = {name: common.Server(options, model=a.model) for name, options in chosen.items()}
        if a.together:
            with ThreadPoolExecutor(len(waiting)) as pool:
                list(pool.map(running.enter_context, waiting.values()))
        for name, server in waiting.items():

            def save(kind: str, row: dict, name: str = name) -> None:
                numbers[f"{name}.{kind}"] = row | {"options": chosen[name]}
                common.write_result(a.name, numbers, scores=scores(numbers, a), quiet=True)

            with contextlib.ExitStack() as alone:
                if not a.together:
                    alone.enter_context(server)
                measure(server.client, a, save)
                if a.trace:
                    try:
                        save("traced", traced(server, a, name))
                    except Exception as e:
                        print(f"{name}: no trace, {type(e).__name__} {str(e)[:300]}", flush=True)
                assert not server.errors(), server.errors()
    print(table(numbers))
    common.write_result(a.name, numbers, scores=scores(numbers, a))


if __name__ == "__main__":
    main()

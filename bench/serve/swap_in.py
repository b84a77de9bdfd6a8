"""Prefixes that come back from host memory while other requests decode, in a server.

    python -m bench.serve.swap_in --model <folder> --load-format dummy      # on a GPU, an 8B model
    python -m bench.serve.swap_in --quick                                   # CPU engine, a tiny model

`--streams` requests decode without end. Meanwhile requests of one new token ask for long prefixes in turn. There are
more prefixes than the device holds, so each one comes back from host memory. The same prefix is asked for again at
once, which hits the device and serves as a control.

`load_of_bus`: time of the loads on the device, from the first copy to the last page, over the time of a plain copy of
the same bytes. `slowdown`: that time over itself without the extra time of decode steps. Extra is the time that steps
between sending and first token took beyond as many steps before them, less the same for requests that hit the device.
`slowdown_with_hit` does not subtract that.
`steps_ms` shows which steps are longer: medians of the times between the tokens that follow a request. Random weights
suffice.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

from bench import common
from bench.client import TIMEOUT, Answer, Client
from bench.common import Score
from bench.e2e.serving import result_name
from bench.tiny import tiny_model

NAME, SEED = "serve/swap_in", 7
IDS = range(1000, 40_000)
TAIL = 8  # new tokens after a prefix
BLOCK = 128
PAUSE = 0.15  # seconds of undisturbed decode steps before each request
WARM_UP = 1  # rounds that are not counted
STEPS = 12  # steps after a request whose medians are recorded


class Stream(threading.Thread):
    """An endless answer, and the times at which its tokens arrive."""

    def __init__(self, client: Client, prompt: list[int], answer: int):
        super().__init__(daemon=True)
        body = json.dumps(client.payload(prompt, answer, stream=True)).encode()
        self.request = Request(client.url + "/generate", body, {"Content-Type": "application/json"})
        self.times: list[float] = []

    def run(self) -> None:
        with contextlib.suppress(OSError), urlopen(self.request, timeout=TIMEOUT) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())


def steps_between(times: list[float], begin: float, end: float) -> tuple[int, float]:
    """Number and seconds of the steps from the last token before `begin` to the last one before `end`.

    A server that reads a long request passes tokens on late, so the first token after `begin` says little.
    """
    first, last = (bisect.bisect_right(times, at) - 1 for at in (begin, end))
    return (last - first, times[last] - times[first]) if last > first >= 0 else (0, 0.0)


def median_steps(times: list[float], begins: list[float], count: int) -> list[float]:
    """Medians over `begins` of the milliseconds of the first `count` steps that end after them."""
    spans = []
    for begin in begins:
        first = bisect.bisect_right(times, begin)
        if 0 < first <= len(times) - count:
            spans.append([1000 * (times[i] - times[i - 1]) for i in range(first, first + count)])
    return [statistics.median(step) for step in zip(*spans)]


def extra_seconds(times: list[float], begin: float, end: float) -> float:
    """Seconds that the steps between `begin` and `end` took beyond as many steps in the `PAUSE` before `begin`.

    RuntimeError if there are none in the pause."""
    usual, usual_s = steps_between(times, begin - PAUSE * 0.9, begin)
    if not usual:
        raise RuntimeError(f"no decode step in {PAUSE} s before a request; the server is too slow for this benchmark")
    steps, seconds = steps_between(times, begin, end)
    return seconds - steps * usual_s / usual


def measure(
    client: Client, stream: Stream, others: list[Future], prefixes: list[list[int]], rounds: int, rng: random.Random
) -> dict:
    """Times of requests for the prefixes while `stream` and `others` run: `loaded` from host memory, `hit` on the
    device."""
    spans: dict[str, list[tuple[float, float]]] = {"loaded": [], "hit": []}
    before: dict = {}
    for turn in range(WARM_UP + rounds):
        if turn == WARM_UP:
            before, spans = client.stats(), {kind: [] for kind in spans}
        for prefix in prefixes:
            for kind in spans:
                # Building a long request takes time in which no thread notes a token.
                body = json.dumps(client.payload(prefix + rng.sample(IDS, TAIL), 1)).encode()
                request = Request(client.url + "/generate", body, {"Content-Type": "application/json"})
                time.sleep(PAUSE)
                begin = time.monotonic()
                with urlopen(request, timeout=TIMEOUT) as response:
                    answer = response.read()
                spans[kind].append((begin, time.monotonic()))
                cached = Answer.parse(json.loads(answer)).cached_tokens
                if cached < len(prefix) // BLOCK * BLOCK:
                    raise SystemExit(f"error: {cached} tokens of a prefix were cached; use more --host-memory")
            if not stream.is_alive() or any(other.done() for other in others):
                raise SystemExit(f"error: the streams ended in round {turn}; use a longer --answer or fewer --rounds")
    time.sleep(PAUSE)
    after, times = client.stats(), list(stream.times)
    out = {
        "num_bytes": after["host_arrived_bytes"] - before["host_arrived_bytes"],
        "load_ms": after["host_load_ms"] - before["host_load_ms"],
        # All stored blocks have one format, so their records have one size.
        "prefix_bytes": after["host_bytes"] // after["host_blocks"] * (len(prefixes[0]) // BLOCK),
    }
    for kind, pairs in spans.items():
        out[kind] = {
            "requests": len(pairs),
            "seconds": sum(end - begin for begin, end in pairs),
            "ms_median": 1000 * statistics.median(end - begin for begin, end in pairs),
            "steps": sum(steps_between(times, *pair)[0] for pair in pairs),
            "extra_s": sum(extra_seconds(times, *pair) for pair in pairs),
            "steps_ms": median_steps(times, [begin for begin, _ in pairs], STEPS),
        }
    undisturbed = [steps_between(times, begin - PAUSE * 0.9, begin) for begin, _ in spans["loaded"]]
    out["step_ms"] = 1000 * sum(s for _, s in undisturbed) / max(1, sum(n for n, _ in undisturbed))
    return out


def serve(args: argparse.Namespace) -> dict:
    rng = random.Random(SEED)
    options = [
        "--kvc-host-memory", args.host_memory, "--max-running-requests", str(args.streams + 2),
        "--incremental-streaming-output", "--load-format", args.load_format, *args.server_args.split(),
    ]  # fmt: skip
    if common.has_gpu():
        graphs = ["--cuda-graph-max-bs-decode", str(args.streams + 2)]
        options = [*common.ON_GPU.split(), *graphs, "--chunked-prefill-size", "8192", *options]
    else:
        options = ["--device", "cpu", "--sleep-on-idle", *options]
    with common.Server(common.kvc(args.format, *options, memory=args.memory), model=args.model) as server:
        client = server.client
        prefixes = [rng.choices(IDS, k=args.tokens) for _ in range(args.prefixes)]
        for prefix in prefixes:
            client.generate(prefix, 1)
        prompts = [rng.choices(IDS, k=args.input) for _ in range(args.streams)]
        # Only one answer is streamed, so that many threads do not disturb the one that takes the times.
        with ThreadPoolExecutor(args.streams) as pool:
            waiting = [pool.submit(client.generate, prompt, args.answer) for prompt in prompts[1:]]
            time.sleep(1)
            stream = Stream(client, prompts[0], args.answer)
            stream.start()
            while not stream.times and stream.is_alive():
                time.sleep(0.1)
            time.sleep(2)
            try:
                row = measure(client, stream, waiting, prefixes, args.rounds, rng)
            finally:
                client.post("/abort_request", {"abort_all": True})
            stream.join()
        if errors := server.errors():
            raise RuntimeError(f"{errors}")
    return row


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", help="model folder; default: a tiny random model")
    p.add_argument("--load-format", default="auto")
    p.add_argument("--format", default="k4v4")
    p.add_argument("--tokens", type=int, default=102_400, help="tokens of a prefix")
    p.add_argument("--prefixes", type=int, default=5)
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--streams", type=int, default=64)
    p.add_argument("--input", type=int, default=8192, help="prompt tokens of a stream")
    p.add_argument("--answer", type=int, default=3000, help="maximum tokens of a stream")
    p.add_argument("--memory", default="36GB", help="KV memory; it must not hold all prefixes")
    p.add_argument("--host-memory", default="32GB")
    p.add_argument("--server-args", default="", help="additional options of the server")
    p.add_argument("--quick", action="store_true", help="short prefixes, no result file")
    args = p.parse_args(argv)
    if args.quick:
        args.tokens, args.prefixes, args.rounds, args.streams, args.input = 1024, 8, 2, 2, 256
        args.answer, args.memory, args.host_memory = 2000, "4MiB", "32MiB"
    args.model = args.model or str(tiny_model(Path(tempfile.mkdtemp(prefix="kvc-tiny-"))))
    row = serve(args)
    needed = args.prefixes * args.rounds
    print(json.dumps(row, indent=1))
    if row["num_bytes"] < needed * row["prefix_bytes"]:
        raise SystemExit("error: some prefixes were still on the device; lower --memory or use more --prefixes")
    if not common.has_gpu():  # loads end at once
        return
    from bench.kernels.swap import bus

    row["bus_ms"] = needed * bus(row["num_bytes"] // needed, False)
    load, steps = row["loaded"], f"{args.streams} requests, steps of {row['step_ms']:.1f} ms"
    row["load_of_bus"] = row["load_ms"] / row["bus_ms"]
    row["extra_ms"] = 1000 * (load["extra_s"] - row["hit"]["extra_s"])
    row["slowdown"] = row["load_ms"] / (row["load_ms"] - row["extra_ms"])
    row["slowdown_with_hit"] = row["load_ms"] / (row["load_ms"] - 1000 * load["extra_s"])
    added = (load["ms_median"] - row["hit"]["ms_median"]) * needed / row["bus_ms"]
    unit = "of the time of a plain copy"
    scores = {
        "agents.swap_in_of_pcie": Score(
            row["load_of_bus"], f"{unit}, {args.tokens} tokens", "one copy of the same bytes, same bus", n=needed
        ),
        "agents.swap_in_added": Score(
            added, f"{unit}, added to the time to first token", "the same prefix on the device", n=needed
        ),
        "agents.decode_slowdown": Score(
            row["slowdown"], f"of the time of a decode step, {steps}",
            "the steps before, less what hits on the device add", n=needed,
        ),
    }  # fmt: skip
    if args.quick:
        print({name: score.value for name, score in scores.items()})
    else:
        common.write_result(result_name(NAME), row | vars(args), scores=scores)


if __name__ == "__main__":
    main()

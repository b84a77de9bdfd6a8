"""End to end: output tokens/s of the compressed cache, stock bf16 and stock fp8 on one machine, with equal KV memory,
in one run.

    python -m bench.e2e.serving --model <folder> --load-format dummy          # on a GPU
    python -m bench.e2e.serving --model <folder> --load-format dummy --quick  # the constrained runs alone
    ... --stock-backends fa3,fa3:128,flashinfer   # stock servers with each; scores take the fastest of them
    ... --repeat 5           # each load five times; figures are medians with minimum and maximum
    ... --together           # start all servers at once, if the GPU has room; one is loaded at a time
    ... --also "h2o: --kvc-policy prune --kvc-scorer h2o --kvc-budget 4x"   # a further server of ours, kvc_h2o
    ... --profile FOLDER     # a trace of ten decode steps of each server, and its kernels in the result file

Constrained: every server gets the KV memory of `--tokens` bf16 tokens (fp8 twice the tokens, ours the same bytes).
By default stock SGLang and our server also capture prefills in CUDA graphs, broken at each attention. That takes time
at start and saves host time, which matters when few tokens are new. `--no-prefill-graphs` turns it off for all servers;
such runs give no score.

Unconstrained: loads with ample memory. If `--tokens` hold all requests, this is the same server. Otherwise bf16 gets a
server with more memory (all of it, or `--free-tokens`), and our server stays the same. Load comes from SGLang's own
generator (random token ids). Random weights prove speed, never quality.

The result file is written after every load. `--append` continues the file of an earlier call on the same commit and
device. Loads that it already has often enough are not repeated, so an interrupted call can be repeated, and
`--only NAMES` adds servers. Concurrent calls on several GPUs may share one file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from bench.common import (
    RESULTS,
    Score,
    Server,
    command_line,
    default_attention,
    device_name,
    measured_commit,
    write_result,
)
from bench.e2e import arms
from bench.e2e.trace import profile
from bench.e2e.trace import table as profile_table
from bench.revision import card

FIGURES = {
    "output_tok_s": r"Output token throughput \(tok/s\):\s+([\d.]+)",
    "total_tok_s": r"Total token throughput \(tok/s\):\s+([\d.]+)",
    "ttft_ms_median": r"Median TTFT \(ms\):\s+([\d.]+)",
    "ttft_ms_p99": r"P99 TTFT \(ms\):\s+([\d.]+)",
    "itl_ms_median": r"Median ITL \(ms\):\s+([\d.]+)",
    "itl_ms_p99": r"P99 ITL \(ms\):\s+([\d.]+)",
    "duration_s": r"Benchmark duration \(s\):\s+([\d.]+)",
}
RUNNING = ("running_median", "running_most")  # concurrently decoding requests, from the server's log
FREE = f"{arms.BF16}_free"  # stock with ample memory, if `--tokens` do not hold a load
DECODE_WAIT = 300  # maximum seconds until all prompts of a traced load decode
LEAST_PROMPTS = 8
TRACE_OUTPUT = 256  # minimum tokens of a traced request: until the log's second report, and the traced steps


BACKENDS_HELP = "of stock's attention, separated by commas; fa3:128 has pages of 128 tokens; default: SGLang's own"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", required=True)
    p.add_argument("--load-format", default="auto")
    p.add_argument("--tokens", type=int, default=120_000, help="bf16 tokens whose memory every server gets")
    p.add_argument("--input", type=int, default=4096)
    p.add_argument("--output", type=int, default=512)
    p.add_argument("--prompts", type=int, default=64)
    p.add_argument("--formats", default="k4v4", help="formats of our servers, separated by commas")
    p.add_argument("--also", action="append", default=[], metavar="NAME: OPTIONS", help="an additional server of ours")
    p.add_argument("--concurrency", default="1,8,64", help="of the runs with memory to spare; empty: none")
    p.add_argument("--stock-backends", default="", help=BACKENDS_HELP)
    p.add_argument("--repeat", type=int, default=1, help="number of runs of each load")
    p.add_argument("--no-prefill-graphs", action="store_true", help="no server captures prefills")
    p.add_argument("--only", default="", help="names of servers to run, separated by commas; default: all")
    p.add_argument("--server-args", default="", help="more options for every server")
    p.add_argument("--quick", action="store_true", help="no unconstrained runs")
    p.add_argument("--append", action="store_true", help="keep what the result file holds of other servers")
    p.add_argument("--free-tokens", type=int, default=0, help="tokens of the unconstrained runs; 0: all memory")
    p.add_argument("--together", action="store_true", help="start all servers at once, load them one by one")
    p.add_argument("--profile", default="", help="folder for traces of decode steps")
    p.add_argument("--name", default="", help="of the result file; default: e2e/serving_CARD")
    return p


def arguments(argv: list[str] | None = None, given: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The options in `argv`; `given`: a parser with other defaults or more options."""
    a = (given or parser()).parse_args(argv)
    if a.quick:
        a.concurrency = ""
    a.stock_backends = a.stock_backends or default_attention()
    a.name = a.name or named("e2e/serving")
    return a


def named(bench: str) -> str:
    """The result file's name; each card has its own file."""
    return f"{bench}_{card(device_name())}"


def servers(a: argparse.Namespace) -> dict[str, tuple[list[str], list[int]]]:
    """name -> (server options, concurrencies)."""
    base = ["--load-format", a.load_format, "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    base += ["--cuda-graph-max-bs-decode", "64", *a.server_args.split()]
    base += ["--cuda-graph-backend-prefill=disabled"] if a.no_prefill_graphs else []
    memory = ["--max-total-tokens", str(a.tokens)]
    spare = ["--max-total-tokens", str(a.free_tokens)] if a.free_tokens else []
    free = [int(c) for c in a.concurrency.split(",") if c]
    fits = [c for c in free if c * (a.input + a.output) <= a.tokens]
    both = [a.prompts, *(c for c in fits if c != a.prompts)]

    def stock(name: str, options: list[str], loads: list[int]) -> dict[str, tuple[list[str], list[int]]]:
        return {n: (o, loads) for n, o in arms.stock(name, a.stock_backends, [*base, *options]).items()}

    out = stock(arms.BF16, memory, both)
    twice = ["--max-total-tokens", str(2 * a.tokens)]
    out |= stock(arms.FP8, ["--kv-cache-dtype", arms.FP8, *twice], [a.prompts])
    for i, fmt in enumerate(a.formats.split(",")):
        ours = [*base, "--kv-backend", "kvc", "--kvc-high", fmt, *memory]
        out[f"kvc_{fmt}"] = (ours, [a.prompts] if i else [*both, *(c for c in free if c not in both)])
    for name, _, options in (text.partition(":") for text in a.also):
        ours = [*base, "--kv-backend", "kvc", *options.split(), *memory]
        out[f"kvc_{name.strip()}"] = (ours, [a.prompts])
    if len(fits) < len(free):
        out |= stock(FREE, spare, [c for c in free if c not in fits])
    return arms.chosen(out, a.only)


def load(
    server: Server, a: argparse.Namespace, concurrency: int, prompts: int, output: int, *, input: int = 0,
    seed: int = 0, quality: str = "",
) -> dict[str, float]:  # fmt: skip
    """One run of SGLang's own load generator, in this process (it takes 10 s to import); every request at its full
    length. `quality`: what every request asks of our server, like `one-shot:8x`. Its figures by name."""
    from sglang.benchmark.serving import cli_main

    command = ["sglang.benchmark.serving", "--backend", "sglang", "--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--tokenizer", a.model, "--dataset-name", "random-ids", "--random-range-ratio", "1.0"]
    command += ["--random-input-len", str(input or a.input), "--random-output-len", str(output)]
    command += ["--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--seed", str(seed + concurrency)]
    # No warm-up request: it would be the load's first prompt, and leave it in the cache.
    command += ["--warmup-requests", "0", "--output-file", str(server.log.parent / "load.jsonl")]
    if quality:  # SGLang's generator replaces the whole object
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True, "custom_params": {"kvc": quality}}
        command += ["--extra-request-body", json.dumps({"sampling_params": sampling})]
    said, skip = io.StringIO(), len(server.log.read_text(errors="replace"))
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(said):
        cli_main()
    found = {name: float(m[1]) for name, p in FIGURES.items() if (m := re.search(p, said.getvalue()))}
    if "output_tok_s" not in found:
        raise RuntimeError(f"the load generator reported nothing:\n{said.getvalue()[-2000:]}\n{server.tail()}")
    return found | running(server.log, skip)


def running(log: Path, skip: int) -> dict[str, float]:
    """Number of concurrently decoding requests, from the log after its first `skip` characters, which reports it every
    40 steps."""
    found = re.findall(r"Decode batch.*#running-req: (\d+),", log.read_text(errors="replace")[skip:])
    counts = [int(n) for n in found] or [0]
    return dict(zip(RUNNING, (statistics.median(counts), max(counts)), strict=True))


def when_decoding(log: Path, skip: int, requests: int, over: threading.Event) -> None:
    """Wait until `requests` requests decode, from the server's log after its first `skip` characters.

    The log reports every 40 steps. At the first report the last prompts may still be prefilled; at the second they
    cannot.
    """
    until = time.monotonic() + DECODE_WAIT
    while time.monotonic() < until and not over.is_set():
        said = re.findall(r"Decode batch.*#running-req: (\d+),", log.read_text(errors="replace")[skip:])
        if said.count(str(requests)) >= 2:
            return
        time.sleep(0.05)
    raise RuntimeError(f"the log never said twice that {requests} requests decode")


def trace(server: Server, a: argparse.Namespace, name: str) -> dict:
    """Ten steps that decode `a.prompts` requests, as a torch trace in `a.profile`; returns its summary.

    The prompts are as long as in the measured runs, or shorter so that all fit into the smallest server's memory.
    """
    folder, mark, steps = Path(a.profile).resolve(), str(int(time.time())), 10
    output = max(a.output, TRACE_OUTPUT)
    input = max(16, min(a.input, int(0.9 * a.tokens) // a.prompts - output))
    body = {"num_steps": steps, "output_dir": str(folder), "activities": ["CPU", "GPU"]}
    # Stacks and shapes are most of a trace's bytes.
    body |= {"profile_prefix": name, "profile_id": mark, "with_stack": False, "record_shapes": False}
    server.client.flush()
    over, skip = threading.Event(), len(server.log.read_text(errors="replace"))

    def start() -> None:
        when_decoding(server.log, skip, a.prompts, over)
        server.client.post("/start_profile", body).raise_for_status()

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start)
        try:
            load(server, a, a.prompts, a.prompts, output, input=input)
        finally:
            over.set()
        started.result()
    files = sorted(folder.glob(f"{name}-{mark}-*.json.gz"))
    if not files:
        raise RuntimeError(f"the server wrote no trace to {folder}")
    return {"requests": a.prompts, "input": input, "output": output, "steps": steps, **profile(files[0])}


def earlier(a: argparse.Namespace) -> dict[str, dict]:
    """The numbers of an earlier call; refused if they are of another commit or device."""
    path = RESULTS / f"{a.name}.json"
    if not (a.append and path.exists()):
        return {}
    record = json.loads(path.read_text())
    for field, now in (("commit", measured_commit()), ("device", device_name())):
        if record[field] != now:
            raise SystemExit(f"error: {path.name} holds {field} {record[field]}, not {now}: leave --append out")
    return record["numbers"]


def table(numbers: dict[str, dict]) -> str:
    """Table of the runs."""
    numbers = {name: run for name, run in numbers.items() if "profile" not in run}
    columns = [c for c in (*FIGURES, *RUNNING) if any(c in n for n in numbers.values())]
    lines = [f"{'run':24}" + "".join(f"{c:>16}" for c in columns)]
    for name, run in numbers.items():
        lines.append(f"{name:24}" + "".join(f"{run[c]:16.1f}" if c in run else " " * 16 for c in columns))
    return "\n".join(lines)


def missing(numbers: dict, a: argparse.Namespace, name: str, concurrencies: list[int]) -> list[int]:
    """The loads of a server that `numbers` has fewer than `--repeat` times."""
    return [c for c in concurrencies if len(numbers.get(f"{name}.c{c}", {}).get("runs", [])) < a.repeat]


def summary(runs: list[dict[str, float]]) -> dict:
    """Each figure's median over the runs of one load, and the runs."""
    return {f: statistics.median(run[f] for run in runs) for f in (*FIGURES, *RUNNING) if f in runs[0]} | {"runs": runs}


def keep(numbers: dict, a: argparse.Namespace, *, quiet: bool = True) -> None:
    """Write the result file, merged with results that calls on other GPUs have added."""
    numbers |= {name: run for name, run in earlier(a).items() if name not in numbers}
    write_result(a.name, numbers, scores=a.score(numbers, a), quiet=quiet)


def measure(
    server: Server, a: argparse.Namespace, name: str, options: list[str], concurrencies: list[int], numbers: dict
) -> None:
    """All loads of one server, into `numbers` and the result file."""
    start = round(server.seconds_to_start, 1)  # with --together all start at once
    load(server, a, 8, 8, 16)  # compile and warm up
    for c in concurrencies:
        prompts = a.prompts if c == a.prompts else max(2 * c, LEAST_PROMPTS)
        runs = list(numbers.get(f"{name}.c{c}", {}).get("runs", []))
        while len(runs) < a.repeat:
            server.client.flush()
            runs.append(load(server, a, c, prompts, a.output, seed=1000 * len(runs)))
            kvc = server.client.stats() if name.startswith("kvc") else None
            said = {"options": options, "command": command_line(), "prompts": prompts, "stats": kvc, "start_s": start}
            numbers[f"{name}.c{c}"] = said | summary(runs)
            print(f"{name}.c{c}: " + ", ".join(f"{k} {v:g}" for k, v in runs[-1].items()), flush=True)
            keep(numbers, a)
    if a.profile:
        try:
            found = trace(server, a, name)
            numbers[name] = {"profile": found}
            print(f"{name}: {found['steps']} decode steps\n{profile_table(found)}", flush=True)
            keep(numbers, a)
        except Exception as e:
            print(f"{name}: no trace, {type(e).__name__} {str(e)[:300]}", flush=True)
    for line in server.errors():
        print(name, line)


def scores(numbers: dict[str, dict], a: argparse.Namespace) -> dict[str, Score]:
    """The scoreboard's ratios for the first format; none for other loads or for servers with extra options."""
    usual, fields = arguments(["--model", a.model]), ("tokens", "input", "output", "prompts", "server_args")
    if any(getattr(a, f) != getattr(usual, f) for f in (*fields, "no_prefill_graphs")):
        return {}
    ours, out = f"kvc_{a.formats.split(',')[0]}", {}

    def compare(name: str, stock: str, concurrency: int, figure: str = "output_tok_s") -> None:
        point, sign = f"c{concurrency}", 1 if figure == "output_tok_s" else -1
        best = arms.fastest(numbers, stock, point, lambda run: sign * run[figure])
        if best and f"{ours}.{point}" in numbers:
            out[name] = ratio(numbers[f"{ours}.{point}"], numbers[best], figure)

    compare("e2e.vs_bf16", arms.BF16, a.prompts)
    compare("e2e.vs_fp8", arms.FP8, a.prompts)
    compare("e2e.ttft_vs_fp8", arms.FP8, a.prompts, "ttft_ms_median")
    spare = "e2e.unconstrained_vs_bf16"
    most = a.tokens // (a.input + a.output)  # sessions that its usual memory holds
    free = [int(c) for c in a.concurrency.split(",") if c]
    for c in free:
        compare(f"{spare}_c{c}", arms.BF16 if c <= most else FREE, c)
    if found := [out[f"{spare}_c{c}"] for c in free if f"{spare}_c{c}" in out]:
        worst = min(found)
        out[spare] = worst._replace(unit=f"{worst.unit}, worst of {len(found)} concurrencies")
    return out


UNITS = {"output_tok_s": "x output tok/s", "ttft_ms_median": "x median time to first token"}


def ratio(mine: dict, stock: dict, figure: str) -> Score:
    """Ratio of medians; `low` and `high` are its limits over the runs of both."""
    x, y = ([run[figure] for run in side["runs"]] for side in (mine, stock))
    return Score(
        mine[figure] / stock[figure], UNITS[figure], arms.described(stock["options"]), n=min(len(x), len(y)),
        low=min(x) / max(y), high=max(x) / min(y),
    )  # fmt: skip


def main(argv: list[str] | None = None, score: Callable[..., dict[str, Score]] = scores) -> None:
    """Run the load of `argv`; `score(numbers, a)` makes the result file's scores."""
    a = arguments(argv)
    a.score = score
    numbers = earlier(a)
    wanted = {name: (options, missing(numbers, a, name, loads)) for name, (options, loads) in servers(a).items()}
    chosen = {name: (options, loads) for name, (options, loads) in wanted.items() if loads or a.profile}
    with contextlib.ExitStack() as running:
        if a.together:
            waiting = {name: Server(options, model=a.model) for name, (options, _) in chosen.items()}
            with ThreadPoolExecutor(max(1, len(waiting))) as pool:
                list(pool.map(running.enter_context, waiting.values()))
        for name, (options, concurrencies) in chosen.items():
            with contextlib.ExitStack() as alone:
                if a.together:
                    server = waiting[name]
                else:
                    server = alone.enter_context(Server(options, model=a.model))
                measure(server, a, name, options, concurrencies, numbers)
    print(table(numbers))
    keep(numbers, a, quiet=False)


if __name__ == "__main__":
    main()

"""Throughput and latency of the compressed cache, stock bf16 and stock fp8 under load, in equal KV memory.

    python -m bench.e2e.serving --model <folder> --load-format dummy          # on a GPU
    python -m bench.e2e.serving --model <folder> --load-format dummy --quick  # only the constrained runs
    ... --stock-backends fa3,fa3:128,flashinfer   # one stock server per backend; the fastest is the baseline
    ... --repeat 5           # run each load five times; figures are medians with minimum and maximum
    ... --together           # start all servers at once, if the GPU has room, and load them one by one
    ... --also "h2o: --kvc-policy prune --kvc-scorer h2o --kvc-budget 4x"   # an additional server, kvc_h2o
    ... --text FILE          # prompts are passages of a text; for models with trained weights
    ... --profile FOLDER     # trace ten decode steps of each server and add its kernels to the result file

Constrained runs: every server has the KV memory of `--tokens` bf16 tokens. This is room for twice as many fp8 tokens.
Like stock SGLang, our server captures prefills in CUDA graphs by default, broken at each attention. Graphs save host
time, which matters when few tokens are new. `--no-prefill-graphs` turns them off for all servers; such runs give no
scores.

Unconstrained runs: loads with ample memory. If `--tokens` hold all requests, the constrained servers run them.
Otherwise stock bf16 gets a server with more memory (all of it, or `--free-tokens`), and our server keeps its memory.
SGLang's load generator sends random token ids, or passages with `--text`. Random weights show speed, not quality. All
servers stream incrementally. By default each event of `/generate` repeats the whole answer, whose CPU time grows with
the square of its length.

The result file is written after every load. `--append` adds to the file of an earlier call at the same commit on the
same device, and runs only the loads that the file lacks. Repeat an interrupted call with it, or add servers with
`--only NAMES`. Concurrent calls on several GPUs may share one file.
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
from bench.e2e.passages import write_passages
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
FREE = f"{arms.BF16}_free"  # stock with ample memory, for loads that `--tokens` do not hold
DECODE_WAIT = 300  # maximum seconds until all prompts of a traced load decode
MIN_PROMPTS = 8
TRACE_OUTPUT = 256  # minimum output tokens of a traced request; covers two log reports and the traced steps

BACKENDS_HELP = "attention backends of stock, separated by commas; fa3:128 has 128-token pages; default: SGLang's"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", required=True)
    p.add_argument("--load-format", default="auto")
    p.add_argument("--tokens", type=int, default=120_000, help="KV memory of every server, in bf16 tokens")
    p.add_argument("--input", type=int, default=4096)
    p.add_argument("--output", type=int, default=512)
    p.add_argument("--prompts", type=int, default=64)
    p.add_argument("--formats", default="k4v4", help="formats of our servers, separated by commas")
    p.add_argument("--also", action="append", default=[], metavar="NAME: OPTIONS", help="an additional kvc server")
    p.add_argument("--concurrency", default="1,8,64", help="concurrencies of the unconstrained runs; empty: none")
    p.add_argument("--stock-backends", default="", help=BACKENDS_HELP)
    p.add_argument("--repeat", type=int, default=1, help="number of runs of each load")
    p.add_argument("--no-prefill-graphs", action="store_true", help="turn off prefill CUDA graphs on all servers")
    p.add_argument("--only", default="", help="names of servers to run, separated by commas; default: all")
    p.add_argument("--server-args", default="", help="additional options of every server")
    p.add_argument("--text", default="", help="file whose passages are the prompts; default: random token ids")
    p.add_argument("--quick", action="store_true", help="skip the unconstrained runs")
    p.add_argument("--append", action="store_true", help="keep the rows of the result file and add to them")
    p.add_argument("--free-tokens", type=int, default=0, help="tokens of unconstrained stock; 0: all memory")
    p.add_argument("--together", action="store_true", help="start all servers at once, load them one by one")
    p.add_argument("--profile", default="", help="folder for traces of decode steps")
    p.add_argument("--name", default="", help="name of the result file; default: e2e/serving_CARD")
    return p


def arguments(argv: list[str] | None = None, given: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parse `argv`. `given`: a parser with other defaults or additional options."""
    args = (given or parser()).parse_args(argv)
    if args.quick:
        args.concurrency = ""
    args.stock_backends = args.stock_backends or default_attention()
    args.name = args.name or result_name("e2e/serving")
    return args


def result_name(bench: str) -> str:
    """Name of the result file of this GPU model."""
    return f"{bench}_{card(device_name())}"


def servers(args: argparse.Namespace) -> dict[str, tuple[list[str], list[int]]]:
    """Name -> (server options, concurrencies)."""
    base = ["--load-format", args.load_format, "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    base += ["--incremental-streaming-output", "--cuda-graph-max-bs-decode", "64", *args.server_args.split()]
    base += ["--cuda-graph-backend-prefill=disabled"] if args.no_prefill_graphs else []
    memory = ["--max-total-tokens", str(args.tokens)]
    free_memory = ["--max-total-tokens", str(args.free_tokens)] if args.free_tokens else []
    free = [int(c) for c in args.concurrency.split(",") if c]
    fits = [c for c in free if c * (args.input + args.output) <= args.tokens]
    bf16_loads = [args.prompts, *(c for c in fits if c != args.prompts)]

    def stock(name: str, options: list[str], loads: list[int]) -> dict[str, tuple[list[str], list[int]]]:
        return {n: (o, loads) for n, o in arms.stock(name, args.stock_backends, [*base, *options]).items()}

    out = stock(arms.BF16, memory, bf16_loads)
    out |= stock(arms.FP8, ["--kv-cache-dtype", arms.FP8, "--max-total-tokens", str(2 * args.tokens)], [args.prompts])
    for i, fmt in enumerate(args.formats.split(",")):
        ours = [*base, "--kv-backend", "kvc", "--kvc-high", fmt, *memory]
        out[f"kvc_{fmt}"] = (ours, [args.prompts] if i else [*bf16_loads, *(c for c in free if c not in bf16_loads)])
    for name, _, options in (text.partition(":") for text in args.also):
        ours = [*base, "--kv-backend", "kvc", *options.split(), *memory]
        out[f"kvc_{name.strip()}"] = (ours, [args.prompts])
    if len(fits) < len(free):
        out |= stock(FREE, free_memory, [c for c in free if c not in fits])
    return arms.select(out, args.only)


def load(
    server: Server, args: argparse.Namespace, concurrency: int, prompts: int, output: int, *, input: int = 0,
    seed: int = 0, quality: str = "",
) -> dict[str, float]:  # fmt: skip
    """Run SGLang's load generator in this process, because its import takes 10 s; return its figures by name. All
    answers have their full length. `quality`: the quality that every request asks for, like `one-shot:8x`."""
    from sglang.benchmark.serving import cli_main

    command = ["sglang.benchmark.serving", "--backend", "sglang", "--host", "127.0.0.1", "--port", str(server.port)]
    command += ["--tokenizer", args.model]
    if args.text:
        file = server.log.parent / "passages.jsonl"
        write_passages(file, Path(args.text), args.model, prompts, input or args.input, seed + concurrency)
        command += ["--dataset-name", "custom", "--dataset-path", str(file), "--sharegpt-output-len", str(output)]
    else:
        command += ["--dataset-name", "random-ids", "--random-range-ratio", "1.0"]
        command += ["--random-input-len", str(input or args.input), "--random-output-len", str(output)]
    command += ["--num-prompts", str(prompts), "--max-concurrency", str(concurrency), "--seed", str(seed + concurrency)]
    # A warm-up request would leave the load's first prompt in the cache.
    command += ["--warmup-requests", "0", "--output-file", str(server.log.parent / "load.jsonl")]
    if quality:  # this replaces all sampling parameters of the generator
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True, "custom_params": {"kvc": quality}}
        command += ["--extra-request-body", json.dumps({"sampling_params": sampling})]
    stdout, skip = io.StringIO(), len(server.log.read_text(errors="replace"))
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(stdout):
        cli_main()
    figures = {name: float(m[1]) for name, p in FIGURES.items() if (m := re.search(p, stdout.getvalue()))}
    if "output_tok_s" not in figures:
        raise RuntimeError(f"the load generator reported nothing:\n{stdout.getvalue()[-2000:]}\n{server.tail()}")
    return figures | running(server.log, skip)


def running(log: Path, skip: int) -> dict[str, float]:
    """Median and maximum number of concurrently decoding requests, from the log after its first `skip` characters."""
    counts = decode_counts(log, skip) or [0]
    return dict(zip(RUNNING, (statistics.median(counts), max(counts)), strict=True))


def decode_counts(log: Path, skip: int) -> list[int]:
    """Numbers of decoding requests, which the log reports every 40 steps."""
    return [int(n) for n in re.findall(r"Decode batch.*#running-req: (\d+),", log.read_text(errors="replace")[skip:])]


def wait_until_decoding(log: Path, skip: int, requests: int, stop: threading.Event) -> None:
    """Wait until the log reports `requests` decoding requests for the second time after its first `skip` characters.

    At the first report, the last prompts may still be prefilled.
    """
    until = time.monotonic() + DECODE_WAIT
    while time.monotonic() < until and not stop.is_set():
        if decode_counts(log, skip).count(requests) >= 2:
            return
        time.sleep(0.05)
    raise RuntimeError(f"the log did not report {requests} decoding requests twice")


def trace(server: Server, args: argparse.Namespace, name: str) -> dict:
    """Write a torch trace of ten decode steps with `args.prompts` requests to `args.profile`; return its summary.

    Prompts are shorter than in the measured runs if the smallest server could not hold all of them otherwise.
    """
    folder, mark, steps = Path(args.profile).resolve(), str(int(time.time())), 10
    output = max(args.output, TRACE_OUTPUT)
    input = max(16, min(args.input, int(0.9 * args.tokens) // args.prompts - output))
    body = {"num_steps": steps, "output_dir": str(folder), "activities": ["CPU", "GPU"]}
    # Stacks and shapes would take most of the trace's bytes.
    body |= {"profile_prefix": name, "profile_id": mark, "with_stack": False, "record_shapes": False}
    server.client.flush()
    stop, skip = threading.Event(), len(server.log.read_text(errors="replace"))

    def start() -> None:
        wait_until_decoding(server.log, skip, args.prompts, stop)
        server.client.post("/start_profile", body).raise_for_status()

    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start)
        try:
            load(server, args, args.prompts, args.prompts, output, input=input)
        finally:
            stop.set()
        started.result()
    files = sorted(folder.glob(f"{name}-{mark}-*.json.gz"))
    if not files:
        raise RuntimeError(f"the server wrote no trace to {folder}")
    return {"requests": args.prompts, "input": input, "output": output, "steps": steps, **profile(files[0])}


def earlier_rows(args: argparse.Namespace) -> dict[str, dict]:
    """Rows of the result file with `--append`, else none.

    Raises:
        SystemExit: they are from another commit or device.
    """
    path = RESULTS / f"{args.name}.json"
    if not (args.append and path.exists()):
        return {}
    record = json.loads(path.read_text())
    for field, now in (("commit", measured_commit()), ("device", device_name())):
        if record[field] != now:
            raise SystemExit(f"error: {path.name} is for {field} {record[field]}, not {now}; run without --append")
    return record["numbers"]


def table(numbers: dict[str, dict]) -> str:
    """Table of the runs."""
    numbers = {name: run for name, run in numbers.items() if "profile" not in run}
    columns = [c for c in (*FIGURES, *RUNNING) if any(c in n for n in numbers.values())]
    lines = [f"{'run':24}" + "".join(f"{c:>16}" for c in columns)]
    for name, run in numbers.items():
        lines.append(f"{name:24}" + "".join(f"{run[c]:16.1f}" if c in run else " " * 16 for c in columns))
    return "\n".join(lines)


def missing(numbers: dict, args: argparse.Namespace, name: str, concurrencies: list[int]) -> list[int]:
    """Loads of a server that `numbers` has fewer than `--repeat` times."""
    return [c for c in concurrencies if len(numbers.get(f"{name}.c{c}", {}).get("runs", [])) < args.repeat]


def summary(runs: list[dict[str, float]]) -> dict:
    """Median of each figure over the runs of one load, and the runs themselves."""
    return {f: statistics.median(run[f] for run in runs) for f in (*FIGURES, *RUNNING) if f in runs[0]} | {"runs": runs}


def save(numbers: dict, args: argparse.Namespace, *, quiet: bool = True) -> None:
    """Write the result file, merged with the rows that concurrent calls have added."""
    numbers |= {name: run for name, run in earlier_rows(args).items() if name not in numbers}
    write_result(args.name, numbers, scores=args.score(numbers, args), quiet=quiet)


def measure(
    server: Server, args: argparse.Namespace, name: str, options: list[str], concurrencies: list[int], numbers: dict
) -> None:
    """Run all loads of one server; add the figures to `numbers` and the result file."""
    start = round(server.seconds_to_start, 1)  # with --together, servers start concurrently
    load(server, args, 8, 8, 16)  # compile and warm up
    for c in concurrencies:
        prompts = args.prompts if c == args.prompts else max(2 * c, MIN_PROMPTS)
        runs = list(numbers.get(f"{name}.c{c}", {}).get("runs", []))
        while len(runs) < args.repeat:
            server.client.flush()
            runs.append(load(server, args, c, prompts, args.output, seed=1000 * len(runs)))
            kvc = server.client.stats() if name.startswith("kvc") else None
            setup = {"options": options, "command": command_line(), "prompts": prompts, "stats": kvc, "start_s": start}
            numbers[f"{name}.c{c}"] = setup | summary(runs)
            print(f"{name}.c{c}: " + ", ".join(f"{k} {v:g}" for k, v in runs[-1].items()), flush=True)
            save(numbers, args)
    if args.profile:
        try:
            kernels = trace(server, args, name)
            numbers[name] = {"profile": kernels}
            print(f"{name}: {kernels['steps']} decode steps\n{profile_table(kernels)}", flush=True)
            save(numbers, args)
        except Exception as e:
            print(f"{name}: no trace, {type(e).__name__} {str(e)[:300]}", flush=True)
    for line in server.errors():
        print(name, line)


def scores(numbers: dict[str, dict], args: argparse.Namespace) -> dict[str, Score]:
    """Ratios of the first format to the fastest stock server. Only the default load without extra server options gives
    scores. Stock's unconstrained server counts only if it ran all requests at once."""
    defaults = arguments(["--model", args.model])
    fields = ("tokens", "input", "output", "prompts", "server_args", "no_prefill_graphs", "text")
    if any(getattr(args, f) != getattr(defaults, f) for f in fields):
        return {}
    ours, out = f"kvc_{args.formats.split(',')[0]}", {}

    def compare(name: str, stock: str, concurrency: int, figure: str = "output_tok_s") -> None:
        point, sign = f"c{concurrency}", 1 if figure == "output_tok_s" else -1
        best = arms.fastest(numbers, stock, point, lambda run: sign * run[figure])
        if best and stock == FREE and numbers[best]["running_most"] < concurrency:
            return
        if best and f"{ours}.{point}" in numbers:
            out[name] = ratio(numbers[f"{ours}.{point}"], numbers[best], figure)

    compare("e2e.vs_bf16", arms.BF16, args.prompts)
    compare("e2e.vs_fp8", arms.FP8, args.prompts)
    compare("e2e.ttft_vs_fp8", arms.FP8, args.prompts, "ttft_ms_median")
    name = "e2e.unconstrained_vs_bf16"
    capacity = args.tokens // (args.input + args.output)  # requests that the constrained stock server holds
    free = [int(c) for c in args.concurrency.split(",") if c]
    for c in free:
        compare(f"{name}_c{c}", arms.BF16 if c <= capacity else FREE, c)
    if ratios := [out[f"{name}_c{c}"] for c in free if f"{name}_c{c}" in out]:
        worst = min(ratios)
        out[name] = worst._replace(unit=f"{worst.unit}, worst of {len(ratios)} concurrencies")
    return out


UNITS = {"output_tok_s": "x output tok/s", "ttft_ms_median": "x median time to first token"}


def ratio(ours: dict, stock: dict, figure: str) -> Score:
    """Ratio of medians; `low` and `high` are limits over all pairs of runs."""
    x, y = ([run[figure] for run in side["runs"]] for side in (ours, stock))
    return Score(
        ours[figure] / stock[figure], UNITS[figure], arms.describe(stock["options"]), n=min(len(x), len(y)),
        low=min(x) / max(y), high=max(x) / min(y),
    )  # fmt: skip


def main(argv: list[str] | None = None, score: Callable[..., dict[str, Score]] = scores) -> None:
    """Run the loads that `argv` asks for. `score(numbers, args)` returns the scores of the result file."""
    args = arguments(argv)
    args.score = score
    numbers = earlier_rows(args)
    wanted = {name: (options, missing(numbers, args, name, loads)) for name, (options, loads) in servers(args).items()}
    todo = {name: (options, loads) for name, (options, loads) in wanted.items() if loads or args.profile}
    with contextlib.ExitStack() as running:
        if args.together:
            pending = {name: Server(options, model=args.model) for name, (options, _) in todo.items()}
            with ThreadPoolExecutor(max(1, len(pending))) as pool:
                list(pool.map(running.enter_context, pending.values()))
        for name, (options, concurrencies) in todo.items():
            with contextlib.ExitStack() as alone:
                if args.together:
                    server = pending[name]
                else:
                    server = alone.enter_context(Server(options, model=args.model))
                measure(server, args, name, options, concurrencies, numbers)
    print(table(numbers))
    save(numbers, args, quiet=False)


if __name__ == "__main__":
    main()

"""Runner of all benchmarks and tests for a GPU, with time limits, on all GPUs of the machine.

    python -m bench.gpu [--only tests,decode,..] [--model DIR [--load-format dummy]]
    python -m bench.gpu --list        # steps, their time limits in seconds, and their commands

Steps that depend on host time run first, one by one. The other timed steps follow, one per GPU. Steps that only pass or
fail come next, so that their compilers do not disturb timed steps. The sanitizer runs last, on all GPUs.

Result files go to bench/results, and the output of each step to `--logs`. This command only prints how each step ended.
`serving`, `long_answers`, `rates`, `agents`, `agents_bfcl` and `first_token` need a larger model (`--model`), and
`agent_replay` also needs recorded sessions (`--traces`). `served`, `kits`, `cold_warm`, `page_hash`, `round_trips` and
`devices` use the demo model. For a machine without a network, copy the folder that `python -m sglang_kvc.demo.model`
prints to SGLANG_KVC_CACHE. `--data` also adds the tool calls to `round_trips`.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT

PYTHON = [sys.executable, "-m"]
ALONE, TIMED, CHECK, ALL_GPUS = range(4)  # kinds of steps, in the order in which they run
# FlashAttention 3 is SGLang's default on Hopper; over fp8 it is faster with pages of 128 tokens. Other GPUs lack it.
STOCK_ON_HOPPER = "fa3,fa3:128"
STOP_SECONDS = 60  # time for an interrupted step to stop its servers


@dataclass(frozen=True)
class Step:
    name: str
    command: list[str]
    seconds: int
    kind: int


def steps(args: argparse.Namespace) -> list[Step]:
    model = ["--model", args.model, "--load-format", args.load_format]
    data = ["--data", args.data] if args.data else []
    stock = ["--stock-backends", args.stock_backends]
    arms = ["--tokens", "105000", "--host-gb", "32", "--seconds", "60", "--until-missed"]
    arms += ["--arm", "kvc_tiers,kvc,stock_fp8_hicache,stock_fp8,stock_bf16"]
    # Lengths, pauses and memory are a quarter of the recorded ones.
    replay = ["bench.e2e.agent_replay", args.traces, *model, "--length-scale", "0.25", "--time-scale", "0.25", *arms]
    replay += ["--curve", "16,24,32,48,56,64,72,80,96"]
    # With long tool calls, prefix reuse rather than the prefill of new tokens limits the number of agents.
    dialogues = ["bench.e2e.agent_replay", "--workload", "bfcl", *data, *model, "--tool-seconds", "30", *arms]
    dialogues += ["--curve", "16,32,48,64,80,96,128"]
    windows = ["bench.serve.windows", "--head-dim", "256", "--name", "serve/windows_gpu"]
    windows += ["--tokenizer", args.model] if args.model else []
    out = [
        ("serving", ["bench.e2e.serving", *model, *stock, "--repeat", "3"], 2000, ALONE),
        ("long_answers", ["bench.e2e.long_answers", *model, *stock], 1500, ALONE),
        ("rates", ["bench.e2e.rates", *model, *stock], 900, ALONE),
        ("first_token", ["bench.e2e.first_token", *model, *stock], 700, ALONE),
        ("decode", "bench.kernels.decode targets", 300, TIMED),
        ("agents", ["bench.e2e.agents", *model, *data], 1800, TIMED),
        ("agent_replay", replay, 3600, TIMED),
        ("agents_bfcl", dialogues, 3600, TIMED),
        ("grid", "bench.kernels.decode grid", 300, TIMED),
        ("uneven", "bench.kernels.decode uneven", 300, TIMED),
        ("extend", "bench.kernels.extend", 300, TIMED),
        ("compaction", "bench.kernels.compaction", 300, TIMED),
        ("swap", "bench.kernels.swap", 120, TIMED),
        ("tests", f"pytest -q -p no:cacheprovider -n {min(16, os.cpu_count() or 1)} -m gpu tests", 900, CHECK),
        ("served", "pytest -q -p no:cacheprovider tests/server", 580, CHECK),
        ("kits", "bench.serve.kits --format k4v4,leankv,quota", 580, CHECK),
        ("windows", windows, 500, CHECK),
        ("devices", "bench.serve.devices --against bench/results/serve/devices_cpu.json.gz", 500, CHECK),
        ("page_hash", "bench.serve.page_hash --name serve/page_hash_gpu", 400, CHECK),
        ("round_trips", ["bench.quality.round_trips", *(data or ["--tasks", "niah,kv"])], 580, CHECK),
        ("cold_warm", "bench.serve.cold_warm --name serve/cold_warm_gpu --formats stock,bf16,k4v4", 800, CHECK),
        ("sanitizer", "bench.kernels.sanitizer --seconds 1150", 1200, ALL_GPUS),
    ]
    skipped = () if args.model else ("serving", "long_answers", "rates", "agents", "agents_bfcl", "first_token")
    skipped += () if args.model and args.traces else ("agent_replay",)
    skipped += () if shutil.which("compute-sanitizer") else ("sanitizer",)
    return [
        Step(name, [*PYTHON, *(command.split() if isinstance(command, str) else command)], seconds, kind)
        for name, command, seconds, kind in out
        if name not in skipped
    ]


def run(step: Step, gpus: str, logs: Path) -> bool:
    """Run a step, print how it ended, and return whether it passed. A step that exceeds its limit is interrupted, so
    that it stops its servers."""
    began, log = time.monotonic(), logs / f"{step.name}.log"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    with open(log, "w") as out:
        process = subprocess.Popen(step.command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(step.seconds)
            end = "ok" if code == 0 else f"FAILED with {code}"
        except subprocess.TimeoutExpired:
            end = f"FAILED: not done after {step.seconds} s"
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(f"{step.name:12} {time.monotonic() - began:6.0f} s  GPU {gpus:8} {end}  {log}", flush=True)
    return end == "ok"


def run_all(chosen: list[Step], gpus: list[str], logs: Path) -> int:
    """Run all steps, one kind after another; return the number of failed steps."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job; steps would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    free: queue.Queue[str] = queue.Queue()
    for gpu in gpus:
        free.put(gpu)

    def run_on_free_gpu(step: Step) -> bool:
        gpu = free.get()
        try:
            return run(step, gpu, logs)
        finally:
            free.put(gpu)

    failed = [run(s, gpus[0], logs) for s in chosen if s.kind == ALONE].count(False)
    with ThreadPoolExecutor(len(gpus)) as pool:
        for kind in (TIMED, CHECK):
            failed += [*pool.map(run_on_free_gpu, [s for s in chosen if s.kind == kind])].count(False)
    return failed + [run(s, ",".join(gpus), logs) for s in chosen if s.kind == ALL_GPUS].count(False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="steps, separated by commas")
    parser.add_argument("--model", default="", help="model folder for the steps that need a larger model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--stock-backends", default=STOCK_ON_HOPPER, help="attention backends of stock servers")
    parser.add_argument("--data", default="", help="output of `bench.quality.fetch tasks`, for agents* and round_trips")
    parser.add_argument("--traces", default="", help="recorded sessions (`bench.agents.traces`), for agent_replay")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "kvc-gpu")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = steps(args)
    if args.only:
        names, only = [s.name for s in chosen], args.only.split(",")
        if unknown := set(only) - {*names}:
            parser.error(f"no such step: {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
        chosen = [s for s in chosen if s.name in only]
    if args.list:
        print("\n".join(f"{s.name:12} {s.seconds:5} s  python {' '.join(s.command[1:])}" for s in chosen))
        print(f"{'all':12} {sum(s.seconds for s in chosen):5} s  on one GPU")
        return 0
    import torch

    if not torch.cuda.is_available():
        parser.error("no CUDA device is available")
    args.logs.mkdir(parents=True, exist_ok=True)
    from bench.kernels.sanitizer import visible_gpus

    return run_all(chosen, visible_gpus(), args.logs)


if __name__ == "__main__":
    sys.exit(main())

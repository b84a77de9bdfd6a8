"""Everything that has to run on a GPU, one step after the other, each within its time: tests first, then the figures.

    python -m bench.gpu [--only tests,decode,..] [--model DIR [--load-format dummy]] [--list]

The steps leave their result files under bench/results as they do alone. What a step printed is in `--logs`; here stands
only how it ended. `serving` and `agents` need a model of some size (`--model`); those that serve the demo model are
`cold_warm`, `page_hash` and `devices`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import ROOT

PYTHON = [sys.executable, "-m"]


def steps(args) -> dict[str, tuple[list[str], int]]:
    """name -> (command, seconds)."""
    test = [*PYTHON, "pytest", "-q", "-p", "no:cacheprovider"]
    out = {"tests": ([*test, "-n", str(min(8, os.cpu_count() or 1)), "tests/gpu"], 600)}
    if shutil.which("compute-sanitizer"):
        out["sanitizer"] = ([*PYTHON, "bench.kernels.sanitizer", "--seconds", "1150"], 1200)
    kernels = {"decode": "decode targets", "grid": "decode grid", "uneven": "decode uneven", "extend": "extend"}
    for name, module in {**kernels, "compaction": "compaction"}.items():
        out[name] = ([*PYTHON, *f"bench.kernels.{module}".split()], 300)
    name = "--name", "serve/cold_warm_gpu"  # beside the CPU's
    out["cold_warm"] = ([*PYTHON, "bench.serve.cold_warm", *name, "--formats", "stock,bf16,k4v4"], 800)
    out["page_hash"] = ([*PYTHON, "bench.serve.page_hash", "--name", "serve/page_hash_gpu"], 400)
    out["devices"] = ([*PYTHON, "bench.serve.devices", "--against", "bench/results/serve/devices_cpu.json.gz"], 500)
    if args.model:
        model = "--model", args.model, "--load-format", args.load_format
        out["serving"] = ([*PYTHON, "bench.e2e.serving", *model], 900)
        out["agents"] = ([*PYTHON, "bench.e2e.agents", *model, *(["--data", args.data] if args.data else [])], 1200)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="steps, separated by commas")
    parser.add_argument("--model", default="", help="for the serving step")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--data", default="", help="for the agents; file of `bench.quality.fetch tasks`")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "kvc-gpu")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = steps(args)
    if args.only:
        unknown = set(args.only.split(",")) - set(chosen)
        if unknown:
            parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in args.only.split(",")}
    if args.list:
        print("\n".join(f"{name:12} {' '.join(command[1:])}" for name, (command, _) in chosen.items()))
        return 0
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    args.logs.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (command, seconds) in chosen.items():
        began, log = time.monotonic(), args.logs / f"{name}.log"
        with open(log, "w") as out:
            try:
                done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, timeout=seconds, check=False)
                end = "ok" if done.returncode == 0 else f"FAILED with {done.returncode}"
            except subprocess.TimeoutExpired:
                end = f"FAILED: not done after {seconds} s"
        failed += end != "ok"
        print(f"{name:12} {time.monotonic() - began:6.0f} s  {end}  {log}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

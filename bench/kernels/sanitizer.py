"""Run of the kernel tests under compute-sanitizer's memcheck and racecheck, with one result per test.

    python -m bench.kernels.sanitizer [--tools memcheck,racecheck] [--seconds 540] [--jobs 16] [--again] [tests/..]

The tools watch only our kernels (`--kernel-name`), because watching those of torch, cuDNN and FlashInfer would take
most of the time. Each tool must first find an error planted in a kernel with the name of one of ours. Files with the
longest tests come first, in one process per test. Results are kept between runs. A run repeats only tests that have no
result or had errors, and tests whose file or kernels have changed; `--again` repeats all tests. Each row has its commit
and device. A test that fails although the tool reports nothing computed wrong values. Runs over selected files give no
scores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path

import torch

from bench.common import device_name
from bench.revision import ROOT, commit

from .common import RESULTS, Results

KERNELS = ROOT / "kernels" / "kvc_kernels"
PLANTED = Path(__file__).with_name("planted.py")
CHUNK = 6  # maximum tests per process, which share imports and compiled kernels
# These compile every kernel and take minutes under a tool, so they start first.
FAKE_QUANT = "tests/kernels/extend/test_gpu_fake_quant.py"
LONGEST = ("tests/engine/test_gpu_warm_up.py", "tests/runtime/test_gpu.py", FAKE_QUANT)
REPEATS = "8"  # for tests that repeat launches to find differences; fewer, because a tool checks each launch
MIN_SECONDS = 45  # remaining time below which no process starts
TOOLS = ("memcheck", "racecheck")


def kernel_names() -> list[str]:
    """Names of our kernels, in Python and in CUDA."""
    python = "\n".join(p.read_text() for p in sorted(KERNELS.rglob("*.py")))
    cuda = "\n".join(p.read_text() for p in sorted(KERNELS.rglob("*.cu*")))
    return sorted({*re.findall(r"^def (\w*kernel)\(", python, re.M), *re.findall(r"__global__ .*?(\w+)\(const", cuda)})


def collect(paths: list[str]) -> list[str]:
    """Ids of the GPU tests in `paths`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *paths]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in out.splitlines() if "::" in line]


@cache
def sources(file: str) -> str:
    """Digest of our kernels, the code that launches them, and the test file `file`."""
    digest = hashlib.sha256()
    for path in [*sorted(p for p in KERNELS.rglob("*") if p.is_file() and p.suffix != ".pyc"), ROOT / file]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def file_of(test: str) -> str:
    return test.split("::")[0]


def visible_gpus() -> list[str]:
    """Names of the visible GPUs, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(max(1, torch.cuda.device_count()))]


def read_log(text: str) -> list[dict]:
    """Rows of the tests that a process finished: id, outcome, number of errors, first errors, reason of a failure."""
    rows, test, errors = [], None, []
    lines = iter(text.splitlines())
    for line in lines:
        if re.match(r"=+ (FAILURES|ERRORS|warnings summary|short test summary|\d+ (passed|failed|skipped))", line):
            break  # the summary repeats the names of tests
        if match := re.match(r"(tests/\S+::.*?) ?(=========.*|PASSED.*|FAILED.*|SKIPPED.*|ERROR.*|)$", line):
            test, errors, line = match[1], [], match[2]
        if re.match(r"=+ (Error|Invalid|Race|Uninitialized|Program hit|Barrier|Fatal)", line):
            errors.append(line.strip("= "))
        if test and (match := re.match(r"(PASSED|FAILED|SKIPPED|ERROR)\b", line)):
            rows.append(dict(test=test, outcome=match[1].lower(), errors=len(errors), first=errors[:3]))
            test = None
    reasons = (match[1] for line in lines if (match := re.match(rf"(?:{ROOT}/)?(\S+\.py:\d+: .+)", line)))
    # pytest lists the reasons in the order of the failed tests.
    for row, reason in zip((r for r in rows if r["outcome"] == "failed"), reasons):
        row["why"] = reason
    return rows


class Sanitizer:
    """Runs tools in processes that take turns on the visible GPUs. `end`: time limit, as time.monotonic()."""

    def __init__(self, end: float):
        self.program, self.end = shutil.which("compute-sanitizer"), end
        self.turn, self.gpus = count(), visible_gpus()
        self.watch = [x for name in kernel_names() for x in ("--kernel-name", f"kns={name}")]

    def run(self, tool: str, *command: str) -> str:
        """Run a Python command under `tool` until it ends or time runs out; return the output of both."""
        argv = [self.program, "--tool", tool, *self.watch, "--print-limit", "20", sys.executable, *command]
        with tempfile.TemporaryFile("w+") as out:
            gpu = self.gpus[next(self.turn) % len(self.gpus)]
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "KVC_TEST_REPEATS": REPEATS}
            process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
            try:
                process.wait(max(1.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            out.seek(0)
            return out.read()

    def finds_planted(self, tool: str) -> bool:
        text = self.run(tool, str(PLANTED), tool)
        return bool(re.search(r"SUMMARY: [1-9]", text))

    def tests(self, tool: str, ids: list[str]) -> list[dict]:
        if self.end - time.monotonic() < MIN_SECONDS:
            return []
        text = self.run(tool, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=line", *ids)
        origin = dict(tool=tool, commit=commit(), device=device_name())
        return [row | origin | dict(sources=sources(file_of(row["test"]))) for row in read_log(text)]


def chunks(todo: list[tuple[str, str]], jobs: int) -> list[tuple[str, list[str]]]:
    """Split all (tool, test) into one (tool, tests of one file) per process, small enough that no job is idle. Tests of
    LONGEST come first, one per process."""
    size = max(1, min(CHUNK, len(todo) // jobs))
    files: dict[tuple[str, str], list[str]] = {}
    for tool, test in todo:
        files.setdefault((file_of(test), tool), []).append(test)
    # racecheck is the slower tool.
    order = sorted(files, key=lambda x: ((*LONGEST, x[0]).index(x[0]), x[1] != "racecheck"))
    out = []
    for file, tool in order:
        tests, step = files[file, tool], 1 if file in LONGEST else size
        out += [(tool, tests[i : i + step]) for i in range(0, len(tests), step)]
    return out


def scores(rows: list[dict], tests: int) -> dict[str, tuple[float, str]]:
    out = {}
    for tool in TOOLS:
        ran = [r for r in rows if r["tool"] == tool and r["outcome"] != "skipped"]
        if ran:
            wrong = sum(r["outcome"] != "passed" and not r["errors"] for r in ran)
            unit = f"errors in {len(ran)} of {tests} kernel tests" + (f", {wrong} failed by value" if wrong else "")
            out[f"sanitizer.{tool}"] = (sum(r["errors"] for r in ran), unit)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="concurrent processes")
    parser.add_argument("--again", action="store_true", help="repeat tests that have a result for the same sources")
    parser.add_argument("--out", type=Path, default=RESULTS / "sanitizer.json")
    args = parser.parse_args()
    sanitizer, tools = Sanitizer(time.monotonic() + args.seconds), args.tools.split(",")
    if sanitizer.program is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    ids, results = collect(args.paths), Results(args.out, kernels=kernel_names())
    if results.path.exists() and not args.again:
        for row in json.loads(results.path.read_text())["rows"]:
            file = file_of(row["test"])
            if not row["errors"] and (ROOT / file).exists() and row["sources"] == sources(file):
                results.rows.append(row)
    blind = [tool for tool in tools if not sanitizer.finds_planted(tool)]
    if blind:
        print(f"{', '.join(blind)} did not find the planted error, so its results do not count", flush=True)
        return 1
    done = {(r["tool"], r["test"]) for r in results.rows}
    todo = chunks([(tool, t) for t in ids for tool in tools if (tool, t) not in done], args.jobs)
    with ThreadPoolExecutor(args.jobs) as pool:
        for rows in pool.map(lambda job: sanitizer.tests(*job), todo):
            results.add(*rows)
    results.write()
    if args.paths == parser.get_default("paths"):
        results.score(scores(results.rows, len({*ids, *(r["test"] for r in results.rows)})))
    for row in results.rows:
        if row["errors"] or row["outcome"] not in ("passed", "skipped"):
            first = " ".join([*row["first"], row.get("why", "")])[:160]
            print(f"{row['tool']:10} {row['outcome']:7} {row['errors']:3} {row['test']}  {first}")
    results.show()
    return int(any(r["errors"] for r in results.rows))


if __name__ == "__main__":
    sys.exit(main())

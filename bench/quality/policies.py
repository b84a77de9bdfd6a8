"""Loss of quality and actual bytes of every policy at every size, through the server.

    python -m bench.quality.policies --model qwen-0.5b --calibration FILE     # on a GPU, about 5 minutes
    python -m bench.quality.policies --model qwen-0.5b --tasks niah,kv,nll,fewshot,extract,code,calls --data FILE
    python -m bench.quality.policies --model qwen-0.5b --first 1000 --cells stock,max    # on other questions
    python -m bench.quality.policies --model smollm2 --device cpu --length 600 --contexts 1 --cells snapkv --parallel 1
    python -m bench.quality.policies --model qwen-0.5b --protocol seen --tasks niah,kv --cells stock,k4v4@one-shot:8x

Each cell (`bench.quality.cells`) runs in its own server; several servers share the device. `bench.quality.suite` has
the tasks, `bench.quality.asking` the two protocols. `--contexts` contexts at a time are in the cache, and questions are
asked concurrently. Flips and KL are relative to stock SGLang in bf16. KL covers the best candidates of the scored
tokens.

The result file is written after each cell. It also records failed cells, with the end of their logs. `--resume` reuses
its finished cells. No cell starts after `--seconds`, and remaining cells are stopped `--grace` seconds later.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import statistics
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import common, prompts
from bench.compare import kl_top, percentile
from bench.ports import are_free
from bench.quality import cells, fetch, pareto, suite, taskdata
from bench.quality.asking import PROTOCOLS, SEEN, UNSEEN, CellError, Tops, measure
from bench.quality.run import SCORED, summary
from bench.quality.suite import NLL, Workload
from bench.quality.tasks import Maker
from sglang_kvc.calibration.model_fingerprint import Identity, identity_of

REPLY = 256  # tokens of memory for a question and its answer, in open blocks
# Cells with different settings are not comparable.
SETTINGS = (
    "model", "length", "contexts", "first", "block", "answer_tokens", "protocol", "one_shot_tokens"
)  # fmt: skip
LIMITS = {"code": "problems", "calls": "calls"}  # task -> setting that only matters for this task
PORTS = 21000, 32000, 16  # above bench.ports.RANGE and below the system's range for outgoing connections


# ---- many cells


class Harness:
    """Runs cells in threads and collects their results under one lock."""

    def __init__(self, args, identity: Identity, workload: Workload, raw: dict[str, dict], tops: dict[str, Tops]):
        self.args, self.identity, self.workload = args, identity, workload
        self.raw, self.tops = raw, tops  # initially those of an earlier run
        self.failed: dict[str, list[dict]] = {}
        self.refused: dict[str, str] = {}
        self.not_started: list[str] = []  # cells that did not start before the deadline
        self.lock, self.began = threading.RLock(), time.monotonic()
        self.running: dict[str, tuple[float, common.Server]] = {}
        ports = range(args.port, *PORTS[1:])
        self.ports = (p for p in ports if are_free(*range(p, p + 6)))  # two ports for each attempt

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self, names: list[str]) -> None:
        for name in names:
            if why := cells.refusal(name, self.identity, self.args.block, self.args.calibration):
                self.refused[name] = why
                print(f"{name}: skipped. {why}", flush=True)
        threading.Thread(target=self.watch, daemon=True).start()
        with ThreadPoolExecutor(self.args.parallel) as pool:
            list(pool.map(self.run_cell, [n for n in names if n not in self.refused and n not in self.raw]))

    def exit(self, *_) -> None:
        """Kill all servers and exit, on a signal. The servers have their own sessions and would outlive this
        process."""
        for _, server in list(self.running.values()):
            server.kill()
        os._exit(1)

    def watch(self) -> None:
        """Kill the servers of cells that take too long, and all servers after the grace period."""
        while True:
            time.sleep(1)
            with self.lock:
                ended = self.seconds > self.args.seconds + self.args.grace
                late = [s for t, s in self.running.values() if ended or time.monotonic() - t > self.args.cell_seconds]
            for server in late:
                server.kill()

    def run_cell(self, name: str) -> None:
        """Run one cell in its thread. A failure must not stop other cells."""
        if self.seconds > self.args.seconds:
            self.not_started.append(name)
            return
        with self.lock:
            port = next(self.ports)
        for options in cells.attempts(name, self.args, port):
            out: dict = {"options": options}
            try:
                self.attempt(name, options, port, out)
                break
            except Exception as e:
                known = isinstance(e, common.ServerError | CellError)
                out["error"] = (str(e) if known else traceback.format_exc())[-4000:]
                self.failed.setdefault(name, []).append(out)
                print(f"{name}: failed. {out['error'].splitlines()[-1]}", flush=True)
            if self.seconds > self.args.seconds or out["seconds"]["start"]:
                break  # fallbacks are only for a server that does not start
            port += 2
        try:
            self.report(name)
        except Exception:
            traceback.print_exc()

    def attempt(self, name: str, options: list[str], port: int, out: dict) -> None:
        server = common.Server(options, model=self.args.model_path, port=port)
        began = time.monotonic()
        out["seconds"] = {"start": None}
        with self.lock:
            self.running[name] = (began, server)
        try:
            server.start()
            up = time.monotonic()
            out["seconds"]["start"] = up - began
            tops = measure(server, name, self.workload, self.args, out)
            out["seconds"]["tasks"] = time.monotonic() - up
            out |= {"log_errors": server.errors()[:10], "commit": common.commit()}
            with self.lock:
                self.raw[name], self.tops[name] = out, tops
        except BaseException:
            out["log"] = server.tail(60)[-8000:] if server.log.exists() else ""
            raise
        finally:
            with self.lock:
                del self.running[name]
            server.kill()  # a graceful stop would take longer
            server.stop()

    # ---- results

    def report(self, name: str | None = None) -> Path:
        """Write the result file. `name`: the cell that just finished."""
        with self.lock:
            reference = next((n for n in (cells.STOCK, "bf16") if n in self.raw), None)
            for other in self.tops:
                self._compare(other, reference)
            rows = {n: self.row(n, reference) for n in sorted(self.raw, key=_order(cells.names()))}
            if name in rows:
                print(pareto.table({name: rows[name]}, head=False), f"{self.seconds:6.0f} s", flush=True)
            if name == reference is not None:
                self.args.reference.write_bytes(gzip.compress(json.dumps(self.tops[name]).encode()))
            keys = (*SETTINGS, *LIMITS.values(), "data_sha256", "tasks", "parallel", "concurrency", "tokens")
            numbers = {k: getattr(self.args, k) for k in keys} | {"wall_seconds": self.seconds, "reference": reference}
            numbers |= {"cells": rows, "refused": self.refused, "failed": self.failed, "not_begun": self.not_started}
            if self.args.protocol == SEEN:
                scores = cells.one_shot_scores(rows, self.args.model)
            else:
                scores = cells.scores(rows, self.args.model, self.args.first, self.args.length)
            numbers["raw"] = self.raw
            return common.write_result(self.args.name, numbers, scores=scores, quiet=True, path=self.args.out)

    def _compare(self, name: str, reference: str | None) -> None:
        """Add the KL of all scored tokens from the reference. It is computed only once, because it takes long."""
        known = self.raw[name].get("kl", {}).get("reference") == reference
        if known or not self.tops.get(reference) or not self.tops[name]:
            return
        pairs = zip(self.tops[reference], self.tops[name])
        kl = [x for p, q in pairs for x in kl_top(p, q)]
        figures = {"mean": statistics.fmean(kl), "p99": percentile(kl, 0.99), "max": max(kl), "tokens": len(kl)}
        self.raw[name]["kl"] = {"reference": reference, **figures}

    def row(self, name: str, reference: str | None) -> dict:
        """Table row of one cell."""
        raw = self.raw[name]
        plain = 4 * self.identity.layers * self.identity.kv_heads * self.identity.head_dim  # bytes of K and V per token
        out = summary({**raw, "ratio": None}, self.raw[reference] if reference not in (None, name) else None)
        accounts = [a for a in raw["accounts"].values() if a]
        if accounts:
            first, running = accounts[0], raw["accounts"]["running"]
            tiers = first["tokens_by_tier"]
            packed = tiers["high"] + tiers["low"] + tiers["pruned"]
            out |= {"kept": (tiers["high"] + tiers["low"]) / packed if packed else 1.0}
            out |= {"packed": min((a["packed"] for a in accounts if "packed" in a), default=None)}
            body = first["bytes_per_token_body"] or running["bytes_per_token"]
            out |= {"bytes_body": body, "bytes": running["bytes_per_token"]}
        else:
            size = plain / 2 if name == cells.FP8 else plain  # the single scale per tensor does not count
            out |= {"kept": 1.0, "packed": None, "bytes_body": size, "bytes": size}
        return out | {"ratio_body": plain / out["bytes_body"], "ratio": plain / out["bytes"], "kl": raw.get("kl")}


def _order(names: list[str]):
    return lambda name: (names.index(name) if name in names else len(names), name)


# ---- the command


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    p.add_argument("--model-path", type=Path, help="folder of the model; default: in the cache folder")
    p.add_argument("--essays", type=Path, help="text file of the essays; default: in the cache folder")
    p.add_argument("--data", type=Path, help="output of `bench.quality.fetch tasks`; default: in the cache folder")
    p.add_argument("--calibration", type=Path, help="output of `sglang-kvc calibrate`, for ada-expected and xkv")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--contexts", type=int, default=13, help="contexts per task, with 8 questions each")
    p.add_argument("--first", type=int, default=0, help="number of the first context; no effect on code and calls")
    p.add_argument("--tasks", default=",".join(suite.DEFAULT), help=f"separated by commas: {', '.join(suite.NAMES)}")
    p.add_argument("--problems", type=int, default=164, help="maximum problems of HumanEval")
    p.add_argument("--calls", type=int, default=100, help="maximum tool calls, in contexts of up to twice --length")
    p.add_argument("--cells", default="all", help="separated by commas; the name of a policy selects all of its cells")
    p.add_argument("--parallel", type=int, default=6, help="concurrent servers")
    p.add_argument("--port", type=int, default=PORTS[0], help="first port; concurrent runs need different ones")
    p.add_argument("--concurrency", type=int, default=16, help="concurrent questions per server")
    p.add_argument("--seconds", type=float, default=280, help="time after which no cell starts")
    p.add_argument("--grace", type=float, default=90, help="additional seconds for running cells")
    p.add_argument("--cell-seconds", type=float, help="time limit of a cell; default: 240 on a GPU, 7200 on a CPU")
    p.add_argument("--block", type=int, default=128)
    p.add_argument("--answer-tokens", type=int, default=7)
    p.add_argument("--protocol", choices=PROTOCOLS, default=UNSEEN, help="seen: context and question are one prompt")
    p.add_argument("--one-shot-tokens", type=int, default=0, help="KV memory of one-shot cells, to thin prompts")
    p.add_argument("--resume", action="store_true", help="reuse the cells of the result file")
    p.add_argument("--list", action="store_true", help="only list the cells")
    p.add_argument("--out", type=Path, help="result file; default: one in bench/results/quality")
    args = p.parse_args(argv)
    try:
        args.tasks = suite.select(args.tasks)
    except ValueError as e:
        p.error(str(e))
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if args.protocol == SEEN and NLL in args.tasks:
        p.error("protocol seen only scores answers; give --tasks without nll, like niah,kv")
    args.device = "cuda" if common.has_gpu() else "cpu"
    args.cell_seconds = args.cell_seconds or (240 if args.device == "cuda" else 7200)
    args.model_path = (args.model_path or fetch.MODELS[args.model]()).resolve()  # servers run in other folders
    args.data_sha256 = None  # set when the file is read
    kind = "seen" if args.protocol == SEEN else "policies"
    args.name = f"quality/{kind}_{args.model}_{args.length}" + (f"_from_{args.first}" if args.first else "")
    args.out = args.out or common.RESULTS / f"{args.name}.json"
    args.reference = args.out.with_suffix(".reference.json.gz")
    # A group of contexts, uncompressed, with room for scores and tables, and the concurrent questions.
    args.tokens = int(1.4 * args.contexts * (args.length + SCORED + args.block)) + args.concurrency * REPLY + 4096
    return args


def earlier_cells(args: argparse.Namespace) -> tuple[dict[str, dict], dict[str, Tops]]:
    """Cells of an earlier run with the same settings; greedy answers stay valid."""
    if not (args.resume and args.out.exists()):
        return {}, {}
    numbers = json.loads(args.out.read_text())["numbers"]
    settings = [*SETTINGS, *(k for task, k in LIMITS.items() if task in args.tasks)]
    numbers = {"first": 0, "protocol": UNSEEN, "one_shot_tokens": 0} | numbers
    if any(numbers.get(k) != getattr(args, k) for k in settings):
        return {}, {}
    raw = {name: cell for name, cell in numbers["raw"].items() if all(task in cell for task in args.tasks)}
    reference = numbers["reference"] if numbers["reference"] in raw else None
    if reference is None or not args.reference.exists():
        # The reference must run again, because its candidates are missing.
        return {name: cell for name, cell in raw.items() if name != reference}, {}
    tops = json.loads(gzip.decompress(args.reference.read_bytes()))
    return raw, {reference: [[{int(t): v for t, v in token.items()} for token in passage] for passage in tops]}


def load_texts(args: argparse.Namespace) -> str:
    """Return the essays, and replace `args.data` by the content of the data file if a task needs it."""
    if args.data or set(args.tasks) & set(suite.FROM_DATA):
        args.data = taskdata.load(args.data or fetch.tasks())
        args.data_sha256 = args.data["sha256"]
    return args.essays.read_text() if args.essays else args.data["essays"] if args.data else fetch.essays().read_text()


def statistics_only(file: Path, folder: Path) -> Path:
    """Copy of the calibration file without its verdicts, because cells also measure formats that it rejects."""
    from safetensors.torch import load_file, save_file

    out = folder / "statistics.safetensors"
    save_file(load_file(file), out)
    return out


def main() -> int:
    args = arguments()
    from transformers import AutoConfig

    identity = identity_of(AutoConfig.from_pretrained(args.model_path))
    with tempfile.TemporaryDirectory(prefix="kvc-policies-") as folder:
        if args.calibration:
            args.calibration = statistics_only(args.calibration, Path(folder))
        names = cells.select(args.cells)
        if args.list:
            for name in names:
                print(f"{name:40} {cells.refusal(name, identity, args.block, args.calibration) or ''}")
            return 0
        maker = Maker(prompts.tokenizer(args.model_path), load_texts(args))
        workload = Workload.create(maker, args)
        args.tokens = max(args.tokens, workload.tokens(args))
        harness = Harness(args, identity, workload, *earlier_cells(args))
        signal.signal(signal.SIGTERM, harness.exit)
        signal.signal(signal.SIGINT, harness.exit)
        harness.run(names)
        path = harness.report()
    record = json.loads(path.read_text())
    print(pareto.table(record["numbers"]["cells"]))
    for name, failures in harness.failed.items():
        state = "failed" if name not in harness.raw else "started with other options"
        print(f"{name}: {state}. {failures[-1]['error'].strip().splitlines()[-1]}")
    if harness.not_started:
        print(f"not started: {', '.join(harness.not_started)}")
    if not harness.raw:
        return 1
    try:
        pareto.plot(record, path.with_name(f"{path.stem}_body.png"))
    except ImportError:
        print("no plot, because matplotlib is not installed; to plot elsewhere: python -m bench.quality.pareto FILE")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

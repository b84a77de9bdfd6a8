"""Every policy at every size, through the server: loss of quality, and actual bytes.

    python -m bench.quality.policies --model qwen-0.5b --calibration FILE     # once, on a GPU: some 5 minutes
    python -m bench.quality.policies --model qwen-0.5b --tasks niah,kv,nll,fewshot,extract,code,calls --data FILE
    python -m bench.quality.policies --model qwen-0.5b --first 1000 --cells stock,max    # on other questions
    python -m bench.quality.policies --model smollm2 --device cpu --length 600 --contexts 1 --cells snapkv --parallel 1
    python -m bench.quality.policies --model qwen-0.5b --protocol seen --tasks niah,kv --cells stock,k4v4@one-shot:8x

Each cell (`bench.quality.cells`) is a server of its own; several share the device. The tasks are those of
`bench.quality.suite`, in one of the two protocols of `bench.quality.asking`. All contexts of a task are resident at
once, and questions are asked concurrently. Flips and KL are against stock SGLang in bf16, KL from the best candidates
of the scored tokens.

A cell that fails is recorded with the end of its log; the result file is written after each cell. `--resume` takes
finished cells from it. No cell begins after `--seconds`, and the last cells are ended `--grace` seconds later.
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
from bench.quality.suite import NLL, Work
from bench.quality.tasks import Maker
from sglang_kvc.calibration.model_fingerprint import Identity, identity_of

REPLY = 256  # tokens of memory for a question and its answer, in open blocks
# Settings whose change makes cells incomparable.
SETTINGS = ("model", "length", "contexts", "first", "block", "answer_tokens", "protocol")
LIMITS = {"code": "problems", "calls": "calls"}  # the same, only if the task is asked
PORTS = 21000, 32000, 16  # after bench.ports.RANGE, and below the system's range for outgoing connections


# ---- many cells


class Harness:
    """Runs cells in threads, a few at a time, and holds all results under one lock."""

    def __init__(self, args, identity: Identity, work: Work, raw: dict[str, dict], tops: dict[str, Tops]):
        self.args, self.identity, self.work = args, identity, work
        self.raw, self.tops = raw, tops  # of an earlier run
        self.failed: dict[str, list[dict]] = {}
        self.refused: dict[str, str] = {}
        self.left: list[str] = []  # not begun before the deadline
        self.lock, self.began = threading.RLock(), time.monotonic()
        self.running: dict[str, tuple[float, common.Server]] = {}
        ports = range(args.port, *PORTS[1:])
        self.ports = (p for p in ports if are_free(*range(p, p + 6)))  # two for each attempt at a server

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def run(self, names: list[str]) -> None:
        for name in names:
            if why := cells.refusal(name, self.identity, self.args.block, self.args.calibration):
                self.refused[name] = why
                print(f"{name}: left out. {why}", flush=True)
        threading.Thread(target=self.watch, daemon=True).start()
        with ThreadPoolExecutor(self.args.parallel) as pool:
            list(pool.map(self.cell, [n for n in names if n not in self.refused and n not in self.raw]))

    def abandon(self, *_) -> None:
        """End all servers when this process is told to end, because they have their own sessions and would outlive
        it."""
        for _, server in list(self.running.values()):
            server.kill()
        os._exit(1)

    def watch(self) -> None:
        """End the servers of cells that take too long, and all servers after the grace period."""
        while True:
            time.sleep(1)
            with self.lock:
                over = self.seconds > self.args.seconds + self.args.grace
                late = [s for t, s in self.running.values() if over or time.monotonic() - t > self.args.cell_seconds]
            for server in late:
                server.kill()

    def cell(self, name: str) -> None:
        """Run one cell in its thread; its failure must not stop the others."""
        if self.seconds > self.args.seconds:
            self.left.append(name)
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
                break  # fallback options are only for a server that does not start
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
            tops = measure(server, name, self.work, self.args, out)
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
            server.kill()  # at once: nothing of it is wanted any more
            server.stop()

    # ---- results

    def report(self, name: str | None = None) -> Path:
        """Write the result file; with `name`, after this cell."""
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
            numbers |= {"cells": rows, "refused": self.refused, "failed": self.failed, "not_begun": self.left}
            if self.args.protocol == SEEN:
                scores = cells.one_shot_scores(rows, self.args.model)
            else:
                scores = cells.scores(rows, self.args.model, self.args.first, self.args.length)
            numbers["raw"] = self.raw
            return common.write_result(self.args.name, numbers, scores=scores, quiet=True, path=self.args.out)

    def _compare(self, name: str, reference: str | None) -> None:
        """KL of every scored token against the reference; computed once, because it takes long."""
        known = self.raw[name].get("kl", {}).get("reference") == reference
        if known or not self.tops.get(reference) or not self.tops[name]:
            return
        pairs = zip(self.tops[reference], self.tops[name])
        kl = [x for theirs, mine in pairs for x in kl_top(theirs, mine)]
        found = {"mean": statistics.fmean(kl), "p99": percentile(kl, 0.99), "max": max(kl), "tokens": len(kl)}
        self.raw[name]["kl"] = {"reference": reference, **found}

    def row(self, name: str, reference: str | None) -> dict:
        """The table's row of one cell."""
        got = self.raw[name]
        plain = 4 * self.identity.layers * self.identity.kv_heads * self.identity.head_dim  # bytes a token, K and V
        out = summary({**got, "ratio": None}, self.raw[reference] if reference not in (None, name) else None)
        accounts = [a for a in got["accounts"].values() if a]
        if accounts:
            first, running = accounts[0], got["accounts"]["running"]
            tiers = first["tokens_by_tier"]
            packed = tiers["high"] + tiers["low"] + tiers["pruned"]
            out |= {"kept": (tiers["high"] + tiers["low"]) / packed if packed else 1.0}
            out |= {"packed": min((a["packed"] for a in accounts if "packed" in a), default=None)}
            body = first["bytes_per_token_body"] or running["bytes_per_token"]
            out |= {"bytes_body": body, "bytes": running["bytes_per_token"]}
        else:
            size = plain / 2 if name == cells.FP8 else plain  # scales are one a tensor
            out |= {"kept": 1.0, "packed": None, "bytes_body": size, "bytes": size}
        return out | {"ratio_body": plain / out["bytes_body"], "ratio": plain / out["bytes"], "kl": got.get("kl")}


def _order(names: list[str]):
    return lambda name: (names.index(name) if name in names else len(names), name)


# ---- the command


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    p.add_argument("--model-path", type=Path, help="its folder, where it is not in the cache folder")
    p.add_argument("--essays", type=Path, help="text file of the essays, if not in the cache folder")
    p.add_argument("--data", type=Path, help="file of fetch tasks, if not in the cache folder; also has the essays")
    p.add_argument("--calibration", type=Path, help="file of sglang-kvc calibrate, for ada-expected and xkv")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--contexts", type=int, default=13, help="of each task; 8 questions each")
    p.add_argument("--first", type=int, default=0, help="number of the first context; HumanEval and calls have one set")
    p.add_argument("--tasks", default=",".join(suite.DEFAULT), help=f"of {', '.join(suite.NAMES)}")
    p.add_argument("--problems", type=int, default=164, help="of HumanEval")
    p.add_argument("--calls", type=int, default=100, help="maximum tool calls within twice the length")
    p.add_argument("--cells", default="all", help="names, separated by commas; a policy's name means all of its cells")
    p.add_argument("--parallel", type=int, default=6, help="servers at a time")
    p.add_argument("--port", type=int, default=PORTS[0], help="the first one; two runs at a time need two")
    p.add_argument("--concurrency", type=int, default=16, help="questions at a time, of one server")
    p.add_argument("--seconds", type=float, default=280, help="no cell begins later")
    p.add_argument("--grace", type=float, default=90, help="seconds for the last ones to end")
    p.add_argument("--cell-seconds", type=float, help="a cell that takes longer is ended (GPU: 240, CPU: 7200)")
    p.add_argument("--block", type=int, default=128)
    p.add_argument("--answer-tokens", type=int, default=7)
    p.add_argument("--protocol", choices=PROTOCOLS, default=UNSEEN, help="whether a question is a part of the prompt")
    p.add_argument("--resume", action="store_true", help="take cells from the result file if they are in it")
    p.add_argument("--list", action="store_true", help="only say what would be measured")
    p.add_argument("--out", type=Path, help="result file (default: one in bench/results/quality)")
    a = p.parse_args(argv)
    try:
        a.tasks = suite.chosen(a.tasks)
    except ValueError as e:
        p.error(str(e))
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if a.protocol == SEEN and NLL in a.tasks:
        p.error("in the protocol seen nothing is scored but answers; give --tasks without nll, like niah,kv")
    a.device = "cuda" if common.has_gpu() else "cpu"
    a.cell_seconds = a.cell_seconds or (240 if a.device == "cuda" else 7200)
    a.model_path = (a.model_path or fetch.MODELS[a.model]()).resolve()  # servers run in a folder of their own
    a.data_sha256 = None  # until it is read
    kind = "seen" if a.protocol == SEEN else "policies"  # the tables of docs/quality.md are of `policies` files
    a.name = f"quality/{kind}_{a.model}_{a.length}" + (f"_from_{a.first}" if a.first else "")
    a.out = a.out or common.RESULTS / f"{a.name}.json"
    a.reference = a.out.with_suffix(".reference.json.gz")
    # All contexts of a task, uncompressed, with room for scores and tables, and what is asked at a time.
    a.tokens = int(1.4 * a.contexts * (a.length + SCORED + a.block)) + a.concurrency * REPLY + 4096
    return a


def earlier(a: argparse.Namespace) -> tuple[dict[str, dict], dict[str, Tops]]:
    """Cells of an earlier run with the same settings; greedy answers stay valid."""
    if not (a.resume and a.out.exists()):
        return {}, {}
    numbers = json.loads(a.out.read_text())["numbers"]
    wanted = [*SETTINGS, *(k for task, k in LIMITS.items() if task in a.tasks)]
    if any(({"first": 0, "protocol": UNSEEN} | numbers).get(k) != getattr(a, k) for k in wanted):
        return {}, {}
    raw = {n: got for n, got in numbers["raw"].items() if all(task in got for task in a.tasks)}
    reference = numbers["reference"] if numbers["reference"] in raw else None
    if reference is None or not a.reference.exists():
        return {n: got for n, got in raw.items() if n != reference}, {}  # its candidates are wanted again
    tops = json.loads(gzip.decompress(a.reference.read_bytes()))
    return raw, {reference: [[{int(t): v for t, v in token.items()} for token in passage] for passage in tops]}


def texts(a: argparse.Namespace) -> str:
    """Return the essays, and replace `a.data` by the content of the data file."""
    if a.data or set(a.tasks) & set(suite.CARRIED):
        a.data = taskdata.load(a.data or fetch.tasks())
        a.data_sha256 = a.data["sha256"]
    return a.essays.read_text() if a.essays else a.data["essays"] if a.data else fetch.essays().read_text()


def statistics_only(file: Path, folder: Path) -> Path:
    """The calibration file without its verdicts, because cells also measure formats that it marks as broken."""
    from safetensors.torch import load_file, save_file

    out = folder / "statistics.safetensors"
    save_file(load_file(file), out)
    return out


def main() -> int:
    a = arguments()
    from transformers import AutoConfig

    identity = identity_of(AutoConfig.from_pretrained(a.model_path))
    with tempfile.TemporaryDirectory(prefix="kvc-policies-") as folder:
        if a.calibration:
            a.calibration = statistics_only(a.calibration, Path(folder))
        names = cells.chosen(a.cells)
        if a.list:
            for name in names:
                print(f"{name:40} {cells.refusal(name, identity, a.block, a.calibration) or ''}")
            return 0
        maker = Maker(prompts.tokenizer(a.model_path), texts(a))
        work = Work.of(maker, a)
        a.tokens = max(a.tokens, work.tokens(a))
        harness = Harness(a, identity, work, *earlier(a))
        signal.signal(signal.SIGTERM, harness.abandon)
        signal.signal(signal.SIGINT, harness.abandon)
        harness.run(names)
        path = harness.report()
    record = json.loads(path.read_text())
    print(pareto.table(record["numbers"]["cells"]))
    for name, failures in harness.failed.items():
        what = "failed" if name not in harness.raw else "began with other options"
        print(f"{name}: {what}. {failures[-1]['error'].strip().splitlines()[-1]}")
    if harness.left:
        print(f"not begun: {', '.join(harness.left)}")
    if not harness.raw:
        return 1  # nothing to draw
    try:
        pareto.plot(record, path.with_name(f"{path.stem}_body.png"))
    except ImportError:
        print("no plot: matplotlib is not installed; python -m bench.quality.pareto FILE makes it elsewhere")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""SGLang's test kits against a server with the compressed cache, under strict memory checks.

    python -m bench.serve.kits [--quick] [--only radix,abort] [--format k4v4,leankv] [--block 64] [--nodes 400]

Each kit of `sglang.test.kits` runs unmodified as a client of our server. The server checks its memory accounting in
every step (SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY). Some kits check little more than status codes. After each kit,
the server must therefore be alive, its log free of errors and, after a flush, every page free. Results are merged with
those of earlier runs with the same settings. `--quick` uses fewer nodes, clients and tokens. On a CPU, several kits run
with smaller numbers than their defaults; the result file lists them.

Several formats run concurrently, each in its own process with its own servers. On a GPU, only `GPU_KITS` run, and the
servers use overlap scheduling and CUDA graphs. The score `kits.gpu.<format>` is the share of kits that pass; all of
them must have run at one commit with the default numbers.

The model is the demo model. For a machine without a network, copy the folder that `python -m sglang_kvc.demo.model`
prints, and set SGLANG_KVC_CACHE to its parent folder there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import random
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field

import requests

from bench import common, prompts
from bench.compare import TIE, match

NAME = "serve/kits"
NODES = 400  # the kit's default
BLOCK = 64
# Maximum difference in nats between a token's cold and warm log-probabilities: other batch shapes round differently.
DRIFT_ON_GPU = 0.4
RUNNING = ("--max-running-requests", "16")
MEMORY = {"cpu": "192MiB", "gpu": "256MiB"}  # small enough that the radix kit causes evictions


@dataclass(frozen=True)
class Kit:
    """One kit. `run(server, args, notes)` raises on failure and adds the numbers that it used to `notes`."""

    name: str
    run: Callable[[common.Server, argparse.Namespace, dict], None]
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = RUNNING
    gpu_args: tuple[str, ...] | None = None  # replace `args` on a GPU
    cpu_memory: str | None = None  # replaces MEMORY["cpu"]; on a GPU, this would need another server


def radix(server: common.Server, args: argparse.Namespace, notes: dict) -> None:
    """Send a random tree of prompts at once, which causes splits, evictions and duplicates in any order."""
    from sglang.test.kits import radix_cache_server_kit as kit

    notes.update(nodes=40 if args.quick else args.nodes, chunk=64 if args.quick else 256)
    random.seed(7)
    # The kit also generates prompts that exceed this model's context.
    nodes = [x for x in kit.gen_radix_tree(notes["nodes"], notes["chunk"]) if len(x["input_ids"]) < 6000]
    data = {
        "input_ids": [x["input_ids"] for x in nodes],
        "sampling_params": [{"max_new_tokens": x["decode_len"], "temperature": 0} for x in nodes],
    }
    response = requests.post(server.url + "/generate", json=data, timeout=4 * 3600)
    assert response.status_code == 200, response.text[:300]
    reasons = [a["meta_info"]["finish_reason"]["type"] for a in response.json()]
    assert set(reasons) <= {"length", "stop"}, reasons
    if args.format not in ("stock", "quota", "leankv"):
        notes["content"] = _content(server, [x["input_ids"] for x in nodes])


def _content(server: common.Server, prompt_ids: list[list[int]]) -> dict:
    """Check that the resulting tree gives the same answers as an empty cache, which the kit itself does not check."""
    long = [ids for ids in prompt_ids if len(ids) > 300]
    sample = long[:: max(1, len(long) // 12)]
    warm = [server.client.generate(ids, 4, top=5) for ids in sample]
    cold = []
    for ids in sample:
        server.client.flush()
        cold.append(server.client.generate(ids, 4, top=5))
    pairs = [match(a, b) for a, b in zip(cold, warm)]
    notes = {
        "prompts": len(sample),
        "hit_tokens": sum(a.cached_tokens for a in warm),
        "same": sum(m.same for m in pairs),
        "drift": max(m.drift for m in pairs),
    }
    assert notes["hit_tokens"], "all prompts of the tree were evicted"
    limit = DRIFT_ON_GPU if common.has_gpu() else TIE
    bad = [m.to_dict() for m in pairs if not (m.ok and m.drift < limit)]
    assert not bad, bad
    return notes


def cache_hit(server: common.Server, args: argparse.Namespace, notes: dict) -> None:
    """Multi-turn kit with 5 blocks per turn: each round must hit the previous round up to a block boundary."""
    from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test

    numbers = {"num_clients": 6, "num_rounds": 4, "request_length": 5 * 64 + 9, "output_length": 40}
    if args.quick:
        numbers.update(num_clients=2, num_rounds=2, output_length=16)
    notes.update(numbers)
    with _offline_requests():
        result = run_multiturn_cache_hit_test(server.url, server.model, max_parallel=4, **numbers)
    notes["cache_hit_rate"] = result["overall"]["cache_hit_rate"]


def mixin(
    path: str,
    numbers: dict | None = None,
    quick_numbers: dict | None = None,
    skip: dict[str, str] | None = None,
    gpu_numbers: dict | None = None,
) -> Callable[[common.Server, argparse.Namespace, dict], None]:
    """Runner of a kit that is a mix-in for unittest classes. `skip`: test -> reason why the model cannot pass it.
    `gpu_numbers`: numbers for a GPU, where short answers would end before the kit acts."""

    def run(server: common.Server, args: argparse.Namespace, notes: dict) -> None:
        module, name = path.split(":")
        kit = getattr(importlib.import_module(f"sglang.test.kits.{module}"), name)
        used = {**(numbers or {}), **((quick_numbers or {}) if args.quick else {})}
        used |= (gpu_numbers or {}) if common.has_gpu() else {}
        notes.update(used)
        attributes = {"base_url": server.url, "model": server.model, "process": server.process, **used}
        case = type("KitTest", (kit, unittest.TestCase), attributes)
        tests = unittest.TestLoader().getTestCaseNames(case)
        if skip:
            notes["skipped"] = {t: skip[t] for t in tests if t in skip}
        suite = unittest.TestSuite(case(t) for t in tests if t not in (skip or {}))
        result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
        notes["tests_run"] = result.testsRun
        bad = [f"{c.id()}: {text.strip().splitlines()[-1]}" for c, text in result.failures + result.errors]
        assert not bad, "; ".join(bad)
        assert result.testsRun, "the kit has no test"

    return run


def kl(server: common.Server, args: argparse.Namespace, notes: dict) -> None:
    """Compare the log-probabilities of a generated answer, cached and recomputed."""
    from sglang.test import kl_test_utils

    # The kit's samples come from a hub; ours are long prose. Its threshold is the caller's.
    tok = prompts.tokenizer(server.model)
    samples = [prompts.cut(tok, prompts.prose(), 500 + 90 * i, start=5000 * i) for i in range(8)]
    kl_test_utils.get_input_ids = lambda *args, **kwargs: samples
    new = {"kl_div_prefill_max_new_tokens": 48, "kl_div_decode_max_new_tokens": 96}
    few = {"kl_div_max_samples": 3, "kl_div_prefill_max_new_tokens": 16, "kl_div_decode_max_new_tokens": 80}
    numbers = {"kl_div_thres": KL_THRESHOLD, "kl_div_max_samples": 8, **new}
    mixin("kl_divergence_kit:KLDivergenceMixin", numbers, few)(server, args, notes)


KL_THRESHOLD = 0.02
LONG = 7000  # tokens of an answer that takes seconds even on a GPU; the model's context has 8192
ABORT = {"abort_all_num_requests": 16, "abort_all_max_new_tokens": 4000, "abort_all_sleep": 6}
PAUSE = {"pause_num_requests": 12, "pause_max_new_tokens": 192}
ABORT_GPU = {"abort_all_max_new_tokens": LONG, "abort_all_sleep": 2}
PAUSE_GPU = {"pause_max_new_tokens": 3000}
PAUSE_QUICK = {"pause_num_requests": 4, "pause_max_new_tokens": 64, "pause_duration": 2}
WAITING = {"waiting_timeout_max_new_tokens": 120}
WAITING_GPU = {"waiting_timeout_max_new_tokens": LONG}
WAVES_GPU = {"running_timeout_max_new_tokens": LONG}
WAVES = {"running_timeout_num_wave1": 4, "running_timeout_num_wave2": 4}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"}
# Stock SGLang fails the same tests: bench/results/serve/kits_stock_p64.json.
CANNOT = {
    "test_basic_math": "the demo model cannot multiply",
    "test_ascii_ratio": "the demo model ends this raw prompt at its first token, on stock SGLang as well",
    "test_concurrent_requests": "the demo model ends these raw prompts at once, on stock SGLang as well",
    "test_color_completion": "the demo model does not know the pattern, on stock SGLang as well",
}

KITS = {
    "radix": Kit("radix_cache_server_kit", radix),
    "hit": Kit("cache_hit_kit", cache_hit),
    "abort": Kit(
        "abort_timeout_kit, abort all",
        mixin("abort_timeout_kit:AbortAllMixin", ABORT, gpu_numbers=ABORT_GPU),
    ),
    "pause": Kit(
        "pause_generation_kit",
        mixin("pause_generation_kit:PauseResumeInPlaceMixin", PAUSE, PAUSE_QUICK, gpu_numbers=PAUSE_GPU),
        # It expects text from every request, but the demo model sometimes ends at its first token.
        args=(*RUNNING, "--preferred-sampling-params", '{"min_new_tokens": 4}'),
        gpu_args=(*RUNNING, "--preferred-sampling-params", '{"min_new_tokens": 2500}'),
    ),
    "kl": Kit("kl_divergence_kit", kl),
    "json": Kit("json_constrained_kit", mixin("json_constrained_kit:JSONConstrainedMixin")),
    "regex": Kit("regex_constrained_kit", mixin("regex_constrained_kit:RegexConstrainedMixin")),
    "decode": Kit(
        "basic_decode_correctness_kit",
        mixin("basic_decode_correctness_kit:BasicDecodeCorrectnessMixin", skip=CANNOT),
    ),
    "stress": Kit(
        "basic_scheduler_stress_kit",
        mixin("basic_scheduler_stress_kit:BasicSchedulerStressMixin", skip=CANNOT),
        cpu_memory="1GB",  # a single prompt nearly fills the model's context
    ),
    "waiting": Kit(
        "abort_timeout_kit, waiting timeout",
        mixin("abort_timeout_kit:WaitingTimeoutMixin", WAITING, gpu_numbers=WAITING_GPU),
        env={"SGLANG_REQ_WAITING_TIMEOUT": "2"},
        args=("--max-running-requests", "1"),
    ),
    "running": Kit(
        "abort_timeout_kit, running timeout",
        mixin("abort_timeout_kit:RunningTimeoutTwoWaveMixin", WAVES, gpu_numbers=WAVES_GPU),
        env={"SGLANG_REQ_RUNNING_TIMEOUT": "5"},
    ),
    "retract": Kit("radix_cache_server_kit, forced retraction", radix, env=RETRACT),
}
# Kits that need neither a grammar backend nor a better model. Consecutive kits with equal options share a server.
GPU_KITS = ("radix", "hit", "abort", "stress", "pause", "waiting", "running", "retract")


@contextlib.contextmanager
def _offline_requests():
    """Replace the hit kit's prompts, which come from a data set on a hub, with random token ids."""
    from types import SimpleNamespace

    from sglang.test.kits import cache_hit_kit

    rng = random.Random(11)

    def sample(*, input_len: int, num_prompts: int, **_):
        return [
            SimpleNamespace(prompt=[rng.randrange(1000, 40000) for _ in range(input_len)])
            for _ in range(num_prompts)
        ]

    original = cache_hit_kit.sample_random_requests
    cache_hit_kit.sample_random_requests = sample
    try:
        yield
    finally:
        cache_hit_kit.sample_random_requests = original


def run_kit(kit: Kit, server: common.Server, args: argparse.Namespace) -> dict:
    """Run one kit and check the server afterwards."""
    server.client.flush()
    start = server.client.when_idle().get("pages_free")
    before = len(server.errors())
    began = time.monotonic()
    notes: dict = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            kit.run(server, args, notes)
        problem = _after(server, start, before)
    except Exception as e:
        problem = f"{type(e).__name__}: {e}"
    return {
        "kit": kit.name,
        "passed": not problem,
        "problem": problem[:1500],
        "seconds": round(time.monotonic() - began, 1),
        "settings": notes,
        "server": server.args,
        "environment": {**common.STRICT, **kit.env},
    }


def _after(server: common.Server, start: int | None, before: int) -> str:
    if not server.alive:
        return "the server died: " + server.tail(5)
    server.client.flush()
    if new := server.errors()[before:]:
        return f"errors in the server's log: {new[:3]}"
    end = server.client.when_idle().get("pages_free")
    return "" if start == end else f"{start} pages were free before the kit, {end} after the flush"


def server_options(kit: Kit, args: argparse.Namespace) -> list[str]:
    # SGLang's warm-up request is shorter than the minimum answer length of the pause kit.
    shared = ["--enable-fp32-lm-head", "--chunked-prefill-size", "512", "--skip-server-warmup"]
    options = [*kit.args, *shared]
    if common.has_gpu():
        graphs = ["--cuda-graph-max-bs-decode", RUNNING[1]]
        options = [*common.ON_GPU.split(), *graphs, *(kit.gpu_args or kit.args), *shared]
    if args.format == "stock":
        return common.stock(*options)
    memory = args.memory or (MEMORY["gpu"] if common.has_gpu() else kit.cpu_memory or MEMORY["cpu"])
    return common.kvc(args.format, *options, block=args.block, memory=memory)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help=f"kits, separated by commas: {','.join(KITS)}")
    parser.add_argument("--format", default="k4v4", help="formats or policies, separated by commas; or stock")
    parser.add_argument("--block", type=int, default=BLOCK)
    parser.add_argument("--nodes", type=int, default=NODES, help="prompts of the radix kit")
    parser.add_argument("--memory", default="", help=f"KV memory; default: {MEMORY['cpu']}, on a GPU {MEMORY['gpu']}")
    args = parser.parse_args()
    if unknown := {*filter(None, args.only.split(","))} - {*KITS}:
        parser.error(f"no such kit: {', '.join(sorted(unknown))}; choose from {', '.join(KITS)}")
    if "," in args.format:
        return side_by_side(args.format.split(","), sys.argv[1:])

    names = args.only.split(",") if args.only else GPU_KITS if common.has_gpu() else [*KITS]
    rows, server, started = [], None, None
    try:
        for kit in (KITS[n] for n in names):
            options = server_options(kit, args)
            if server is None or not server.alive or started != (options, kit.env):
                if server is not None:
                    server.stop()
                server, started = common.Server(options, env={**common.STRICT, **kit.env}), (options, kit.env)
                server.start()
            rows.append(run_kit(kit, server, args))
            _write(args, rows[-1])
            state = "passed" if rows[-1]["passed"] else "FAILED"
            name = f"{args.format}: {kit.name}"
            print(f"{name:50} {state} {rows[-1]['seconds']:8.1f} s  {rows[-1]['problem'][:300]}", flush=True)
    finally:
        if server is not None:
            server.stop()
    passed = sum(r["passed"] for r in rows)
    print(f"{args.format}: {passed} of {len(rows)} kits passed", flush=True)
    return 0 if passed == len(rows) else 1


def side_by_side(formats: list[str], argv: list[str]) -> int:
    """Run one process per format, because kits patch modules; return 1 if any failed. Interrupting this process
    interrupts them."""
    command = [sys.executable, "-m", "bench.serve.kits", *argv]
    runs = [subprocess.Popen([*command, "--format", fmt], cwd=common.ROOT) for fmt in formats]
    try:
        return int(any([run.wait() for run in runs]))
    except BaseException:
        for run in runs:
            run.send_signal(signal.SIGINT)
        for run in runs:
            run.wait()
        raise


def scores(args: argparse.Namespace, kits: list[dict]) -> dict[str, tuple[float, str]]:
    """Scores on a GPU, if all kits ran at this commit with at least their default numbers."""
    last = {r["kit"]: r for r in kits if r["commit"] == common.commit()}
    required = [KITS[name].name for name in GPU_KITS]
    if not common.has_gpu() or args.quick or args.block != BLOCK or args.nodes < NODES or not {*required} <= {*last}:
        return {}
    passed = sum(last[name]["passed"] for name in required)
    return {f"kits.gpu.{args.format}": (passed / len(required), f"share of {len(required)} kits of SGLang")}


def _write(args, row: dict) -> None:
    """Write the result file after each kit, so that an interrupted run keeps its results. The row replaces the kit's
    earlier row."""
    name = f"{NAME}_{args.format}_p{args.block}"
    name += ("_gpu" if common.has_gpu() else "") + ("_quick" if args.quick else "")
    row |= {"commit": common.commit(), "command": common.command_line()}
    path = common.RESULTS / f"{name}.json"
    earlier = json.loads(path.read_text())["numbers"]["kits"] if path.exists() else []
    kits = [*(r for r in earlier if r["kit"] != row["kit"]), row]
    numbers = {"passed": sum(r["passed"] for r in kits), "of": len(kits), "kits": kits}
    common.write_result(name, numbers, scores=scores(args, kits))


if __name__ == "__main__":
    sys.exit(main())

"""Host time of a decode step with many long requests: our cache and stock, in SGLang's scheduler without a model.

    python -m bench.serve.host_step [--requests 256] [--tokens 32768] [--quick]

The figure is CPU time of the scheduler's thread per step on one core, as median and mean over `--steps` steps. A step
prepares the next batch, launches queued page operations (without running kernels or the model), and processes the
result of the previous step. Only some steps fill blocks, so the mean is the relevant figure. Stock has pages of one
token, SGLang's default, and memory for all requests in bf16.

The figure excludes inputs, sampling and replies to clients, which are equal on both sides. It also excludes the plan of
the attention backend and, for our cache, the CUDA driver's time for launches and copies. Every step copies its slots to
the device. A step that fills blocks has six more launches, a running sum and two more copies. Stock's allocator has
none of these.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections import deque
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from triton.runtime.jit import JITFunction

from bench.common import Score, write_result
from bench.scheduler import ModelFreeScheduler, configured
from kvc_kernels.store import PageStore
from kvc_patches import requests
from kvc_patches import scheduler as hooks
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.runtime import Runtime
from sglang_kvc.options.config import KvcConfig

P, WARMUP = 128, 8
LAYERS, HEADS, HEAD_DIM = 1, 1, 32


class Server(ModelFreeScheduler):
    """Scheduler with our cache, or with stock's if `runtime` is None."""

    def __init__(self, runtime, pool, allocator, tree, rows: int):
        super().__init__(pool, allocator, tree, rows=rows, page_size=P if runtime else 1)
        self.runtime, self.rows = runtime, rows

    def submit(self, i: int, tokens: int, answer: int) -> None:
        params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
        params.normalize(None)
        prompt = array("q", range(i * tokens, (i + 1) * tokens))
        # Prompts end at different offsets in a block, as in real traffic.
        req = Req(str(i), "", prompt[: tokens - i % P], params, vocab_size=1 << 30)
        if self.runtime:
            requests.before_add_request_to_queue(self, req)
        self._add_request_to_queue(req)

    def get_new_batch_prefill(self, running_batch):
        if self.runtime is None:
            return super().get_new_batch_prefill(running_batch)
        return hooks.around_get_new_batch_prefill(Scheduler.get_new_batch_prefill, self, running_batch)

    def run_batch(self, batch, pp_proxy_tensors=None):
        if self.runtime:
            hooks.before_run_batch(self, batch, None)
            self.runtime.flush()
        return GenerationBatchResult(next_token_ids=torch.full((len(batch.reqs),), 7))

    def process_batch_result(self, batch, result):
        if batch.forward_mode.is_decode():
            self.batch_result_processor.process_batch_result_decode(batch, result)
        else:
            self.batch_result_processor.process_batch_result_prefill(batch, result)
        if self.runtime:
            hooks.after_process_batch_result(None, self, batch, result)

    def turn(self) -> int:
        """Run one turn of `event_loop_overlap`; returns the number of decoding requests."""
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            self.result_queue.append((batch.copy(), self.run_batch(batch)))
        if self.last_batch:
            self.process_batch_result(*self.result_queue.popleft())
        self.last_batch = batch
        return len(batch.reqs) if batch and batch.forward_mode.is_decode() else 0


def kvc_runtime(blocks: int) -> Runtime:
    """Runtime with room for `blocks` uncompressed blocks of a model with one small layer."""
    num_bytes = int(blocks * 2 * HEADS * HEAD_DIM * P * 2 * 1.2)
    return build_runtime(
        KvcConfig(block_size=P), num_bytes=num_bytes, layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip


def make_server(runtime: Runtime | None, rows: int, context: int) -> Server:
    pool = ReqToTokenPool(rows, context + P, "cpu", enable_memory_saver=False)
    if runtime is not None:
        allocator = KvcAllocator(runtime, SimpleNamespace(runtime=runtime), "cpu")
        return Server(runtime, pool, allocator, KvcRadixCache(CacheInitParams(False, pool, allocator, P)), rows)
    size = rows * (context + 1)
    allocator = TokenToKVPoolAllocator(size, torch.bfloat16, "cpu", SimpleNamespace(size=size), need_sort=False)
    params = CacheInitParams(False, pool, allocator, 1, tree_components=(ComponentType.FULL,))
    return Server(None, pool, allocator, UnifiedRadixCache(params), rows)


def measure(kvc: bool, rows: int, tokens: int, steps: int) -> dict[str, float]:
    """Milliseconds of host time of a decode step of `rows` requests."""
    answer = steps + 4 * WARMUP
    runtime = kvc_runtime(rows * (-(-(tokens + answer) // P) + 1)) if kvc else None
    with configured(runtime, rows=rows):
        server = make_server(runtime, rows, tokens + answer)
        for i in range(rows):
            server.submit(i, tokens, answer)
        while server.turn() < rows:
            pass
        times: deque[float] = deque(maxlen=steps)
        for _ in range(WARMUP + steps):
            began = time.thread_time()
            decoding = server.turn()
            times.append((time.thread_time() - began) * 1e3)
            assert decoding == rows
    return {"median_ms": statistics.median(times), "mean_ms": statistics.mean(times), "max_ms": max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=2 * P)
    parser.add_argument("--quick", action="store_true", help="few short requests, no result file")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.tokens, args.steps = 8, 3 * P, P
    torch.set_num_threads(1)
    no_launch = mock.patch.object(JITFunction, "run", lambda *args, **options: None)
    with no_launch, mock.patch.object(PageStore, "use_kernels", True):
        load = args.requests, args.tokens, args.steps
        rows = {"kvc": measure(True, *load), "stock": measure(False, *load)}
    for name, row in rows.items():
        print(f"{name:8}" + "".join(f"{figure:>12} {value:8.3f}" for figure, value in row.items()))
    if not args.quick:
        unit = f"x CPU time of a decode step of {args.requests} requests of {args.tokens} tokens, kernels left out"
        score = Score(rows["kvc"]["mean_ms"] / rows["stock"]["mean_ms"], unit, "SGLang's scheduler", n=args.steps)
        write_result("serve/host_step", rows | vars(args), scores={"current.host_step_vs_stock": score})


if __name__ == "__main__":
    main()

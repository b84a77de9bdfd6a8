"""Host time of a scheduling pass that sorts many waiting prompts: `python -m bench.agents.waiting`; needs no GPU.

Each of 512 prompts has 30,000 tokens, and all or none of them are cached in blocks of 128 tokens. The figure is the
CPU time of SGLang's `SchedulePolicy.calc_priority` over our radix tree, as SGLang has it or with our hooks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from bench import common
from bench.scheduler import configured
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.options.config import KvcConfig

P, ROWS = 128, 8
NEVER = 1 << 30  # waiting prompts from which SGLang falls back to first come, first served


def waiting_prompts(count: int, tokens: int) -> list[Req]:
    draw, queue = np.random.default_rng(0), []
    for i in range(count):
        params = SamplingParams(max_new_tokens=8)
        params.normalize(None)
        prompt = array("q", draw.integers(0, 50_000, tokens).tolist())
        req = Req(str(i), "", prompt, params, vocab_size=1 << 20)
        req.arrival_processed_tokens = i
        queue.append(req)
    return queue


def tree_with(queue: list[Req]) -> KvcRadixCache:
    """A radix tree that holds the prompts of `queue`, without pages."""
    runtime = build_runtime(
        KvcConfig(block_size=P, high="k4v4", window=0), num_bytes=3 << 30, layers=1, heads=1, head_dim=64,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    pool = ReqToTokenPool(ROWS, P, "cpu", enable_memory_saver=False)
    allocator = KvcAllocator(runtime, SimpleNamespace(runtime=runtime), "cpu")
    tree, first = KvcRadixCache(CacheInitParams(False, pool, allocator, P)), 1
    for req in queue:
        blocks = np.arange(first, first + len(req.origin_input_ids) // P)
        first, n = first + len(blocks), len(blocks) * P
        key, value = RadixKey(req.origin_input_ids[:n]), tree.component.slots_of(blocks)
        tree.insert(InsertParams(key=key, value=value, prev_prefix_len=n, inserted_len=0, priority=0))
    return tree


def measure(tree: KvcRadixCache, queue: list[Req], *, hooks: bool, limit: int | None, passes: int) -> dict[str, float]:
    """CPU milliseconds of a pass. `limit`: waiting prompts from which SGLang falls back; None: its own."""
    times, policy = [], SchedulePolicy("hrrn", tree, False, False, False)
    limit = limit or schedule_policy.WAITING_QUEUE_PREFIX_MATCH_MAX
    with (
        configured(tree.runtime if hooks else None, rows=ROWS),
        mock.patch.object(schedule_policy, "WAITING_QUEUE_PREFIX_MATCH_MAX", limit),
    ):
        for _ in range(passes):
            began = time.thread_time_ns()
            policy.calc_priority(queue, None, processed_tokens=10**6)
            times.append((time.thread_time_ns() - began) / 1e6)
    return {"median_ms": round(statistics.median(times), 3), "most_ms": round(max(times), 3)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--waiting", type=int, default=512)
    p.add_argument("--tokens", type=int, default=30_000)
    p.add_argument("--passes", type=int, default=32)
    args = p.parse_args()
    torch.set_num_threads(1)
    numbers = {"settings": vars(args)}
    few = schedule_policy.WAITING_QUEUE_PREFIX_MATCH_MAX
    for cached in (True, False):
        queue = waiting_prompts(args.waiting, args.tokens)
        tree, kind = tree_with(queue if cached else []), "cached" if cached else "uncached"
        for name, count, hooks, limit in (
            ("stock_few", few, False, None),
            ("stock_fallback", args.waiting, False, None),
            ("unbounded", args.waiting, False, NEVER),
            ("kvc", args.waiting, True, None),
        ):
            row = measure(tree, queue[:count], hooks=hooks, limit=limit, passes=args.passes)
            numbers[f"{kind}.{name}"] = row
            print(f"{kind:9}{name:15}{count:5} prompts{row['median_ms']:9.2f} ms, at most {row['most_ms']:.1f}")
    common.write_result("agents/waiting", numbers)


if __name__ == "__main__":
    main()

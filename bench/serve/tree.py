"""Cost of match, insert and evict in a radix tree with many leaves.

    python -m bench.serve.tree [--leaves 100000] [--quick]

Each leaf is a private block below one of 1,000 shared blocks. The figures are CPU time of the scheduler's thread,
median of `REPEATS`, for our tree and SGLang's with the same keys. No model runs, and no page is read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from bench.common import Score, write_result
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.options.config import KvcConfig

P, SHARED, REPEATS, EVICTED = 64, 1000, 200, 16


def key(i: int) -> RadixKey:
    """Key of leaf `i`: a shared block, then a private one."""
    shared = i % SHARED
    tokens = array("q", [*range(shared * P, shared * P + P), *range(10**6 + i * P, 10**6 + i * P + P)])
    return RadixKey(tokens, None)


class Ours:
    def __init__(self, leaves: int):
        blocks = int(leaves * 1.1) + SHARED
        config = KvcConfig(high="bf16", block_size=P)
        sizes = dict(layers=1, heads=1, head_dim=32, dtype=torch.bfloat16, device="cpu")
        self.runtime = build_runtime(config, num_bytes=blocks * 3 * P * 32 * 4, **sizes)
        allocator = KvcAllocator(self.runtime, SimpleNamespace(runtime=self.runtime), "cpu")
        rows = SimpleNamespace(req_to_token=None)
        self.tree = KvcRadixCache(CacheInitParams(False, rows, allocator, P))
        self.allocator = allocator

    def value(self, tokens: int) -> torch.Tensor:
        return self.tree.component.slots_of(self.runtime.take([0] * (tokens // P)))

    def insert(self, i: int) -> None:
        """Insert one leaf and free the shared block if the tree already has it, as a request would."""
        k = key(i)
        value = self.value(len(k))
        known = self.tree.insert(InsertParams(key=k, value=value, prev_prefix_len=len(k))).prefix_len
        self.runtime.free(value.numpy()[:known:P] // P)


class Stock:
    def __init__(self, leaves: int):
        size = (int(leaves * 1.1) + 2 * SHARED) * P
        kvcache = SimpleNamespace(size=size)
        self.allocator = PagedTokenToKVPoolAllocator(size, P, torch.bfloat16, "cpu", kvcache, need_sort=False)
        rows = SimpleNamespace(req_to_token=None)
        params = CacheInitParams(False, rows, self.allocator, P, tree_components=(ComponentType.FULL,))
        self.tree = UnifiedRadixCache(params)

    def insert(self, i: int) -> None:
        k = key(i)
        self.tree.insert(InsertParams(key=k, value=self.allocator.alloc(len(k))))


def microseconds(call, repeats: int = REPEATS) -> float:
    """Median CPU time of `call`."""
    times = []
    for i in range(repeats):
        began = time.thread_time()
        call(i)
        times.append((time.thread_time() - began) * 1e6)
    return statistics.median(times)


def measure(server, leaves: int) -> dict[str, float]:
    for i in range(leaves):
        server.insert(i)
    tree = server.tree
    fresh = iter(range(leaves, 10 * leaves))
    out = {
        "match_us": microseconds(lambda i: tree.match_prefix(MatchPrefixParams(key=key(i * 7 % leaves)))),
        "insert_us": microseconds(lambda i: server.insert(next(fresh))),
    }

    def evict(_):
        tree.evict(EvictParams(num_tokens=EVICTED * P))

    out["evict_us_per_block"] = microseconds(evict, REPEATS // 4) / EVICTED
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="a small tree, no result file")
    args = parser.parse_args()
    leaves = 2000 if args.quick else args.leaves
    numbers = {name: measure(kind(leaves), leaves) for name, kind in (("kvc", Ours), ("stock", Stock))}
    for name, row in numbers.items():
        print(f"{name:8}" + "".join(f"{figure:>24} {value:8.1f}" for figure, value in row.items()))
    if not args.quick:
        unit = f"microseconds a block of {P} tokens, {leaves} leaves"
        score = Score(numbers["kvc"]["evict_us_per_block"], unit, "SGLang's tree in the same run", n=REPEATS // 4)
        write_result("serve/tree", numbers | {"leaves": leaves}, scores={"current.evict_us_100k": score})


if __name__ == "__main__":
    main()

"""A long prefix to host memory and back: time over the bus's, and what the copies cost attention beside them.

    python -m bench.kernels.swap [--tokens 102400] [--layers 32] [--seconds 60]

8 KV heads, head_dim 128, blocks of 128 tokens in k4v4: an 8B model's cache. Blocks go through the runtime's operation
queue, as in a server. The floor is one copy of the same bytes between page-locked and device memory, in large pieces,
in the same run. `host_ms` is the time that the host takes to launch all of it. `beside` is decode attention of 64
requests of 8192 tokens, over a store of its own, while the blocks come back, against the same alone.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from bench.common import Score
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.runtime import Runtime
from sglang_kvc.options.config import KvcConfig

from .common import RESULTS, Results, Workload

HEADS, DIM, P = 8, 128, 128
BATCH = 64  # uncompressed blocks at a time


def packed_blocks(runtime: Runtime, n: int) -> np.ndarray:
    """`n` packed blocks with random bytes in their pages."""
    blocks: list[int] = []
    while len(blocks) < n:
        some = runtime.take([0] * min(BATCH, n - len(blocks)))
        runtime.flush()
        runtime.queue_due(np.asarray(some))
        runtime.flush()
        blocks += some
    runtime.settle()
    runtime.store.pages.random_(0, 256)
    return np.array(blocks)


def timed(launch, stream: torch.cuda.Stream) -> tuple[float, float]:
    """Seconds from the launch until `stream` is done, and seconds of the host."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    launch()
    launched = time.perf_counter() - began
    stream.synchronize()
    return time.perf_counter() - began, launched


def bus(num_bytes: int, to_host: bool) -> float:
    """Seconds of one copy of `num_bytes` bytes in pieces of 64 MiB; the best of three."""
    piece = 64 << 20
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(piece, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for at in range(0, num_bytes, piece):
            n = min(piece, num_bytes - at)
            (host if to_host else device)[:n].copy_((device if to_host else host)[:n], non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def attention():
    """One run of decode attention in all of a store's layers, and its bytes."""
    from kvc_kernels.decode.attention import DecodeAttention

    store, rows, lens, _ = Workload("k4v4", block_tokens=P, batch=64, tokens=8192).build()
    q = torch.randn((64, HEADS * 4, DIM), device="cuda", dtype=torch.bfloat16)
    op = DecodeAttention(store, max_batch=64, max_blocks=rows.shape[1], query_heads=HEADS * 4)
    op.plan(rows, lens)
    return lambda: op.run(0, q, scale=DIM**-0.5)


def per_run(run, until, least: int = 20) -> float:
    """Milliseconds of one `run`: the median of groups of ten, which begin until `until()` is true; at least `least`."""
    times = []
    while len(times) < least or not until():
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(10):
            run()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 10)
    return float(np.median(times))


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=102_400)
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--times", type=int, default=5)
    args = p.parse_args(argv)
    n = args.tokens // P
    results = Results(RESULTS / "swap.json", note=__doc__.split("\n\n")[-1].strip())
    plain = 4 * args.layers * HEADS * DIM * P
    config = KvcConfig(block_size=P, window=0, host_memory=int(n * plain / 2.5))
    runtime = build_runtime(
        config, num_bytes=int(n * plain / 2.5) + BATCH * 2 * plain, layers=args.layers, heads=HEADS, head_dim=DIM,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    began = time.perf_counter()
    runtime.attach_host_tier()
    attached = time.perf_counter() - began
    tier, transfers = runtime.host_tier, runtime.host_tier.transfers
    blocks = packed_blocks(runtime, n)
    run = attention()
    for _ in range(3):
        run()
    alone = per_run(run, lambda: True)
    rows = []
    for turn in range(args.times + 1):  # the first one compiles kernels
        before = transfers.bytes_saved, transfers.bytes_loaded

        ids = tier.save(blocks)
        runtime.free(blocks)
        saved, save_host = timed(runtime.flush, transfers.save_stream)
        loading = tier.load(ids)
        back, load_host = timed(runtime.flush, transfers.load_stream)
        tier.loading.clear()
        moved = transfers.bytes_saved - before[0], transfers.bytes_loaded - before[1]
        floors = bus(moved[0], True), bus(moved[1], False)
        # Once more, with attention beside it.
        runtime.free(loading.blocks)
        loading = tier.load(ids)
        runtime.flush()
        beside = per_run(run, lambda loading=loading: loading.finished, least=3)
        tier.loading.clear()
        torch.cuda.synchronize()
        tier.free(ids)
        blocks = loading.blocks
        if not turn:
            continue
        rows.append(
            {
                "tokens": args.tokens, "gb": moved[1] / 1e9, "save_ms": 1e3 * saved, "load_ms": 1e3 * back,
                "save_floor_ms": 1e3 * floors[0], "load_floor_ms": 1e3 * floors[1], "save_host_ms": 1e3 * save_host,
                "load_host_ms": 1e3 * load_host, "attention_ms": alone, "attention_beside_ms": beside,
                "page_lock_s": attached,
            }
        )  # fmt: skip
        results.add(rows[-1])
        print({k: round(v, 3) for k, v in rows[-1].items()}, flush=True)
    load = [r["load_ms"] / r["load_floor_ms"] for r in rows]
    save = [r["save_ms"] / r["save_floor_ms"] for r in rows]
    slow = [r["attention_beside_ms"] / r["attention_ms"] for r in rows]
    unit, baseline = "of the time of a plain copy", "one copy of the same bytes over the same bus"
    results.score(
        {
            "agents.swap_in_of_pcie": Score(float(np.median(load)), unit, baseline=baseline, n=len(rows)),
            "agents.swap_out_of_pcie": Score(float(np.median(save)), unit, baseline=baseline, n=len(rows)),
            "agents.attention_beside_swap": Score(
                float(np.median(slow)), "of the time alone", baseline="decode attention alone", n=len(rows)
            ),
        }
    )  # fmt: skip
    results.show()


if __name__ == "__main__":
    main()

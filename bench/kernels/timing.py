"""Timing of functions on the device and on the host."""

from __future__ import annotations

import time

import torch

from .common import time_graph


def matmul_rate() -> float:
    """Operations per second of a large bf16 matrix product."""
    a, b = torch.randn((2, 8192, 8192), device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / (time_graph(lambda _: a @ b, inner=3) * 1e-3)


def timed(fn) -> float:
    """Median milliseconds of `fn`, from a CUDA graph if it can be captured, else from events."""
    try:
        return time_graph(lambda _: fn(), inner=5)
    except RuntimeError:
        torch.cuda.synchronize()
        times = []
        for _ in range(9):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(5):
                fn()
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b) / 5)
        return sorted(times)[4]


def host_us(fn, calls: int = 100) -> float:
    """Median microseconds of host time per call of `fn`."""
    fn()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return sorted(times)[3]

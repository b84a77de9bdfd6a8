"""The operation queue on the GPU: blocks are taken, planned, packed and returned without the host ever waiting."""

import contextlib

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.options.config import KvcConfig

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POLICIES = [
    dict(policy="quantise", high="k4v4"),
    dict(policy="quota", keep=0.5),
    dict(policy="kv-compress", keep=0.5),
    dict(policy="leankv", high="k8v4", low="k4v2", alpha_high=1.0, alpha_low=0.05),
]


@contextlib.contextmanager
def never_waiting(device):
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("options", POLICIES, ids=lambda x: x["policy"])
def test_flush_does_not_wait(options, device):
    config = KvcConfig(block_size=128, window=0, **options)
    runtime = build_runtime(
        config, num_bytes=32 << 20, layers=2, heads=2, head_dim=64, dtype=torch.bfloat16, device=device
    )
    for turn in range(3):  # the first turn compiles kernels, which may wait
        with never_waiting(device) if turn else contextlib.nullcontext():
            ids = runtime.take([0, 128, 256])
            runtime.flush()
            runtime.queue_due(np.asarray(ids))
            runtime.flush()
            runtime.free(ids[:2])
            runtime.flush()
        if device == "cuda":
            torch.cuda.synchronize()
        ops.check_invariants(runtime.store)
        format_ids = runtime.store.format_id[torch.as_tensor(ids)].tolist()
        assert format_ids == [-1, -1, 1]
    # One block a turn is left, charged for just the pages that the device says are not free.
    runtime.settle()
    head, tail = runtime.store.cursor.tolist()
    assert runtime.blocks.used_count == 3
    assert runtime.ledger.total == runtime.sizing.num_pages - 1 - (tail - head)

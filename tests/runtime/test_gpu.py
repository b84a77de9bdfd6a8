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
    dict(policy="quantize", high="k4v4"),
    dict(policy="quota", keep=0.5),
    dict(policy="kv-compress", keep=0.5),
    dict(policy="leankv", high="k8v4", low="k4v2", alpha_high=1.0, alpha_low=0.05),
]
LATE = [
    dict(policy="leankv", high="k8v4", low="k4v2", lag=512),
    dict(policy="kv-compress", high="k4v4", keep=0.3, lag=512),
    dict(policy="h2o", high="k4v4", keep=0.3, lag=512),
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
    # One block per turn stays, charged only for the pages that are not free on the device.
    runtime.settle()
    head, tail = runtime.store.cursor.tolist()
    assert runtime.blocks.used_count == 3
    assert runtime.ledger.total == runtime.sizing.num_pages - 1 - (tail - head)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("options", LATE, ids=lambda x: x["policy"])
def test_plans_of_whole_blocks_do_not_wait(options, device):
    """Blocks are packed whole, planned alone or with others, some of them twice, and keep as many pages as queued."""
    config = KvcConfig(block_size=128, window=0, sinks=0, **options)
    runtime = build_runtime(
        config, num_bytes=64 << 20, layers=2, heads=2, head_dim=64, dtype=torch.bfloat16, device=device
    )
    policy = runtime.policy
    for turn in range(3):  # the first turn compiles kernels, which may wait
        with never_waiting(device) if turn else contextlib.nullcontext():
            ids = np.asarray(runtime.take([128 * i for i in range(9)]))
            runtime.flush()
            runtime.queue_due(ids, policy.unplanned_format)
            runtime.flush()
            rounds = [[[5, 9]], [[5, 4], [4, 16]]] if policy.answer_format else [None]
            for groups in rounds:
                planned = ids if groups is None else ids[: sum(n for n, _ in groups)]
                runtime.queue_move(
                    planned, from_format=policy.unplanned_format, to_format=policy.answer_format or 1,
                    lengths=np.full(len(planned), 2000), **({} if groups is None else {"groups": np.array(groups)}),
                )  # fmt: skip
                runtime.flush()
        runtime.settle()
        ops.check_invariants(runtime.store)
        if policy.answer_format:
            assert runtime.ledger.charge[ids[:5]].sum() == 4 and runtime.ledger.charge[ids[5:]].sum() == 16
        runtime.free(ids)
    runtime.settle()
    head, tail = runtime.store.cursor.tolist()
    assert runtime.ledger.total == runtime.blocks.used_count == 0 and tail - head == runtime.sizing.num_pages - 1

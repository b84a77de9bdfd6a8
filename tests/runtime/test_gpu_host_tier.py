"""The host tier on the GPU: blocks leave and return with the same bytes while other blocks are written and packed."""

import random

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.cache import transfers
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.host_memory import HostMemory
from sglang_kvc.cache.runtime import Runtime
from sglang_kvc.options.config import KvcConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
P, LAYERS, HEADS, DIM = 128, 2, 2, 64
POLICIES = [
    dict(policy="quantize", high="k4v4"),
    dict(policy="quota", keep=0.5),
    dict(policy="leankv", high="k8v4", low="k4v2", alpha_high=1.0, alpha_low=0.05),
]


def write_rows(runtime: Runtime, blocks: list[int], seed: int) -> None:
    """Random K and V in all tokens of `blocks`."""
    gen = torch.Generator("cuda").manual_seed(seed)
    at = torch.arange(len(blocks) * P, device="cuda")
    ids = torch.tensor(blocks, device="cuda")[at // P]
    for layer in range(LAYERS):
        k, v = torch.randn((2, len(at), HEADS, DIM), generator=gen, device="cuda").bfloat16()
        ops.append(runtime.store, layer, ids, at % P, k, v)


def digests(runtime: Runtime, blocks: np.ndarray) -> list[str]:
    return [ops.block_digest(runtime.store, int(b), scores=False) for b in blocks]


@pytest.mark.parametrize("options", POLICIES, ids=lambda x: x["policy"])
def test_blocks_come_back_while_others_are_written(options):
    config = KvcConfig(block_size=P, window=0, host_memory=64 << 20, **options)
    runtime = build_runtime(
        config, num_bytes=64 << 20, layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=torch.bfloat16, device="cuda"
    )
    runtime.attach_host_tier()
    draw, tier = random.Random(0), runtime.host_tier
    tier.transfers.timed = True
    resident: list[tuple[int, str]] = []  # packed blocks and their digests
    stored: list[tuple[int, str]] = []  # stored blocks and their digests
    for turn in range(40):
        fresh = runtime.take([0] * draw.randint(1, 6))
        runtime.flush()
        write_rows(runtime, fresh, turn)
        runtime.queue_due(np.asarray(fresh))
        runtime.settle()
        resident += zip(fresh, digests(runtime, fresh))

        leaving = [resident.pop(draw.randrange(len(resident))) for _ in range(draw.randint(0, len(resident)))]
        if leaving:
            blocks = np.array([b for b, _ in leaving])
            stored += zip(tier.save(blocks).tolist(), [d for _, d in leaving])
            runtime.free(blocks)
        loaded = [stored.pop(draw.randrange(len(stored))) for _ in range(draw.randint(0, min(6, len(stored))))]
        loading = tier.load(np.array([i for i, _ in loaded])) if loaded else None
        others = runtime.take([0] * 2)  # the next forward: launches saves and loads, then writes and packs
        runtime.flush()
        write_rows(runtime, others, 1000 + turn)
        runtime.queue_due(np.asarray(others))
        runtime.flush()
        if loading is not None:
            torch.cuda.synchronize()
            assert tier.arrived() == 1 and loading.finished
            tier.take_arrived()
            assert digests(runtime, loading.blocks) == [d for _, d in loaded]
            tier.free(np.array([i for i, _ in loaded]))
            resident += zip(loading.blocks.tolist(), [d for _, d in loaded])
        runtime.free(others)
        runtime.settle()
        ops.check_invariants(runtime.store)
        assert digests(runtime, [b for b, _ in resident]) == [d for _, d in resident]
    assert tier.saved_blocks > 30 and tier.loaded_blocks > 10
    assert tier.load_ms > 0 and tier.arrived_bytes == tier.transfers.bytes_loaded > 0
    saved = tier.transfers.take_saved()
    assert sum(save.num_bytes for save in saved) == tier.transfers.bytes_saved
    assert sum(save.blocks for save in saved) == tier.saved_blocks
    assert all(0 < save.seconds < 1 for save in saved)


def filled_tier(buffers: int) -> tuple[Runtime, list[int], list[str]]:
    """A runtime with packed blocks that fill this many buffers, and their digests."""
    config = KvcConfig(block_size=P, window=0, host_memory=256 << 20)
    runtime = build_runtime(
        config, num_bytes=512 << 20, layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=torch.bfloat16, device="cuda"
    )
    runtime.attach_host_tier()
    layout = runtime.host_tier.layout
    blocks: list[int] = []
    for turn in range(-(-buffers * layout.buffer_bytes // layout.unit_bytes // 64)):
        batch = runtime.take([0] * 64)
        runtime.flush()
        write_rows(runtime, batch, turn)
        runtime.queue_due(np.asarray(batch))
        blocks += batch
    runtime.settle()
    return runtime, blocks, digests(runtime, np.array(blocks))


def test_more_blocks_than_the_buffers_hold():
    """Saves and loads of many buffers in one flush; the host never waits for them."""
    runtime, blocks, before = filled_tier(6)
    ids = runtime.host_tier.save(np.array(blocks))
    runtime.free(blocks)
    runtime.flush()
    loading = runtime.host_tier.load(ids)
    runtime.flush()
    torch.cuda.synchronize()
    assert loading.finished and digests(runtime, loading.blocks) == before


def test_load_in_slices_beside_other_blocks(monkeypatch):
    """Later parts of a load are launched by later flushes. These take, pack and release other blocks, behind a forward
    that still runs."""
    monkeypatch.setattr(transfers, "BUFFERS_PER_FLUSH", 1)
    runtime, blocks, before = filled_tier(5)
    ids = runtime.host_tier.save(np.array(blocks))
    runtime.free(blocks)
    loading, flushes = runtime.host_tier.load(ids), 0
    while loading.queued:
        torch.cuda._sleep(10_000_000)  # cycles, some milliseconds
        others = runtime.take([0] * 16)
        runtime.flush()
        write_rows(runtime, others, 1000 + flushes)
        runtime.queue_due(np.asarray(others))
        runtime.flush()
        runtime.free(others)
        flushes += 2
    assert flushes > 4
    runtime.settle()
    assert loading.finished and digests(runtime, loading.blocks) == before
    ops.check_invariants(runtime.store)


def test_freed_memory_is_not_registered():
    memory = HostMemory(1 << 20, 4096, page_locked=True)
    same = torch.empty(0, dtype=torch.uint8).set_(memory.data.untyped_storage())  # keeps the bytes
    assert same.is_pinned()
    del memory
    assert not same.is_pinned()

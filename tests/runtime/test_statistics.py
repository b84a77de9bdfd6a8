"""Statistics of the cache against a reference count, and their cost to the scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvc_patches import internal_state
from sglang_kvc.cache.blocks import State
from sglang_kvc.stats import collect
from sglang_kvc.stats.collect import figures, measure

from .model import ONE_RANK, H, L, P, ToyServer, make_runtime


@pytest.fixture
def server(monkeypatch):
    """A server with blocks in every block format, some queued for packing, measured two at a time."""
    monkeypatch.setattr(collect, "CHUNK", 2)
    toy_server = ToyServer(policy="leankv", high="k8v4", low="k4v2", window=0, blocks=20)
    for i in range(4):
        toy_server.finish(toy_server.admit([*range(100 * i, 100 * i + 2 * P), 1]))
    toy_server.runtime.flush()
    random = torch.randint(0, P // 2, toy_server.runtime.store.counts.shape, generator=torch.Generator().manual_seed(1))
    toy_server.runtime.store.counts.copy_(random)
    for i in range(4, 6):
        toy_server.finish(toy_server.admit([*range(100 * i, 100 * i + P), 1]))
    assert len(toy_server.runtime.log)
    return toy_server


def counted(runtime) -> tuple[np.ndarray, int]:
    """Token counts `[L, H, 2]` of packed blocks, and the token slots of their pages."""
    tokens, slots = np.zeros((L, H, 2), dtype=np.int64), 0
    for block in np.flatnonzero(runtime.blocks.state == State.PACKED):
        counts = runtime.store.counts[block].numpy().astype(np.int64)
        if runtime.store.format_id[block] == 0:
            counts = np.broadcast_to([P, 0], (L, H, 2))
        tokens += counts
        block_format = runtime.store.block_formats[runtime.blocks.format_id[block]]
        for tier, fmt in enumerate((block_format.high, block_format.low)):
            if fmt is not None:
                t = runtime.layout.page(fmt).tokens
                slots += int((-(-counts[..., tier] // t) * t).sum())
    return tokens, slots


def test_statistics_match_reference_count(server):
    runtime = server.runtime
    tokens, slots = counted(runtime)
    packed = int((runtime.blocks.state == State.PACKED).sum())
    assert packed > 5 and tokens[..., 1].any() and (tokens.sum(-1) < packed * P).any()
    stats, shown = figures(runtime)
    assert stats.tokens_by_tier["high"] == tokens[..., 0].sum() and stats.tokens_by_tier["low"] == tokens[..., 1].sum()
    assert stats.tokens_by_tier["pruned"] == packed * P * L * H - tokens.sum()
    assert stats.occupancy == tokens.sum() / slots
    assert shown.blocks == packed
    assert np.allclose(shown.kept, tokens.sum(-1) / (packed * P))
    assert np.allclose(shown.high, tokens[..., 0] / (packed * P))
    assert measure(runtime, detail=True) == stats


def test_cache_without_packed_blocks_has_statistics():
    stats, shown = figures(ToyServer(high="k4v4").runtime)
    assert stats.occupancy is None and shown.blocks == 0 and shown.kept == [[0.0] * H] * L


class Largest(TorchDispatchMode):
    """Tracks the largest 8-byte integer tensor, in elements, that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.int64:
            self.elements = max(self.elements, out.numel())
        return out


def test_counts_are_summed_without_widening(server):
    """On a GPU, widening would take four times the table's memory next to a full pool, and a copy of it to the host."""
    with Largest() as largest:
        figures(server.runtime)
    packed = int((server.runtime.blocks.state == State.PACKED).sum())
    assert largest.elements <= max(packed, 2 * L * H) < packed * 2 * L * H


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only in `make`, which takes 0.1 s."""
    now = SimpleNamespace(seconds=100.0, made=0)
    monkeypatch.setattr(internal_state.time, "monotonic", lambda: now.seconds)

    def make(runtime):
        now.seconds += 0.1
        now.made += 1
        return {"made": now.made}

    monkeypatch.setattr(internal_state, "_figures", make)
    return now


def test_frequent_snapshots_take_at_most_tenth_of_time(clock):
    runtime = SimpleNamespace(cleared=0)
    assert [internal_state.snapshot(runtime)["made"] for _ in range(3)] == [1, 1, 1]
    clock.seconds += 0.95
    assert internal_state.snapshot(runtime)["made"] == 1
    clock.seconds += 0.1
    assert internal_state.snapshot(runtime)["made"] == 2
    other = SimpleNamespace(cleared=0)  # of another server in this process
    assert internal_state.snapshot(other)["made"] == 3


def test_snapshot_after_tier_was_emptied_is_new(clock, tmp_path):
    server = ToyServer(high="k4v4", window=0, host_memory=200_000, disk=str(tmp_path), disk_size=1 << 20)
    server.tree.init_hicache(ONE_RANK, None)
    for number, empty in enumerate((server.tree.clear_storage_backend, server.tree.reset), start=1):
        assert [internal_state.snapshot(server.runtime)["made"] for _ in range(2)] == [number, number]
        empty()
    assert internal_state.snapshot(server.runtime)["made"] == 3


def test_host_time_of_copies_is_not_that_of_compactions():
    runtime = make_runtime(high="k4v4", window=0, host_memory=200_000)
    runtime.attach_host_tier()
    blocks = np.array(runtime.take([0] * 3))
    runtime.flush()
    runtime.queue_due(blocks)
    runtime.flush()
    compaction, copies = runtime.counters.compaction_ms, runtime.counters.transfer_ms
    assert compaction > 0 and copies == 0
    stored = runtime.host_tier.save(blocks)
    runtime.flush()
    saved = runtime.counters.transfer_ms
    runtime.host_tier.load(stored)
    runtime.flush()
    assert runtime.counters.transfer_ms > saved > 0 and runtime.counters.compaction_ms == compaction

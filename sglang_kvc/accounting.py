"""Reads a runtime's figures off its records: real bytes per token, tiers, occupancy, the per-head map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .blocks import State
from .policies.budget import RING_ENTRY_BYTES
from .stats import HeadMap, KvcStats

if TYPE_CHECKING:
    from kvc_kernels.layout import Rung

    from .runtime import Runtime


def rung_name(rung: Rung) -> str:
    return rung.high.name + (f"+{rung.low.name}" if rung.low else "")


def measure(runtime: Runtime, *, detail: bool) -> KvcStats:
    """Figures from the CPU records. `detail` also reads token counts, which on a GPU waits for the device."""
    layout, blocks, ledger = runtime.layout, runtime.blocks, runtime.ledger
    packed = np.flatnonzero(blocks.state == State.PACKED)
    used = np.flatnonzero(blocks.state != State.FREE)
    page_cost = layout.page_bytes + RING_ENTRY_BYTES

    def bytes_of(ids: np.ndarray) -> int:
        return int(ledger.charge[ids].sum()) * page_cost + len(ids) * layout.block_meta_bytes

    ladder = runtime.store.ladder
    by_rung = {rung_name(r): int((blocks.rung[used] == i).sum()) for i, r in enumerate(ladder)}
    tokens = int(blocks.filled[used].sum())
    tiers, occupancy = {}, None
    if detail or runtime.store.device.type == "cpu":
        tiers, occupancy = _tiers(runtime, packed, tokens)
    return KvcStats(
        config=runtime.config.summary(),
        scope=runtime.policy.scope,
        bf16_token_bytes=2 * layout.layers * layout.heads * layout.head_dim * runtime.store.dtype.itemsize,
        page_bytes=layout.page_bytes,
        pages_total=ledger.limit,
        pages_free=ledger.free,
        tokens=tokens,
        bytes=bytes_of(used),
        packed_tokens=len(packed) * layout.block_tokens,
        packed_bytes=bytes_of(packed),
        blocks_by_rung=by_rung,
        tokens_by_tier=tiers,
        occupancy=occupancy,
        compactions=runtime.counters.compactions,
        compaction_ms=runtime.counters.compaction_ms,
        evicted_blocks=runtime.counters.evicted_blocks,
    )


def _tiers(runtime: Runtime, packed: np.ndarray, tokens: int) -> tuple[dict[str, int], float | None]:
    """(layer, head, token) triples in each tier, and the share of the packed pages' token slots that hold a token."""
    layout, store = runtime.layout, runtime.store
    heads = layout.layers * layout.heads
    counts = _counts(runtime, packed)
    high, low = int(counts[..., 0].sum()), int(counts[..., 1].sum())
    stored = len(packed) * layout.block_tokens * heads
    tiers = {
        "bf16": (tokens - len(packed) * layout.block_tokens) * heads,
        "high": high,
        "low": low,
        "pruned": stored - high - low,
    }
    slots = 0
    for i, rung in enumerate(store.ladder[1:], start=1):
        mine = counts[torch.from_numpy(runtime.blocks.rung[packed] == i)]
        for tier, fmt in enumerate((rung.high, rung.low)):
            if fmt is not None:
                t = layout.page(fmt).tokens
                slots += int(((mine[..., tier] + t - 1) // t * t).sum())
    return tiers, (high + low) / slots if slots else None


def head_map(runtime: Runtime) -> HeadMap:
    """Kept and high shares per layer and head over all packed blocks; waits for the device."""
    packed = np.flatnonzero(runtime.blocks.state == State.PACKED)
    counts = _counts(runtime, packed).float()
    share = counts.sum(0) / max(1, len(packed) * runtime.layout.block_tokens)
    return HeadMap(kept=share.sum(-1).tolist(), high=share[..., 0].tolist(), blocks=len(packed))


def _counts(runtime: Runtime, packed: np.ndarray) -> torch.Tensor:
    """int64 `[n, L, H, 2]` token counts of packed blocks.

    Page state changes on the forward stream alone, so nothing is flushed here: blocks whose compaction is still queued
    count as kept whole.
    """
    ids = torch.from_numpy(packed).to(runtime.store.device)
    counts = runtime.store.counts[ids].to("cpu", torch.int64)
    waiting = runtime.store.rung[ids].cpu() == 0
    counts[waiting] = torch.tensor([runtime.layout.block_tokens, 0])
    return counts

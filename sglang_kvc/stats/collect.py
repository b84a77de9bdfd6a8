"""Statistics of a runtime: bytes per token, tiers, occupancy, the head map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvc_kernels.layout import RING_ENTRY_BYTES

from ..cache.blocks import State
from .records import HeadMap, KvcStats

if TYPE_CHECKING:
    from kvc_kernels.layout import BlockFormat

    from ..cache.block_store import BlockStore
    from ..cache.host_tier import HostTier
    from ..cache.runtime import Runtime

CHUNK = 4096  # blocks whose counts are read at a time


def format_name(block_format: BlockFormat) -> str:
    return block_format.high.name + (f"+{block_format.low.name}" if block_format.low else "")


@dataclass(frozen=True)
class PackedTokens:
    """Tokens in packed blocks, int64 `[L, H, 2]` (high, low), and the token slots of their pages. The blocks stand for
    `sequence_tokens` tokens of their sequences, dropped ones included."""

    blocks: int
    sequence_tokens: int
    tokens: torch.Tensor
    slots: int


def packed_tokens(runtime: Runtime) -> PackedTokens:
    """Summed on the device, `CHUNK` blocks at a time; waits for the device.

    Page state changes on the forward stream alone, so nothing is flushed here. Blocks whose compaction is still queued
    count as if every token were kept.
    """
    layout, store, blocks = runtime.layout, runtime.store, runtime.blocks
    packed = np.flatnonzero(blocks.state == State.PACKED)
    tokens = torch.zeros((layout.layers, layout.heads, 2), dtype=torch.int64, device=store.device)
    slots = torch.zeros((), dtype=torch.int64, device=store.device)
    all_kept = torch.tensor([layout.block_tokens, 0], dtype=store.counts.dtype).to(store.device)
    for i, block_format in enumerate(store.block_formats[1:], start=1):
        formats = (block_format.high,) if block_format.low is None else (block_format.high, block_format.low)
        ids = torch.from_numpy(packed[blocks.format_id[packed] == i])
        for chunk in ids.split(CHUNK):
            chunk = chunk.to(store.device)
            queued = (store.format_id[chunk] == 0)[:, None, None, None]
            counts = torch.where(queued, all_kept, store.counts[chunk])
            tokens += counts.sum(0, dtype=torch.int64)
            for tier, fmt in enumerate(formats):
                t = layout.page(fmt).tokens
                pages = torch.div(counts[..., tier] + (t - 1), t, rounding_mode="floor")
                slots += t * pages.sum(dtype=torch.int64)
    return PackedTokens(len(packed), int(blocks.num_tokens[packed].sum()), tokens.cpu(), int(slots))


def measure(runtime: Runtime, *, detail: bool) -> KvcStats:
    """Statistics from the scheduler state. `detail` also reads token counts, which on a GPU waits for the device."""
    return _stats(runtime, packed_tokens(runtime) if detail or not runtime.store.on_gpu else None)


def figures(runtime: Runtime) -> tuple[KvcStats, HeadMap]:
    """Detailed statistics, and kept and high shares per layer and head over all packed blocks."""
    packed = packed_tokens(runtime)
    share = packed.tokens.double() / max(1, packed.sequence_tokens)
    head_map = HeadMap(kept=share.sum(-1).tolist(), high=share[..., 0].tolist(), blocks=packed.blocks)
    return _stats(runtime, packed), head_map


def _stats(runtime: Runtime, counted: PackedTokens | None) -> KvcStats:
    layout, blocks, ledger = runtime.layout, runtime.blocks, runtime.ledger
    packed = np.flatnonzero(blocks.state == State.PACKED)
    used = np.flatnonzero(blocks.state != State.FREE)
    page_cost = layout.page_bytes + RING_ENTRY_BYTES

    def bytes_of(ids: np.ndarray) -> int:
        return int(ledger.charge[ids].sum()) * page_cost + len(ids) * layout.block_meta_bytes

    block_formats = runtime.store.block_formats
    by_format = dict.fromkeys(map(format_name, block_formats), 0)
    for i, block_format in enumerate(block_formats):  # several formats may share a name
        by_format[format_name(block_format)] += int((blocks.format_id[used] == i).sum())
    tokens = int(blocks.num_tokens[used].sum())
    tiers, occupancy = ({}, None) if counted is None else _tiers(runtime, counted, tokens)
    return KvcStats(
        config=runtime.config.summary(),
        scope=runtime.policy.scope,
        bf16_token_bytes=2 * layout.layers * layout.heads * layout.head_dim * runtime.store.dtype.itemsize,
        page_bytes=layout.page_bytes,
        pages_total=ledger.limit,
        pages_free=ledger.free,
        tokens=tokens,
        bytes=bytes_of(used),
        packed_tokens=int(blocks.num_tokens[packed].sum()),
        packed_bytes=bytes_of(packed),
        block_ids_total=blocks.num_blocks - 1,  # without the scratch block
        block_ids_free=blocks.free_count,
        blocks_by_format=by_format,
        tokens_by_tier=tiers,
        occupancy=occupancy,
        compactions=runtime.counters.compactions,
        compaction_ms=runtime.counters.compaction_ms,
        evicted_blocks=runtime.counters.evicted_blocks,
        demoted_blocks=runtime.counters.demoted_blocks,
        recomputed_tokens=runtime.counters.recomputed_tokens,
        running_share=runtime.running_share.now,
        canceled_loads=runtime.counters.canceled_loads,
        transfer_ms=runtime.counters.transfer_ms,
        **({} if runtime.host_tier is None else _host(runtime.host_tier)),
    )


def _host(tier: HostTier) -> dict[str, Any]:
    memory = tier.memory
    return {
        **({} if tier.disk is None else _disk(tier.disk.store)),
        "host_bytes": (memory.num_units - memory.free_units) * memory.unit_bytes,
        "host_bytes_total": memory.num_units * memory.unit_bytes,
        "host_blocks": tier.stored,
        "host_saved_bytes": tier.transfers.bytes_saved,
        "host_loaded_bytes": tier.transfers.bytes_loaded,
        "host_arrived_bytes": tier.arrived_bytes,
        "host_load_ms": tier.load_ms,
        "host_loading": len(tier.loading),
    }


def _disk(store: BlockStore) -> dict[str, int]:
    return {
        "disk_bytes": store.num_bytes,
        "disk_bytes_total": store.limit,
        "disk_blocks": len(store),
        "disk_written_bytes": store.bytes_written,
        "disk_read_bytes": store.bytes_read,
        "disk_damaged": store.damaged,
    }


def _tiers(runtime: Runtime, packed: PackedTokens, tokens: int) -> tuple[dict[str, int], float | None]:
    """(layer, head, token) triples in each tier, and the share of token slots of packed pages that hold a token."""
    heads, packed_all = runtime.layout.layers * runtime.layout.heads, packed.sequence_tokens
    high, low = packed.tokens.sum((0, 1)).tolist()
    pruned = packed_all * heads - high - low
    tiers = {"bf16": (tokens - packed_all) * heads, "high": high, "low": low, "pruned": pruned}
    return tiers, (high + low) / packed.slots if packed.slots else None

"""`compact` with kernels for the move: gather, header, quantise, pack, write, for all layers and heads at once."""

from __future__ import annotations

import functools

import torch
import triton

from ..layout import BF16, TOKEN, Format, PoolLayout, Rung
from ..store import PageStore
from .compact import _table_rows, check_rung, compact
from .compact_pack_triton import pack_kernel
from .compact_repack_triton import order_kernel, repack_kernel
from .ring import return_pages, table_order, take_pages, tier_pages
from .tiers import HIGH, LOW


def _constants(layout: PoolLayout, fmt: Format | None) -> tuple[int, ...]:
    """What `write_tier` has to know of the pages it writes."""
    if fmt is None:
        return ()
    page = layout.page(fmt)
    names = ("key_meta", "value_codes", "value_meta", "scores", "positions")
    slack = triton.next_power_of_2(max(1, layout.page_bytes - page.used_bytes))
    return (
        fmt.key_bits, fmt.value_bits, page.tokens, triton.next_power_of_2(page.tokens),
        *(page.offset(n) for n in names), page.used_bytes, slack,
    )  # fmt: skip


@functools.lru_cache
def _prepared(layout: PoolLayout, to: Rung) -> tuple[tuple[int, ...], ...]:
    """Constants of the uncompressed pages, and of both tiers; checked once, for it is much Python."""
    check_rung(layout, to)
    bf16 = layout.page(BF16)
    source = (bf16.tokens, bf16.offset("value_codes"), bf16.offset("scores"))
    return source, _constants(layout, to.high), _constants(layout, to.low)


def compact_triton(
    store: PageStore, blocks: torch.Tensor, to_rung: int, tiers: torch.Tensor, *, from_rung: int
) -> torch.Tensor:
    """`compact` with the same bytes, in a fixed number of launches for all layers, heads and blocks."""
    layout = store.layout
    to, source, n = store.ladder[to_rung], store.ladder[from_rung], blocks.numel()
    if not to.high.packed or not n:
        return compact(store, blocks, to_rung, tiers, from_rung=from_rung)
    _prepared(layout, to)
    m = n * layout.layers * layout.heads
    old = store.table[blocks].view(m, -1)
    tiers = tiers.reshape(m, layout.block_tokens).contiguous()
    move = _repack if source.high.packed else _pack
    ids, held, counts = move(store, blocks, old, tiers, source, to)
    high, low = held
    old_high, old_low = (x.flatten() for x in _held_pages(store, blocks, source))
    store.table[blocks] = _table_rows(ids, high, low).view(n, *store.table.shape[1:])
    store.counts[blocks] = counts.to(torch.int16).view(n, *store.counts.shape[1:])
    # Assigning a number through an index would copy it from the host and wait.
    store.rung.index_fill_(0, blocks.long(), to_rung)
    return_pages(store, table_order(old, old_high, old_low), old_high + old_low)
    return (high + low).view(n, -1).sum(1).to(torch.int32)


def _held_pages(store: PageStore, blocks: torch.Tensor, rung: Rung) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages (high, low), int64 `[n, L, H]`, of blocks that are all at `rung`."""
    counts = store.counts[blocks]
    if rung.high.packed:
        return tier_pages(store, rung, counts)
    high = torch.full(counts.shape[:-1], store.layout.head_pages_bf16, dtype=torch.int64, device=store.device)
    return high, torch.zeros_like(high)


def _take(store: PageStore, to: Rung, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page ids int32 `[m, E]` (high, then low) and their numbers int64 `[2, m]` for tokens `counts[m, 2]`."""
    held = torch.stack(tier_pages(store, to, counts))
    return take_pages(store, held[0] + held[1]), held


def _pack(store: PageStore, blocks: torch.Tensor, old: torch.Tensor, tiers: torch.Tensor, source: Rung, to: Rung):
    """Move uncompressed heads: page ids, page counts, token counts."""
    layout, p = store.layout, store.layout.block_tokens
    plain, high, low = _prepared(layout, to)
    kept = [(tiers == HIGH).sum(1, dtype=torch.int32)]
    kept.append((tiers == LOW).sum(1, dtype=torch.int32) if to.low is not None else torch.zeros_like(kept[0]))
    counts = torch.stack(kept, 1)
    ids, held = _take(store, to, counts)
    order = torch.empty(tiers.shape, dtype=torch.int16, device=ids.device)
    pack_kernel[(len(tiers),)](
        store.pages, old, ids, held, blocks, tiers, order, store.headers, store.pages.view(store.dtype),
        layout.layers * layout.heads, layout.head_pages_bf16, layout.head_dim, p, triton.next_power_of_2(p),
        layout.page_bytes, *plain, high, low, layout.key_mode == TOKEN, layout.scored, 32, num_warps=4,
    )  # fmt: skip
    return ids, held, counts


def _repack(store: PageStore, blocks: torch.Tensor, old: torch.Tensor, tiers: torch.Tensor, source: Rung, to: Rung):
    """Move packed heads, as `_pack`. Key headers stay."""
    layout, p = store.layout, store.layout.block_tokens
    _, high, low = _prepared(layout, to)
    tiers_from = tuple(x for x in _prepared(layout, source)[1:] if x)
    where, order = torch.empty((2, *tiers.shape), dtype=torch.int16, device=store.device)
    counts = torch.empty((len(tiers), 2), dtype=torch.int32, device=store.device)
    order_kernel[(len(tiers),)](
        store.pages, old, store.counts[blocks].view(-1, 2), tiers, where, order, counts, layout.head_pages_bf16, p,
        triton.next_power_of_2(p), layout.page_bytes, tiers_from, to.low is not None, layout.scored, num_warps=4,
    )  # fmt: skip
    ids, held = _take(store, to, counts)
    # Without fused multiply-add, for the reference multiplies and adds one after the other.
    repack_kernel[(len(tiers),)](
        store.pages, old, ids, held, counts, where, order, layout.head_pages_bf16, layout.head_dim, p,
        layout.page_bytes, tiers_from, high, low, layout.key_mode == TOKEN, layout.scored,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return ids, held, counts

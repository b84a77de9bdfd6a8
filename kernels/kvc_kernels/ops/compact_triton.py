"""`compact` with the move of uncompressed blocks in one kernel: gather, header, quantise, pack, write."""

from __future__ import annotations

import functools

import torch
import triton

from ..layout import BF16, TOKEN, Format, PoolLayout, Rung
from ..store import PageStore
from .compact import _table_rows, check_rung, compact
from .compact_pack_triton import pack_kernel
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
    """`compact` with the same bytes, in a fixed number of launches for all layers, heads and blocks.

    Blocks that are packed already go through `compact` itself.
    """
    layout = store.layout
    to, n = store.ladder[to_rung], blocks.numel()
    if store.ladder[from_rung].high.packed or not to.high.packed or not n:
        return compact(store, blocks, to_rung, tiers, from_rung=from_rung)
    source, high_constants, low_constants = _prepared(layout, to)
    p = layout.block_tokens
    m = n * layout.layers * layout.heads
    old = store.table[blocks].view(m, -1)
    tiers = tiers.reshape(m, p)
    kept = [(tiers == HIGH).sum(1, dtype=torch.int32)]
    kept.append((tiers == LOW).sum(1, dtype=torch.int32) if to.low is not None else torch.zeros_like(kept[0]))
    counts = torch.stack(kept, 1)
    held = torch.stack(tier_pages(store, to, counts))
    high, low = held
    ids = take_pages(store, high + low)
    order = torch.empty((m, p), dtype=torch.int16, device=ids.device)
    pack_kernel[(m,)](
        store.pages, old, ids, held, blocks, tiers.contiguous(), order, store.headers,
        store.pages.view(store.dtype), layout.layers * layout.heads, layout.head_pages_bf16, layout.head_dim, p,
        triton.next_power_of_2(p), layout.page_bytes, *source, high_constants, low_constants,
        layout.key_mode == TOKEN, layout.scored, 32, num_warps=4,
    )  # fmt: skip
    store.table[blocks] = _table_rows(ids, high, low).view(n, *store.table.shape[1:])
    store.counts[blocks] = counts.to(torch.int16).view(n, *store.counts.shape[1:])
    # Assigning a number through an index would copy it from the host and wait.
    store.rung.index_fill_(0, blocks.long(), to_rung)
    all_high = torch.full_like(high, layout.head_pages_bf16)
    return_pages(store, table_order(old, all_high, torch.zeros_like(all_high)), all_high)
    return (high + low).view(n, -1).sum(1).to(torch.int32)

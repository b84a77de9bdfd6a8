"""Page exchange on the GPU: `reference` in a fixed number of launches for any number of blocks, layers and heads.

A row is one head of one layer of one block. Ring, table, counts and storage formats end up as `reference` and `compact`
leave them, page for page. Taking and returning share a launch: at most n - 1 of the ring's n slots are in use, free or
owed to a live row, so a push after the tail never reaches a pop at the head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..layout import BlockFormat, PoolLayout
from ..store import PageStore


class Exchange(NamedTuple):
    """Pages taken and returned by m rows; E entries per table row. A release has neither `ids` nor `old`."""

    ids: torch.Tensor | None  # int32 [m, E]: pages taken, high then low, page 0 after them
    page_counts: torch.Tensor  # int64 [4, m]: number of pages taken, high and low, and returned, high and low
    old: torch.Tensor | None  # int32 [m, E]: the table rows before
    pages: torch.Tensor  # int32 [n]: pages of each block afterwards


def tier_tokens(layout: PoolLayout, block_format: BlockFormat) -> tuple[int, int]:
    """Tokens per page of the high and the low tier of `block_format`, 0 for a missing tier. Uncompressed pages count 0,
    because they come as whole rows.
    """
    if not block_format.high.packed:
        return 0, 0
    return layout.page(block_format.high).tokens, layout.page(block_format.low).tokens if block_format.low else 0


@triton.jit(do_not_specialize=["m"])
def _count_kernel(
    tiers, new_counts, blocks, format_id, counts, page_counts, need, m,
    LH: tl.constexpr, E: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, TO: tl.constexpr, BLOCK_FORMATS: tl.constexpr,
    GIVEN: tl.constexpr,
):
    """grid (m,). page_counts int64 `[4, m]`: pages high and low that a row gets, then pages high and low that it has.
    need int64 `[2, m]`: their sums. new_counts int32 `[m, 2]` is read, or written if GIVEN is "tiers" or "nothing"
    (all P tokens are high). TO, BLOCK_FORMATS: tokens per page of the tiers.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + row // LH).to(tl.int64)
    if TO[0] > 0:
        if GIVEN == "nothing":
            high = tl.full([], P, tl.int32)
            low = high * 0
            tl.store(new_counts + row * 2, high)
            tl.store(new_counts + row * 2 + 1, low)
        elif GIVEN == "tiers":
            t = tl.arange(0, PP)
            tier = tl.load(tiers + row * P + t, mask=t < P, other=0)
            high = tl.sum((tier == 2).to(tl.int32), 0)
            low = high * 0
            if TO[1] > 0:
                low = tl.sum((tier == 1).to(tl.int32), 0)
            tl.store(new_counts + row * 2, high)
            tl.store(new_counts + row * 2 + 1, low)
        else:
            high = tl.load(new_counts + row * 2)
            low = tl.load(new_counts + row * 2 + 1)
        new_high = ((high + TO[0] - 1) // TO[0]).to(tl.int64)
        new_low = new_high * 0
        if TO[1] > 0:
            new_low = ((low + TO[1] - 1) // TO[1]).to(tl.int64)
        tl.store(page_counts + row, new_high)
        tl.store(page_counts + m + row, new_low)
        tl.store(need + row, new_high + new_low)
    else:
        tl.store(need + row, row * 0)
    block_format_id = tl.load(format_id + block).to(tl.int32)
    entry = counts + (block * LH + row % LH) * 2
    stored_high = tl.load(entry).to(tl.int32)
    stored_low = tl.load(entry + 1).to(tl.int32)
    old_high = tl.where(block_format_id == 0, E, 0)
    old_low = old_high * 0
    for r in tl.static_range(1, len(BLOCK_FORMATS)):
        old_high = tl.where(
            block_format_id == r, (stored_high + BLOCK_FORMATS[r][0] - 1) // BLOCK_FORMATS[r][0], old_high
        )
        if BLOCK_FORMATS[r][1] > 0:
            old_low = tl.where(
                block_format_id == r, (stored_low + BLOCK_FORMATS[r][1] - 1) // BLOCK_FORMATS[r][1], old_low
            )
    tl.store(page_counts + 2 * m + row, old_high.to(tl.int64))
    tl.store(page_counts + 3 * m + row, old_low.to(tl.int64))
    tl.store(need + m + row, (old_high + old_low).to(tl.int64))


@triton.jit(do_not_specialize=["m"])
def _exchange_kernel(
    ring, cursor, table, counts, blocks, page_counts, need, ends, new_counts, ids, old_rows, m, size,
    LH: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, GETS: tl.constexpr,
):
    """grid (m,). Copy the table row to old_rows, push its pages, pop new ones (with GETS), write the row and the
    counts. ends int64 `[2 m]` is the running sum of need.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    inside = e < E
    entry = tl.load(blocks + row // LH).to(tl.int64) * LH + row % LH
    old = tl.load(table + entry * E + e, mask=inside, other=0)
    old_high = tl.load(page_counts + 2 * m + row)
    old_low = tl.load(page_counts + 3 * m + row)
    back = E - 1 - e
    given = inside & ((e < old_high) | (back < old_low))
    place = tl.where(e < old_high, e, old_high + back)
    taken = tl.load(ends + m - 1)
    push_start = tl.load(cursor + 1) + tl.load(ends + m + row) - tl.load(need + m + row) - taken
    tl.store(ring + (push_start + place) % size, old, mask=given)
    fresh = tl.zeros([EP], tl.int32)
    if GETS:
        tl.store(old_rows + row * E + e, old, mask=inside)
        first = tl.load(cursor) + tl.load(ends + row) - tl.load(need + row)
        high = tl.load(page_counts + row)
        low = tl.load(page_counts + m + row)
        popped = tl.load(ring + (first + e) % size, mask=inside & (e < high + low), other=0)
        tl.store(ids + row * E + e, popped, mask=inside)
        of_low = back < low
        place = tl.where(of_low, high + back, e)
        fresh = tl.load(ring + (first + place) % size, mask=inside & ((e < high) | of_low), other=0)
        tl.store(counts + entry * 2, tl.load(new_counts + row * 2).to(tl.int16))
        tl.store(counts + entry * 2 + 1, tl.load(new_counts + row * 2 + 1).to(tl.int16))
    else:
        tl.store(counts + entry * 2, tl.zeros([], tl.int16))
        tl.store(counts + entry * 2 + 1, tl.zeros([], tl.int16))
    tl.store(table + entry * E + e, fresh, mask=inside)


@triton.jit(do_not_specialize=["m"])
def _finish_kernel(
    cursor, blocks, format_id, need, ends, pages, m, LH: tl.constexpr, LHP: tl.constexpr, FORMAT_ID: tl.constexpr
):
    """grid (n,): storage formats, pages of each block `pages[n]`, and both cursors (first program)."""
    i = tl.program_id(0).to(tl.int64)
    tl.store(format_id + tl.load(blocks + i), tl.full([], FORMAT_ID, tl.int8))
    row = tl.arange(0, LHP)
    tl.store(pages + i, tl.sum(tl.load(need + i * LH + row, mask=row < LH, other=0), 0).to(tl.int32))
    if i == 0:
        taken = tl.load(ends + m - 1)
        tl.store(cursor, tl.load(cursor) + taken)
        tl.store(cursor + 1, tl.load(cursor + 1) + tl.load(ends + 2 * m - 1) - taken)


@triton.jit
def _take_kernel(
    ring, cursor, table, counts, blocks, size, LH: tl.constexpr, E: tl.constexpr, EP: tl.constexpr
):
    """grid (m,): take whole uncompressed table rows, in row order."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    entry = tl.load(blocks + row // LH).to(tl.int64) * LH + row % LH
    ids = tl.load(ring + (tl.load(cursor) + row * E + e) % size, mask=e < E, other=0)
    tl.store(table + entry * E + e, ids, mask=e < E)
    tl.store(counts + entry * 2, tl.zeros([], tl.int16))
    tl.store(counts + entry * 2 + 1, tl.zeros([], tl.int16))


@triton.jit
def _taken_kernel(cursor, blocks, format_id, query_counts, PAGES: tl.constexpr):
    """grid (n,): the blocks' states, and the cursor (first program)."""
    i = tl.program_id(0)
    block = tl.load(blocks + i)
    tl.store(format_id + block, tl.zeros([], tl.int8))
    tl.store(query_counts + block, tl.zeros([], tl.int32))
    if i == 0:
        tl.store(cursor, tl.load(cursor) + tl.num_programs(0).to(tl.int64) * PAGES)


def _constants(layout: PoolLayout) -> tuple[int, int, int]:
    """Rows per block, entries per row, entries rounded up to a power of two."""
    entries = layout.head_pages_bf16
    return layout.layers * layout.heads, entries, triton.next_power_of_2(entries)


def _swap_constants(store: PageStore, format_id: int) -> tuple:
    """Those of `_constants`, rows rounded up to a power of two, and the count kernel's data of the block formats."""
    if (known := store.launch_constants.get(("swap", format_id))) is None:
        layout, p = store.layout, store.layout.block_tokens
        rows, entries, padded = _constants(layout)
        block_formats = tuple(tier_tokens(layout, r) for r in store.block_formats)
        to = block_formats[format_id] if format_id > 0 else (0, 0)
        known = rows, entries, padded, triton.next_power_of_2(rows), (p, triton.next_power_of_2(p), to, block_formats)
        store.launch_constants["swap", format_id] = known
    return known


def exchange_pages(
    store: PageStore,
    blocks: torch.Tensor,
    format_id: int,
    *,
    tiers: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Exchange:
    """Move `blocks[n]` (int64, distinct) to packed format `format_id`, or release them (-1), in the table and the ring;
    no page is written.

    A row's pages follow from `tiers` (int8 `[m, P]`, contiguous) or from token `counts` (int32 `[m, 2]`). With neither,
    every token is kept high.
    """
    n, (rows, entries, padded, padded_rows, formats) = blocks.numel(), _swap_constants(store, format_id)
    # a release (format id -1) takes no pages and records none
    m, gets, ring, cursor = n * rows, format_id > 0, store.ring, store.cursor
    page_counts, need = cursor.new_empty((4, m)), cursor.new_empty(2 * m)
    given = "tiers" if tiers is not None else "nothing" if counts is None else "counts"
    ids = old = None
    if gets:
        # Two tensors: the alignment of the second half of one tensor, and with it the compiled kernel, varies with m.
        ids, old = ring.new_empty((m, entries)), ring.new_empty((m, entries))
        if counts is None:
            counts = ring.new_empty((m, 2))
    pages = ring.new_empty(n)
    _count_kernel[(m,)](
        counts if tiers is None else tiers, counts, blocks, store.format_id, store.counts, page_counts, need, m, rows,
        entries, *formats, given, num_warps=1,
    )  # fmt: skip
    ends = need.cumsum(0)
    _exchange_kernel[(m,)](
        ring, cursor, store.table, store.counts, blocks, page_counts, need, ends, counts, ids, old, m, ring.numel(),
        rows, entries, padded, gets, num_warps=1,
    )  # fmt: skip
    _finish_kernel[(n,)](
        cursor, blocks, store.format_id, need, ends, pages, m, rows, padded_rows, format_id, num_warps=1
    )
    return Exchange(ids, page_counts, old, pages)


def release(store: PageStore, blocks: torch.Tensor) -> None:
    """`reference.release` as kernels."""
    if blocks.numel():
        exchange_pages(store, blocks.long(), -1)


def take_bf16(store: PageStore, blocks: torch.Tensor) -> None:
    """`reference.take_bf16` as kernels."""
    if not blocks.numel():
        return
    blocks, n = blocks.long(), blocks.numel()
    rows, entries, padded = _constants(store.layout)
    _take_kernel[(n * rows,)](
        store.ring, store.cursor, store.table, store.counts, blocks, store.ring.numel(), rows, entries, padded,
        num_warps=1,
    )  # fmt: skip
    _taken_kernel[(n,)](store.cursor, blocks, store.format_id, store.query_counts, rows * entries, num_warps=1)

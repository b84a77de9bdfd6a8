"""Free-page ring and block table: allocation and release of pages by prefix sums on the device.

Nothing here reads device data on the host. Overflow is not checked: the CPU ledger charges every block before its
operation is queued, so the ring always has the pages (`check_invariants` is for tests).
"""

from __future__ import annotations

import torch

from ..layout import BlockFormat
from ..store import SCRATCH_BLOCK, SCRATCH_PAGE, PageStore


def _starts(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exclusive prefix sum int64 `[m]` and total `[]` of `counts[m]`."""
    ends = counts.to(torch.int64).cumsum(0)
    return ends - counts, ends[-1]


def take_pages(store: PageStore, counts: torch.Tensor) -> torch.Tensor:
    """Pop `counts[m]` pages for m rows, in row order. Returns int32 ids `[m, E]`, page 0 after each row's count."""
    if not counts.numel():
        return store.ring.new_zeros((0, store.layout.head_pages_bf16))
    starts, total = _starts(counts)
    j = torch.arange(store.layout.head_pages_bf16, device=store.device)
    at = (store.cursor[0] + starts.unsqueeze(-1) + j) % store.ring.numel()
    ids = torch.where(j < counts.unsqueeze(-1), store.ring[at], SCRATCH_PAGE)
    store.cursor[0] += total
    return ids


def return_pages(store: PageStore, ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Push the first `counts[m]` of each row of `ids[m, E]` onto the ring, in row order."""
    if not counts.numel():
        return
    starts, total = _starts(counts)
    tail = store.cursor[1]
    j = torch.arange(ids.shape[1], device=store.device)
    # Page 0 never enters the ring, so at most n-1 of its n slots are in use. The slot at the new tail is free and takes
    # the entries after the counts, which keeps all shapes independent of the data.
    at = torch.where(j < counts.unsqueeze(-1), tail + starts.unsqueeze(-1) + j, tail + total)
    store.ring[at % store.ring.numel()] = ids.to(torch.int32)
    store.cursor[1] += total


def tier_pages(store: PageStore, block_format: BlockFormat, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages (high, low), int64 of the leading shape, of packed heads with token counts `[..., 2]` at `block_format`."""
    c = counts.to(torch.int64)
    high = store.layout.page(block_format.high).tokens
    pages_high = (c[..., 0] + high - 1) // high
    if block_format.low is None:
        return pages_high, torch.zeros_like(pages_high)
    low = store.layout.page(block_format.low).tokens
    return pages_high, (c[..., 1] + low - 1) // low


def block_tier_pages(store: PageStore, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages (high, low) `[n, L, H]` of blocks in any storage format; bf16 counts as high, a free block has none."""
    format_id = store.format_id[blocks].view(-1, 1, 1)
    counts = store.counts[blocks]
    high = (format_id == 0).to(torch.int64).expand(counts.shape[:-1]) * store.layout.head_pages_bf16
    low = torch.zeros_like(high)
    # One pass per block format with constants instead of a lookup, so a step creates no tensor from host data.
    for r, spec in enumerate(store.block_formats):
        if r:
            pages_high, pages_low = tier_pages(store, spec, counts)
            high = torch.where(format_id == r, pages_high, high)
            low = torch.where(format_id == r, pages_low, low)
    return high, low


def block_head_pages(store: PageStore, blocks: torch.Tensor) -> torch.Tensor:
    """Pages int64 `[n, L, H]` of each head of `blocks[n]`, in any storage format."""
    high, low = block_tier_pages(store, blocks)
    return high + low


def table_order(rows: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Table rows `[..., E]` (high from the left, low from the right) as high, then low entries, left-aligned."""
    entries = rows.shape[-1]
    j = torch.arange(entries, device=rows.device)
    h = high.unsqueeze(-1)
    at = torch.where(j < h, j, (entries - 1 - (j - h)).clamp(0, entries - 1))
    return torch.where(j < h + low.unsqueeze(-1), rows.gather(-1, at), SCRATCH_PAGE)


def table_rows(ids: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Inverse of `table_order`: rows `[m, E]` of ids (high, then low), high from the left, low from the right, page 0
    between."""
    entries = ids.shape[1]
    e = torch.arange(entries, device=ids.device).expand(ids.shape)
    h, back = high.unsqueeze(-1), entries - 1 - e
    from_low = back < low.unsqueeze(-1)
    at = torch.where(from_low, h + back, e).clamp(max=entries - 1)
    return torch.where((e < h) | from_low, ids.gather(1, at), SCRATCH_PAGE)


def take_bf16(store: PageStore, blocks: torch.Tensor) -> None:
    """Give `blocks[n]` (distinct, free) their uncompressed pages: format id 0, counts 0, query counts 0.

    Takes L*H*E pages per block, in (block, layer, head, entry) order.
    """
    blocks = blocks.long()
    shape = (blocks.numel(), *store.table.shape[1:])
    n = shape[0] * shape[1] * shape[2] * shape[3]
    at = (store.cursor[0] + torch.arange(n, device=store.device)) % store.ring.numel()
    store.table[blocks] = store.ring[at].view(shape)
    store.cursor[0] += n
    # Not `counts[blocks] = 0`: assigning a Python number copies it from the host and waits.
    store.counts.index_fill_(0, blocks, 0)
    store.format_id.index_fill_(0, blocks, 0)
    store.query_counts.index_fill_(0, blocks, 0)


def release(store: PageStore, blocks: torch.Tensor) -> None:
    """Push all pages of `blocks[n]` (distinct) in (block, layer, head, high then low entry) order; the format id
    becomes -1.

    The table row then names page 0, so a late write lands in the scratch page. A free block gives nothing back.
    """
    blocks = blocks.long()
    high, low = block_tier_pages(store, blocks)
    ids = table_order(store.table[blocks], high, low)
    return_pages(store, ids.flatten(0, 2), (high + low).flatten())
    store.table.index_fill_(0, blocks, SCRATCH_PAGE)
    store.counts.index_fill_(0, blocks, 0)
    store.format_id.index_fill_(0, blocks, -1)


def check_invariants(store: PageStore) -> None:
    """Raise AssertionError unless every page but page 0 is exactly once in the ring or in one live table row.

    Reads everything back to the host: for tests and debugging.
    """
    n = store.ring.numel()
    head, tail = store.cursor.tolist()
    assert 0 <= tail - head <= n - 1, f"ring cursors {head}, {tail} with {n} pages"
    ring = store.ring.cpu()
    free = ring[(torch.arange(head, tail)) % n].long()
    blocks = torch.arange(store.table.shape[0], device=store.device)
    blocks = blocks[blocks != SCRATCH_BLOCK]
    high, low = block_tier_pages(store, blocks)
    rows = table_order(store.table[blocks], high, low).cpu().flatten(0, 2).long()
    live = torch.arange(rows.shape[-1]) < (high + low).cpu().flatten().unsqueeze(-1)
    used = rows[live]
    seen = torch.bincount(torch.cat((free, used)), minlength=n)
    assert seen.numel() == n, "page id out of range"
    assert seen[SCRATCH_PAGE] == 0, "page 0 is in use"
    wrong = (seen[1:] != 1).nonzero().flatten() + 1
    assert not wrong.numel(), f"pages lost or doubled: {wrong[:8].tolist()}"
    limit = store.layout.head_pages_bf16
    assert int((high + low).max()) <= limit if blocks.numel() else True, "a table row overflows"
    assert int(store.format_id[SCRATCH_BLOCK]) == 0
    assert not store.table[SCRATCH_BLOCK].any()

"""Blocks to records and back, in plain torch. `layout.RecordLayout` has the bytes of a record.

A record holds exactly the bytes of the pages, so a block comes back unchanged.
"""

from __future__ import annotations

import torch

from ..layout import RecordLayout
from ..pages.reference import block_tier_pages, table_order, table_rows, take_bf16, take_pages, tier_pages
from ..store import PageStore


def record_segment(
    layout: RecordLayout, records: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """View of one segment of uint8 `records` `[n, bytes]` as `[n, *shape]` of `dtype`."""
    at, size = layout.offsets[name], dtype.itemsize * torch.Size(shape).numel()
    return records[:, at : at + size].view(dtype).unflatten(1, shape)


def write_meta(store: PageStore, blocks: torch.Tensor, records: torch.Tensor) -> None:
    """Write all segments but the pages."""
    layout, g = RecordLayout(store.layout), store.layout
    heads = (g.layers, g.heads)
    record_segment(layout, records, "counts", torch.int16, (*heads, 2)).copy_(store.counts[blocks])
    record_segment(layout, records, "query_count", torch.int32, (1,)).copy_(store.query_counts[blocks].unsqueeze(1))
    record_segment(layout, records, "headers", torch.float16, (*heads, 2, g.head_dim)).copy_(store.headers[blocks])


def read_meta(store: PageStore, blocks: torch.Tensor, records: torch.Tensor) -> None:
    """Read the segments that `write_meta` wrote, except the counts, which the blocks got when their pages were
    taken."""
    layout, g = RecordLayout(store.layout), store.layout
    query_count = record_segment(layout, records, "query_count", torch.int32, (1,)).squeeze(1)
    store.query_counts.index_copy_(0, blocks, query_count)
    headers = record_segment(layout, records, "headers", torch.float16, (g.layers, g.heads, 2, g.head_dim))
    store.headers.index_copy_(0, blocks, headers)


def _places(store: PageStore, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of `blocks[n]`: for each its row in `blocks`, its place in the block's record and its id, all int64."""
    high, low = block_tier_pages(store, blocks)
    ids = table_order(store.table[blocks], high, low)
    count = (high + low).flatten(1)
    first = count.cumsum(1) - count
    entry = torch.arange(ids.shape[-1], device=ids.device)
    row, head, at = (entry < count.unsqueeze(-1)).nonzero(as_tuple=True)
    return row, first[row, head] + at, ids.flatten(1, 2)[row, head, at].long()


def take_stored(store: PageStore, blocks: torch.Tensor, format_id: int, counts: torch.Tensor) -> None:
    """Give `blocks[n]` (distinct, free) pages of format `format_id` for token counts int16 `[n, L, H, 2]`.

    Nothing reads the pages until `read_records` has filled them.
    """
    blocks = blocks.long()
    if not blocks.numel():
        return
    if format_id == 0:
        take_bf16(store, blocks)
        return
    flat = counts.reshape(-1, 2).long()
    high, low = tier_pages(store, store.block_formats[format_id], flat)
    ids = take_pages(store, high + low)
    store.table[blocks] = table_rows(ids, high, low).view(-1, *store.table.shape[1:]).to(torch.int32)
    store.counts[blocks] = counts.to(torch.int16)
    store.format_id.index_fill_(0, blocks, format_id)
    store.query_counts.index_fill_(0, blocks, 0)


def write_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor) -> None:
    """Write `blocks[n]` (taken, full) to uint8 `records` `[n, bytes]`. Bytes after the pages stay unchanged."""
    blocks = blocks.long()
    write_meta(store, blocks, records)
    row, place, ids = _places(store, blocks)
    _pages(store, records)[row, place] = store.pages[ids]


def read_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, *, first: int = 0) -> None:
    """Fill `blocks[first : first + n]`, which `take_stored` gave pages, from their records, uint8 `[n, bytes]`."""
    blocks = blocks[first : first + len(records)].long()
    read_meta(store, blocks, records)
    row, place, ids = _places(store, blocks)
    store.pages[ids] = _pages(store, records)[row, place]


def _pages(store: PageStore, records: torch.Tensor) -> torch.Tensor:
    """View of as many pages as fit after the other segments of `records`, uint8 `[n, pages, page_bytes]`."""
    at, size = RecordLayout(store.layout).offsets["pages"], store.layout.page_bytes
    room = (records.shape[1] - at) // size
    return records[:, at : at + room * size].unflatten(1, (room, -1))

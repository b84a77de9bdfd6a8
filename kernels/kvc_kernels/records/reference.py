"""Blocks to records and back, in plain torch. `layout.RecordLayout` has the bytes of a record.

A record holds exactly the bytes of the pages, so a block comes back unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Places(NamedTuple):
    """Pages of n blocks, `ids`, and their places in the blocks' records, both int64 `[n, L * H * E]`. A place of -1
    means no page."""

    ids: torch.Tensor
    places: torch.Tensor

    def part(self, rows: slice) -> Places:
        return Places(self.ids[rows], self.places[rows])


def record_places(store: PageStore, blocks: torch.Tensor) -> Places:
    """The places of `blocks[n]` (taken), for one or several calls of `write_records` or `read_records`."""
    blocks = blocks.long()
    high, low = block_tier_pages(store, blocks)
    ids = table_order(store.table[blocks], high, low).long()
    count = (high + low).flatten(1)
    first = count.cumsum(1) - count
    entry = torch.arange(ids.shape[-1], device=ids.device)
    places = torch.where(entry < count.unsqueeze(-1), first.unsqueeze(-1) + entry, -1)
    return Places(ids.flatten(1), places.flatten(1))


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


def write_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, places: Places) -> None:
    """Write `blocks[n]` (taken, full), with their `places`, to uint8 `records` `[n, bytes]`. Bytes after the pages
    stay unchanged."""
    blocks = blocks.long()
    write_meta(store, blocks, records)
    row, entry = (places.places >= 0).nonzero(as_tuple=True)
    _pages(store, records)[row, places.places[row, entry]] = store.pages[places.ids[row, entry]]


def read_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, places: Places) -> None:
    """Fill `blocks[n]`, which `take_stored` gave pages, with their `places` from their records, uint8 `[n, bytes]`."""
    blocks = blocks.long()
    read_meta(store, blocks, records)
    row, entry = (places.places >= 0).nonzero(as_tuple=True)
    store.pages[places.ids[row, entry]] = _pages(store, records)[row, places.places[row, entry]]


def _pages(store: PageStore, records: torch.Tensor) -> torch.Tensor:
    """View of as many pages as fit after the other segments of `records`, uint8 `[n, pages, page_bytes]`."""
    at, size = RecordLayout(store.layout).offsets["pages"], store.layout.page_bytes
    room = (records.shape[1] - at) // size
    return records[:, at : at + room * size].unflatten(1, (room, -1))

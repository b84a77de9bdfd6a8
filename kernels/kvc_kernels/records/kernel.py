"""Records on the GPU: `reference` with one launch for all pages of all blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import RecordLayout
from ..pages.kernel import exchange_pages, take_bf16
from ..store import PageStore
from .reference import page_places, read_meta, write_meta

CHUNK = 1024  # words of 8 bytes that a program moves at a time
WARPS = 4


@triton.jit
def _copy_pages_kernel(
    pages, records, ids, places, stride, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TO_RECORDS: tl.constexpr,
):
    """grid (n * PER_BLOCK,): copy one page to its place in the record of its block, or back.

    pages int64 `[num_pages, WORDS]`; records int64, rows `stride` words apart, from their first page on; ids, places
    int64 `[n * PER_BLOCK]`, a place of -1 means no page.
    """
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(places + i)
    if place >= 0:
        page = pages + tl.load(ids + i) * WORDS
        record = records + (i // PER_BLOCK) * stride + place * WORDS
        for at in tl.static_range(0, WORDS, CHUNK):
            word = at + tl.arange(0, CHUNK)
            if TO_RECORDS:
                tl.store(record + word, tl.load(page + word, mask=word < WORDS), mask=word < WORDS)
            else:
                tl.store(page + word, tl.load(record + word, mask=word < WORDS), mask=word < WORDS)


def _copy(store: PageStore, blocks: torch.Tensor, records: torch.Tensor, to_records: bool) -> None:
    ids, places = page_places(store, blocks)
    first = records[:, RecordLayout(store.layout).offsets["pages"] :]
    _copy_pages_kernel[(ids.numel(),)](
        store.pages.view(torch.int64), first.view(torch.int64), ids, places, records.stride(0) // 8,
        store.layout.page_bytes // 8, ids.shape[1], CHUNK, to_records, num_warps=WARPS,
    )  # fmt: skip


def take_stored(store: PageStore, blocks: torch.Tensor, format_id: int, counts: torch.Tensor) -> None:
    """`reference.take_stored` as kernels."""
    blocks = blocks.long()
    if not blocks.numel():
        return
    if format_id == 0:
        take_bf16(store, blocks)
        return
    exchange_pages(store, blocks, format_id, counts=counts.reshape(-1, 2).to(torch.int32))
    store.query_counts.index_fill_(0, blocks, 0)


def write_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor) -> None:
    """`reference.write_records` as kernels. Rows of `records` are a multiple of 8 bytes apart."""
    blocks = blocks.long()
    write_meta(store, blocks, records)
    _copy(store, blocks, records, True)


def read_records(store: PageStore, blocks: torch.Tensor, records: torch.Tensor) -> None:
    """`reference.read_records` as kernels. Rows of `records` are a multiple of 8 bytes apart."""
    blocks = blocks.long()
    read_meta(store, blocks, records)
    _copy(store, blocks, records, False)

"""Which blocks the observing queries of a forward look at: a list, made on the device once a forward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.format_class import ladder_classes, rung_class_masks
from ..store import PageStore

MAX_CLASSES = 12  # bits that a word of the list has for them
MAX_PLACES = 1 << 20


@triton.jit(do_not_specialize=["row_stride", "n_requests", "capacity"])
def _list_kernel(
    requests, row_blocks, row_stride, n_requests, rung, rung_tiers, found, listed, capacity,
    P: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):
    """grid (B, places / STEP). The requests' places one after the other: see `ObservedBlocks`.

    Shared blocks hold a common prefix, so their places agree.
    """
    me = tl.program_id(0)
    mine = tl.load(requests + me * 4)
    j = tl.program_id(1) * STEP + tl.arange(0, STEP)
    held = j * P < mine
    block = tl.load(row_blocks + me.to(tl.int64) * row_stride + j, mask=held, other=0)
    tiers = tl.load(rung_tiers + tl.maximum(tl.load(rung + block, mask=held, other=0).to(tl.int32), 0))
    first = tl.zeros([STEP], tl.int32) + n_requests
    last = tl.zeros([STEP], tl.int32) - 1
    before = me * 0
    places = me * 0
    for at in range(0, n_requests, ROWS):
        r = at + tl.arange(0, ROWS)
        tokens = tl.load(requests + r * 4, mask=r < n_requests, other=0)
        takes = (tokens + P - 1) // P
        before += tl.sum(tl.where(r < me, takes, 0), 0)
        places += tl.sum(takes, 0)
        # A place behind a request's end names any block.
        live = (tokens[:, None] > (j * P)[None, :]) & held[None, :]
        other = tl.load(row_blocks + (r.to(tl.int64) * row_stride)[:, None] + j[None, :], mask=live, other=-1)
        same = live & (other == block[None, :])
        first = tl.minimum(first, tl.min(tl.where(same, r[:, None], n_requests), 0))
        last = tl.maximum(last, tl.max(tl.where(same, r[:, None], -1), 0))
    # Who is not the first to hold a block leaves it to that request.
    tiers = tl.where(first == me, tiers, 0)
    what = (block.to(tl.int64) << 32) | (j << 12).to(tl.int64) | tiers.to(tl.int64)
    who = (tl.zeros([STEP], tl.int64) + me.to(tl.int64) << 32) | last.to(tl.int64)
    tl.store(listed + before + j, what, mask=held)
    tl.store(listed + capacity + before + j, who, mask=held)
    if (me == 0) & (tl.program_id(1) == 0):
        tl.store(found, places)


class ObservedBlocks:
    """Lists int64 `[2, places]` of each place of each observing request: block << 32 | place in the request << 12 |
    classes that the block holds tokens of, a bit each (none: an earlier request lists it); and request << 32 | last
    request that holds the block, too. `found` int32 `[1]`: how many places.
    """

    def __init__(self, store: PageStore):
        classes = len(ladder_classes(store))
        if classes > MAX_CLASSES:
            raise ValueError(f"a list has words for {MAX_CLASSES} formats and sides, the ladder has {classes}")
        self.store = store
        self._tiers = torch.tensor(rung_class_masks(store), dtype=torch.int32, device=store.device)
        self.found = torch.zeros(1, dtype=torch.int32, device=store.device)

    def room(self, places: int) -> torch.Tensor:
        """Memory for a list of so many places."""
        return torch.empty((2, max(1, places)), dtype=torch.int64, device=self.store.device)

    def update(self, requests: torch.Tensor, row_blocks: torch.Tensor, listed: torch.Tensor) -> None:
        """`requests` int32 `[B, 4]`, tokens first (0: nobody observes), `row_blocks[B, NB]` int32; does not sync."""
        n, blocks = row_blocks.shape
        if blocks >= MAX_PLACES:
            raise ValueError(f"a list has words for {MAX_PLACES} blocks a request, got {blocks}")
        if n and blocks:
            _list_kernel[(n, -(-blocks // 32))](
                requests, row_blocks, row_blocks.stride(0), n, self.store.rung, self._tiers, self.found, listed,
                listed.shape[1], self.store.layout.block_tokens, 32, 32, num_warps=4,
            )  # fmt: skip

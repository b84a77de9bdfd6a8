"""List of the blocks that receive attention scores in a forward, built on the device once per forward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.format_class import format_class_masks, format_tiers
from ..store import PageStore

MAX_CLASSES = 12  # bits for classes in a word of the list
MAX_PLACES = 1 << 20


@triton.jit(do_not_specialize=["row_stride", "n_requests", "capacity"])
def _list_kernel(
    requests, row_blocks, row_stride, n_requests, format_id, tier_masks, num_places, listed, capacity,
    P: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):
    """grid (B, places / STEP). List the requests' places one after the other: see `BlockPlaces`.

    Shared blocks hold a common prefix, so their places agree.
    """
    request = tl.program_id(0)
    num_tokens = tl.load(requests + request * 4)
    j = tl.program_id(1) * STEP + tl.arange(0, STEP)
    in_request = j * P < num_tokens
    block = tl.load(row_blocks + request.to(tl.int64) * row_stride + j, mask=in_request, other=0)
    tiers = tl.load(tier_masks + tl.maximum(tl.load(format_id + block, mask=in_request, other=0).to(tl.int32), 0))
    first = tl.zeros([STEP], tl.int32) + n_requests
    last = tl.zeros([STEP], tl.int32) - 1
    before = request * 0
    places = request * 0
    for at in range(0, n_requests, ROWS):
        r = at + tl.arange(0, ROWS)
        tokens = tl.load(requests + r * 4, mask=r < n_requests, other=0)
        num_blocks = (tokens + P - 1) // P
        before += tl.sum(tl.where(r < request, num_blocks, 0), 0)
        places += tl.sum(num_blocks, 0)
        # A place after a request's end holds an arbitrary block id.
        live = (tokens[:, None] > (j * P)[None, :]) & in_request[None, :]
        other_block = tl.load(row_blocks + (r.to(tl.int64) * row_stride)[:, None] + j[None, :], mask=live, other=-1)
        same = live & (other_block == block[None, :])
        first = tl.minimum(first, tl.min(tl.where(same, r[:, None], n_requests), 0))
        last = tl.maximum(last, tl.max(tl.where(same, r[:, None], -1), 0))
    # The first request that holds a shared block processes it.
    tiers = tl.where(first == request, tiers, 0)
    block_word = (block.to(tl.int64) << 32) | (j << 12).to(tl.int64) | tiers.to(tl.int64)
    request_word = (tl.zeros([STEP], tl.int64) + request.to(tl.int64) << 32) | last.to(tl.int64)
    tl.store(listed + before + j, block_word, mask=in_request)
    tl.store(listed + capacity + before + j, request_word, mask=in_request)
    if (request == 0) & (tl.program_id(1) == 0):
        tl.store(num_places, places)


class BlockPlaces:
    """List int64 `[2, places]` of all block places of all sampled requests, two words each.

    Word 0: block << 32 | place in the request << 12 | one bit per class of which the block holds tokens (no bit: an
    earlier request lists the block). Word 1: request << 32 | last request that also holds the block. `num_places` int32
    `[1]`.
    """

    def __init__(self, store: PageStore):
        classes = len(format_tiers(store))
        if classes > MAX_CLASSES:
            raise ValueError(f"a list word holds {MAX_CLASSES} format classes, the store has {classes}")
        self.store = store
        self._tiers = torch.tensor(format_class_masks(store), dtype=torch.int32, device=store.device)
        self.num_places = torch.zeros(1, dtype=torch.int32, device=store.device)

    def room(self, places: int) -> torch.Tensor:
        """Memory for a list of `places` places."""
        return torch.empty((2, max(1, places)), dtype=torch.int64, device=self.store.device)

    def update(self, requests: torch.Tensor, row_blocks: torch.Tensor, listed: torch.Tensor) -> None:
        """Fill `listed` from `requests` int32 `[B, 4]`, tokens first (0: not sampled), and `row_blocks[B, NB]` int32;
        does not sync.
        """
        n, blocks = row_blocks.shape
        if blocks >= MAX_PLACES:
            raise ValueError(f"a list word holds {MAX_PLACES} blocks per request, got {blocks}")
        if n and blocks:
            _list_kernel[(n, -(-blocks // 32))](
                requests, row_blocks, row_blocks.stride(0), n, self.store.format_id, self._tiers, self.num_places,
                listed,
                listed.shape[1], self.store.layout.block_tokens, 32, 32, num_warps=4,
            )  # fmt: skip

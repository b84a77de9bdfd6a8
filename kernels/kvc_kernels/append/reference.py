"""Append of new K/V rows to the uncompressed pages of open blocks."""

from __future__ import annotations

import torch

from ..common.bits import bf16_rows, segment
from ..formats import BF16
from ..store import PageStore


def append(
    store: PageStore,
    layer: int,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Store `k[N, H, D]`, `v[N, H, D]` at token `offsets[N]` (0..P-1) of bf16 `blocks[N]` of `layer`.

    Page = table[block, layer, head, offset // T0], slot = offset % T0. In layouts with scores the slot's score is set
    to 0, because a reused page still holds the scores of its previous owner. Rows of padded requests have block 0.
    """
    page = store.layout.page(BF16)
    entry = torch.div(offsets, page.tokens, rounding_mode="floor")
    slot = (offsets - entry * page.tokens).unsqueeze(-1).long()
    heads = torch.arange(store.layout.heads, device=store.device)
    ids = store.table[blocks.unsqueeze(-1), layer, heads, entry.unsqueeze(-1)].long()
    rows_k, rows_v = bf16_rows(page, store.pages, store.dtype)
    rows_k[ids, slot] = k.to(store.dtype)
    rows_v[ids, slot] = v.to(store.dtype)
    scores = segment(page, store.pages, "scores", torch.float32)
    if scores is not None:
        scores[ids, slot] = scores.new_zeros(())  # a Python 0 is copied from the host


class ReferenceAppend:
    """`append` for the layers of a forward: `plan` once a forward, `run` for each layer."""

    def __init__(self, store: PageStore):
        self.store = store

    def plan(self, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Plan for tokens `offsets[N]` of bf16 `blocks[N]`."""
        self._blocks, self._offsets = blocks, offsets

    def run(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k`, `v` `[N, H, D]`."""
        append(self.store, layer, self._blocks, self._offsets, k, v)

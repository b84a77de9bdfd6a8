"""Snapshot of a decode step, shared by all layers: the block table of each request and the place of its new token."""

from __future__ import annotations

import torch

from ..store import PageStore


def decode_snapshot(
    store: PageStore,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    write: torch.Tensor,
    *,
    columns: int,
) -> None:
    """Copy the step into buffers that may be larger: B requests, the first `columns` blocks of each.

    `req_to_token[R, C]` (slot of each token), `req_pool_indices[B]` (row of each request) and `seq_lens[B]` (including
    the new token, at least 1) are int32 or int64. Writes block ids to `rows` int32 `[>= B, >= columns]`, lengths to
    `lens` int32 `[>= B]`, and block and offset of the new token to `write` int64 `[2, >= B]`. `columns` covers the
    longest request. A place after a request's end gets the block that its row of `req_to_token` names there.
    """
    n, p = len(seq_lens), store.layout.block_tokens
    # The first slot of a block determines the block.
    blocks = req_to_token[:, ::p][req_pool_indices, :columns] // p
    last = seq_lens.long() - 1
    rows[:n, :columns] = blocks
    lens[:n] = seq_lens
    write[0, :n] = blocks.gather(1, (last // p)[:, None])[:, 0]
    write[1, :n] = last % p

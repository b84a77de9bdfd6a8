"""What all layers of one decode step use: the blocks of each request and where its new token goes."""

from __future__ import annotations

import torch


def decode_snapshot(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    write: torch.Tensor,
    *,
    block_tokens: int,
    columns: int,
) -> None:
    """Copy the step into buffers that may be larger: B requests, the leading `columns` blocks of each.

    `req_to_token[R, C]` (slot of each token), `req_pool_indices[B]` (row of each request) and `seq_lens[B]` (the new
    token counted, at least 1) are int32 or int64. Into `rows` int32 `[>= B, >= columns]` block ids, into `lens` int32
    `[>= B]` the lengths, into `write` int64 `[2, >= B]` block of the new token and its place there. `columns` covers
    the longest request; a place behind a request's end gets what its row of `req_to_token` names there.
    """
    n, p = len(seq_lens), block_tokens
    # Only the first slot of every block is read; the rest of a block follows from it.
    blocks = req_to_token[:, ::p][req_pool_indices, :columns] // p
    last = seq_lens.long() - 1
    rows[:n, :columns] = blocks
    lens[:n] = seq_lens
    write[0, :n] = blocks.gather(1, (last // p)[:, None])[:, 0]
    write[1, :n] = last % p

"""`decode_snapshot` in one launch, directly into the buffers that a captured step reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..store import PageStore

STEP = 256  # blocks per program


# The two inputs may be slices of a server's buffers. Their alignment must not select another compiled kernel.
@triton.jit(
    do_not_specialize=["row_stride", "rows_stride", "write_stride", "columns"],
    do_not_specialize_on_alignment=["req_pool_indices", "seq_lens"],
)
def _snapshot_kernel(
    req_to_token, row_stride, req_pool_indices, seq_lens, rows, rows_stride, lens, write, write_stride, columns,
    P: tl.constexpr, STEP: tl.constexpr,
):
    """grid (B, columns / STEP): STEP blocks of one request. A request's first program also writes length and place."""
    b = tl.program_id(0).to(tl.int64)
    row = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * row_stride
    j = tl.program_id(1) * STEP + tl.arange(0, STEP)
    slots = tl.load(row + j.to(tl.int64) * P, mask=j < columns, other=0)
    tl.store(rows + b * rows_stride + j, (slots // P).to(tl.int32), mask=j < columns)
    if tl.program_id(1) == 0:
        seq_len = tl.load(seq_lens + b).to(tl.int64)
        tl.store(lens + b, seq_len.to(tl.int32))
        last = seq_len - 1
        offset = last % P
        tl.store(write + b, tl.load(row + last - offset).to(tl.int64) // P)
        tl.store(write + write_stride + b, offset)


def decode_snapshot_triton(
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
    """`decode_snapshot` as a kernel; does not sync. The last dimension of every tensor is contiguous."""
    if not len(seq_lens):
        return
    if len(seq_lens) > rows.shape[0] or columns > rows.shape[1]:
        raise ValueError(f"the buffers hold {tuple(rows.shape)}, got {len(seq_lens)} requests of {columns} blocks")
    _snapshot_kernel[(len(seq_lens), triton.cdiv(columns, STEP))](
        req_to_token, req_to_token.stride(0), req_pool_indices, seq_lens, rows, rows.stride(0), lens, write,
        write.stride(0), columns, store.layout.block_tokens, STEP, num_warps=4,
    )  # fmt: skip

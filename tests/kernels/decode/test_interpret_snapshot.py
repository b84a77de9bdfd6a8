"""The snapshot of a decode step: the kernel against the reference."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.decode.snapshot_kernel import decode_snapshot_triton
from tests.support.pages import make_store

BATCH, BLOCKS = 6, 300  # sizes of the buffers


def table(p, rows, columns, dtype, gen):
    """Slots of whole blocks, as the allocator assigns them; row 0 belongs to the scratch block. The table ends within a
    block."""
    blocks = torch.randint(1, 10_000, (rows, columns), generator=gen)
    slots = blocks.repeat_interleave(p, 1) * p + torch.arange(columns * p) % p
    slots[0] = 0
    return slots[:, : columns * p - p // 2].to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("p", [32, 128])
def test_snapshot_equals_reference(dtype, p):
    gen, store = torch.Generator().manual_seed(p), make_store(block_tokens=p)
    req_to_token = table(p, 9, BLOCKS, dtype, gen)
    want, got = (
        (
            torch.full((BATCH, BLOCKS), 7, dtype=torch.int32),
            torch.full((BATCH,), 7, dtype=torch.int32),
            torch.full((2, BATCH), 7, dtype=torch.int64),
        )
        for _ in range(2)
    )
    capacity = req_to_token.shape[1]
    cases = (
        # Lengths on both sides of a block border, and a request that fills its row of the table.
        ([3, 5, 1, 8], [p, p + 1, 2 * p - 1, capacity]),
        # Padded rows of a captured step name row 0 and one token.
        ([4, 0, 0], [3 * p + 5, 1, 1]),
        ([0] * BATCH, [1] * BATCH),
        ([2], [1]),
    )
    for rows, lens in cases:
        lens_cpu, rows = lens, torch.tensor([9, *rows], dtype=dtype)[1:]  # a slice, at an odd address
        lens = torch.tensor(lens, dtype=dtype)
        columns = -(-max(lens_cpu) // p)
        ops.decode_snapshot(store, req_to_token, rows, lens, *want, columns=columns)
        decode_snapshot_triton(store, req_to_token, rows, lens, *got, columns=columns)
        # Compare whole buffers, because entries outside the step must not change.
        assert all(torch.equal(a, b) for a, b in zip(want, got))
        for i, n in enumerate(lens_cpu):
            slot = int(req_to_token[rows[i], n - 1])
            assert want[2][:, i].tolist() == ([slot // p, slot % p] if int(rows[i]) else [0, (n - 1) % p])

"""`decode_snapshot_triton` on the GPU: what `decode_snapshot` writes, for steps of every size and slices of buffers."""

import pytest
import torch

from kvc_kernels import ops
from tests.support.pages import make_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_snapshot():
    from kvc_kernels.decode.snapshot_kernel import decode_snapshot_triton

    p, columns, requests = 128, 1025, 65
    store = make_store(block_tokens=p)
    gen = torch.Generator("cuda").manual_seed(1)
    blocks = torch.randint(0, 1 << 20, (requests, columns), generator=gen, device="cuda", dtype=torch.int32)
    table = blocks.repeat_interleave(p, 1) * p + torch.arange(columns * p, device="cuda", dtype=torch.int32) % p
    want, got = (
        (
            torch.zeros((requests, columns), dtype=torch.int32, device="cuda"),
            torch.zeros(requests, dtype=torch.int32, device="cuda"),
            torch.zeros((2, requests), dtype=torch.int64, device="cuda"),
        )
        for _ in range(2)
    )
    for n, longest in ((1, 1), (1, columns * p), (7, 300), (64, 20_000)):
        lens = torch.randint(1, longest + 1, (n + 1,), generator=gen, device="cuda")[1:]
        rows = torch.randperm(requests, generator=gen, device="cuda")[1 : n + 1]
        columns_read = -(-int(lens.max()) // p)
        ops.decode_snapshot.reference(store, table, rows, lens, *want, columns=columns_read)
        decode_snapshot_triton(store, table, rows, lens, *got, columns=columns_read)
        assert all(torch.equal(a, b) for a, b in zip(want, got))

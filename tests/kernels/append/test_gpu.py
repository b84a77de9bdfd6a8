"""`append_triton` on the GPU: the bytes of `append`, also when captured in a CUDA graph."""

import pytest
import torch

from kvc_kernels import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize("heads, head_dim", [(8, 128), (3, 64), (2, 256), (1, 128)])
def test_append_in_a_graph(heads, head_dim, has_scores):
    from kvc_kernels.append.kernel import append_triton
    from kvc_kernels.formats import BF16
    from kvc_kernels.layout import BlockFormat, PoolLayout
    from kvc_kernels.store import PageStore

    layout = PoolLayout(3, heads, head_dim, 64, 8 * (4 * head_dim + 4), has_scores=has_scores)
    stores = []
    for _ in range(2):
        store = PageStore.create(
            layout, (BlockFormat(BF16),), num_pages=1 + 9 * layout.block_pages_bf16, num_blocks=12,
            dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip
        store.pages.fill_(171)
        ops.take_bf16(store, torch.tensor([7, 2, 5, 1], device="cuda"))
        stores.append(store)
    n = 50
    blocks = torch.empty(n, dtype=torch.int64, device="cuda")
    offsets = torch.empty_like(blocks)
    qkv = torch.empty((n, 3 * heads, head_dim), dtype=torch.bfloat16, device="cuda")
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]

    def fresh():
        at = torch.randperm(4 * 64, device="cuda")[:n]
        blocks.copy_(torch.tensor([7, 2, 5, 1], device="cuda")[at // 64])
        offsets.copy_(at % 64)
        qkv.normal_()

    fresh()
    append_triton(stores[1], 2, blocks, offsets, k, v)
    ops.append.reference(stores[0], 2, blocks, offsets, k, v)
    assert torch.equal(stores[0].pages, stores[1].pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_triton(stores[1], 1, blocks, offsets, k, v)
    for _ in range(3):
        fresh()
        graph.replay()
        ops.append.reference(stores[0], 1, blocks, offsets, k, v)
        assert torch.equal(stores[0].pages, stores[1].pages)

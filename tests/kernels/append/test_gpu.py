"""`append_triton` on the GPU: the bytes of `append`, also when captured in a CUDA graph."""

import pytest
import torch

from kvc_kernels import ops
from tests.support.rows import LAYOUTS, laid_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


BLOCKS = (7, 2, 5, 1)


def two_stores(heads, head_dim, has_scores=False, layers=3):
    """Two equal stores with uncompressed BLOCKS of 64 tokens."""
    from kvc_kernels.formats import BF16
    from kvc_kernels.layout import BlockFormat, PoolLayout
    from kvc_kernels.store import PageStore

    layout = PoolLayout(layers, heads, head_dim, 64, 8 * (4 * head_dim + 4), has_scores=has_scores)
    stores = []
    for _ in range(2):
        store = PageStore.create(
            layout, (BlockFormat(BF16),), num_pages=1 + 9 * layout.block_pages_bf16, num_blocks=12,
            dtype=torch.bfloat16,
            device="cuda",
        )  # fmt: skip
        store.pages.fill_(171)
        ops.take_bf16(store, torch.tensor(BLOCKS, device="cuda"))
        stores.append(store)
    return stores


@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize("heads, head_dim", [(8, 128), (3, 64), (2, 256), (1, 128)])
def test_append_in_a_graph(heads, head_dim, has_scores):
    from kvc_kernels.append.kernel import append_triton

    stores = two_stores(heads, head_dim, has_scores)
    n = 50
    blocks = torch.empty(n, dtype=torch.int64, device="cuda")
    offsets = torch.empty_like(blocks)
    qkv = torch.empty((n, 3 * heads, head_dim), dtype=torch.bfloat16, device="cuda")
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]

    def fresh():
        at = torch.randperm(4 * 64, device="cuda")[:n]
        blocks.copy_(torch.tensor(BLOCKS, device="cuda")[at // 64])
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


def test_layers_of_several_forwards(monkeypatch):
    """Rows differ in strides, addresses and dtype from layer to layer. Layers with like rows bind their arguments once;
    later ones launch the compiled kernel, in a graph, too."""
    from triton.runtime.jit import JITFunction

    from kvc_kernels.append.kernel import LayerAppend

    heads, head_dim, forms = 3, 64, [*LAYOUTS, torch.float32]
    stores, ordinary = two_stores(heads, head_dim, layers=3 * len(forms)), []
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **options: ordinary.append(self) or run(self, *args, **options)
    )
    append = LayerAppend(stores[1])

    def rows(form):
        x = torch.randn((tokens, heads, head_dim), device="cuda")
        return laid_out(x.bfloat16(), form) if isinstance(form, str) else x

    for tokens in (50, 1, 130):
        at = torch.randperm(4 * 64, device="cuda")[:tokens]
        blocks, offsets = torch.tensor(BLOCKS, device="cuda")[at // 64], at % 64
        append.plan(blocks, offsets.int() if tokens == 1 else offsets)
        kv = [(rows(form), rows(form)) for form in 2 * forms]
        ordinary.clear()
        for layer, (k, v) in enumerate(kv):
            append.run(layer, k, v)
        assert 1 <= len(ordinary) <= len(LAYOUTS)
        # Rows of float32 are converted to contiguous ones of the model's dtype.
        ordinary.clear()
        captured = [(rows(form), rows(form)) for form in forms]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer, (k, v) in enumerate(captured):
                append.run(len(kv) + layer, k, v)
        assert not ordinary
        for x in (y for pair in captured for y in pair):
            x.normal_()
        graph.replay()
        for layer, (k, v) in enumerate(kv + captured):
            ops.append.reference(stores[0], layer, blocks, offsets, k, v)
        assert torch.equal(stores[0].pages, stores[1].pages)

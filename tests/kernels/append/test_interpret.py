"""`append_triton` against `append`: the same bytes in every page."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.append.kernel import LayerAppend, append_triton
from tests.support.pages import make_store
from tests.support.rows import LAYOUTS, laid_out


@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize("heads, head_dim, dtype", [(2, 64, torch.bfloat16), (3, 32, torch.float16)])
def test_same_bytes(heads, head_dim, dtype, has_scores):
    stores = [
        make_store(layers=2, heads=heads, head_dim=head_dim, has_scores=has_scores, dtype=dtype) for _ in range(2)
    ]
    gen = torch.Generator().manual_seed(3)
    blocks = torch.tensor([1, 2, 3])
    for store in stores:
        ops.take_bf16(store, blocks)
    where = torch.randperm(3 * 32, generator=gen)[:21]
    # The last row is padding and goes to the scratch block.
    ids = torch.cat((blocks[where // 32], torch.zeros(1, dtype=torch.long)))
    at = torch.cat((where % 32, torch.zeros(1, dtype=torch.long)))
    qkv = torch.randn((22, 3 * heads, head_dim), generator=gen).to(dtype)
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    for layer in range(2):
        ops.append(stores[0], layer, ids, at, k, v)
        append_triton(stores[1], layer, ids.int(), at, k, v)
    assert torch.equal(stores[0].pages, stores[1].pages)


def test_append_converts_dtype_and_accepts_no_rows():
    store, expected = make_store(heads=1), make_store(heads=1)
    blocks = torch.tensor([4])
    for s in (store, expected):
        ops.take_bf16(s, blocks)
    k = torch.randn(1, 1, 32)
    append_triton(store, 0, blocks, torch.tensor([31]), k, -k)
    append_triton(store, 0, blocks[:0], blocks[:0], k[:0], k[:0])
    ops.append(expected, 0, blocks, torch.tensor([31]), k, -k)
    assert torch.equal(store.pages, expected.pages)


def test_layers_of_several_forwards():
    stores = [make_store(layers=len(LAYOUTS)) for _ in range(2)]
    blocks = torch.tensor([1, 2, 3])
    for store in stores:
        ops.take_bf16(store, blocks)
    appends = ops.LayerAppend(stores[0]), LayerAppend(stores[1])
    for tokens in (21, 40):
        at = torch.randperm(3 * 32)[:tokens]
        for append in appends:
            append.plan(blocks[at // 32], at % 32)
        for layer, layout in enumerate(LAYOUTS):
            k, v = (laid_out(torch.randn(tokens, 2, 32).bfloat16(), layout) for _ in "kv")
            for append in appends:
                append.run(layer, k, v)
    assert torch.equal(stores[0].pages, stores[1].pages)

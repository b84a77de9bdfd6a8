"""`encode_kept_triton` against `encode_kept`: the same pages and key headers; and `pack_kept` with either."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.compact import pack_kept
from kvc_kernels.compact.kept_kernel import encode_kept_triton
from kvc_kernels.compact.pack_kept import encode_kept
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import page_bytes_for
from kvc_kernels.store import PageStore
from tests.support.pages import KernelStore, block_formats_of, fill, make_store, random_kv

BLOCKS = torch.tensor([5, 2, 7, 3])


@pytest.mark.parametrize("spec, page_tokens", [("k4v4", 64), ("k4v4", 16), ("k8v4", 32), ("k4v2", 64), ("k2v2", 32)])
@pytest.mark.parametrize("kept", [1, 3])
def test_kernel_gives_same_bytes(spec, page_tokens, kept):
    """Heads with no page, with some, and with all of the kept blocks; tokens in the order of their positions."""
    fmt, p, d = FORMATS[spec], 64, 64
    store = make_store(
        block_formats_of(spec), layers=2, heads=2, head_dim=d, block_tokens=p, blocks=9,
        page_bytes=page_bytes_for(fmt, page_tokens, head_dim=d, has_scores=False),
    )  # fmt: skip
    assert store.layout.page(fmt).tokens == page_tokens
    fill(store, BLOCKS, *random_kv(store, len(BLOCKS) * p, 3))
    ids = store.table[BLOCKS].flatten(1, 2)[:, 1:]  # three of the four heads
    gen, per_block = torch.Generator().manual_seed(kept), p // page_tokens
    tokens = torch.stack([torch.randperm(len(BLOCKS) * p, generator=gen)[: kept * p] for _ in range(3)]).int()
    pages = torch.tensor([0, kept * per_block - 1, kept * per_block])
    counts = (pages[:, None] - torch.arange(kept) * per_block).clamp(0, per_block)
    for head in range(3):
        held = int(pages[head]) * page_tokens
        tokens[head, :held] = tokens[head, :held].sort().values
    want = encode_kept(store, store.layout.page(fmt), ids, tokens, counts)
    got = encode_kept_triton(store, store.layout.page(fmt), ids, tokens, counts)
    assert torch.equal(got[1], want[1]) and torch.equal(got[0], want[0])


@pytest.mark.parametrize("limit", [1 << 30, 1])  # all heads at once, one at a time
def test_prompt_has_same_bytes(monkeypatch, limit):
    monkeypatch.setitem(pack_kept.TEMP_BYTES, "cpu", limit)
    gen, digests = torch.Generator().manual_seed(2), []
    best = torch.rand(2, 2, 4 * 64, generator=gen).argsort(-1)[..., : 2 * 64].int()
    pages = torch.tensor([[0, 1], [3, 4]])
    for kind in (PageStore, KernelStore):
        base = make_store(block_formats_of("k8v4"), layers=2, heads=2, head_dim=64, block_tokens=64, page_bytes=3264)
        assert base.layout.page(FORMATS["k8v4"]).tokens == 32
        store = kind(**vars(base))
        fill(store, BLOCKS, *random_kv(store, len(BLOCKS) * 64, 3))
        ops.pack_kept(store, BLOCKS, 2, 1, best, pages)
        ops.check_invariants(store)
        digests.append([ops.block_digest(store, int(block)) for block in BLOCKS[:2]])
    assert digests[0] == digests[1]

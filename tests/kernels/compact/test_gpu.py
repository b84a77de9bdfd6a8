"""`compact_triton` on the GPU: bit for bit what `compact` writes, on the GPU and on the CPU."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common import bits
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes, page_bytes_for
from kvc_kernels.store import PageStore
from tests.support.pages import free_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, TOKENS = 3, 256


def block_format_of(names):
    high, *low = (FORMATS[x] for x in names.split("+"))
    return BlockFormat(high, low[0] if low else None)


def make(device, specs, head_dim, heads, has_scores, dtype, blocks=5, tokens=TOKENS, page_tokens=None):
    formats = [FORMATS[x] for spec in specs for x in spec.split("+")]
    sizes = dict(head_dim=head_dim, has_scores=has_scores)
    page = (
        page_bytes_for(formats[0], page_tokens, **sizes)
        if page_tokens
        else choose_page_bytes(formats, block_tokens=tokens, **sizes)
    )
    layout = PoolLayout(LAYERS, heads, head_dim, tokens, page, has_scores)
    block_formats = (BlockFormat(BF16), *(block_format_of(x) for x in specs))
    store = PageStore.create(
        layout, block_formats, num_pages=1 + 2 * blocks * layout.block_pages_bf16, num_blocks=blocks + 3, dtype=dtype,
        device=device,
    )  # fmt: skip
    store.pages.fill_(171)
    return store


@pytest.mark.parametrize(
    "specs, head_dim, heads, has_scores, dtype",
    [
        (["k4v4"], 128, 8, False, torch.bfloat16),
        (["k4v4"], 64, 3, True, torch.float16),
        (["k8v8", "k4v4", "k2v2"], 128, 2, False, torch.bfloat16),
        (["k8v4+k4v2", "k8v4+k4v2"], 128, 8, True, torch.bfloat16),
        (["k4v8", "k4v2"], 64, 2, True, torch.bfloat16),
        (["k8v4+k4v2", "k2v2"], 128, 2, True, torch.bfloat16),
        (["k2v2", "k2v2"], 64, 1, False, torch.bfloat16),
        (["k4v2"], 256, 2, False, torch.bfloat16),
    ],
)
def test_same_bytes(specs, head_dim, heads, has_scores, dtype):
    """Blocks move from bf16 through every block format of the list, with random tiers at each step."""
    from kvc_kernels.compact.launch import compact_triton

    seed = torch.initial_seed()
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    blocks = torch.tensor([4, 1, 6, 3])
    k, v = torch.randn((2, LAYERS, 4 * TOKENS, heads, head_dim), generator=gen)
    k = k * torch.rand(head_dim, generator=gen) * 8 + 4 * torch.randn(head_dim, generator=gen)
    plans, reference = [], ops.compact.reference
    for spec in specs:
        tiers = torch.randint(0, 3, (4, LAYERS, heads, TOKENS), generator=gen).to(torch.int8)
        tiers[torch.rand(tiers.shape[:3], generator=gen) < 0.2] = 0
        tiers[torch.rand(tiers.shape[:3], generator=gen) < 0.4] = 2
        # Tiers only go down; a block format without a low format drops what was low.
        plans.append(torch.minimum(tiers, plans[-1]) if plans and "+" in spec else tiers)
    stores = []
    for device, move in (("cpu", reference), ("cuda", reference), ("cuda", compact_triton)):
        store = make(device, specs, head_dim, heads, has_scores, dtype)
        ids = blocks.to(device)
        ops.take_bf16(store, ids)
        at = torch.arange(4 * TOKENS, device=device)
        for layer in range(LAYERS):
            rows = (x[layer].to(device, dtype) for x in (k, v))
            ops.append(store, layer, ids[at // TOKENS], at % TOKENS, *rows)
        if has_scores:
            scores = bits.segment(store.layout.page(BF16), store.pages, "scores", torch.float32)
            scores.copy_(torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)))
        seen = []
        for i, tiers in enumerate(plans):
            count = move(store, ids, i + 1, tiers.to(device), from_format=i)
            ops.check_invariants(store)
            seen.append(([ops.block_digest(store, b) for b in blocks.tolist()], count.tolist()))
        stores.append((store, seen))
    for store, seen in stores[1:]:
        assert seen == stores[0][1]
        for name in ("table", "counts", "format_id", "cursor"):
            assert torch.equal(getattr(store, name).cpu(), getattr(stores[0][0], name)), name
        assert torch.equal(free_pages(store).cpu(), free_pages(stores[0][0]))


@pytest.mark.parametrize(
    "spec, head_dim, tokens, page_tokens, has_scores, dtype",
    [
        ("k4v4", 128, 128, 64, False, torch.bfloat16),
        ("k8v4", 128, 128, 64, False, torch.bfloat16),
        ("k8v8", 128, 128, 64, True, torch.float16),
        ("k4v2", 128, 128, 80, True, torch.bfloat16),
        ("k2v2", 64, 192, 64, False, torch.float16),
        ("k4v4", 128, 256, 48, False, torch.bfloat16),
        ("k4v8", 256, 256, 32, False, torch.bfloat16),
        ("k4v4", 128, 1024, 64, False, torch.bfloat16),
        ("k8v4+k4v2", 128, 192, 64, True, torch.bfloat16),
    ],
)
def test_all_kept(spec, head_dim, tokens, page_tokens, has_scores, dtype):
    """With tiers that keep everything and without tiers, on ties between codes and beyond fp16 too."""
    from kvc_kernels.compact.launch import compact_triton

    seed = torch.initial_seed()
    print("seed", seed)
    gen = torch.Generator().manual_seed(seed)
    heads, blocks = 2, torch.tensor([2, 5, 1])
    k, v = torch.randn((2, LAYERS, 3 * tokens, heads, head_dim), generator=gen) * 4
    k, v = k + 4 * torch.randn(head_dim, generator=gen), v + 0.5
    # Steps of 1/8 in ranges of 15/8, 3/8 and 255/8 have their codes exactly between two.
    for x, axis, size in ((k, 1, 3 * tokens), (v, 3, head_dim)):
        shape = [1, 1, 1, 1]
        shape[axis] = size
        at = torch.arange(size).view(shape)
        x[0] = (at % 31 * 0.0625 - 0.5).expand_as(x)[0]
        x[1, :, 1] = (at % 7 * 0.0625).expand_as(x)[1, :, 1]
    if dtype == torch.bfloat16:
        k[2, tokens + 3, 1, 5:7] = torch.tensor([3e38, -3e38])
        v[2, tokens + 7, 1, 5:7] = torch.tensor([3e38, -3e38])
    stores, reference = [], ops.compact.reference
    for device, move, given in (
        ("cpu", reference, True), ("cuda", reference, False), ("cuda", compact_triton, True),
        ("cuda", compact_triton, False),
    ):  # fmt: skip
        store = make(device, [spec], head_dim, heads, has_scores, dtype, 3, tokens, page_tokens)
        ids = blocks.to(device)
        ops.take_bf16(store, ids)
        at = torch.arange(3 * tokens, device=device)
        for layer in range(LAYERS):
            ops.append(store, layer, ids[at // tokens], at % tokens, *(x[layer].to(device, dtype) for x in (k, v)))
        if has_scores:
            scores = bits.segment(store.layout.page(BF16), store.pages, "scores", torch.float32)
            scores.copy_(torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)))
        tiers = ops.keep_all(3, store.layout, device) if given else None
        counts = move(store, ids, 1, tiers, from_format=0)
        ops.check_invariants(store)
        stores.append((store, [ops.block_digest(store, b) for b in blocks.tolist()], counts.tolist()))
    for store, *seen in stores[1:]:
        assert seen == list(stores[0][1:])
        for name in ("table", "counts", "format_id", "cursor"):
            assert torch.equal(getattr(store, name).cpu(), getattr(stores[0][0], name)), name
        assert torch.equal(free_pages(store).cpu(), free_pages(stores[0][0]))


@pytest.mark.parametrize("source, given", [(0, True), (1, True), (0, False)])
def test_no_sync(source, given):
    """A compaction is queued without waiting for the device."""
    from kvc_kernels.compact.launch import compact_triton

    store = make("cuda", ["k8v4+k4v2", "k8v4+k4v2"], 64, 2, True, torch.bfloat16)
    first, second = torch.tensor([1, 4], device="cuda"), torch.tensor([3, 5], device="cuda")
    tiers = torch.randint(0, 3, (2, LAYERS, 2, TOKENS), device="cuda").to(torch.int8)
    for ids in (first, second):
        ops.take_bf16(store, ids)
        if source:
            compact_triton(store, ids, 1, tiers, from_format=0)
    compact_triton(store, first, source + 1, tiers if given else None, from_format=source)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compact_triton(store, second, source + 1, tiers if given else None, from_format=source)
    finally:
        torch.cuda.set_sync_debug_mode("default")

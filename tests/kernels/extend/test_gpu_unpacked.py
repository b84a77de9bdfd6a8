"""Long appends over packed prefixes for a prefill library, on the GPU."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import page_bytes_for
from tests.support.pages import block_formats_of, fill, make_store, random_kv

from .test_interpret_fake_quant import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
P, HEADS, DIM, SCALE = 128, 2, 128, 128**-0.5
PREFIX, NEW = [17 * P, 0, 40 * P], [600, 70, 515]
PACKED = [16, 0, 40]  # whole blocks of the prefix that are packed; the others wait


def case(spec, page_tokens=32):
    """A store on the device with the prefixes and new tokens; rows of blocks; new rows `[L, N, H, D]`."""
    from kvc_kernels.store import PageStore

    need = [-(-(a + b) // P) for a, b in zip(PREFIX, NEW)]
    store = make_store(
        block_formats_of(spec), layers=2, heads=HEADS, head_dim=DIM, block_tokens=P, blocks=2 * sum(need),
        page_bytes=page_bytes_for(FORMATS[spec], page_tokens, head_dim=DIM, has_scores=False),
    )  # packing takes pages before it gives back
    ids = (1 + torch.randperm(sum(need))).split(need)
    rows, new = torch.zeros((len(need), max(need)), dtype=torch.int32), []
    for r, blocks in enumerate(ids):
        rows[r, : len(blocks)] = blocks
        k, v = random_kv(store, PREFIX[r] + NEW[r], seed=r)
        fill(store, blocks, k, v)
        if PACKED[r]:
            ops.compact(store, blocks[: PACKED[r]], 1, ops.keep_all(PACKED[r], store.layout), from_format=0)
        new.append((k[:, PREFIX[r] :], v[:, PREFIX[r] :]))
    fields = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in vars(store).items()}
    return PageStore(**fields), rows.cuda(), *(torch.cat([x[i] for x in new], 1).cuda() for i in (0, 1))


@pytest.mark.parametrize("page_tokens", [32, 64])
@pytest.mark.parametrize("spec", [f.name for f in FORMATS.values() if f.packed])
def test_rows_are_those_of_the_reference_bit_for_bit(spec, page_tokens):
    from kvc_kernels.extend.attention import ExtendAttention

    store, rows, _, _ = case(spec, page_tokens)
    op = ExtendAttention(store, query_heads=4 * HEADS, whole=True, hopper=False)._unpacked
    assert op.plan(rows, PREFIX, NEW)
    op.k.fill_(torch.nan)
    op.v.fill_(torch.nan)
    op.rows.fill(1, op._blocks, op._items, 0, 17, op.k, op.v)
    want = ops.load_dense(store, 1, rows[0, :17].long())
    for got, x in zip((op.k, op.v), want):
        assert torch.equal(got[:17].transpose(1, 2), x.to(store.dtype))


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("spec, group, cap", [("k4v4", 4, 0.0), ("k8v4", 1, 20.0)])
def test_against_the_reference(spec, group, cap, staged):
    from kvc_kernels.extend.attention import ExtendAttention

    store, rows, k, v = case(spec, 64)
    seed = torch.initial_seed()
    print("seed", seed)
    gen = torch.Generator(device="cuda").manual_seed(seed)
    qkv = torch.randn((sum(NEW), HEADS * (group + 2), DIM), generator=gen, device="cuda").bfloat16()
    q = qkv[:, : HEADS * group]  # a view, as a model hands it over
    fmt = store.block_formats[1].high if staged else None
    op = ExtendAttention(
        store, query_heads=HEADS * group, max_blocks=64, fake_quant_format=fmt, whole=True, hopper=False
    )
    op._unpacked.slots = 16  # several passes
    op.plan(rows, PREFIX, NEW, [[16], [], []] if staged else None)
    assert op.steps.prefix == "unpacked"
    for layer in (0, 1):
        out, lse = op.run(layer, q, k[layer], v[layer], scale=SCALE, logit_cap=cap, return_lse=True)
        want = ops.extend_attention(
            store, layer, q, rows, PREFIX, NEW, scale=SCALE, logit_cap=cap, fake_quant_format=[fmt] * len(NEW)
        )
        assert error(out, want) < 0.03
        assert lse.isfinite().all()


def test_no_sync():
    from kvc_kernels.extend.attention import ExtendAttention

    store, rows, k, v = case("k4v4")
    q = torch.randn((sum(NEW), HEADS * 4, DIM), device="cuda").bfloat16()
    op = ExtendAttention(
        store, query_heads=HEADS * 4, max_blocks=64, fake_quant_format=store.block_formats[1].high, hopper=False
    )
    for _ in range(2):
        op.plan(rows, PREFIX, NEW, [[16], [], []])
        assert op.steps.prefix == "unpacked"
        op.run(0, q, k[0], v[0], scale=SCALE)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_results_joined_in_place():
    """The log-sum-exps of the rows are read by all warps of a program and written by one."""
    from kvc_kernels.extend.merge_kernel import merge_states

    gen = torch.Generator(device="cuda").manual_seed(2)
    a, b = torch.randn((2, 4099, 32, DIM), generator=gen, device="cuda").bfloat16()
    x, y = torch.randn((2, 4099, 32), generator=gen, device="cuda") * 3
    out, lse = torch.empty_like(a), torch.empty_like(x)
    merge_states(a, x, b, y, out, lse)
    w = torch.softmax(torch.stack((x, y)).double() * torch.log(torch.tensor(2.0)), 0)
    want = w[0, ..., None] * a.double() + w[1, ..., None] * b.double()
    assert (out - want).abs().max() < 0.02
    merge_states(a.clone(), x.clone(), b, y, b, y)
    assert torch.equal(b, out) and torch.equal(y, lse)

"""Prefills that see fake-quantized blocks, on the GPU: FlashAttention 3, FlashInfer, and our own kernels."""

import os

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.extend.fake_quant import fake_quantize
from kvc_kernels.formats import FORMATS
from kvc_kernels.store import PageStore
from tests.support.libraries import skip_without
from tests.support.rows import laid_out

from .test_interpret_fake_quant import NEW, PREFIX, ROWS, WAITING, error, request_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TIMES, DIM, HEADS, SCALE = 4, 128, 8, 128**-0.5
PREFIX, NEW = ([TIMES * n for n in x] for x in (PREFIX, NEW))
REQUESTS = len(NEW)
TOLERANCE = 0.03
REPEATS = int(os.environ.get("KVC_TEST_REPEATS", 400))
# The reference reads pages as bf16. At 8 bits a key, loud tokens (logits of 50) show that: 0.04 against float64.
ROUNDED = {"k8v4": 0.08}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def case(spec, dtype=torch.bfloat16, heads=HEADS, dim=DIM):
    """The store and the new rows `[L, N, H, D]` on the device."""
    store, k, v = request_case(spec, dtype, heads, dim, TIMES)
    fields = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in vars(store).items()}
    return PageStore(**fields), k.cuda(), v.cuda()


def queries(heads, dim, dtype=torch.bfloat16):
    seed = torch.initial_seed()
    print("seed", seed)
    gen = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn((sum(NEW), heads, dim), generator=gen, device="cuda").to(dtype)


def make(store, query_heads, requests=REQUESTS, **options):
    """The operation, planned for the first `requests` requests."""
    from kvc_kernels.extend.attention import ExtendAttention

    op = ExtendAttention(
        store, query_heads=query_heads, max_blocks=16, fake_quant_format=store.block_formats[1].high, **options
    )
    plan(op, requests)
    return op


def plan(op, requests):
    op.plan(ROWS[:requests].cuda(), PREFIX[:requests], NEW[:requests], WAITING[:requests])


@pytest.mark.parametrize("spec", [f.name for f in FORMATS.values() if f.packed])
def test_rows_are_those_of_the_reference_bit_for_bit(spec):
    from kvc_kernels.extend.fake_quant_kernel import FakeQuantRows

    store, _, _ = case(spec)
    fmt = store.block_formats[1].high
    # Row, place; slot fake-quantized, slot exact, tokens.
    items = [[0, 1, 2, 4, 128], [0, 2, 0, 5, 128], [1, 0, 1, -1, 128], [2, 0, 3, 6, 20]]
    slots, items = [2, 0, 1, 3], torch.tensor([[*x, 0, 0, 0] for x in items], dtype=torch.int32, device="cuda")
    rows = FakeQuantRows(store, fmt)
    blocks = ROWS.cuda()[items[:, 0].long(), items[:, 1].long()].long()
    for size in (7, 20):  # the second plan needs larger buffers
        rows.plan(ROWS.cuda(), items, size)
        for layer in (0, 1):
            k, v, _ = ops.load_dense(store, layer, blocks)
            rows.k.fill_(torch.nan)
            rows.v.fill_(torch.nan)
            rows.fill(layer)
            want = fake_quantize(store.layout, fmt, k.to(store.dtype), v.to(store.dtype))
            for got, x, plain in zip((rows.k, rows.v), want, (k, v)):
                assert torch.equal(got[slots].transpose(1, 2), x)
                assert torch.equal(got[4:6].transpose(1, 2), plain[:2].to(store.dtype))
                assert torch.equal(got[6, :20].transpose(0, 1), plain[3, :, :20].to(store.dtype))
                assert not got[6, 20:].any()


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
@pytest.mark.parametrize(
    "spec, group, cap, dtype",
    [
        ("k4v4", 4, 0.0, torch.bfloat16),
        ("k8v4", 7, 0.0, torch.bfloat16),
        ("k4v2", 1, 20.0, torch.float16),
        ("k2v2", 3, 0.0, torch.bfloat16),
    ],
)
def test_against_the_reference(spec, group, cap, dtype, dense):
    skip_without(dense)
    store, k, v = case(spec, dtype)
    q = queries(HEADS * group, DIM, dtype)
    op = make(store, HEADS * group, dense=dense, hopper=HOPPER and dense != "none")
    assert op.steps.staged and op.steps.new == ("prefix" if dense == "none" else "paged")
    for layer in (0, 1):
        out, lse = op.run(layer, q, k[layer], v[layer], scale=SCALE, logit_cap=cap, return_lse=True)
        want, exact = (
            ops.extend_attention(
                store, layer, q, ROWS.cuda(), PREFIX, NEW, scale=SCALE, logit_cap=cap, fake_quant_format=[x] * len(NEW)
            )
            for x in (store.block_formats[1].high, None)
        )
        assert error(out, want) < ROUNDED.get(spec, TOLERANCE)
        assert spec == "k8v4" or error(out, exact) > 2 * TOLERANCE
        assert lse.isfinite().all()


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
def test_nothing_before_the_chunk(dense):
    """No pages are read: the library's result is the output."""
    skip_without(dense)
    store, _, _ = case("k4v4")
    new = [TIMES * 33, TIMES * 15]
    rows = ROWS[2:4].cuda()
    q = queries(4 * HEADS, DIM)[: sum(new)]
    parts = [ops.load_dense(store, 0, row[: -(-n // 128)].long()) for row, n in zip(rows, new)]
    k, v = (
        torch.cat([p[i].transpose(1, 2).flatten(0, 1)[:n] for p, n in zip(parts, new)]).to(store.dtype) for i in (0, 1)
    )
    op = make(store, 4 * HEADS, dense=dense)
    op.plan(rows, [0, 0], new)
    assert (op.steps.prefix is None) == (dense != "none")
    out = op.run(0, q, k, v, scale=SCALE)
    seen = [store.block_formats[1].high] * len(new)
    want = ops.extend_attention(store, 0, q, rows, [0, 0], new, scale=SCALE, fake_quant_format=seen)
    assert error(out, want) < TOLERANCE


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
def test_forwards_of_other_sizes(dense):
    """Buffers grow and are used again, over layers of other strides, scales and logit caps."""
    skip_without(dense)
    store, k, v = case("k4v4")
    q, fmt = queries(4 * HEADS, DIM), store.block_formats[1].high
    op = make(store, 4 * HEADS, requests=1, dense=dense)
    for n in (1, 2, REQUESTS, 1):
        plan(op, n)
        for layer, layout, scale, cap in ((0, "contiguous", SCALE, 0.0), (1, "packed", SCALE / 2, 20.0)):
            rows = [laid_out(x[: sum(NEW[:n])], layout) for x in (q, k[layer], v[layer])]
            out = op.run(layer, *rows, scale=scale, logit_cap=cap)
            want = ops.extend_attention(
                store, layer, rows[0], ROWS[:n].cuda(), PREFIX[:n], NEW[:n], scale=scale, logit_cap=cap,
                fake_quant_format=n * [fmt],
            )  # fmt: skip
            assert error(out, want) < TOLERANCE, (n, layer)


@pytest.mark.parametrize("dense", ["fa3", "flashinfer", "none"])
def test_exact_requests_beside_others(dense):
    skip_without(dense)
    store, k, v = case("k4v4")
    q, fmt, exact = queries(4 * HEADS, DIM), store.block_formats[1].high, [False, True, False, True, True]
    op = make(store, 4 * HEADS, dense=dense)
    op.plan(ROWS.cuda(), PREFIX, NEW, WAITING, [None if x else fmt for x in exact])
    out = op.run(0, q, k[0], v[0], scale=SCALE)
    seen = [None if x else fmt for x in exact]
    want = ops.extend_attention(store, 0, q, ROWS.cuda(), PREFIX, NEW, scale=SCALE, fake_quant_format=seen)
    assert error(out, want) < TOLERANCE


@pytest.mark.parametrize("dense", ["fa3", "flashinfer"])
def test_same_answer_many_times(dense):
    """Neither our kernels nor the library's depend on which warp is faster (see docs/lab-notes/2026-11-prefill.md)."""
    skip_without(dense)
    store, k, v = case("k4v4")
    q = queries(4 * HEADS, DIM)
    op = make(store, 4 * HEADS, dense=dense)
    first = [op.run(layer, q, k[layer], v[layer], scale=SCALE) for layer in (0, 1)]
    num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(REPEATS):
        out = op.run(i % 2, q, k[i % 2], v[i % 2], scale=SCALE)
        num_wrong += (out != first[i % 2]).any(-1).sum()
    assert num_wrong == 0, f"{int(num_wrong)} of {REPEATS * q.shape[0] * q.shape[1]} rows differ"


@pytest.mark.parametrize("dense", ["fa3", "flashinfer"])
def test_no_sync(dense):
    skip_without(dense)
    store, k, v = case("k4v4")
    q = queries(4 * HEADS, DIM)
    op = make(store, 4 * HEADS, dense=dense)
    rows = ROWS.cuda()
    for _ in range(2):
        op.plan(rows, PREFIX, NEW, WAITING)
        op.run(0, q, k[0], v[0], scale=SCALE)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")

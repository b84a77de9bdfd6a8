"""Prefills that see fake-quantized blocks, under the interpreter, against the plain-torch reference."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.extend.attention import ExtendAttention, Tuning
from kvc_kernels.extend.fake_quant import fake_quantize
from kvc_kernels.extend.fake_quant_kernel import FakeQuantRows
from kvc_kernels.extend.staged import Groups
from kvc_kernels.formats import FORMATS
from tests.support.pages import block_formats_of, fill, make_store, random_kv

P, HEADS, DIM, SCALE = 32, 2, 64, 0.125
TOLERANCE = 0.04  # this kernel reads pages as fp16, the reference as bf16; loud keys make the softmax sharp
# Prefixes that end inside a block and at borders; blocks that wait to be packed; one block, two and more; no tokens.
PREFIX, NEW = [45, 64, 0, 10, 96], [60, 40, 33, 5, 0]
WAITING = [[], [0], [], [], [1]]
ROWS = torch.tensor([[3, 1, 4, 12], [2, 5, 6, 9], [7, 8, 0, 0], [10, 0, 0, 0], [13, 14, 15, 0]], dtype=torch.int32)


def request_case(spec="k4v4", dtype=torch.bfloat16, heads=HEADS, dim=DIM, times=1):
    """A store of two layers, and the new tokens' K and V `[L, N, H, D]`, which are appended. All lengths in tokens
    (blocks, prefixes and chunks) are multiplied by `times`.
    """
    p = times * P
    store = make_store(
        block_formats_of(spec), layers=2, heads=heads, head_dim=dim, block_tokens=p, blocks=16, dtype=dtype
    )
    new_k, new_v = [], []
    for r, (prefix, new) in enumerate(zip(PREFIX, NEW)):
        prefix, new = times * prefix, times * new
        blocks = ROWS[r, : -(-(prefix + new) // p)].long()
        k, v = random_kv(store, prefix + new, seed=r)
        fill(store, blocks, k, v)
        packed = torch.tensor([int(ROWS[r, j]) for j in range(prefix // p) if j not in WAITING[r]], dtype=torch.long)
        if len(packed):
            ops.compact(store, packed, 1, ops.keep_all(len(packed), store.layout), from_format=0)
        new_k.append(k[:, prefix:])
        new_v.append(v[:, prefix:])
    return store, torch.cat(new_k, 1), torch.cat(new_v, 1)


def queries(group, dtype=torch.bfloat16):
    return torch.randn(sum(NEW), HEADS * group, DIM, generator=torch.Generator().manual_seed(5)).to(dtype)


def error(out, ref):
    """Worst row, over that row's norm or the mean norm where that is larger. (The interpreter cuts bf16 off.)"""
    ref = ref.double()
    norm = ref.norm(dim=-1)
    return float(((out.double() - ref).norm(dim=-1) / norm.clamp(min=norm.mean())).max())


def items_of(places):
    """Items of `FakeQuantRows` for four blocks: all fake-quantized and out of order; two blocks, and 20 tokens of
    another, exact."""
    slots = [[2, 4, P], [0, 5, P], [1, -1, P], [3, 6, 20]]
    return torch.tensor([[*a, *b, 0, 0, 0] for a, b in zip(places, slots)], dtype=torch.int32)


@pytest.mark.parametrize("spec", [f.name for f in FORMATS.values() if f.packed])
def test_rows_equal_reference_bit_for_bit(spec):
    store, _, _ = request_case(spec)
    fmt = store.block_formats[1].high
    items, slots = items_of([[0, 1], [0, 2], [1, 0], [2, 0]]), [2, 0, 1, 3]
    rows = FakeQuantRows(store, fmt)
    rows.plan(ROWS, items, 7)
    rows.k.fill_(torch.nan)
    rows.v.fill_(torch.nan)
    blocks = ROWS[items[:, 0].long(), items[:, 1].long()].long()
    for layer in (0, 1):
        k, v, _ = ops.load_dense(store, layer, blocks)
        want = fake_quantize(store.layout, fmt, k.to(store.dtype), v.to(store.dtype))
        rows.fill(layer)
        for got, x, plain in zip((rows.k, rows.v), want, (k, v)):
            assert torch.equal(got[slots].transpose(1, 2), x)
            assert torch.equal(got[4:6].transpose(1, 2), plain[:2].to(store.dtype))
            assert torch.equal(got[6, :20].transpose(0, 1), plain[3, :, :20].to(store.dtype))
            assert not got[6, 20:].any()


class Dense:
    """Stands in for `StagedPrefill`: `plan` and `run` in plain torch."""

    def plan(self, tokens, slots, last):
        self.runs = list(zip(tokens, slots, last))

    def run(self, q, k, v, into, *, scale, logit_cap):
        at = 0
        for n, slots, last in self.runs:
            keys, values = (x[slots].flatten(0, 1)[: (len(slots) - 1) * P + last] for x in (k, v))
            seen = torch.ones(n, len(keys)).tril(len(keys) - n).bool()
            out, lse = self.attend(q[at : at + n], keys, values, seen, scale, logit_cap)
            into[0][at : at + n] = out
            if into[1] is not None:
                into[1][at : at + n] = lse
            at += n

    @staticmethod
    def attend(q, k, v, seen, scale, cap):
        group = q.shape[1] // k.shape[1]
        logits = torch.einsum("nhgd,shd->nhgs", q.float().unflatten(1, (-1, group)), k.float()) * scale
        logits = cap * torch.tanh(logits / cap) if cap else logits
        logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
        out = torch.einsum("nhgs,shd->nhgd", logits.softmax(-1), v.float()).flatten(1, 2)
        return out.to(q.dtype), logits.logsumexp(-1).flatten(1) / torch.log(torch.tensor(2.0))


def make(store, group, *, programs=12, fake=False):
    op = ExtendAttention(
        store, query_heads=HEADS * group, tuning=Tuning(rows=16, tile=32, programs_per_sm=programs),
        fake_quant_format=store.block_formats[1].high,
    )  # fmt: skip
    if fake:
        op._staged.prefill = Dense()
    return op


@pytest.mark.parametrize(
    "spec, group, cap, dtype, fake",
    [
        ("k4v4", 4, 0.0, torch.bfloat16, False),
        ("k4v4", 4, 0.0, torch.bfloat16, True),
        ("k8v4", 7, 0.0, torch.bfloat16, False),
        ("k4v2", 1, 20.0, torch.float16, True),
        ("k2v2", 3, 20.0, torch.bfloat16, False),
    ],
)
def test_prefill_matches_reference(spec, group, cap, dtype, fake):
    store, k, v = request_case(spec, dtype)
    q, fmt = queries(group, dtype), store.block_formats[1].high
    op = make(store, group, fake=fake)
    op.plan(ROWS, PREFIX, NEW, WAITING)
    out, lse = op.run(1, q, k[1], v[1], scale=SCALE, logit_cap=cap, return_lse=True)
    kw = {"scale": SCALE, "logit_cap": cap}
    want, exact = (
        ops.extend_attention(store, 1, q, ROWS, PREFIX, NEW, fake_quant_format=[x] * len(NEW), **kw)
        for x in (fmt, None)
    )
    assert error(out, want) < TOLERANCE
    assert fmt.key_bits == 8 or error(out, exact) > 3 * TOLERANCE
    assert lse.isfinite().all()


@pytest.mark.parametrize("fake", [False, True])
def test_split_prefix_and_empty_prefix(fake):
    store, k, v = request_case()
    q, fmt = queries(2), store.block_formats[1].high
    for programs in (1, 60):
        op = make(store, 2, programs=programs, fake=fake)
        op.plan(ROWS, PREFIX, NEW, WAITING)
        out = op.run(0, q, k[0], v[0], scale=SCALE)
        want = ops.extend_attention(store, 0, q, ROWS, PREFIX, NEW, scale=SCALE, fake_quant_format=[fmt] * len(NEW))
        assert error(out, want) < TOLERANCE
    # Requests 2 and 3 alone, from their first token: all their blocks are uncompressed.
    lens = [33, 15]
    fresh = [random_kv(store, n, seed=r) for r, n in zip((2, 3), lens)]
    k, v = (torch.cat([x[i][0] for x in fresh]) for i in (0, 1))
    op.plan(ROWS[2:4], [0, 0], lens)
    assert op.steps.staged and op.steps.prefix == (None if fake else "triton")
    out, lse = op.run(0, q[:48], k, v, scale=SCALE, return_lse=True)
    want = ops.extend_attention(store, 0, q[:48], ROWS[2:4], [0, 0], lens, scale=SCALE, fake_quant_format=[fmt] * 2)
    assert error(out, want) < TOLERANCE
    assert lse.isfinite().all()


@pytest.mark.parametrize("fake", [False, True])
def test_exact_requests_in_mixed_batch(fake):
    store, k, v = request_case()
    q, fmt = queries(2), store.block_formats[1].high
    exact = [False, True] * (len(NEW) // 2) + [True] * (len(NEW) % 2)
    op = make(store, 2, fake=fake)
    op.plan(ROWS, PREFIX, NEW, WAITING, [None if x else fmt for x in exact])
    out = op.run(0, q, k[0], v[0], scale=SCALE)
    want = ops.extend_attention(
        store, 0, q, ROWS, PREFIX, NEW, scale=SCALE, fake_quant_format=[None if x else fmt for x in exact]
    )
    assert error(out, want) < TOLERANCE


def test_forward_within_one_block_uses_usual_path():
    store, k, v = request_case()
    q = queries(2)
    rows, prefix, new = ROWS[[0, 3]], [96, 10], [9, 5]
    outs = []
    for fmt in (store.block_formats[1].high, None):
        op = ExtendAttention(store, query_heads=4, tuning=Tuning(rows=16, tile=32), fake_quant_format=fmt)
        op.plan(rows, prefix, new)
        assert not op.steps.staged
        outs.append(op.run(0, q[:14], k[0, :14], v[0, :14], scale=SCALE))
    assert torch.equal(*outs)


def test_groups_split_items_between_requests():
    groups = Groups.cut([45, 64, 10], [60, 40, 5], [[], [1, 0], []], P)
    assert groups.request == [0, 0, 0, 1, 1, 2]
    assert groups.tokens == [19, 32, 9, 32, 8, 5]
    assert groups.prefix == [45, 32, 32, 64, 64, 10]
    assert groups.first == [0, 0, 0, 2, 2, 5]
    assert groups.count == [0, 1, 2, 2, 3, 0]
    assert groups.staged == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert groups.runs() == ([0, 1, 2], [32, 64, 0], [60, 40, 5])
    slots, last, items = groups.lists()
    assert [x.tolist() for x in slots] == [[5], [0, 6], [0, 1, 7], [2, 3, 8], [2, 3, 4, 9], [10]]
    assert last == [32, 32, 9, 32, 8, 15]
    # (request, place, slot fake-quantized, slot exact, tokens)
    assert items[:3] == [(0, 1, 0, 5, 32), (0, 2, 1, 6, 32), (1, 0, 2, -1, 32)]
    assert items[3:] == [(1, 1, 3, -1, 32), (1, 2, 4, 8, 32), (0, 3, -1, 7, 9), (1, 3, -1, 9, 8), (2, 0, -1, 10, 15)]


def test_groups_of_exact_requests():
    groups = Groups.cut([45, 64], [60, 40], [[], [0, 1]], P, [True, False])
    assert (groups.request, groups.tokens) == ([0, 1, 1], [60, 32, 8])
    assert (groups.prefix, groups.first, groups.count) == ([45, 64, 64], [0, 0, 0], [0, 2, 3])
    assert groups.staged == [(1, 0), (1, 1), (1, 2)]
    slots, last, items = groups.lists()
    assert [x.tolist() for x in slots] == [[3, 4, 5], [0, 1, 6], [0, 1, 2, 7]]
    assert last == [9, 32, 8]
    assert (0, 1, -1, 3, 32) in items and (0, 3, -1, 5, 9) in items and (1, 2, 2, 6, 32) in items
    assert groups.runs() == ([0, 1], [32, 64], [60, 40])

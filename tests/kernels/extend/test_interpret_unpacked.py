"""Packed blocks unpacked for a dense kernel, under the interpreter, and the passes over them."""

from types import SimpleNamespace

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.extend import unpacked as module
from kvc_kernels.extend.attention import ExtendAttention
from kvc_kernels.extend.unpack_rows_kernel import UnpackedRows
from kvc_kernels.formats import FORMATS

from .test_interpret_fake_quant import DIM, HEADS, NEW, PREFIX, ROWS, SCALE, WAITING, Dense, P, error, request_case

ITEMS = [(0, 0), (1, 1), (1, 0), (4, 2), (4, 1)]  # packed ones, and two that wait as bf16


class Whole(Dense):
    """Like `Dense`, without a mask."""

    def run(self, q, k, v, into, *, scale, logit_cap):
        (n, slots, last) = self.runs[0]
        assert n == len(q) and last == P
        keys, values = (x[slots].flatten(0, 1) for x in (k, v))
        seen = torch.ones(n, len(keys)).bool()
        for to, x in zip(into, self.attend(q, keys, values, seen, scale, logit_cap)):
            to.copy_(x)


def unpacked(store, query_heads, slots):
    op = module.UnpackedPrefix(store, SimpleNamespace(heads=(query_heads, HEADS, DIM)))
    op.slots, op._prefill = slots, Whole
    return op


@pytest.mark.parametrize("spec", [f.name for f in FORMATS.values() if f.packed])
def test_rows_equal_reference_bit_for_bit(spec):
    store, _, _ = request_case(spec)
    n = len(ITEMS)
    items = [(3, 0, 0, P), *((r, j, n - 1 - i, P) for i, (r, j) in enumerate(ITEMS))]
    rows = torch.full((2, n, P, HEADS, DIM), torch.nan, dtype=store.dtype)
    blocks = torch.tensor([int(ROWS[r, j]) for r, j in ITEMS])
    assert {int(x) for x in store.format_id[blocks]} == {0, 1}
    for layer in (0, 1):
        UnpackedRows(store).fill(layer, ROWS, torch.tensor(items, dtype=torch.int32), 1, n, *rows)
        want = ops.load_dense(store, layer, blocks)
        for got, x in zip(rows, want):
            assert torch.equal(got.flip(0).transpose(1, 2), x.to(store.dtype))


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_merged_passes_match_reference(slots, monkeypatch):
    """The batch has three requests with a prefix, one of which has a waiting block, one without a prefix, and one
    without tokens."""
    monkeypatch.setattr(module, "MIN_NEW", 1)
    monkeypatch.setattr(module, "MIN_PREFIX", 1)
    store, _, _ = request_case()
    group, prefix, new = 3, [P, 2 * P, 0, 0, 3 * P], [7, 5, 4, 0, 3]
    op = unpacked(store, HEADS * group, slots)
    assert op.plan(ROWS, prefix, new, [[], [0], [], [], []])
    q, o = torch.randn((2, sum(new), HEADS * group, DIM), generator=torch.Generator().manual_seed(1)).bfloat16()
    lse = torch.linspace(-2, 3, sum(new) * HEADS * group).view(sum(new), HEADS * group)
    want, want_lse, at = [], [], 0
    for r, (tokens, n) in enumerate(zip(prefix, new)):
        span = slice(at, at + n)
        parts = [(o[span].float(), lse[span])]
        places = [j for j in range(tokens // P) if (r, j) != (1, 0)]
        if n and places:
            rows = ops.load_dense(store, 1, ROWS[r, places].long())
            k, v = (x.to(store.dtype).transpose(1, 2).flatten(0, 1) for x in rows[:2])
            seen = torch.ones(n, len(k)).bool()
            parts.append(Dense.attend(q[span], k, v, seen, SCALE, 0.0))
        top = torch.stack([x[1] for x in parts])
        w = torch.softmax(top * torch.log(torch.tensor(2.0)), 0)
        want.append(sum(a[..., None] * x[0].float() for a, x in zip(w, parts)))
        want_lse.append(torch.logsumexp(top * torch.log(torch.tensor(2.0)), 0) / torch.log(torch.tensor(2.0)))
        at += n
    out, out_lse = torch.full_like(q, torch.nan), torch.full_like(lse, torch.nan)
    op.run(1, q, (o.clone(), lse.clone()), out, out_lse, scale=SCALE, logit_cap=0.0)
    assert error(out, torch.cat(want)) < 0.02
    assert torch.allclose(out_lse, torch.cat(want_lse), atol=1e-3)
    again = torch.full_like(q, torch.nan)
    op.run(1, q, (o.clone(), lse.clone()), again, None, scale=SCALE, logit_cap=0.0)
    assert torch.equal(again, out)


def test_plan_accepts_only_long_packed_prefixes(monkeypatch):
    store, _, _ = request_case()
    op = unpacked(store, HEADS, 2)
    assert not op.plan(ROWS, PREFIX, NEW)
    monkeypatch.setattr(module, "MIN_NEW", 5)
    monkeypatch.setattr(module, "MIN_PREFIX", 2 * P)
    assert op.plan(ROWS, [2 * P, 0, 0, 0, 0], [5, 4, 0, 0, 0])
    assert not op.plan(ROWS, [P, 0, 0, 0, 0], [5, 4, 0, 0, 0])  # a short prefix
    assert not op.plan(ROWS, [2 * P, 0, 0, 0, 0], [4, 4, 0, 0, 0])  # few new tokens
    assert not op.plan(ROWS, [2 * P + 1, 0, 0, 0, 0], [5, 4, 0, 0, 0])  # an open block
    assert not op.plan(ROWS, [2 * P, 0, 0, 0, 0], [5, 4, 0, 0, 0], [[0, 1], [], [], [], []])  # all blocks wait
    low = SimpleNamespace(block_formats=(store.block_formats[0], SimpleNamespace(low=FORMATS["k4v2"])))
    assert module.UnpackedPrefix.create(low, SimpleNamespace()) is None


@pytest.mark.parametrize("exact", [None, [False, True, False, False, True]])
def test_forward_over_stored_blocks_matches_reference(exact, monkeypatch):
    """A whole forward, with stand-ins for FlashInfer, against the reference."""
    monkeypatch.setattr(module, "MIN_NEW", 1)
    monkeypatch.setattr(module, "MIN_PREFIX", 1)
    store, k, v = request_case()
    fmt, q = store.block_formats[1].high, torch.randn(
        sum(NEW), HEADS * 2, DIM, generator=torch.Generator().manual_seed(5)
    )
    q = q.bfloat16()
    op = ExtendAttention(store, query_heads=HEADS * 2, fake_quant_format=fmt)
    op._staged.prefill = Dense()
    op._unpacked = unpacked(store, HEADS * 2, 1)
    op.plan(ROWS, PREFIX, NEW, WAITING, exact and [None if x else fmt for x in exact])
    assert (op.steps.prefix, op.steps.new, op.steps.merge) == ("unpacked", "paged", "passes")
    out, lse = op.run(0, q, k[0], v[0], scale=SCALE, return_lse=True)
    seen = [None if exact and exact[r] else fmt for r in range(len(NEW))]
    want = ops.extend_attention(store, 0, q, ROWS, PREFIX, NEW, scale=SCALE, fake_quant_format=seen)
    assert error(out, want) < 0.04
    assert lse.isfinite().all()
    # Blocks of a one-shot prompt do not keep every token.
    op.plan(ROWS, PREFIX, NEW, WAITING, exact and [None if x else fmt for x in exact], whole=False)
    assert op.steps.prefix == "triton"

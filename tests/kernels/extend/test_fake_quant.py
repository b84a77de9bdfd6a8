"""Prefills that see fake-quantized blocks give equal bits however much of a prompt was cached and wherever it was
cut."""

import itertools

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.extend.fake_quant import fake_quantize
from kvc_kernels.formats import FORMATS
from tests.kernels.common.test_attention_reference import error
from tests.support.pages import block_formats_of, fill, make_store, random_kv

PACKED = [f.name for f in FORMATS.values() if f.packed]
P, LENGTH, SCALE = 64, 230, 64**-0.5


def filled(spec, seed=0, dtype=torch.bfloat16):
    """A store with one uncompressed request of LENGTH tokens. Returns store, row of blocks, K, V `[S, L, H, D]`."""
    store = make_store(block_formats_of(spec), dtype=dtype, block_tokens=P, head_dim=64, blocks=9)
    row = torch.tensor([4, 2, 7, 1])
    k, v = random_kv(store, LENGTH, seed)
    fill(store, row, k, v)
    return store, row


def queries(dtype=torch.bfloat16):
    return torch.randn(LENGTH, 6, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def pack(store, row):
    ops.compact(store, row, 1, ops.keep_all(len(row), store.layout), from_format=0)


def extend(store, row, q, prefix, end, cap=0.0):
    fmt = store.block_formats[1].high
    args = dict(scale=SCALE, logit_cap=cap, fake_quant_format=[fmt])
    return ops.extend_attention(store, 0, q[prefix:end], row[None], [prefix], [end - prefix], **args)


@pytest.mark.parametrize("spec", PACKED)
def test_fake_quantized_rows_equal_packed_rows(spec):
    store, row = filled(spec)
    k, v, _ = ops.load_dense(store, 0, row[:3])
    want = fake_quantize(store.layout, store.block_formats[1].high, k.bfloat16(), v.bfloat16())
    pack(store, row[:3])
    got = ops.load_dense(store, 0, row[:3])
    for a, b in zip(want, got):
        assert torch.equal(a, b.bfloat16())
    assert not torch.equal(want[0], k.bfloat16())


@pytest.mark.parametrize("spec", PACKED)
@pytest.mark.parametrize("cap", [0.0, 20.0])
def test_cold_chunked_and_warm_prefills_are_bit_identical(spec, cap):
    q = queries()
    store, row = filled(spec)
    cold = extend(store, row, q, 0, LENGTH, cap)
    for cuts in ((0, 64, 192, LENGTH), (0, 128, LENGTH), (0, 30, 70, 128, 229, LENGTH)):
        # Nothing is packed, every full block before the chunk is packed, or only some blocks are.
        for packed_blocks in (lambda at: 0, lambda at: at // P, lambda at: at // P // 2):
            store, row = filled(spec)
            done, out = 0, []
            for a, b in itertools.pairwise(cuts):
                if (n := packed_blocks(a)) > done:
                    pack(store, row[done:n])
                    done = n
                out.append(extend(store, row, q, a, b, cap))
            if all(x % P == 0 for x in cuts[:-1]):
                assert torch.equal(torch.cat(out), cold)
            else:  # the rounding of the CPU's attention kernel depends on the number of rows
                assert error(torch.cat(out), cold.double()) < 2e-3


@pytest.mark.parametrize("cap", [0.0, 20.0])
@pytest.mark.parametrize("spec", ["k4v4", "k4v2", "k2v2"])
def test_attention_matches_float64(spec, cap):
    """Token t of block b sees the blocks before b dequantized and its own block up to t exactly."""
    q = queries()
    store, row = filled(spec)
    exact = dense(store, row)
    got = extend(store, row, q, 0, LENGTH, cap)
    pack(store, row[:3])
    stored = dense(store, row)
    for t in (0, 63, 64, 127, 190, 191, 192, LENGTH - 1):
        want, plain = (attend(q[t], x, exact, t, cap) for x in (stored, exact))
        assert error(got[t], want) < 1e-2
        assert t < P or error(got[t], plain) > 5e-2


def dense(store, row):
    """fp64 K and V `[H, S, D]`."""
    return [x.transpose(0, 1).flatten(1, 2).double() for x in ops.load_dense(store, 0, row)[:2]]


def attend(q, before, current, t, cap):
    """`q[Hq, D]` at position t whose own block is `current`, over the blocks `before` it."""
    border = t // P * P
    k, v = (torch.cat((b[:, :border], o[:, border : t + 1]), 1) for b, o in zip(before, current))
    logits = torch.einsum("hgd,hsd->hgs", q.double().view(k.shape[0], -1, 64), k) * SCALE
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return torch.einsum("hgs,hsd->hgd", logits.softmax(-1), v).reshape(q.shape)


def test_batching_does_not_change_output():
    q = queries()
    store, row = filled("k4v4")
    alone = [extend(store, row, q, a, b) for a, b in ((0, 100), (128, LENGTH))]
    both = ops.extend_attention(
        store, 0, torch.cat((q[:100], q[128:])), row.expand(2, -1), [0, 128], [100, LENGTH - 128],
        scale=SCALE, fake_quant_format=[FORMATS["k4v4"]] * 2,
    )  # fmt: skip
    assert torch.equal(both, torch.cat(alone))

"""Attention over pages against float64 attention over the dense blocks, and bits against SGLang's torch_native."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from tests.support.pages import block_formats_of, fill, make_store, random_kv, random_tiers

FORMAT_LISTS = [f.name for f in FORMATS.values() if f.packed] + ["k8v4+k4v2", "k4v8+k2v2"]


def request(spec, *, groups=1, length=170, packed=2, prune=True, seed=0, dtype=torch.bfloat16, **kw):
    """A store with one request: `packed` full blocks at block format 1, the rest open. Returns store, row of blocks,
    dense.
    """
    kw = {"block_tokens": 64, "head_dim": 64, "blocks": 11, **kw}
    store = make_store(block_formats_of(spec) if spec else block_formats_of(), dtype=dtype, **kw)
    gen = np.random.default_rng(seed)
    p = store.layout.block_tokens
    row = torch.from_numpy(gen.permutation(kw["blocks"])[: -(-length // p)] + 1)
    k, v = random_kv(store, length, seed)
    fill(store, row, k, v)
    if spec and packed:
        tiers = ops.keep_all(packed, store.layout)
        if prune:
            tiers = random_tiers(store, packed, store.block_formats[1], gen)
            tiers[0, 0, 0] = 0  # a head that kept nothing
        ops.compact(store, row[:packed], 1, tiers, from_format=0)
    return store, row, gen


def dense(store, row, length, layer=0):
    """fp64 K, V `[H, S, D]` and mask `[H, S]` of the stored tokens."""
    k, v, tier = ops.load_dense(store, layer, row)
    h = store.layout.heads
    k, v = (x.transpose(0, 1).reshape(h, -1, x.shape[-1])[:, :length].double() for x in (k, v))
    return k, v, tier.transpose(0, 1).reshape(h, -1)[:, :length] > 0


def reference(q, k, v, stored, scale, cap=0.0):
    """`q[new, Hq, D]` at the last positions -> fp64 (out `[new, Hq, D]`, probabilities `[Hq, new, S]`)."""
    new, slots = q.shape[0], k.shape[1]
    group = q.shape[1] // k.shape[0]
    k, v, stored = (x.repeat_interleave(group, 0) for x in (k, v, stored))
    logits = torch.einsum("nhd,hsd->hns", q.double(), k) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    position = torch.arange(slots - new, slots).unsqueeze(-1)
    seen = stored.unsqueeze(1) & (torch.arange(slots) <= position)
    p = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("hns,hsd->nhd", p, v), p


def error(out, want):
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.parametrize("spec", FORMAT_LISTS)
@pytest.mark.parametrize("has_scores", [False, True])
def test_all_formats(spec, has_scores):
    for head_dim, group in ((64, 3), (128, 1), (32, 7)):
        store, row, _ = request(spec, has_scores=has_scores, head_dim=head_dim, layers=2, seed=group)
        k, v, stored = dense(store, row, 170, layer=1)
        gen = torch.Generator().manual_seed(1)
        scale = head_dim**-0.5
        q = torch.randn(40, 2 * group, head_dim, generator=gen)
        want, _ = reference(q, k, v, stored, scale)
        got = ops.decode_attention(store, 1, q[-1:], row[None].int(), torch.tensor([170]), scale=scale)
        assert error(got, want[-1:]) < 1e-5
        got = ops.extend_attention(store, 1, q, row[None], [130], [40], scale=scale)
        assert error(got, want) < 1e-5
        # In the model dtype, queries and the output are rounded too.
        half = q.bfloat16()
        want, _ = reference(half, k, v, stored, scale)
        got = ops.decode_attention(store, 1, half[-1:], row[None], torch.tensor([170]), scale=scale, seq_lens_cpu=[170])
        assert error(got, want[-1:].bfloat16()) < 1e-3
        got = ops.extend_attention(store, 1, half, row[None], torch.tensor([130]), [40], scale=scale)
        assert error(got, want) < 8e-3


@pytest.mark.parametrize("length,packed", [(1, 0), (63, 0), (64, 0), (65, 1), (128, 1), (129, 2), (250, 3), (370, 4)])
def test_lengths(length, packed):
    store, row, _ = request("k8v4+k4v2", length=length, packed=packed, seed=length)
    k, v, stored = dense(store, row, length)
    new = length - packed * 64
    q = torch.randn(new, 6, 64)
    want, _ = reference(q, k, v, stored, 0.125)
    got = ops.extend_attention(store, 0, q, row[None], [length - new], [new], scale=0.125)
    assert error(got, want) < 1e-5
    got = ops.decode_attention(store, 0, q[-1:], row[None], torch.tensor([length]), scale=0.125)
    assert error(got, want[-1:]) < 1e-5


@pytest.mark.parametrize("spec", [None, "k4v4"])
def test_logit_cap(spec):
    store, row, _ = request(spec)
    k, v, stored = dense(store, row, 170)
    q = 3 * torch.randn(30, 6, 64)
    want, _ = reference(q, k, v, stored, 0.125, cap=4.0)
    got = ops.extend_attention(store, 0, q, row[None], [140], [30], scale=0.125, logit_cap=4.0)
    assert error(got, want) < 1e-5
    got = ops.decode_attention(store, 0, q[-1:], row[None], torch.tensor([170]), scale=0.125, logit_cap=4.0)
    assert error(got, want[-1:]) < 1e-5


def test_row_mixes_blocks_of_several_formats():
    """Uncompressed, packed and lower blocks occur in any order, as a shared prefix with a pinned window may leave
    them."""
    store, row, gen = request("k8v4+k4v2", length=370, packed=0)
    for at in (0, 2, 3):
        tiers = random_tiers(store, 1, store.block_formats[1], gen)
        ops.compact(store, row[at : at + 1], 1, tiers, from_format=0)
    k, v, stored = dense(store, row, 370)
    q = torch.randn(30, 2, 64)
    want, _ = reference(q, k, v, stored, 0.125)
    got = ops.extend_attention(store, 0, q, row[None], [340], [30], scale=0.125)
    assert error(got, want) < 1e-5
    got = ops.decode_attention(store, 0, q[-1:], row[None], torch.tensor([370]), scale=0.125)
    assert error(got, want[-1:]) < 1e-5


def test_fully_pruned_head_gives_zero():
    store, row, _ = request("k4v4", length=64, packed=0)
    ops.compact(store, row, 1, torch.zeros(1, 1, 2, 64, dtype=torch.int8), from_format=0)
    q = torch.randn(1, 2, 64)
    assert not ops.decode_attention(store, 0, q, row[None], torch.tensor([64]), scale=0.125).any()


def test_garbage_in_scratch_page_does_not_reach_output():
    """Heads with fewer pages read page 0 after their end, so NaN there must not spread."""
    store, row, _ = request("k4v4+k4v2")
    q = torch.randn(20, 6, 64)
    outs = []
    for byte in (0, 255):
        store.pages[0] = byte
        outs.append(ops.extend_attention(store, 0, q, row[None], [150], [20], scale=0.125))
        outs.append(ops.decode_attention(store, 0, q[:1], row[None], torch.tensor([170]), scale=0.125))
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert torch.isfinite(outs[0]).all()


def test_answers_do_not_depend_on_the_batch():
    store, row, _ = request("k4v4", length=170)
    other = torch.tensor([b for b in range(1, 12) if b not in row.tolist()])
    k, v = random_kv(store, 100, seed=9)
    fill(store, other[:2], k, v)
    rows = torch.zeros(2, 4, dtype=torch.int32)
    rows[0, :2], rows[1, :3] = other[:2], row
    q = torch.randn(2, 6, 64).bfloat16()
    both = ops.decode_attention(store, 0, q, rows, torch.tensor([100, 170]), scale=0.125)
    for i, (r, n) in enumerate(((other[:2], 100), (row, 170))):
        alone = ops.decode_attention(store, 0, q[i : i + 1], r[None], torch.tensor([n]), scale=0.125)
        assert torch.equal(both[i], alone[0])
    q = torch.randn(50, 6, 64).bfloat16()
    both = ops.extend_attention(store, 0, q, rows, [80, 140], [20, 30], scale=0.125)
    assert torch.equal(both[:20], ops.extend_attention(store, 0, q[:20], rows[:1], [80], [20], scale=0.125))
    assert torch.equal(both[20:], ops.extend_attention(store, 0, q[20:], rows[1:], [140], [30], scale=0.125))


# ---- uncompressed: the bits of SGLang's torch_native backend


def stock_extend(q, k, v, prefix, scale):
    """As in `_run_sdpa_forward_extend`, all positions are queries, and the prefix's outputs are dropped."""
    rows = torch.zeros(q.shape[1], k.shape[0], q.shape[2], dtype=q.dtype)
    rows[:, prefix:] = q.movedim(0, 1)
    out = scaled_dot_product_attention(
        rows[None],
        k.movedim(0, 1)[None],
        v.movedim(0, 1)[None],
        enable_gqa=q.shape[1] != k.shape[1],
        scale=scale,
        is_causal=True,
    )
    return out[0].movedim(1, 0)[prefix:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_tokens", [64, 72])  # 72: the last page of a block is part-filled
def test_uncompressed_decode_equals_stock_bit_for_bit(dtype, block_tokens):
    for length, group in ((1, 3), (100, 3), (257, 1), (400, 7)):
        store, row, _ = request(None, length=length, dtype=dtype, block_tokens=block_tokens)
        k, v = random_kv(store, length, 0)
        q = torch.randn(1, 2 * group, 64).to(dtype)
        got = ops.decode_attention(store, 0, q, row[None], torch.tensor([length]), scale=0.125)
        want = scaled_dot_product_attention(
            q.movedim(0, 1)[None],
            k[0].movedim(0, 1)[None],
            v[0].movedim(0, 1)[None],
            enable_gqa=group != 1,
            scale=0.125,
        )
        assert torch.equal(got, want[0].movedim(1, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length,new", [(90, 90), (300, 1), (300, 13), (1100, 1), (1290, 2), (1400, 65), (1500, 700)])
def test_uncompressed_extend_equals_stock_bit_for_bit(dtype, length, new):
    """This includes queries that start at a tile border rather than at 0."""
    store, row, _ = request(None, length=length, dtype=dtype, block_tokens=256, page_bytes=4096)
    k, v = random_kv(store, length, 0)
    q = torch.randn(new, 6, 64).to(dtype)
    got = ops.extend_attention(store, 0, q, row[None], [length - new], [new], scale=0.125)
    assert torch.equal(got, stock_extend(q, k[0], v[0], length - new, 0.125))


# ---- attention scores


@pytest.mark.parametrize("spec", ["k4v4", "k8v4+k4v2"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_scores_are_column_sums_of_attention(spec, window, cap):
    """Scores of two prefills, each to the end of a prompt, and two decode steps against the explicit attention
    matrix."""
    store, row, _ = request(spec, has_scores=True, length=170, packed=0)
    sampling = ops.ScoreSampling(window, decode_stride=1)
    scores = torch.zeros(2, 170, dtype=torch.float64)
    for step, (prefix, new) in enumerate(((0, 100), (100, 68), (168, 1), (169, 1))):
        if step == 1:  # the first block is packed in between
            tiers = random_tiers(store, 1, store.block_formats[1], np.random.default_rng(3))
            ops.compact(store, row[:1], 1, tiers, from_format=0)
        end = prefix + new
        k, v, stored = dense(store, row, 170)
        scores = torch.where(stored, scores, 0)
        q = torch.randn(new, 6, 64)
        want, p = reference(q, k[:, :end], v[:, :end], stored[:, :end], 0.125, cap)
        kw = {"scale": 0.125, "logit_cap": cap, "sampling": sampling}
        if new == 1:
            got = ops.decode_attention(store, 0, q, row[None], torch.tensor([end]), **kw)
        else:
            got = ops.extend_attention(store, 0, q, row[None], [prefix], [new], **kw)
        assert error(got, want) < 1e-5
        p.diagonal(prefix, -2, -1).zero_()
        chosen = p if window is None else p[:, -window:]
        scores[:, :end] += chosen.sum(1).view(2, 3, -1).amax(1)
        counted = torch.tensor([min(new, window or new)])
        ops.count_queries(store, row[None], torch.tensor([prefix + new]), counted, ops.ScoreSampling(window))
    got = ops.block_scores(store, row).transpose(0, 2)[:, 0].reshape(2, -1)[:, :170]
    assert torch.allclose(got.double(), scores, rtol=1e-4, atol=1e-5)
    # Queries after each block's last token, counted by hand.
    queries = [range(max(a, b - (window or 999)), b) for a, b in ((0, 100), (100, 168), (168, 169), (169, 170))]
    counts = [sum(x >= 64 * (i + 1) for r in queries for x in r) for i in range(3)]
    assert store.query_counts[row].tolist() == counts
    places = torch.tensor([0, 64]), torch.tensor([170, 170])
    mean = ops.mean_attention_scores(store, row[:2], *places, ops.ScoreSampling(window))
    mean_attention_scores = mean.transpose(0, 2)[:, 0].reshape(2, -1)
    for j in (0, 5, 63, 64, 127):
        n = counts[j // 64] + (63 - j % 64 if window is None else 0)
        assert torch.allclose(mean_attention_scores[:, j].double(), scores[:, j] / max(1, n), rtol=1e-4, atol=1e-6)


def test_shared_prefix_collects_scores_from_every_request():
    store, row, _ = request("k4v4", has_scores=True, length=100, packed=0)
    more = torch.tensor([b for b in range(1, 12) if b not in row.tolist()])[:1]
    ops.compact(store, row[:1], 1, ops.keep_all(1, store.layout), from_format=0)
    k, v = random_kv(store, 36, seed=4)
    fill(store, more, k, v)
    rows = torch.stack([row, torch.cat((row[:1], more))])
    q = torch.randn(2, 6, 64)
    lens = torch.tensor([100, 100])
    kw = {"scale": 0.125, "sampling": ops.ScoreSampling(decode_stride=1)}
    ops.decode_attention(store, 0, q, rows, lens, **kw)
    both = ops.block_scores(store, row[:1])
    single = []
    for i in (0, 1):
        ops.decode_attention(store, 0, q[i : i + 1], rows[i : i + 1], lens[i : i + 1], **kw)
        single.append(ops.block_scores(store, row[:1]) - both - sum(single))
    assert torch.allclose(both, single[0] + single[1], atol=1e-5)
    ops.count_queries(store, rows, torch.tensor([100, 100]), torch.tensor([1, 1]), ops.ScoreSampling())
    assert store.query_counts[row].tolist() == [2, 0]


def test_scores_need_a_scored_layout():
    store, row, _ = request("k4v4")
    with pytest.raises(ValueError, match="no scores"):
        ops.block_scores(store, row)

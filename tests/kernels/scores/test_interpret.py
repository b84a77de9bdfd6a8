"""Attention received by stored tokens: the kernel's column sums against the scores of the torch reference."""

import copy

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.decode.attention import DecodeAttention
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import page_bytes_for
from kvc_kernels.scores.count_kernel import count_queries_triton
from kvc_kernels.scores.decode_kernel import StepTuning
from kvc_kernels.scores.planner import BlockPlaces
from kvc_kernels.scores.prefill_kernel import AttentionScores
from tests.support.pages import block_formats_of, fill, make_store, random_kv, random_tiers

P = 32
# The third request shares the packed blocks of the first, each at its own length.
PREFIX, NEW = [100, 0, 64], [17, 40, 9]
ROWS = torch.tensor([[3, 1, 4, 6], [2, 5, 9, 9], [3, 1, 7, 8]], dtype=torch.int32)
TOTAL = [p + n for p, n in zip(PREFIX, NEW)]
SCALE = 0.05
ALPHA = 0.012


def packed_case(spec, times=1, page_bytes=None):
    """Two stores of equal bytes: all tokens appended, the first two full blocks of request 0 packed. `times` multiplies
    the lengths of blocks and requests."""
    store = make_store(
        block_formats=block_formats_of(spec), head_dim=64, block_tokens=P * times, has_scores=True, layers=2, blocks=10,
        page_bytes=page_bytes,
    )  # fmt: skip
    store.pages.zero_()  # the reference reads beyond the written bytes, which may spell NaN
    for r in (0, 1):
        fill(store, ROWS[r, : -(-TOTAL[r] // P)].long(), *random_kv(store, TOTAL[r] * times, seed=r))
    k, v = random_kv(store, NEW[2] * times, seed=2)
    fill(store, ROWS[2, 2:3].long(), k, v)
    full = torch.tensor([3, 1])
    tiers = random_tiers(store, 2, store.block_formats[1], np.random.default_rng(1))
    ops.compact(store, full, 1, tiers, from_format=0)
    kernel_store = copy.copy(store)
    kernel_store.pages = store.pages.clone()
    return store, kernel_store


def lse_of(store, layer, q, lens, prefixes, cap):
    """Base-2 log-sum-exp `[N, Hq]` in float64 of each new token over its request's stored tokens up to itself."""
    out, at, p = torch.empty(q.shape[:2], dtype=torch.float64), 0, store.layout.block_tokens
    group = q.shape[1] // store.layout.heads
    for r, (prefix, total) in enumerate(zip(prefixes, lens)):
        new = total - prefix
        k, _, tier = ops.load_dense(store, layer, ROWS[r, : -(-total // p)].long())
        k = k.transpose(0, 1).flatten(1, 2)[:, :total].double()
        stored = tier.transpose(0, 1).flatten(1)[:, :total] > 0
        logits = torch.einsum("nhgd,hsd->nhgs", q[at : at + new].double().unflatten(1, (-1, group)), k) * SCALE
        if cap:
            logits = cap * torch.tanh(logits / cap)
        seen = stored[None] & (torch.arange(total) <= prefix + torch.arange(new)[:, None])[:, None]
        out[at : at + new] = logits.masked_fill(~seen[:, :, None], -torch.inf).logsumexp(-1).flatten(1)
        at += new
    return (out / np.log(2)).float()


def queries(n, heads):
    return torch.randn(n, heads, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def compare(store, kernel_store):
    blocks = ROWS.flatten().unique().long()
    blocks = blocks[store.format_id[blocks] >= 0]
    a, b = (ops.block_scores(s, blocks) for s in (store, kernel_store))
    assert a[:, 1].max() > 2e-3
    assert a[:, 0].max() == b[:, 0].max() == 0
    assert torch.allclose(a, b, atol=2e-3 * float(a.max()), rtol=0.02)


@pytest.mark.parametrize(
    "spec, group, cap, sampling",
    [
        ("k4v4", 2, 0.0, ops.ScoreSampling()),
        ("k8v4+k4v2", 3, 0.0, ops.ScoreSampling(8, "sum", power=2)),
        ("k8v4+k4v2", 1, 3.0, ops.ScoreSampling(8, skip=4)),
        ("k2v2", 2, 0.0, ops.ScoreSampling(reduce="squares")),
        ("k4v4", 2, 0.0, ops.ScoreSampling(None, "sum", power=2, skip=10, stride=4)),
        ("k4v4", 1, 0.0, ops.ScoreSampling(16, stride=8)),
        ("k8v4+k4v2", 2, 0.0, ops.ScoreSampling(16, "worst", stride=2)),
        ("k4v4", 2, 3.0, ops.ScoreSampling(None, "worst", power=2, skip=4)),
    ],
)
@pytest.mark.parametrize("prompts", [None, [TOTAL[0] + 50, TOTAL[1] + 3, TOTAL[2]]])
def test_prefill_scores_match_reference(spec, group, cap, sampling, prompts):
    """The second prompt ends within a window after its chunk, the first one later."""
    store, kernel_store = packed_case(spec)
    q = queries(sum(NEW), 2 * group)
    lse = lse_of(store, 1, q, TOTAL, PREFIX, cap)
    ops.extend_attention(
        store, 1, q, ROWS, PREFIX, NEW, scale=SCALE, logit_cap=cap, sampling=sampling, prompt_lens=prompts
    )
    op = AttentionScores(kernel_store, query_heads=2 * group, sampling=sampling, tile=32, queries=16)
    op.plan(ROWS, PREFIX, NEW, prompts)
    op.add(1, q, lse, scale=SCALE, logit_cap=cap)
    compare(store, kernel_store)


@pytest.mark.parametrize(
    "spec, group, cap, sampling",
    [
        ("k4v4", 4, 0.0, ops.ScoreSampling(decode_stride=1)),
        ("k8v4+k4v2", 3, 0.0, ops.ScoreSampling(reduce="squares", decode_stride=1)),
        ("k2v2", 1, 3.0, ops.ScoreSampling(reduce="sum", power=2, skip=10, decode_stride=1)),
        ("k8v4+k4v2", 2, 0.0, ops.ScoreSampling(reduce="worst", decode_stride=1)),
        ("k4v4", 4, 0.0, ops.ScoreSampling(decode_stride=8)),  # one of 117, 40 and 73 tokens
    ],
)
def test_decode_scores_match_reference(spec, group, cap, sampling):
    """Covers the log-sum-exp of the decode kernel and a row of padding."""
    store, kernel_store = packed_case(spec)
    q = queries(4, 2 * group)
    rows = torch.cat((ROWS, torch.zeros_like(ROWS[:1])))
    lens = torch.tensor([*TOTAL, 1], dtype=torch.int32)
    ops.decode_attention(store, 1, q, rows, lens, scale=SCALE, logit_cap=cap, sampling=sampling)
    attend = DecodeAttention(kernel_store, max_batch=4, max_blocks=4, query_heads=2 * group)
    attend.plan(rows, lens)
    lse = torch.full((4, 2 * group), torch.nan)
    attend.run(1, q, scale=SCALE, logit_cap=cap, lse=lse)
    assert torch.allclose(lse[:3], lse_of(store, 1, q[:3], TOTAL, [n - 1 for n in TOTAL], cap), atol=5e-3)
    op = AttentionScores(kernel_store, query_heads=2 * group, sampling=sampling, max_batch=4, max_blocks=4, tile=32)
    op.plan_decode(rows, lens)
    op.add(1, q, lse, scale=SCALE, logit_cap=cap)
    compare(store, kernel_store)
    with pytest.raises(ValueError, match="made for steps"):
        op.plan_decode(rows.repeat(1, 2), lens)


@pytest.mark.parametrize("page_tokens, times", [(64, 4), (48, 4), (48, 3)])
def test_decode_launch_variants_agree(page_tokens, times):
    """Products over one page, two pages, or parts of them, one or more per program, on blocks of 128 and 96 tokens of
    which some heads keep half."""
    size = page_bytes_for(FORMATS["k4v4"], page_tokens, head_dim=64, has_scores=True)
    store, kernel_store = packed_case("k4v4", times, size)
    lens, q = torch.tensor(TOTAL, dtype=torch.int32) * times, queries(3, 8)
    sampling = ops.ScoreSampling(reduce="sum", power=2, decode_stride=1)
    ops.decode_attention(store, 1, q, ROWS, lens, scale=SCALE, sampling=sampling)
    prefixes = [int(n) - 1 for n in lens]
    lse = lse_of(store, 1, q, [int(n) for n in lens], prefixes, 0.0)
    pages = kernel_store.pages.clone()
    for tile, tiles in ((128, 1), (64, 2), (64, 1), (32, 3), (32, 1)):
        kernel_store.pages.copy_(pages)
        op = AttentionScores(
            kernel_store, query_heads=8, sampling=sampling, max_batch=3, max_blocks=4, step=StepTuning(tile, tiles)
        )
        op.plan_decode(ROWS, lens)
        op.add(1, q, lse, scale=SCALE)
        compare(store, kernel_store)


def test_blocks_are_listed_once():
    store, _ = packed_case("k8v4+k4v2")
    blocks = BlockPlaces(store)
    listed = blocks.room(12)
    # The first two requests share blocks; the second one, which is the first to observe, also lists them.
    rows = torch.tensor([[3, 1, 4, 6], [3, 1, 7, 8], [3, 2, 9, 9], [5, 0, 0, 0]], dtype=torch.int32)
    requests = torch.tensor([[0] * 4, [TOTAL[2]] + [0] * 3, [40, 0, 0, 0], [7, 0, 0, 0]], dtype=torch.int32)
    blocks.update(requests, rows, listed)
    assert int(blocks.num_places) == 6
    entries, owners = listed[:, :6].tolist()
    packed, plain, left = 6, 1, 0
    assert [(w >> 32, (w >> 12) & 0xFFFFF, w & 0xFFF) for w in entries] == [
        (3, 0, packed), (1, 1, packed), (7, 2, plain), (3, 0, left), (2, 1, plain), (5, 0, plain),
    ]  # fmt: skip
    assert [(w >> 32, w & 0xFFFFFFFF) for w in owners] == [(1, 2), (1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    "sampling",
    [
        ops.ScoreSampling(),
        ops.ScoreSampling(stride=16),
        ops.ScoreSampling(32, stride=8, decode_stride=1),
    ],
)
@pytest.mark.parametrize("counted", [[130, 64, 9], [0, 8, 1], None])
def test_query_counts_match_reference(sampling, counted):
    """Blocks belong to one or several requests; positions after a request's end name any block, here one in use."""
    store, kernel_store = packed_case("k4v4")
    kernel_store.query_counts = store.query_counts.clone()
    lens = torch.tensor([160, 64, 73])  # two requests end on a block border
    rows = torch.cat((ROWS, torch.full_like(ROWS, 3)), 1)
    rows[0, 4] = 8
    counted = None if counted is None else torch.tensor(counted)
    ops.count_queries(store, rows, lens, counted, sampling)
    count_queries_triton(kernel_store, rows, lens, counted, sampling)
    assert store.query_counts.any()
    assert torch.equal(store.query_counts, kernel_store.query_counts)


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("spec, group, cap", [("k4v4", 2, 0.0), ("k8v4+k4v2", 3, 3.0)])
def test_recurrence_words_match_reference(spec, group, cap, decoding):
    """The same words from kernel and reference, except where a probability is within 3 % of the threshold. Tokens have
    words of an earlier forward, and blocks are shared."""
    results = []
    for alpha in (0.97 * ALPHA, ALPHA, 1.03 * ALPHA):
        sampling = ops.ScoreSampling(reduce="recurrence", decode_stride=1, alpha=alpha)
        store, mine = packed_case(spec)
        q = queries(sum(NEW), 2 * group)
        ops.extend_attention(store, 1, q.flip(0), ROWS, PREFIX, NEW, scale=SCALE, logit_cap=cap, sampling=sampling)
        mine.pages.copy_(store.pages)
        op = AttentionScores(
            mine, query_heads=2 * group, sampling=sampling, max_batch=3, max_blocks=4, tile=32, queries=16
        )
        prefixes, kw = [n - 1 for n in TOTAL] if decoding else PREFIX, {"scale": SCALE, "logit_cap": cap}
        if decoding:
            q = q[:3]
            ops.decode_attention(store, 1, q, ROWS, torch.tensor(TOTAL), sampling=sampling, **kw)
            op.plan_decode(ROWS, torch.tensor(TOTAL, dtype=torch.int32))
        else:
            ops.extend_attention(store, 1, q, ROWS, PREFIX, NEW, sampling=sampling, **kw)
            op.plan(ROWS, PREFIX, NEW)
        op.add(1, q, lse_of(store, 1, q, TOTAL, prefixes, cap), **kw)
        blocks = ROWS.flatten().unique().long()
        blocks = blocks[store.format_id[blocks] >= 0]
        results.append([ops.block_scores(s, blocks).view(torch.int32) for s in (store, mine)])
    (low, _), (want, got), (high, _) = results
    sure = low == high
    assert sure[:, 1].float().mean() > 0.8 and torch.equal(want[sure], got[sure])
    last, interval = ops.recurrence(got.view(torch.float32))
    assert len(last[:, 1][sure[:, 1]].unique()) > 3 and bool((interval > 0).any()) == decoding
    assert got[:, 0].max() == 0


def test_packing_moves_recurrence_words_unchanged():
    from kvc_kernels.compact.launch import compact_triton

    store, _ = packed_case("k8v4+k4v2")
    sampling = ops.ScoreSampling(reduce="recurrence", decode_stride=1, alpha=0.035)
    block = torch.tensor([2])  # uncompressed
    q = queries(NEW[1], 4)
    ops.extend_attention(store, 1, q, ROWS[1:2], [0], [NEW[1]], scale=SCALE, sampling=sampling)
    ops.decode_attention(store, 1, q[:1], ROWS[1:2], torch.tensor([TOTAL[1]]), scale=SCALE, sampling=sampling)
    words = ops.block_scores(store, block).view(torch.int32)
    tiers = random_tiers(store, 1, store.block_formats[1], np.random.default_rng(2))
    assert len(words.unique()) > 10
    for from_format in (0, 1):
        compact_triton(store, block, 1, tiers, from_format=from_format)
        got = ops.block_scores(store, block).view(torch.int32)
        assert torch.equal(got, torch.where(tiers > 0, words, 0))
        tiers = (tiers - torch.arange(P) % 2).clamp(min=0).to(torch.int8)


def test_reductions_have_names():
    with pytest.raises(ValueError, match="max, sum, squares, worst"):
        ops.ScoreSampling(reduce="mean")

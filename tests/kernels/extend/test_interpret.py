"""Prefill attention under the interpreter against a float64 reading of the same pages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_kernels.extend.attention import ExtendAttention, Tuning
from kvc_kernels.extend.planner import ExtendPlan, cut_prefixes
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes
from tests.support.pages import packed_prompt
from tests.support.random_store import dense_head, random_store

SMALL = Tuning(rows=16, tile=32, programs_per_sm=12)


def make_case(block_formats, *, group, head_dim=64, heads=2, block_tokens=32, dtype=torch.bfloat16,
              has_scores=False, format_ids=(1, 2, 0, 1, 0, 2), device="cpu", seed=0, layers=2, full=False):
    """A store of `len(format_ids)` blocks with ragged heads (whole ones with `full`)."""
    format_ids = torch.tensor(format_ids) % len(block_formats)
    formats = [f for r in block_formats for f in (r.high, r.low) if f is not None and f.packed] or [BF16]
    page = choose_page_bytes(formats, head_dim=head_dim, block_tokens=block_tokens, has_scores=has_scores)
    layout = PoolLayout(layers, heads, head_dim, block_tokens, page, has_scores)
    gen = torch.Generator().manual_seed(seed)
    shape = (len(format_ids), layers, heads)
    high = torch.randint(0, block_tokens + 1, shape, generator=gen)
    high[0], high[-1] = 0, block_tokens
    low = (torch.rand(shape, generator=gen) * (block_tokens - high + 1)).long()
    one_tier = torch.tensor([r.low is None for r in block_formats])[format_ids].view(-1, 1, 1)
    low = torch.where(one_tier, 0, low)
    if full:
        high, low = torch.full_like(high, block_tokens), torch.zeros_like(low)
    counts = torch.stack((high, low), -1)
    return random_store(layout, block_formats, format_ids, counts, dtype=dtype, device=device, seed=seed)


def reference(store, layer, q, k, v, row_blocks, prefix_lens, extend_lens, *, scale, logit_cap=0.0, lse=False):
    """float64 `[N, Hq, D]`; with `lse` also the base-2 log-sum-exp `[N, Hq]`."""
    layout, p, at = store.layout, store.layout.block_tokens, 0
    group = q.shape[1] // layout.heads
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    out = torch.full(q.shape, torch.nan, dtype=torch.float64)
    sums = torch.full(q.shape[:2], torch.nan, dtype=torch.float64)
    for b, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
        for h in range(layout.heads):
            ids = [int(row_blocks[b, j]) for j in range(-(-prefix // p))]
            parts = [dense_head(store, x, layer, h, min(p, prefix - j * p)) for j, x in enumerate(ids)]
            kc, vc = (torch.cat([x[i] for x in parts] + [y[at : at + new, h]]) for i, y in ((0, k), (1, v)))
            x = q[at : at + new, h * group : (h + 1) * group]
            logits = torch.einsum("ngd,sd->gns", x, kc) * scale
            if logit_cap:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            old = len(kc) - new
            later = torch.arange(len(kc)) - old > torch.arange(new).unsqueeze(1)
            logits = logits.masked_fill(later, -torch.inf)
            heads = slice(h * group, (h + 1) * group)
            out[at : at + new, heads] = torch.einsum("gns,sd->ngd", torch.softmax(logits, -1), vc)
            sums[at : at + new, heads] = logits.logsumexp(-1).T / math.log(2)
        at += new
    return (out, sums) if lse else out


def inputs(store, group, tokens, dtype, seed=1, device="cpu"):
    """Views of one qkv tensor, as a model passes them."""
    heads, d = store.layout.heads, store.layout.head_dim
    gen = torch.Generator(device=device).manual_seed(seed)
    qkv = torch.randn((tokens, (group + 2) * heads, d), generator=gen, device=device).to(dtype)
    return qkv.split((group * heads, heads, heads), 1)


def error(out, ref):
    """Relative error: the worst output row over the mean norm."""
    diff = (out.double().cpu() - ref).norm(dim=-1)
    return float(diff.max() / ref.norm(dim=-1).mean())


FORMAT_LISTS = {
    "k4v4": (BlockFormat(BF16), BlockFormat(FORMATS["k4v4"])),
    "k8v8": (BlockFormat(BF16), BlockFormat(FORMATS["k8v8"])),
    "k2v2": (BlockFormat(BF16), BlockFormat(FORMATS["k2v2"])),
    "tiers": (BlockFormat(BF16), BlockFormat(FORMATS["k8v4"], FORMATS["k4v2"]), BlockFormat(FORMATS["k4v8"])),
    "plain": (BlockFormat(BF16),),
    "ladder": tuple(BlockFormat(FORMATS[name]) for name in ("bf16", "k8v8", "k8v4", "k4v4", "k4v2", "k2v2")),
}
ROWS = torch.tensor([[3, 1, 2, 4, 5], [6, 0, 0, 0, 0], [2, 4, 1, 0, 0]], dtype=torch.int32)


@pytest.mark.parametrize(
    "spec, group", [("k4v4", 4), ("k8v8", 1), ("k2v2", 3), ("tiers", 2), ("plain", 7), ("ladder", 4)]
)
def test_formats_and_groups_match_float64(spec, group):
    format_ids = (1, 2, 3, 4, 5, 0) if spec == "ladder" else (1, 2, 0, 1, 0, 2)
    store = make_case(FORMAT_LISTS[spec], group=group, has_scores=group == 2, format_ids=format_ids)
    prefix, new = [4 * 32 - 11, 0, 64], [4, 2, 1]
    q, k, v = inputs(store, group, sum(new), torch.bfloat16)
    op = ExtendAttention(store, query_heads=2 * group, tuning=SMALL)
    op.plan(ROWS, prefix, new)
    out = op.run(1, q, k, v, scale=0.2)
    assert error(out, reference(store, 1, q, k, v, ROWS, prefix, new, scale=0.2)) < 0.02


def test_one_part_and_many_parts_agree():
    store = make_case(FORMAT_LISTS["k4v4"], group=2, format_ids=(1, 1, 0, 1, 1, 0))
    prefix, new = [150, 33], [9, 8]
    q, k, v = inputs(store, 2, 17, torch.bfloat16)
    outs = []
    for programs in (1, 100):
        op = ExtendAttention(store, query_heads=4, tuning=Tuning(rows=16, tile=32, programs_per_sm=programs))
        op.plan(ROWS[::2], prefix, new)
        assert (op._plan.n_merges > 0) == (programs > 1)
        outs.append(op.run(0, q, k, v, scale=0.1, return_lse=True))
    assert error(outs[0][0], outs[1][0].double()) < 0.01
    _, lse = reference(store, 0, q, k, v, ROWS[::2], prefix, new, scale=0.1, lse=True)
    assert all((x[1] - lse).abs().max() < 0.01 for x in outs)


def attend(store, layer, q, k, v, rows, prefix, new, **options):
    op = ExtendAttention(store, query_heads=q.shape[1])
    op.plan(rows, prefix, new)
    return op.run(layer, q, k, v, **options)


def test_logit_cap_with_fp16_and_strided_rows():
    store = make_case(FORMAT_LISTS["k4v4"], group=1, dtype=torch.float16)
    prefix, new = [100], [20]
    q, k, v = inputs(store, 1, 20, torch.float16)
    out = attend(store, 0, q, k, v, ROWS[:1], prefix, new, scale=1.0, logit_cap=5.0)
    assert error(out, reference(store, 0, q, k, v, ROWS[:1], prefix, new, scale=1.0, logit_cap=5.0)) < 0.01


def test_output_of_other_kernel_is_merged():
    store = make_case(FORMAT_LISTS["k4v4"], group=2, full=True)
    prefix, new = [96, 40], [7, 9]
    q, k, v = inputs(store, 2, 16, torch.bfloat16)
    expected = reference(store, 1, q, k, v, ROWS[::2], prefix, new, scale=0.2)
    new_o, lse = reference(store, 1, q, k, v, ROWS[::2], [0, 0], new, scale=0.2, lse=True)
    for programs in (1, 100):
        op = ExtendAttention(store, query_heads=4, tuning=Tuning(rows=16, tile=32, programs_per_sm=programs))
        op.plan(ROWS[::2], prefix, new)
        out = torch.full((16, 4, 64), torch.nan, dtype=torch.bfloat16)
        op._attend(1, q, k, v, out, None, (new_o.bfloat16(), lse.float()), 0.2, 0.0)
        assert error(out, expected) < 0.02


def test_empty_store_and_empty_requests():
    store = make_case(FORMAT_LISTS["k4v4"], group=2, format_ids=(1, 1, 1, 1, 1, 1))
    store.counts[1:] = 0
    q, k, v = inputs(store, 2, 3, torch.bfloat16)
    out = attend(store, 0, q, k, v, ROWS[:2], [160, 32], [3, 0], scale=0.2)
    assert error(out, reference(store, 0, q, k, v, ROWS[:2], [160, 32], [3, 0], scale=0.2)) < 0.02
    none = attend(store, 0, q[:0], k[:0], v[:0], ROWS[:1], [160], [0], scale=0.2)
    assert none.shape == (0, 4, 64)


def ends(blocks, tiles, programs, limit, start):
    """The time at which the last part ends, with each part assigned to the first free program."""
    cut = [(min(limit, b - at) + start, t) for b, t in zip(blocks, tiles) for at in range(0, max(b, 1), limit)]
    works = [work for work, t in cut for _ in range(t)]
    free = [0] * programs
    for work in sorted(works, reverse=True):
        i = free.index(min(free))
        free[i] += work
    return max(free)


def test_cut_size_balances_programs():
    assert cut_prefixes([801], [8], 132, 2) == 49  # 16 parts of 49 per head and one of 17, two of which fit in parallel
    assert cut_prefixes([800], [4], 132, 2) == 25
    assert cut_prefixes([64], [1024], 132, 2) == 64  # enough rounds without cuts
    assert cut_prefixes([400] + [4] * 63, [8] * 64, 264) <= 25
    assert cut_prefixes([], [], 264) == 1


@given(
    works=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=8),
    programs=st.integers(1, 64),
    start=st.integers(0, 4),
)
@settings(max_examples=150, deadline=None)
def test_cut_prefixes_shorten_schedule(works, programs, start):
    blocks, tiles = [b for b, _ in works], [t for _, t in works]
    limit = cut_prefixes(blocks, tiles, programs, start)
    end = ends(blocks, tiles, programs, limit, start)
    assert end <= ends(blocks, tiles, programs, max([1, *blocks]), start)
    parts = [max(1, -(-b // limit)) for b in blocks]
    assert sum(t * n for t, n in zip(tiles, parts)) <= sum(tiles) + 3 * programs
    # No schedule is shorter than an even share of the work; with the longest part first it is at most one part longer.
    assert end <= -(-sum((b + start * n) * t for (b, t), n in zip(works, parts)) // programs) + limit + start


@pytest.mark.parametrize("most", [None, 64])
@pytest.mark.parametrize("new_tokens", [True, False])
def test_items_cover_every_token_once(new_tokens, most):
    store = make_case(FORMAT_LISTS["k4v4"], group=2)
    plan = ExtendPlan(store, 2, max_blocks=8)
    prefix, new = [160, 0, 32], [70, 9, 0]
    programs = 40 if most is None else 1
    plan.update(ROWS, prefix, new, rows=32, programs=programs, new_tokens=new_tokens, most_tokens=most)
    items = plan.items.view(-1, 8).tolist()
    assert most is None or max(x[5] - x[4] for x in items) == most // 32
    assert len(items) == plan.n_items and items == sorted(items, key=lambda x: x[4] - x[5])
    for r, n in enumerate(new):
        for first in range(0, 2 * n, 32):
            parts = sorted(x for x in items if x[0] == r and x[2] == first)
            total = -(-prefix[r] // 32) + new_tokens * -(-min(first + 32, 2 * n) // 64)
            assert [x[4] for x in parts] == [0, *(x[5] for x in parts[:-1])] and parts[-1][5] == total
            assert {x[6] for x in parts} == {max(total, 1)} and {(x[1], x[3]) for x in parts} == {(sum(new[:r]), 2 * n)}
            joined = [j for j in plan.merges.view(-1, 5).tolist() if j[:2] == [sum(new[:r]), first]]
            slots = [x[7] for x in parts]
            assert joined == ([[sum(new[:r]), first, 2 * n, slots[0], len(parts)]] if len(parts) > 1 else [])
            assert slots == (list(range(slots[0], slots[0] + len(parts))) if joined else [-1])


@pytest.mark.parametrize("new", [1, 3, 40])
def test_tokens_after_prompt_packed_into_few_blocks(new):
    """Blocks are part-filled or empty for some heads; with mixed chunks, decode steps read them through this kernel."""
    store, rows, lens = packed_prompt(head_dim=64, block_tokens=64)
    gen = torch.Generator().manual_seed(3)
    q = torch.randn(2 * new, 4, 64, generator=gen).to(store.dtype)
    k, v = (torch.randn(2 * new, 2, 64, generator=gen).to(store.dtype) for _ in range(2))
    op = ExtendAttention(store, query_heads=4, max_blocks=5, tuning=SMALL)
    op.plan(rows, lens.tolist(), [new, new], whole=False)
    for layer in range(2):
        out = op.run(layer, q, k, v, scale=0.125)
        want = reference(store, layer, q, k, v, rows, lens.tolist(), [new, new], scale=0.125)
        assert ((out.double() - want).norm() / want.norm()) < 4e-3

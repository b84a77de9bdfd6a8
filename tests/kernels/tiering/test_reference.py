"""Plans: exact quota counts and threshold rules, on hand-made cases and against slow references."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_kernels import ops
from kvc_kernels.layout import PoolLayout


def test_keep_all_puts_every_token_in_high_tier():
    layout = PoolLayout(3, 2, 32, 16, 1024)
    tiers = ops.keep_all(4, layout)
    assert tiers.shape == (4, 3, 2, 16) and tiers.dtype == torch.int8 and (tiers == 2).all()


def slow_quota(scores: np.ndarray, pages: int, t: int, floor: int) -> np.ndarray:
    """One block `[L, H, P]`: pages as an explicit list, sorted in Python."""
    tiers, rest, candidates, first = np.zeros(scores.shape, np.int8), pages, [], []
    for l in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            order = sorted(range(scores.shape[2]), key=lambda p: (-scores[l, h, p], p))
            for j in range(0, len(order), t):
                page = order[j : j + t]
                entry = (-scores[l, h, page[0]], l, h, j, page)
                (first if j // t < floor else candidates).append(entry)
    rest -= len(first)
    for _, l, h, _, page in first + sorted(candidates)[:rest]:
        tiers[l, h, page] = 2
    return tiers


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_quota_equals_slow_reference_with_exact_count(data):
    layers, heads, p = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([16, 24, 32])))
    t = data.draw(st.sampled_from([4, 8, 12, 16, 48]))
    per_head = -(-p // t)
    floor = data.draw(st.integers(0, 2))
    least = layers * heads * min(floor, per_head)
    pages = data.draw(st.integers(least, layers * heads * per_head))
    seed = data.draw(st.integers(0, 999))
    gen = np.random.default_rng(seed)
    # Few distinct values give many ties.
    scores = gen.integers(0, data.draw(st.sampled_from([1, 3, 1000])), (2, layers, heads, p)).astype(np.float32)
    tiers = ops.quota(torch.from_numpy(scores), pages, t, floor)
    kept = (tiers == 2).sum(-1)
    assert ((kept + t - 1) // t).sum((1, 2)).tolist() == [pages, pages]
    for i in range(2):
        assert np.array_equal(tiers[i].numpy(), slow_quota(scores[i], pages, t, floor))


def test_quota_bounds():
    scores = torch.rand(1, 2, 2, 32)
    for pages in (3, 9):
        with pytest.raises(ValueError, match=r"4\.\.8"):
            ops.quota(scores, pages, 16)
    assert (ops.quota(scores, 8, 16) == 2).all()


def test_quota_gives_pages_to_head_with_higher_scores():
    scores = torch.rand(1, 1, 2, 64)
    scores[0, 0, 1] += 1
    kept = (ops.quota(scores, 4, 16) == 2).sum(-1)[0, 0]
    assert kept.tolist() == [16, 48]


@pytest.mark.parametrize("pages", range(2, 9))
def test_quota_ranks_dropped_tokens_last(pages):
    """Each head has 44 stored tokens, which fill 2.75 pages. Dropped tokens may take the rest of the third page, and
    the fourth, only where the head keeps all its stored tokens."""
    gen = torch.Generator().manual_seed(1)
    scores = torch.rand(50, 1, 2, 64, generator=gen)
    scores[..., 10:30] = -torch.inf
    stored = scores > -torch.inf
    kept = ops.quota(scores, pages, 16) == 2
    assert (kept.sum(-1).sum((1, 2)) == 16 * pages).all()
    lost_kept, stored_dropped = (kept & ~stored).any(-1), (~kept & stored).any(-1)
    assert not (lost_kept & stored_dropped).any()
    # The fourth page of a head is worth less than any page of the other one.
    assert pages > 6 or kept.sum(-1).max() <= 48


def plan(mean_attention_scores, ceiling=None, ah=0.5, al=0.2, high=4, low=8, divisor=1.0, limit=None):
    s = torch.tensor(mean_attention_scores, dtype=torch.float32).view(1, 1, 1, -1)
    c = torch.full(s.shape, 2, dtype=torch.int8) if ceiling is None else torch.tensor(ceiling).view(s.shape)
    d = torch.full((1, s.shape[-1]), divisor) if isinstance(divisor, float) else torch.tensor([divisor])
    m = None if limit is None else torch.tensor([[[limit]]])
    return ops.threshold(s, d, ah, al, c.to(torch.int8), high, low, m)[0, 0, 0].tolist()


def test_threshold_tiers_of_hand_made_cases():
    # 4 high or 8 low tokens fill a page, so nothing is rounded.
    assert plan([0.9] * 4 + [0.3] * 8 + [0.1] * 4) == [2] * 4 + [1] * 8 + [0] * 4
    # Thresholds are inclusive and divided by position.
    assert plan([0.5, 0.5, 0.25, 0.25] * 2, high=1, low=1, divisor=[1.0, 0.5, 2.0, 0.5] * 2) == [2, 1, 2, 0] * 2
    assert plan([0.05] * 16) == [0] * 16
    # With alpha_high 0 there is no low tier.
    assert plan([0.9] * 4 + [0.3] * 8 + [0.1] * 4, ah=0.0) == [2] * 12 + [0] * 4
    assert plan([0.9] * 4 + [0.3] * 8 + [0.1] * 4, ah=0.0, al=0.0) == [2] * 16


def test_threshold_fills_last_pages():
    # With 5 high tokens the second page has 3 slots, which the best low tokens take; the 5 best pruned tokens join the
    # 3 remaining low ones.
    s = [0.9] * 5 + [0.3, 0.31, 0.32, 0.33, 0.34, 0.35] + [0.1, 0.15, 0.11, 0.12, 0.13, 0.14, 0.01, 0.02]
    assert plan(s) == [2] * 5 + [1, 1, 1, 2, 2, 2] + [0, 1, 1, 1, 1, 1, 0, 0]
    # Ties go to the lower position; without a part-filled page there is nothing to fill.
    assert plan([0.9] * 3 + [0.3] * 4 + [0.0] * 9) == [2] * 3 + [2, 1, 1, 1] + [1] * 5 + [0] * 4
    assert plan([0.9] * 4 + [0.1] * 12) == [2] * 4 + [0] * 12


def test_threshold_never_raises_stored_tier():
    ceiling = [1, 2, 0, 2, 1, 0, 2, 2]
    assert plan([0.9] * 8, ceiling, low=8) == ceiling
    # The free slot of the high page must not raise a token that is stored low, nor the low page a token that was
    # dropped.
    got = plan([0.9, 0.9, 0.9, 0.4, 0.3, 0.1, 0.1, 0.1], [2, 2, 2, 1, 2, 0, 1, 0])
    assert got == [2, 2, 2, 1, 2, 0, 1, 0]
    # When low tokens run out, pruned ones that are still stored high take the rest of the page.
    assert plan([0.9, 0.3, 0.1, 0.15, 0.05, 0.01]) == [2, 2, 2, 2, 0, 0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([(4, 8), (8, 8), (4, 6), (8, 4)]))
def test_threshold_invariants_hold_for_random_scores(seed, tokens):
    """Tiers never exceed the ceiling, pages never increase, and no slot stays empty while a token could fill it."""
    high, low = tokens
    gen = torch.Generator().manual_seed(seed)
    s = torch.rand(2, 2, 2, 32, generator=gen)
    ceiling = torch.randint(0, 3, s.shape, generator=gen).to(torch.int8)
    if seed % 3 == 0:
        ceiling.fill_(2)
    divisor = torch.rand(2, 32, generator=gen) + 0.5

    def pages(tiers):
        h, l = (tiers == 2).sum(-1), (tiers == 1).sum(-1)
        return -(-h // high) + -(-l // low), h, l

    limit, _, _ = pages(ceiling)
    tiers = ops.threshold(s, divisor, 0.7, 0.3, ceiling, high, low, limit)
    assert (tiers <= ceiling).all()
    used, h, l = pages(tiers)
    assert (used <= limit).all()
    if low >= high:  # with fewer tokens per low page a head may be at its ceiling
        by = divisor[:, None, None]
        plain = torch.where(s >= 0.7 / by, 2, torch.where(s >= 0.3 / by, 1, 0)).minimum(ceiling)
        assert (tiers >= plain).all()
        assert torch.equal(pages(plain)[0] >= used, torch.ones_like(used, dtype=torch.bool))
        could = ((tiers < 2) & (ceiling == 2)).any(-1)
        assert not (could & (h % high > 0)).any()
        assert not (((tiers == 0) & (ceiling >= 1)).any(-1) & (l % low > 0)).any()


def test_threshold_respects_page_limit():
    # One page is allowed, but the ceiling needs two, so the best high tokens that fit stay.
    assert plan([0.9, 0.8, 0.7, 0.95, 0.6, 0.3], limit=1) == [2, 2, 2, 2, 0, 0]
    assert plan([0.9] * 6, limit=0) == [0] * 6

"""The competition for pages within a sequence, against a slow page-by-page reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_kernels import ops


def slow_kept(scores: np.ndarray, pages: int, t: int, floor: int, max_pages: int, always: set[int]) -> list[list[int]]:
    """The tokens that each head of `scores` `[heads, S]` keeps, from an explicit list of all pages."""
    entries = []
    for head, row in enumerate(scores):
        worth = [np.inf if i in always else x for i, x in enumerate(row)]
        order = sorted(range(len(row)), key=lambda i: (-worth[i], i))
        for j in range(min(max_pages, len(row) // t)):
            page = order[j * t : (j + 1) * t]
            entries.append((j >= floor, -worth[page[0]], head, j, page))
    kept = [[] for _ in scores]
    for _, _, head, _, page in sorted(entries)[:pages]:
        kept[head] += page
    return [sorted(x) for x in kept]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_sequence_quota_equals_slow_reference(data):
    t, heads = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.integers(1, 5))
    of_head = data.draw(st.integers(2, 9))
    max_pages = data.draw(st.integers(1, of_head))
    first, last = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    floor = min(max_pages, -(-(first + last) // t))
    pages = data.draw(st.integers(floor * heads, max_pages * heads))
    draw = np.random.default_rng(data.draw(st.integers(0, 999)))
    # Few distinct values give many ties.
    scores = draw.integers(0, data.draw(st.sampled_from([1, 3, 1000])), (heads, of_head * t)).astype(np.float32)
    best, worth = ops.ranked_tokens(torch.from_numpy(scores), max_pages * t, t, first, last)
    kept = ops.sequence_quota(worth, pages, floor)
    assert kept.sum() == pages and (kept >= floor).all() and (kept <= max_pages).all()
    always = {*range(first), *range(of_head * t - last, of_head * t)}
    want = slow_kept(scores, pages, t, floor, max_pages, always)
    assert [sorted(row[: n * t]) for row, n in zip(best.tolist(), kept.tolist())] == want
    if pages >= heads * -(-len(always) // t):
        assert all(always <= set(row) for row in want)


def test_page_count_out_of_range_is_rejected():
    worth = torch.rand(3, 4)
    for pages in (2, 13):
        with pytest.raises(ValueError, match=r"3\.\.12"):
            ops.sequence_quota(worth, pages, 1)


@pytest.mark.parametrize("reach, share", [(0, 0.5), (1, 0.1), (48, 0.1), (48, 1.0), (300, 0.3)])
def test_carried_scores_equal_loop(reach, share):
    scores = np.random.default_rng(reach).random((3, 200)).astype(np.float32) ** 8
    want = [[max(x, *(share * y for y in row[max(0, i - reach) : i + 1])) for i, x in enumerate(row)] for row in scores]
    got = ops.carry_scores(torch.from_numpy(scores), reach, share)
    np.testing.assert_allclose(got.numpy(), np.array(want), rtol=1e-6)


def test_tokens_after_attended_token_rank_first():
    """A head attends to one token: the 48 tokens after it rank before all others, those before it do not."""
    scores = torch.full((1, 512), 1e-6)
    scores[0, 200] = 0.9
    best, _ = ops.ranked_tokens(ops.carry_scores(scores, 48, 0.1), 64, 8, 0, 0)
    assert best[0, 0] == 200 and set(best[0, :49].tolist()) == set(range(200, 249))

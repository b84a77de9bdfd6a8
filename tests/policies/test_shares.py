"""Allocation of pages: whole numbers that add up, with each method checked against its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_kernels import ops
from sglang_kvc.policies import SHARES
from tests.kernels.tiering.test_reference import slow_quota

T = 16


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_apportion_adds_up_within_bounds_and_is_proportional(data):
    n = data.draw(st.integers(1, 6))
    lower = data.draw(st.integers(0, 3))
    upper = data.draw(st.integers(lower, 12))
    total = data.draw(st.integers(n * lower, n * upper))
    weights = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    got = ops.apportion(weights, total, lower, upper)
    assert sum(got) == total and all(lower <= x <= upper for x in got)
    for (a, wa), (b, wb) in itertools.permutations(zip(got, weights), 2):
        assert wa < wb or a >= b - 1 or a == upper  # equal weights get equal shares, to within one
        # Webster: moving a unit elsewhere never improves the allocation, unless a bound applies.
        if a > lower and b < upper and wb:
            assert wa * (2 * b + 1) >= wb * (2 * a - 1)


def test_apportion_rejects_unsatisfiable_bounds():
    for total in (3, 9):
        with pytest.raises(ValueError, match=r"4\.\.8"):
            ops.apportion([1, 1], total, 2, 4)


@pytest.mark.parametrize("total, n", [(7, 3), (6, 3), (0, 4), (5, 8), (9, 1)])
def test_spread_is_even(total, n):
    got = ops.spread(total, n)
    assert sum(got) == total and len(got) == n and max(got) - min(got) <= 1


def test_pyramid_is_linear_with_requested_mean():
    line = ops.pyramid(5, 10, 100, beta=4)
    assert line == pytest.approx([17.5, 13.75, 10, 6.25, 2.5])
    # The first layer cannot use more than it has, so the last one keeps the mean.
    assert ops.pyramid(3, 10, 12, beta=20) == pytest.approx([12, 10, 8])
    assert ops.pyramid(1, 10, 12, beta=1) == [10]


def test_retention_is_share_of_best_units():
    curves = ops.retention_curves(torch.tensor([[1.0, 5, 2], [0, 0, 0]]))
    assert torch.allclose(curves, torch.tensor([[5 / 8, 7 / 8, 1], [1, 1, 1]], dtype=torch.float64))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("least", [0, 1])
def test_greedy_allocation_is_optimal(seed, least):
    curves = ops.retention_curves(torch.rand(3, 5, generator=torch.Generator().manual_seed(seed)) ** 3)
    retained = np.concatenate([np.zeros((3, 1)), curves.numpy()], 1)
    for total in range(3 * least, 16):
        got = ops.greedy_allocation(curves, total, least)
        assert sum(got) == total and min(got) >= least
        every = [x for x in itertools.product(range(least, 6), repeat=3) if sum(x) == total]
        best = max(sum(retained[l, n] for l, n in enumerate(x)) for x in every)
        assert sum(retained[l, n] for l, n in enumerate(got)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("least", [0, 1])
def test_least_memory_for_retention_is_minimal(seed, least):
    """XKV's other constraint (equation 18): no allocation of fewer units retains as much."""
    curves = ops.retention_curves(torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) ** 3)
    retained = np.concatenate([np.zeros((3, 1)), curves.numpy()], 1)
    every = list(itertools.product(range(least, 5), repeat=3))
    for goal in (0.1, 0.5, 0.9, 0.99, 1.0):
        got = ops.least_allocation(curves, goal, least)
        assert np.mean([retained[l, n] for l, n in enumerate(got)]) >= goal - 1e-8 and min(got) >= least
        enough = [x for x in every if np.mean([retained[l, n] for l, n in enumerate(x)]) >= goal + 1e-8]
        assert sum(got) <= min((sum(x) for x in enough), default=12)
    with pytest.raises(ValueError, match="retain less"):
        ops.least_allocation(curves / 2, 0.9)


def test_layer_weights_match_papers():
    """CAKE's and MiniKV's weights are computed by hand; XKV's follow the kept share."""
    statistics = {
        "attention_entropy": torch.tensor([4.0, 1.0]),
        "attention_shift": torch.tensor([8.0, 1.0]),
        "attention_variance": torch.tensor([3.0, 1.0]),
        # The first layer's attention is concentrated in few tokens, so it wins a small budget and loses a large one.
        "importance_retention": torch.tensor([[0.8, 0.9, 0.95, 1.0], [0.4, 0.7, 0.9, 1.0]]),
    }

    def share(name, average=3.0, **settings):
        got = np.array(SHARES[name](**settings).weights(2, average, 6, statistics))
        return (got / got.sum()).tolist()

    assert share("cake") == pytest.approx([32 / 33, 1 / 33])
    assert share("cake", tau1=2, tau2=3) == pytest.approx([4 / 5, 1 / 5])
    assert share("variance") == pytest.approx([3 / 4, 1 / 4])
    assert share("variance", inverse=True) == pytest.approx([1 / 4, 3 / 4])
    assert share("variance", even=0.5) == pytest.approx([5 / 8, 3 / 8])
    assert share("xkv", average=1.5) == pytest.approx([1 / 2, 1 / 2])
    assert share("xkv", average=3.0) == pytest.approx([1 / 4, 3 / 4])
    # MiniKV gives half of the pages to recent tokens of every layer and the rest in a pyramid.
    assert SHARES["pyramid"](beta=7, even=0.5).weights(3, 14, 28, None) == pytest.approx([20, 14, 8])


def test_greedy_rejects_nonconcave_curves_and_unreachable_totals():
    with pytest.raises(ValueError, match="concave"):
        ops.greedy_allocation(torch.tensor([[0.1, 0.9]]), 1)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        ops.greedy_allocation(torch.tensor([[0.6, 0.9]]), 3)


# ---- competition between heads


def pages_of(tiers: torch.Tensor) -> np.ndarray:
    """Pages `[n, L, H]`."""
    return ((tiers == 2).sum(-1) + T - 1).div(T, rounding_mode="floor").numpy()


def draw(seed: int, layers: int = 3, heads: int = 2, tokens: int = 64) -> torch.Tensor:
    """Few distinct values give many ties."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 5, (2, layers, heads, tokens)).astype(np.float32))


@pytest.mark.parametrize("seed", range(4))
def test_each_group_is_separate_quota(seed):
    scores = draw(seed)
    by_layer, floors = [3, 8, 5], [0, 2, 1]
    tiers = ops.quota(scores, by_layer, T, floors)
    for n, (i, (share, floor)) in itertools.product(range(2), enumerate(zip(by_layer, floors))):
        assert np.array_equal(tiers[n, i].numpy(), slow_quota(scores[n, i : i + 1].numpy(), share, T, floor)[0])
    by_head = [1, 4, 2, 0, 3, 2]
    tiers = ops.quota(scores, by_head, T, 0)
    assert pages_of(tiers).reshape(2, -1).tolist() == [by_head, by_head]
    for n, i in itertools.product(range(2), range(6)):
        l, h = divmod(i, 2)
        want = slow_quota(scores[n, l : l + 1, h : h + 1].numpy(), by_head[i], T, 0)[0, 0]
        assert np.array_equal(tiers[n, l, h].numpy(), want)


def test_groups_are_checked():
    for shares, floors in (([4, 4], 1), ([4, 4, 4], [1]), ([1, 4, 4], 1), ([9, 4, 4], 1)):
        with pytest.raises(ValueError, match="quota"):
            ops.quota(draw(0), shares, T, floors)


@pytest.mark.parametrize("pages", [6, 11, 17, 24])
def test_shares_distribute_all_pages(pages):
    scores, plans = draw(7), {}
    statistics = {
        "importance_retention": torch.stack((*[1 - 0.1 ** torch.arange(1.0, 9)] * 2, torch.arange(1.0, 9) / 8)),
        "attention_variance": torch.tensor([1.0, 1.0, 6.0]),
        "attention_entropy": torch.tensor([1.0, 1.0, 2.0]),
        "attention_shift": torch.tensor([1.0, 1.0, 3.0]),
    }
    for name, cls in SHARES.items():
        plans[name] = pages_of(cls().plan(scores, pages, T, 1, statistics))
        assert (plans[name].sum((1, 2)) == pages).all() and (plans[name] >= 1).all(), name
    assert plans["uniform"].max() - plans["uniform"].min() <= 1
    layers = plans["pyramid"][0].sum(-1)
    assert (np.diff(layers) <= 0).all() and (pages in (6, 24) or layers[0] > layers[2])
    layers = plans["ada"].sum(-1)
    assert layers.max() - layers.min() <= 1
    for name in ("xkv", "cake", "variance"):
        layers = plans[name][0].sum(-1)
        assert layers[2] == layers.max() and (pages in (6, 24) or layers[2] > layers[0]), name


def test_ada_favors_important_head_above_floor_of_other():
    scores = draw(3, layers=1, tokens=160)
    scores[:, :, 1] += 10
    plan = {floor: pages_of(SHARES["ada"](floor=floor).plan(scores, 10, T, 1, None))[0, 0] for floor in (0, 0.4, 1)}
    assert {k: v.tolist() for k, v in plan.items()} == {0: [1, 9], 0.4: [2, 8], 1: [5, 5]}

"""Apportionment of pages to layers and heads before any score is known: deterministic integers on the CPU."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import torch


def apportion(weights: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Integers in `least`..`most` that add up to `total`, as nearly proportional to `weights` as possible.

    Webster's method above the floor: the next unit goes to the largest weight / (have + 1/2), ties to the smallest
    count. ValueError if `total` cannot be met.
    """
    n = len(weights)
    if not n * least <= total <= n * most:
        raise ValueError(f"{total} units are not within {n * least}..{n * most} for {n} shares of {least}..{most}")
    have = [least] * n
    queue = [(-w / (least + 0.5), least, i) for i, w in enumerate(weights) if least < most]
    heapq.heapify(queue)
    for _ in range(total - n * least):
        *_, i = heapq.heappop(queue)
        have[i] += 1
        if have[i] < most:
            heapq.heappush(queue, (-weights[i] / (have[i] + 0.5), have[i], i))
    return have


def spread(total: int, n: int) -> list[int]:
    """`total` units over `n` heads that differ by at most one, the larger ones evenly spaced."""
    return [(i + 1) * total // n - i * total // n for i in range(n)]


def pyramid(layers: int, average: float, most: float, beta: float) -> list[float]:
    """Units of each layer on PyramidKV's straight line, from the first layer to the last; their mean is `average`.

    The last layer gets average / beta, the first 2 * average - average / beta. If a layer cannot use that many, the
    first gets `most`, and the last gets the number that keeps the mean. beta 1 is uniform.
    """
    last = average / beta
    first = 2 * average - last
    if first > most:
        first, last = most, 2 * average - most
    return [first + (last - first) * i / max(1, layers - 1) for i in range(layers)]


def retention_curves(importance: torch.Tensor) -> torch.Tensor:
    """XKV's importance retention (equation 4): share of a layer's importance in its best s + 1 units, fp64 `[L, S]`.

    `importance` `[L, S]`, not negative. A layer without importance retains all with its first unit.
    """
    best = importance.double().sort(dim=-1, descending=True).values.cumsum(-1)
    total = best[:, -1:]
    return torch.where(total > 0, best / total.clamp(min=torch.finfo(torch.float64).tiny), 1.0)


def greedy_allocation(curves: torch.Tensor, total: int, least: int = 0) -> list[int]:
    """XKV's Algorithm 1: units of each layer, `total` together, that maximize the sum of retained importance (equation
    17).

    `curves` `[L, S]`: importance that layer l retains with s + 1 units. The next unit goes to the layer with the
    largest gain, ties to the first. This is optimal because gains never grow: curves are concave, since the best units
    come first, and means of concave curves are concave. Every layer gets `least`. ValueError for other curves, or if
    `total` is not within L * least .. L * S.
    """
    layers, units = curves.shape
    if not layers * least <= total <= layers * units:
        raise ValueError(f"{total} units are not within {layers * least}..{layers * units} for these curves")
    have = [least] * layers
    for i, _ in itertools.islice(_next_units(curves, least), total - layers * least):
        have[i] += 1
    return have


def least_allocation(curves: torch.Tensor, retention: float, least: int = 0) -> list[int]:
    """Units of each layer, as few together as possible, whose mean retained importance is `retention` or more (XKV,
    equation 18); arguments as in `greedy_allocation`. ValueError if all units retain less."""
    layers = len(curves)
    have, held = [least] * layers, float(curves[:, least - 1].double().sum()) if least else 0.0
    wanted = (retention - 1e-9) * layers
    for i, gain in _next_units(curves, least):
        if held >= wanted:
            break
        have[i] += 1
        held += gain
    if held < wanted:
        raise ValueError(f"all units together retain less than {retention:g} of the importance")
    return have


def _gains(curves: torch.Tensor) -> torch.Tensor:
    return torch.diff(curves.double(), dim=-1, prepend=curves.new_zeros((len(curves), 1), dtype=torch.float64))


def is_concave(curves: torch.Tensor) -> bool:
    """Whether each further unit of `curves` `[L, U]` retains no more than the one before."""
    return not bool((torch.diff(_gains(curves), dim=-1) > 1e-6).any())


def _next_units(curves: torch.Tensor, least: int) -> Iterator[tuple[int, float]]:
    """(layer, gain) of every unit after the first `least` of each layer, largest gain first, ties to the first layer.
    """
    units = curves.shape[1]
    gains = _gains(curves)
    if not is_concave(curves):
        raise ValueError("a retention curve must be concave: each further unit retains no more than the one before")
    rows, have = gains.tolist(), [least] * len(curves)
    queue = [(-row[least], i) for i, row in enumerate(rows) if least < units]
    heapq.heapify(queue)
    while queue:
        gain, i = heapq.heappop(queue)
        have[i] += 1
        if have[i] < units:
            heapq.heappush(queue, (-rows[i][have[i]], i))
        yield i, -gain

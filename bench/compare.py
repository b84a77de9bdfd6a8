"""Comparison of two answers to one prompt: first difference, its margin, and divergence of the distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bench.client import Answer

TIE = 0.05  # nats; rounding decides between two candidates with a smaller gap


@dataclass(frozen=True)
class Match:
    """Comparison of two answers. `equal`: number of tokens before the first difference; later tokens are not
    comparable."""

    equal: int
    total: int
    gap: float | None = None  # difference in log-probability of the two candidates, the larger one of both runs
    candidates: dict[str, dict[int, float | None]] | None = None
    drift: float = 0.0  # largest difference between the runs in the log-probability of an equal token

    @property
    def same(self) -> bool:
        return self.equal == self.total

    @property
    def tie(self) -> bool:
        return self.gap is not None and self.gap <= TIE

    @property
    def ok(self) -> bool:
        return self.same or self.tie

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same, "tie": self.tie}


def match(a: Answer, b: Answer) -> Match:
    """Compare two greedy answers; `a` is the reference. Both need `top` log-probabilities for the gap.

    The gap is infinite if a candidate is not among the best of a run.
    """
    total, drift = max(len(a.ids), len(b.ids)), 0.0
    for i, (x, y) in enumerate(zip(a.ids, b.ids)):
        if x != y:
            candidates = {n: {t: run.top[i].get(t) for t in (x, y)} for n, run in (("a", a), ("b", b))}
            return Match(i, total, max(_gap(*c.values()) for c in candidates.values()), candidates, drift)
        drift = max(drift, abs(a.logprobs[i] - b.logprobs[i]))
    return Match(min(len(a.ids), len(b.ids)), total, drift=drift)


def _gap(first: float | None, second: float | None) -> float:
    return math.inf if first is None or second is None else abs(first - second)


def agreement(a: Iterable[int], b: Iterable[int]) -> float:
    """Share of positions with equal tokens."""
    pairs = list(zip(a, b))
    return sum(x == y for x, y in pairs) / len(pairs)


def kl_top(reference: list[dict[int, float]], other: list[dict[int, float]]) -> list[float]:
    """KL(reference || other) at each position in nats, from the best candidates of both.

    Candidates outside the intersection of both lists are merged into one outcome. Merging cannot increase the
    divergence, so this is a lower bound, which is tight with the ten best candidates.
    """
    return [_kl(p, q) for p, q in zip(reference, other)]


def _kl(p: dict[int, float], q: dict[int, float]) -> float:
    common = p.keys() & q.keys()
    total = sum(math.exp(p[t]) * (p[t] - q[t]) for t in common)
    rest_p = max(1 - sum(math.exp(p[t]) for t in common), 1e-9)
    rest_q = max(1 - sum(math.exp(q[t]) for t in common), 1e-9)
    return max(0.0, total + rest_p * math.log(rest_p / rest_q))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

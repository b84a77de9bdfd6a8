"""Confidence intervals of differences in the share of right answers."""

from __future__ import annotations

from math import sqrt

Z = 1.959964  # for 95 %


def paired(won: int, lost: int, of: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of right answers to the same `of` questions, by Tango's score test
    (Statistics in Medicine 17, 1998). `won`: answers that changed from wrong to right; `lost`: from right to wrong.

    The test assumes independent questions. Even without changed answers, the interval has a width: +-3.6 points for 104
    questions.
    """

    def statistic(difference: float) -> float:
        """Score statistic, which decreases from above `Z` at -1 to below `-Z` at 1."""
        a, c = 2 * of, -lost * difference * (1 - difference)
        b = -won - lost + (2 * of - won + lost) * difference
        variance = 2 * (sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a) + difference * (1 - difference)
        return (won - lost - of * difference) / sqrt(max(of * variance, 1e-12))

    return _crossing(statistic, Z), _crossing(statistic, -Z)


def _crossing(function, level: float) -> float:
    """Point in -1 .. 1 at which the decreasing function `falling` equals `level`."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > level else (low, middle)
    return (low + high) / 2

"""Confidence intervals of differences in the share of right answers."""

from __future__ import annotations

from math import sqrt

Z = 1.959964  # of 95 %


def paired(won: int, lost: int, of: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of right answers to the same `of` questions, by Tango's score test
    (Statistics in Medicine 17, 1998). `won`: answers that turned from wrong to right; `lost`: from right to wrong.

    It assumes independent questions. It has a width even if no answer changed: +-3.6 points for 104 questions.
    """

    def far(difference: float) -> float:
        """The score statistic; falls from above `Z` to below `-Z` between -1 and 1."""
        a, c = 2 * of, -lost * difference * (1 - difference)
        b = -won - lost + (2 * of - won + lost) * difference
        variance = 2 * (sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a) + difference * (1 - difference)
        return (won - lost - of * difference) / sqrt(max(of * variance, 1e-12))

    return _crossing(far, Z), _crossing(far, -Z)


def _crossing(falling, level: float) -> float:
    """The point in -1 .. 1 at which a falling function has the value `level`."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > level else (low, middle)
    return (low + high) / 2

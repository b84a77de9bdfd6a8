"""Tests of the papers' findings: pairs of cells with equal bytes that answer the same questions.

The sign test counts the questions that only one of the two cells answers correctly, over both tasks.
"""

from __future__ import annotations

from math import comb

from bench.quality.merged import Merged

TASKS = ("niah", "kv")
# Finding -> pairs of cells; the first cell of a pair is better if the finding holds.
FINDINGS = {
    "LeanKV: K8V4 is as good as 16 bits": [("k8v4", "stock")],
    "LeanKV, KV-Compress: heads and layers with budgets of their own beat equal ones": [
        ("quota+budget=4x+high=k8v8", "quota+budget=4x+high=k8v8+share=uniform"),
        ("quota+budget=8x", "quota+budget=8x+share=uniform"),
        ("kv-compress+budget=4x", "kv-compress+budget=4x+share=uniform"),
    ],
    "KV-Compress: squared attention beats plain sums": [
        ("kv-compress+budget=4x", "kv-compress+budget=4x+scorer=kv-compress:power=1"),
    ],
    "MiniKV: 2 bits and eviction beat eviction alone": [
        ("minikv+budget=8x", "h2o+budget=8x"),
        ("minikv+budget=8x", "h2o+budget=8x+high=k4v4"),
    ],
    "XKV: layers with budgets of their own beat equal ones": [
        ("xkv+budget=4x", "snapkv+budget=4x"),
        ("xkv+budget=8x+high=k4v4", "snapkv+budget=8x+high=k4v4"),
    ],
    "XKV: and a pyramid": [
        ("xkv+budget=4x", "pyramid+budget=4x"),
        ("xkv+budget=8x+high=k4v4", "pyramid+budget=8x+high=k4v4"),
    ],
}
SIGNIFICANCE = 0.05


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of `wins` among `wins + losses` fair coin tosses."""
    n = wins + losses
    return min(1.0, 2 * sum(comb(n, k) for k in range(max(wins, losses), n + 1)) / 2**n) if n else 1.0


def compare(group: Merged, better: str, other: str) -> dict | None:
    """Shares of right answers of both cells by task, and the sign test over all questions; None if a cell is
    missing."""
    if better not in group.raw or other not in group.raw:
        return None
    wins = losses = 0
    shares = []
    for task in TASKS:
        a, b = group.answers(better, task), group.answers(other, task)
        wins += sum(x and not y for x, y in zip(a, b, strict=True))
        losses += sum(y and not x for x, y in zip(a, b, strict=True))
        shares.append((sum(a) / len(a), sum(b) / len(b)))
    return {"shares": shares, "wins": wins, "losses": losses, "p": sign_test(wins, losses)}


def verdict(comparison: dict) -> str:
    if comparison["p"] >= SIGNIFICANCE:
        return "no difference"
    return "holds" if comparison["wins"] > comparison["losses"] else "the other way round"

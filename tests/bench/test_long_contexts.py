"""Formats by length of the context: needles are counted where they lie."""

from __future__ import annotations

from types import SimpleNamespace

from bench.quality import long_contexts
from bench.quality.tasks import Context, Question


def test_needles_are_counted_in_their_quarter():
    text = "x" * 40 + "a is: 1111." + "x" * 60 + "b is: 2222." + "x" * 78
    context = Context("needles", (), tuple(Question((), answer) for answer in ("2222", "1111")))
    depths = long_contexts.depths(text, context)
    assert depths == [text.index(" is: 2222") / 200, text.index(" is: 1111") / 200]
    assert long_contexts.by_part([True, False], depths) == [[0, 1], [0, 0], [1, 1], [0, 0]]
    assert long_contexts.by_part([True], [1.0])[-1] == [1, 1]


def test_tables_show_lengths_in_order(monkeypatch):
    def group(length, kl):
        rows = {"k4v4": {"kl": {"mean": kl}}, "stock": {"kl": {"mean": 0.0}}}
        return SimpleNamespace(model="qwen-0.5b", length=length, first=0, tasks=["niah"], rows=rows)

    monkeypatch.setattr(long_contexts, "merged", lambda: [group(8000, 0.02), group(2048, 0.01)])
    head, _, row, *rest = [line for line in long_contexts.kl_by_length().splitlines() if "k8v4" not in line]
    assert head == "| model | format | 2,048 | 8,000 |"
    assert row == "| Qwen2.5-Coder-0.5B | `balanced` (k4v4) | 0.0100 | 0.0200 |"
    assert all("|  |  |" in line for line in rest)  # other formats and models have no figures

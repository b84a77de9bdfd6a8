"""One-shot levels by the questions that were asked."""

import json

import pytest

from bench.common import RESULTS
from bench.quality import cells, levels


def run(stock: list[bool], answers: list[bool]) -> dict:
    return {"raw": {"stock": {"kv": [stock]}, "cell": {"kv": [answers]}}}


def test_questions_of_the_tuning_do_not_count(monkeypatch):
    monkeypatch.setattr(levels, "TUNED", {"m": {"kv": 2}})
    first, fresh = run([True] * 4, [False, False, True, False]), run([True, False], [False, True])
    marks = levels.by_questions("m", {levels.FRESH: fresh, levels.FIRST: first}, "cell", "kv")
    assert marks[levels.FIRST] == {"of": 2, "em": 0.5, "right_to_wrong": 1, "wrong_to_right": 0}
    assert marks[levels.FRESH] == {"of": 2, "em": 0.5, "right_to_wrong": 1, "wrong_to_right": 1}
    assert marks[levels.POOLED] == {"of": 4, "em": 0.5, "right_to_wrong": 2, "wrong_to_right": 1}


def test_one_set_of_questions_is_not_pooled():
    assert list(levels.by_questions("m", {levels.FIRST: run([True], [True])}, "cell", "kv")) == [levels.FIRST]


def test_dictionary_at_64x_is_within_15_points_except_on_the_first_questions():
    """The page says so in words."""
    files = levels.FILES["qwen-0.5b"]
    runs = {name: json.loads((RESULTS / f"{path}.json").read_text())["numbers"] for name, path in files.items()}
    marks = levels.by_questions("qwen-0.5b", runs, "k4v4@one-shot:64x", "kv")
    points = {name: cells.delta(m).value for name, m in marks.items()}
    assert marks[levels.FIRST]["of"] == 80 and points[levels.FIRST] == pytest.approx(-17.5)
    assert points[levels.FRESH] > -15 and points[levels.POOLED] > -15

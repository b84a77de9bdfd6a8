"""Merging of several runs of one model, and the sign test used for the papers' findings."""

from __future__ import annotations

import itertools
import json

import pytest

from bench.quality import findings
from bench.quality.merged import Merged, merged


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (3, 0), (5, 1), (2, 7), (4, 4)])
def test_sign_test_counts_outcomes_at_least_as_uneven(wins, losses):
    n = wins + losses
    as_far = [abs(2 * sum(coins) - n) >= abs(wins - losses) for coins in itertools.product((0, 1), repeat=n)]
    assert findings.sign_test(wins, losses) == pytest.approx(sum(as_far) / len(as_far))


def group(**answers: list[int]) -> Merged:
    raw = {name: {task: [[bool(x) for x in marks]] for task in findings.TASKS} for name, marks in answers.items()}
    return Merged("smollm2", 64, 8, "CPU", rows={name: {} for name in raw}, raw=raw)


def test_pairs_are_compared_question_by_question():
    comparison = findings.compare(group(a=[1, 1, 1, 1, 0], b=[0, 0, 0, 1, 1]), "a", "b")
    assert comparison["shares"] == [(0.8, 0.4)] * 2 and (comparison["wins"], comparison["losses"]) == (6, 2)
    assert findings.verdict(comparison) == "no difference"
    sure = findings.compare(group(a=[0] * 4, b=[1] * 4), "a", "b")
    assert sure["p"] == pytest.approx(2 / 2**8) and findings.verdict(sure) == "the other way round"
    assert findings.compare(group(a=[1]), "a", "b") is None


def test_runs_of_one_model_are_merged_preferring_more_tasks(tmp_path):
    def run(name: str, length: int, **cells):
        rows = {n: {t: {"em": em} for t, em in tasks.items()} for n, tasks in cells.items()}
        raw = {n: {t: [[True]] for t in tasks} for n, tasks in cells.items()}
        numbers = {"model": "smollm2", "length": length, "contexts": 2, "cells": rows, "raw": raw}
        (tmp_path / f"policies_{name}.json").write_text(json.dumps({"device": "NVIDIA H100", "numbers": numbers}))

    run("a", 128, stock={"niah": 1.0, "kv": 0.5}, k4v4={"niah": 0.9})
    run("b", 128, stock={"niah": 1.0}, k4v4={"niah": 0.8, "kv": 0.7}, quota={"niah": 0.1})
    run("c", 64, stock={"niah": 0.3})
    run("d", 128, stock={"vt": 0.2, "cwe": 0.1, "multikey": 0.4})
    long, ruler, short = merged(tmp_path)
    assert ruler.length == 128 and ruler.tasks == ["vt", "cwe", "multikey"]
    assert (long.length, short.length, long.questions) == (128, 64, 16)
    assert set(long.rows) == {"stock", "k4v4", "quota"} and long.tasks == ["niah", "kv"]
    assert long.rows["stock"]["kv"]["em"] == 0.5 and long.rows["k4v4"]["niah"]["em"] == 0.8
    assert long.answers("k4v4", "kv") == [True]

"""Tables of points against stock, with intervals."""

import json

import pytest

from bench.quality import points

STOCK = {"ratio_body": 1.0, "kept": 1.0, "niah": {"right": 90, "of": 100, "em": 0.9}, "kl": {"mean": 0.0}}
LOSES = {"right": 80, "of": 100, "em": 0.8, "right_to_wrong": 12, "wrong_to_right": 2}
CELL = {"ratio_body": 3.64, "kept": 0.5, "niah": LOSES, "kl": {"mean": 0.0071}}


@pytest.fixture
def results(tmp_path, monkeypatch):
    (tmp_path / "quality").mkdir()
    monkeypatch.setattr(points, "RESULTS", tmp_path)

    def write(name: str, **cells: dict) -> None:
        (tmp_path / "quality" / f"{name}.json").write_text(json.dumps({"numbers": {"cells": cells}}))

    return write


def test_stock_has_answers_and_others_have_points():
    assert points.points(STOCK, "niah") == "90.0%" and points.points(STOCK, "kv") == ""
    text = points.points(CELL, "niah")
    low, high = (float(x) for x in text[text.index("[") + 1 : -1].split(", "))
    assert text.startswith("-10.0 [") and low < -10 < high < 0


def test_leankv_tables_leave_out_missing_cells(results):
    for model in ("qwen-0.5b", "qwen-1.5b"):
        results(f"policies_{model}_2048_leankv", stock=STOCK, leankv=CELL)
    rows = points.leankv_later().splitlines()[2:]
    assert len(rows) == 4 and rows[0] == "| Qwen2.5-Coder-0.5B | stock bf16 | 1.00x | 100% | 90.0% |  |  |"
    assert rows[1].startswith("| Qwen2.5-Coder-0.5B | `leankv` (1, 0.02) | 3.64x | 50% | -10.0 [")
    assert rows[1].endswith("|  | 0.0071 |")


def test_longer_contexts_have_columns_for_each_length(results):
    cells = dict.fromkeys(points.LONG, CELL) | {"stock": STOCK}
    for model in ("qwen-0.5b", "qwen-1.5b"):
        for length in points.LENGTHS:
            results(f"policies_{model}_{length}", **cells)
    head, _, *rows = points.longer_contexts().splitlines()
    assert "| 8 needles, 16,000 tokens | dictionary, 16,000 |" in head
    assert len(rows) == 10 and all(row.count("|") == head.count("|") for row in rows)


def test_longer_ruler_has_only_cells_that_ran(results):
    task = {"right": 80, "of": 100, "em": 0.8}
    stock, cell = {"vt": task, "multikey": task}, {"vt": LOSES, "multikey": LOSES}
    results("policies_qwen-1.5b_8000_ruler", stock=stock, k4v4=cell, k4v2=cell)
    results("policies_qwen-1.5b_16000_ruler", stock=stock, k4v4=cell)
    rows = points.longer_ruler().splitlines()[2:]
    assert rows[0] == "| stock bf16 | 80.0% | 80.0% | 80.0% | 80.0% |"
    assert [row.split("|")[1].strip() for row in rows] == ["stock bf16", "`balanced` (k4v4)", "`k4v2`"]
    assert rows[2].endswith("|  |  |") and rows[2].count("-10.0 [") == 2

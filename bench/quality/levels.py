"""One-shot levels by the questions that were asked: fresh ones, first ones, and both pooled.

The constants of the ranking were chosen with some of the first questions (`TUNED`), which do not count here.
`bench.quality.report` renders the table.
"""

from __future__ import annotations

import json

from bench.common import RESULTS
from bench.quality import cells
from bench.tables.questions import MODELS
from bench.tables.text import lines, points_lost

TASKS = ("niah", "kv")
CELLS = {f"k4v4@one-shot:{ratio}": f"`one-shot:{ratio}`" for ratio in ("8x", "16x", "32x", "64x")}
FRESH, FIRST, POOLED = "fresh", "first", "both pooled"
FILES = {
    "qwen-0.5b": {FRESH: "quality/seen_qwen-0.5b_2048_from_1000", FIRST: "quality/seen_qwen-0.5b_2048"},
    "qwen-1.5b": {FRESH: "quality/seen_qwen-1.5b_2048_from_1000", FIRST: "quality/seen_qwen-1.5b_2048"},
}
TUNED = {"qwen-0.5b": {"niah": 16, "kv": 24}}  # number of first questions that the constants were chosen with


def table() -> str:
    """Table with one row per model, questions and level."""
    rows = []
    for model, files in FILES.items():
        runs = {questions: json.loads((RESULTS / f"{path}.json").read_text())["numbers"]
                for questions, path in files.items()}  # fmt: skip
        for questions in [*runs, *([POOLED] if len(runs) > 1 else [])]:
            chosen = list(runs.values()) if questions == POOLED else [runs[questions]]
            for cell, level in CELLS.items():
                sizes = [_range([run["cells"][cell][field] for run in chosen]) for field in ("ratio_body", "ratio")]
                points = [_points(by_questions(model, runs, cell, task)[questions]) for task in TASKS]
                rows.append([MODELS[model], questions, level, *sizes, *points])
    head = ["model", "questions", "level", "full blocks", "whole request", "8 needles", "dictionary"]
    return "\n".join(lines(head, rows)).strip()


def by_questions(model: str, runs: dict[str, dict], cell: str, task: str) -> dict[str, dict]:
    """Marks of a cell against stock of the same run, by the questions that were asked. `runs`: questions -> numbers of
    their result file."""
    skipped = {FIRST: TUNED.get(model, {}).get(task, 0)}
    out = {name: _marks(run["raw"], cell, task, skipped.get(name, 0)) for name, run in runs.items()}
    return out | ({POOLED: cells.combined(list(out.values()))} if len(out) > 1 else {})


def _marks(raw: dict, cell: str, task: str, skipped: int) -> dict:
    answers, stock = ([right for context in raw[name][task] for right in context][skipped:]
                      for name in (cell, cells.STOCK))  # fmt: skip
    pairs = list(zip(answers, stock, strict=True))
    flips = {"right_to_wrong": (False, True), "wrong_to_right": (True, False)}
    marks = {name: pairs.count(pair) for name, pair in flips.items()}
    return {"of": len(pairs), "em": sum(answers) / len(pairs), **marks}


def _points(marks: dict) -> str:
    return f"{points_lost(cells.delta(marks).to_dict())} of {marks['of']}"


def _range(ratios: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{ratio:.1f}x" for ratio in (min(ratios), max(ratios))))

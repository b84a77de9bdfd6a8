"""Tables of points against stock bf16 of the same run, with 95% intervals. The row of stock has its right answers.

`bench.quality.report` renders them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from bench.common import RESULTS
from bench.quality import cells
from bench.quality.merged import merged
from bench.tables.questions import MODELS
from bench.tables.text import lines, points_lost

TASKS = ("niah", "kv")
RULER = ("vt", "multikey")
LENGTH = 2048
STOCK = {cells.STOCK: "stock bf16"}
FORMATS = STOCK | {c: f"`{c}`" for c in ("k8v4", "k4v4", "k4v2")}
# Cells of `leankv` and their thresholds (alpha high, low)
THRESHOLDS = {
    "leankv": "(1, 0.02)",
    "leankv+alpha_high=3+alpha_low=0": "(3, 0)",
    "leankv+alpha_high=5+alpha_low=0.1": "(5, 0.1)",
    "leankv+alpha_high=5+alpha_low=0.5+high=k4v4": "(5, 0.5), `--kvc-high k4v4`",
    "leankv+alpha_high=5+alpha_low=1": "(5, 1)",
    "leankv+alpha_high=5+alpha_low=2": "(5, 2)",
    "leankv+alpha_high=10+alpha_low=4": "(10, 4)",
}
LATER = FORMATS | {cell: f"`leankv` {alphas}" for cell, alphas in THRESHOLDS.items()}
SEEN = FORMATS | {f"{c}+observe=64": f"`leankv` {alphas}, last 64 queries" for c, alphas in THRESHOLDS.items()}
SEEN |= {"leankv+alpha_high=5+alpha_low=2": "`leankv` (5, 2), all queries"}
LONG = STOCK | {"stock-fp8": "stock fp8", "k8v4": "`safe` (k8v4)", "k4v4": "`balanced` (k4v4)", "k4v2": "`k4v2`"}
LENGTHS = (8000, 16000)


def points(row: dict, task: str) -> str:
    """Points of a cell in a task with their interval; the share of right answers for stock itself; empty without the
    task."""
    if task not in row:
        return ""
    marks = row[task]
    return points_lost(cells.delta(marks).to_dict()) if "right_to_wrong" in marks else f"{100 * marks['em']:.1f}%"


def leankv_later() -> str:
    """Table of `leankv` with contexts that are packed before the questions."""
    return _leankv("policies", LATER, kl=True)


def leankv_seen() -> str:
    """Table of `leankv` with the question in the prompt."""
    return _leankv("seen", SEEN, kl=False)


def _leankv(kind: str, titles: dict[str, str], *, kl: bool) -> str:
    rows = []
    for model in ("qwen-0.5b", "qwen-1.5b"):
        found = _cells(f"{kind}_{model}_{LENGTH}_leankv")
        for cell, title in titles.items():
            if (row := found.get(cell)) is not None:
                sizes = [f"{row['ratio_body']:.2f}x", f"{100 * row['kept']:.0f}%"]
                marks = [points(row, task) for task in TASKS]
                rows.append([MODELS[model], title, *sizes, *marks, *([_kl(row)] if kl else [])])
    head = ["model", "cell (alpha high, low)", "compression", "tokens kept", "8 needles", "dictionary"]
    return _table([*head, *(["KL mean"] if kl else [])], rows)


def longer_contexts() -> str:
    """Table of plain formats with contexts of `LENGTHS` tokens."""
    rows = []
    for model in ("qwen-0.5b", "qwen-1.5b"):
        found = {n: _cells(f"policies_{model}_{n}") for n in LENGTHS}
        for cell, title in LONG.items():
            row = [MODELS[model], title, f"{found[LENGTHS[-1]][cell]['ratio_body']:.2f}x"]
            for at in found.values():
                row += [*(points(at[cell], task) for task in TASKS), _kl(at[cell])]
            rows.append(row)
    head = [c for n in LENGTHS for c in (f"8 needles, {n:,} tokens", f"dictionary, {n:,}", "KL mean")]
    return _table(["model", "cell", "compression", *head], rows)


def longer_ruler() -> str:
    """Table of RULER's tasks with contexts of `LENGTHS` tokens, which only the 1.5B model ran. No cell answers its
    common words."""
    found = {n: _cells(f"policies_qwen-1.5b_{n}_ruler") for n in LENGTHS}
    rows = []
    for cell, title in LONG.items():
        at = [cells.get(cell, {}) for cells in found.values()]
        if any(at):
            rows.append([title, *(points(row, task) for row in at for task in RULER)])
    head = [c for n in LENGTHS for c in (f"variables, {n:,} tokens", f"keys, {n:,}")]
    return _table(["cell", *head], rows)


def protocols() -> str:
    """Table of the published policies at equal bytes: with the question in the prompt, and with questions later."""
    rows = []
    for group in (g for g in merged() if g.length == LENGTH and not g.first):
        path = f"seen_{group.model}_{LENGTH}_papers"
        seen = _cells(path) if (RESULTS / "quality" / f"{path}.json").exists() else {}
        for cell, row in sorted(seen.items(), key=_right, reverse=True):
            later = group.rows.get(cell, {})
            size = "" if cell == cells.STOCK else f"{row['ratio_body']:.1f}x"
            marks = [points(r, task) for r in (row, later) for task in TASKS]
            rows.append([MODELS[group.model], f"`{cell}`", size, *marks])
    head = ["question in the prompt: 8 needles", "dictionary", "questions later: 8 needles", "dictionary"]
    return _table(["model", "", "size", *head], rows)


def _right(cell: tuple[str, dict]) -> int:
    """Right answers of a named cell."""
    return sum(cell[1][task]["right"] for task in TASKS)


def _cells(name: str) -> dict[str, dict]:
    return json.loads((RESULTS / "quality" / f"{name}.json").read_text())["numbers"]["cells"]


def _kl(row: dict) -> str:
    mean = (row.get("kl") or {}).get("mean")
    return f"{mean:.4f}" if mean else ""  # that of stock is zero by definition


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(lines(head, list(rows))).strip()

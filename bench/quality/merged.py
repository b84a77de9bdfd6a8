"""Merged policy result files of one model and length, for tables with cells from several runs.

Flips and KL of a cell are relative to the reference of its own run. If several runs have a cell, the run with the most
tasks counts, then the latest one. Runs of RULER's tasks alone are merged apart from the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import RESULTS
from bench.quality import ruler
from bench.quality.tasks import TITLES


@dataclass
class Merged:
    """Table rows and single answers, by cell."""

    model: str
    length: int
    questions: int  # of a task with eight questions per context
    device: str
    first: int = 0  # number of the first context; another number means other questions
    rows: dict[str, dict] = field(default_factory=dict)
    raw: dict[str, dict] = field(default_factory=dict)
    source: dict[str, tuple[dict, Path]] = field(default_factory=dict)  # record and file of a cell's row

    @property
    def tasks(self) -> list[str]:
        return [t for t in TITLES if any(t in row for row in self.rows.values())]

    def answers(self, cell: str, task: str) -> list[bool]:
        """Whether each answer is right, in the order that all cells share."""
        return [right for context in self.raw[cell][task] for right in context]


def merged(folder: Path = RESULTS / "quality") -> list[Merged]:
    """Merged results by model, length, number of contexts, first context, and whether only RULER's tasks ran. Long
    contexts come first."""
    out: dict[tuple, Merged] = {}
    ranks: dict[tuple, tuple] = {}
    for path in sorted(folder.glob("policies_*.json")):
        record = json.loads(path.read_text())
        n = record["numbers"]
        tasks = {t for row in n["cells"].values() for t in TITLES if t in row}
        key = n["model"], n["length"], n["contexts"], n.get("first", 0), tasks <= ruler.TASKS.keys()
        new_group = Merged(n["model"], n["length"], 8 * n["contexts"], record["device"], n.get("first", 0))
        group = out.setdefault(key, new_group)
        for name, row in n["cells"].items():
            # The row of `stock` comes from the run with the most cells.
            rank = (_tasks(row), len(n["cells"]) if name == "stock" else 0, record.get("date", ""))
            if rank > ranks.get((key, name), (-1,)):
                ranks[key, name] = rank
                group.rows[name], group.raw[name], group.source[name] = row, n["raw"][name], (record, path)
    return sorted(out.values(), key=lambda g: (-g.length, list(_MODELS).index(g.model), -g.questions, g.first))


def _tasks(row: dict) -> int:
    return sum(t in row for t in TITLES)


_MODELS = ("qwen-0.5b", "qwen-1.5b", "smollm2")

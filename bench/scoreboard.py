"""Collect the figures of all raw result files and render them into README and docs.

    python -m bench.scoreboard [--check]

The scores of all JSON files in bench/results go to bench/results/scoreboard.json: name -> value, unit, baseline, n,
low, high, commands, commit, device, date, file. Figures that depend on the GPU have one name per GPU model:
`e2e.vs_bf16` for the H200, `e2e.vs_bf16_h100` for the H100. The latest measurement on a device counts.

Pages get the tables of docs/benchmarks.md between `<!-- scoreboard -->` marks, the commands of docs/reproduce.md
between `<!-- commands -->` marks, the tables of `bench.quality.report`, and single figures.
`<!--= NAME -->1.92x<!--/-->` shows the figure NAME. A file in bench/results, a path in it and a format show a raw
value: `<!--= e2e/serving_h100 numbers/bf16.c64/output_tok_s .0f -->1374<!--/-->`. `--check` only reports whether all
files are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from bench.common import RESULTS, ROOT, Score
from bench.quality import cells
from bench.quality.merged import merged
from bench.tables import commands as listed
from bench.tables import tables
from bench.tables.questions import PRESETS
from bench.tables.text import keyed, points_lost, short, shown

LENGTH = 2048  # tokens of the contexts whose figures are shown
OUT = RESULTS / "scoreboard.json"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "kernels").glob("*.md")))
BLOCKS = {"<!-- scoreboard -->": tables, "<!-- commands -->": listed}  # mark -> text between two of it
FIGURE = re.compile(r"<!--= (?P<name>\S+)(?: (?P<path>\S+) (?P<format>\S+))? -->.*?<!--/-->", re.DOTALL)
# Preset's name of a figure -> original name.
ALIASES = {
    f"quality.{preset}.ratio_4k": f"serve.ratio_4k.{cell}"
    for preset, cell in (("safe", "k8v4"), ("balanced", "k4v4"), ("max", "max"))
}
ALIASES |= {f"quality.{preset}.ratio_body": f"quality.{preset}.smollm2.ratio_body" for preset in PRESETS}


def collect(results: Path = RESULTS) -> dict[str, dict]:
    """Name -> {value, unit, baseline, n, commands, commit, device, date, file, and low and high if known}."""
    board: dict[str, dict] = {}
    for path in sorted(results.rglob("*.json")):
        if path == results / OUT.name:
            continue
        record = json.loads(path.read_text())
        if not isinstance(record, dict):
            continue
        for name, score in record.get("scores", {}).items():
            name = keyed(name, record["device"])
            row = board_row(score, record, path.relative_to(results))
            if not _is_computed(name) and (name not in board or row["date"] > board[name]["date"]):
                board[name] = row
    board |= _presets_of(results) | _formats_of(results) | _pruned_of(results)
    board |= {name: board[other] for name, other in ALIASES.items() if other in board}
    return dict(sorted(board.items()))


def board_row(score: dict, record: dict, file: Path) -> dict:
    origin = {field: record[field] for field in ("commit", "device", "date")}
    return {"baseline": "", "n": 1, **score, "commands": commands(record), **origin, "file": file.as_posix()}


def commands(record: dict) -> list[str]:
    """Commands that wrote a file: those of its rows if they have any, else the command of the record."""
    numbers = record.get("numbers", {})
    rows = [row for row in numbers.values() if isinstance(row, dict)] if isinstance(numbers, dict) else []
    return list(dict.fromkeys(row["command"] for row in rows if {"options", "command"} <= row.keys())) or [
        record["command"]
    ]


def _is_computed(name: str) -> bool:
    """Whether a figure is computed from the cells of all files, whatever scores these have."""
    return name.startswith(f"{cells.PRUNED}.") or (name.startswith("quality.") and name.split(".")[1] in PRESETS)


def _presets_of(results: Path) -> dict[str, dict]:
    """Points of presets against stock of the same run. `max` was chosen on the first questions, so other questions
    count for it if there are any."""
    out: dict[str, dict] = {}
    for group in sorted((g for g in merged(results / "quality") if g.length == LENGTH), key=lambda g: g.first):
        for name, score in cells.scores(group.rows, group.model, group.first).items():
            preset = name.split(".")[1]
            if not group.first or preset == "max":
                record, file = group.source[cells.RECOMMENDED[preset]]
                out[name] = board_row(score.to_dict(), record, file.relative_to(results))
    return out


def _formats_of(results: Path) -> dict[str, dict]:
    """Ratio of the KL of `k4v2` to that of `k4v4`, for each calibrated model."""
    out: dict[str, dict] = {}
    for path in sorted((results / "calibrate").glob("*.json")):
        record = json.loads(path.read_text())
        numbers = record["numbers"]
        kl = {r["format"]: r["kl_mean"] for r in numbers["formats"] if r.get("key_mode", "channel") == "channel"}
        unit = f"x the mean KL of {numbers['settings']['scored']} tokens"
        score = Score(kl["k4v2"] / kl["k4v4"], unit, "k4v4, simulated")
        row = board_row(score.to_dict(), record, path.relative_to(results))
        out[f"quality.k4v2_over_k4v4_kl.{numbers['model']}"] = row
    return out


def _pruned_of(results: Path) -> dict[str, dict]:
    """Share of tokens that `leankv` drops at the thresholds calibrated by answers, for each model with a cell at
    them."""
    out: dict[str, dict] = {}
    groups = [g for g in merged(results / "quality") if g.length == LENGTH and not g.first]
    for path in sorted((results / "calibrate_answers").glob("*.json")):
        numbers = json.loads(path.read_text())["numbers"]
        for group in (g for g in groups if g.model == numbers["model"]):
            if (cell := cells.calibrated_cell(group.rows, numbers["thresholds"])) is not None:
                record, file = group.source[cell]
                row = board_row(cells.pruned_share(group.rows[cell], cell).to_dict(), record, file.relative_to(results))
                out[f"{cells.PRUNED}.{group.model}"] = row
    return out


def render(page: str, board: dict[str, dict]) -> str:
    """Page with current figures, and with current text between two marks of `BLOCKS`."""
    for mark, make in BLOCKS.items():
        if page.count(mark) not in (0, 2):
            raise SystemExit(f"error: a page has {page.count(mark)} marks {mark}; it must have 2 or none")
        if mark in page:
            block = f"{mark}\n\n{make(board)}\n\n{mark}"
            page = re.sub(f"{mark}.*{mark}", lambda _, block=block: block, page, flags=re.DOTALL)
    return FIGURE.sub(lambda m: m[0][: m[0].index("-->") + 3] + figure(m, board) + "<!--/-->", page)


def figure(mark: re.Match, board: dict[str, dict]) -> str:
    """Text between the marks of one figure. In a path, `~1` is a slash within a key, as in JSON pointers."""
    name, path = mark["name"], mark["path"]
    if path is None:
        if name not in board:
            raise SystemExit(f"error: a page shows {name}, which no result file has; measure it or remove it")
        return points_lost(board[name])
    value = json.loads((RESULTS / f"{name}.json").read_text())
    for key in path.split("/"):
        value = value[int(key) if isinstance(value, list) else key.replace("~1", "/")]
    return format(value, mark["format"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    from bench.quality import report

    board = collect()
    fresh = {OUT: json.dumps(board, indent=1) + "\n"}
    fresh |= {page: render(report.render(page.read_text()), board) for page in PAGES}
    stale = [path for path, text in fresh.items() if not path.exists() or path.read_text() != text]
    if args.check:
        names = ", ".join(path.name for path in stale)
        print(f"stale: {names}; run python -m bench.scoreboard" if stale else "up to date")
        return 1 if stale else 0
    for path, text in fresh.items():
        path.write_text(text)
    for name, row in board.items():
        print(f"{name:48} {shown(row):>10}  {short(row['device'])}  {row['commit']}  n {row['n']}  {row['baseline']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

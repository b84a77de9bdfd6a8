"""Tables of docs/benchmarks.md, and the commands of docs/reproduce.md."""

from __future__ import annotations

from pathlib import Path

from bench.common import RESULTS

from .agents import agents
from .formats import agreement, decode, sizes
from .long_answers import long_answers
from .longest import longest
from .questions import long_contexts, one_shot, presets
from .rates import rates
from .singles import singles
from .text import bare, pictures, sha

MAX_WORD = 60  # characters of a word of a command
MAX_GROUPS = 3  # number of groups of figures that are listed individually


def tables(board: dict[str, dict], results: Path = RESULTS) -> str:
    """Markdown lines of all tables and pictures."""
    size = sizes(board)
    sections = [make(board, results) for make in (long_answers, rates, longest)]
    sections += [decode(board), agents(board, results)]
    sections += [make(board) for make in (presets, one_shot, long_contexts, agreement)]
    used = set().union(*(names for _, names in (size, *sections)))
    speed, others = singles(board, list(dict.fromkeys(bare(name) for name in board if name not in used)))
    if speed:
        speed += pictures(results, "serving", "64 sessions in equal KV memory")
    text = [*size[0], *speed, *(line for section, _ in sections for line in section), *others]
    return "\n".join(text).strip()


def commands(board: dict[str, dict]) -> str:
    """Markdown lines with the commands of each raw file, and its figures, device and commit."""
    files: dict[str, list[str]] = {}
    for name, row in board.items():
        files.setdefault(row["file"], []).append(name)
    out = []
    for file, names in sorted(files.items()):
        row, groups = board[names[0]], sorted({".".join(bare(n).split(".")[:2]) for n in names})
        if len(groups) > MAX_GROUPS:
            groups = sorted({g.split(".")[0] + ".*" for g in groups})
        calls = [_cut(command) for command in row["commands"]]
        figures = ", ".join(f"`{group}`" for group in groups)
        more = " The file does not record the calls of its other rows."
        more = more if len(calls) == 1 and "--append" in calls[0] else ""
        link = f"[{file}](../bench/results/{file})"
        out += [f"* {link}, {row['device']}, {sha(row['commit'])}: {figures}.{more}", "", "  ```sh"]
        out += [*(f"  {call}" for call in calls), "  ```", ""]
    return "\n".join(out).strip()


def _cut(command: str) -> str:
    """Command with shortened lists. The file has the full command."""
    return " ".join(word if len(word) <= MAX_WORD else word.split(",")[0] + ",.." for word in command.split(" "))

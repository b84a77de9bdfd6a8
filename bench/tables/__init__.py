"""The tables of docs/benchmarks.md, and where their figures come from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.common import RESULTS

from .agents import agents
from .formats import decode, formats
from .questions import long_contexts, one_shot, presets
from .singles import SINGLES, singles
from .text import CARDS, bare, titled

LONGEST = 60  # characters of a word of a command on the page
FEW = 3  # groups of figures that are named one by one


def tables(board: dict[str, dict], results: Path = RESULTS) -> str:
    """Markdown: tables by format, answers, agents, single figures, and how all of it was measured."""
    used: set[str] = set()
    text: list[str] = []
    for make in (formats, decode, presets, one_shot, long_contexts, partial(agents, results=results)):
        part, names = make(board)
        text, used = [*text, *part], used | names
    rest = [bare(name) for name in board if name not in used]
    text += singles(board, [n for n in SINGLES if n in rest] + [n for n in dict.fromkeys(rest) if n not in SINGLES])
    return "\n".join([*text, *pictures(results), *origins(board)]).strip()


def pictures(results: Path) -> list[str]:
    """Pictures that `bench.e2e.plot` drew for each card."""
    titles = {"serving": "64 sessions in equal KV memory", "agents": "Agents in equal KV memory",
              "agent_replay": "Recorded coding agents", "agent_replay_bfcl": "Agents in BFCL's dialogues"}  # fmt: skip
    found = [(title, f"{bench}_{which}.png", name) for which, name in CARDS.items() for bench, title in titles.items()]
    shown = [f"![{title}, {name}](../bench/results/e2e/{file})" for title, file, name in found
             if (results / "e2e" / file).exists()]  # fmt: skip
    return [*shown, ""] if shown else []


def origins(board: dict[str, dict]) -> list[str]:
    """For each raw file: which figures, on what, and the commands of its runs."""
    files: dict[str, list[str]] = {}
    for name, row in board.items():
        files.setdefault(row["file"], []).append(name)
    out = titled("Commands", ["Paths are below `bench/results`.", ""] if files else [])
    for file, names in sorted(files.items()):
        row, groups = board[names[0]], sorted({".".join(bare(n).split(".")[:2]) for n in names})
        if len(groups) > FEW:
            groups = sorted({g.split(".")[0] + ".*" for g in groups})
        calls = "; ".join(f"`{_cut(command)}`" for command in row["commands"])
        if len(row["commands"]) == 1 and "--append" in calls:
            calls += " and earlier calls"
        what = ", ".join(f"`{group}`" for group in groups)
        out.append(f"- {what} on {row['device']} at {row['commit'][:7]} (`{file}`): {calls}")
    return out


def _cut(command: str) -> str:
    """A command whose lists are cut: the whole of it is in the file."""
    return " ".join(word if len(word) <= LONGEST else word.split(",")[0] + ",.." for word in command.split(" "))

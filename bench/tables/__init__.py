"""Tables of docs/benchmarks.md and the origins of their figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.common import RESULTS

from .agents import agents
from .formats import decode, formats
from .long_answers import long_answers
from .longest import longest
from .questions import long_contexts, one_shot, presets
from .rates import rates
from .singles import SINGLES, singles
from .text import CARDS, bare, titled

MAX_WORD = 60  # characters of a word of a command
MAX_GROUPS = 3  # number of groups of figures that are listed individually


def tables(board: dict[str, dict], results: Path = RESULTS) -> str:
    """Markdown lines of all tables, pictures and commands."""
    used: set[str] = set()
    text: list[str] = []
    measured = (partial(make, results=results) for make in (agents, rates, long_answers, longest))
    for make in (formats, decode, presets, one_shot, long_contexts, *measured):
        part, names = make(board)
        text, used = [*text, *part], used | names
    rest = [bare(name) for name in board if name not in used]
    text += singles(board, [n for n in SINGLES if n in rest] + [n for n in dict.fromkeys(rest) if n not in SINGLES])
    return "\n".join([*text, *pictures(results), *origins(board)]).strip()


def pictures(results: Path) -> list[str]:
    """Links to the plots of `bench.e2e.plot` for each GPU model."""
    titles = {"serving": "64 sessions in equal KV memory", "agents": "Agents in equal KV memory",
              "agent_replay": "Recorded coding agents", "agent_replay_bfcl": "Agents in BFCL's dialogues",
              "rates": "One-shot prompts by rate"}  # fmt: skip
    links = []
    for card, name in CARDS.items():
        for bench, title in titles.items():
            if (results / "e2e" / f"{bench}_{card}.png").exists():
                links.append(f"![{title}, {name}](../bench/results/e2e/{bench}_{card}.png)")
    return [*links, ""] if links else []


def origins(board: dict[str, dict]) -> list[str]:
    """For each raw file: its figures, device, commit and commands."""
    files: dict[str, list[str]] = {}
    for name, row in board.items():
        files.setdefault(row["file"], []).append(name)
    out = titled("Commands", ["Paths are below `bench/results`.", ""] if files else [])
    for file, names in sorted(files.items()):
        row, groups = board[names[0]], sorted({".".join(bare(n).split(".")[:2]) for n in names})
        if len(groups) > MAX_GROUPS:
            groups = sorted({g.split(".")[0] + ".*" for g in groups})
        calls = "; ".join(f"`{_cut(command)}`" for command in row["commands"])
        if len(row["commands"]) == 1 and "--append" in calls:
            calls += " and earlier calls"
        figures = ", ".join(f"`{group}`" for group in groups)
        out.append(f"- {figures} on {row['device']} at {row['commit'][:7]} (`{file}`): {calls}")
    return out


def _cut(command: str) -> str:
    """Command with shortened lists. The file has the full command."""
    return " ".join(word if len(word) <= MAX_WORD else word.split(",")[0] + ",.." for word in command.split(" "))

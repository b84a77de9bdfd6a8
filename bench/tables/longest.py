"""Table of the longest prompts that servers take in equal KV memory."""

from __future__ import annotations

import json
from pathlib import Path

from .text import lines, sha, short, titled

SERVERS = {
    "stock": "stock bf16",
    "stock-fp8": "stock fp8",
    "k8v4": "`safe` (k8v4)",
    "k4v4": "`balanced` (k4v4)",
    "leankv": "`leankv`",
    "kv-compress-8x": "`kv-compress` in `k4v4`, budget 8x",
    "oneshot-8x": "`one-shot:8x`",
    "oneshot-16x": "`one-shot:16x`",
    "oneshot-32x": "`one-shot:32x`",
}
# Files that share a column, because their model, memory and chunks are equal
COLUMNS = {
    "a tiny model in {memory}": ("longest", "longest_policies"),
    "Qwen2.5-Coder-1.5B in {memory}": ("longest_1gb",),
}
NOTE = """Each cell has the tokens of the longest prompt that a server states as its limit and serves, and their ratio
to stock bf16's. Formats and one-shot budgets pack a prompt chunk by chunk. `leankv` and `kv-compress` rank the tokens
of a whole sequence, so they hold finished chunks [with all their tokens](policies.md#prompts-in-chunks) until the
prompt is complete. Answers are not checked. n = 1."""


def longest(board: dict[str, dict], results: Path) -> tuple[list[str], set[str]]:
    """Table with one row per server and one column per model and memory."""
    columns: dict[str, dict[str, str]] = {}
    for title, files in COLUMNS.items():
        for path in (results / "serve" / f"{file}.json" for file in files):
            if path.exists():
                _add(columns, title, json.loads(path.read_text()))
    rows = [[name, *(column.get(server, "") for column in columns.values())] for server, name in SERVERS.items()
            if any(server in column for column in columns.values())]  # fmt: skip
    text = [NOTE, "", *lines(["server", *columns], rows)] if rows else []
    return titled("Longest prompts", text), {n for n in board if n.startswith("papers.longest.")}


def _add(columns: dict[str, dict[str, str]], title: str, record: dict) -> None:
    """Add the cells of a result file to its column."""
    numbers, device = record["numbers"], short(record["device"])
    column = columns.setdefault(f"{title.format(**numbers)}, chunks of {numbers['chunk']} tokens, {device}", {})
    stock = numbers["cells"]["stock"]["tokens"]
    for server, row in numbers["cells"].items():
        text = f"{row['tokens']:,}" + ("" if server == "stock" else f", {row['tokens'] / stock:.2f}x")
        column[server] = f"{text} ({sha(record['commit'])})"

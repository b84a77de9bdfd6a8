"""Tables with one row per page format: sizes, agreement of answers, decode attention."""

from __future__ import annotations

from .text import CARDS, captions, keyed_on, lines, measured, shown, spread, titled, worded

FORMATS = ("bf16", "k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k4v4_half", "mix", "mix_256", "quota", "max",
           "leankv", "leankv+window=0+lag=64", "kv-compress", "stock")  # fmt: skip
TITLES = {"stock": "stock SGLang", "k4v4_half": "k4v4, half pruned", "mix": "35% k8v4, 40% k4v2, rest pruned",
          "mix_256": "the same mix, blocks of 256 tokens"}  # fmt: skip
TITLES |= {"kv-compress": "kv-compress, 4x", "leankv+window=0+lag=64": "leankv, `--kvc-window 0 --kvc-lag 64`"}
# Scores are grouped by the part of the name before the format.
SIZES = {
    "serve.ratio_body": "compression of packed blocks",
    "serve.ratio_4k": "compression of a running 4K-token request",
}
# Tokens up to the first difference. Names that end with `.answers` are for entire answers.
ANSWERS = {
    "serve.cold_warm_agreement": "cached vs. fresh prefill, CPU engine",
    "serve.cold_warm_agreement_gpu": "cached vs. fresh prefill, GPU",
    "serve.stock_agreement": "vs. stock, CPU engine",
    "serve.stock_agreement_gpu": "vs. stock, GPU",
    "serve.devices_agreement": "GPU vs. CPU engine",
}
SIZES_NOTE = """Compression is relative to bf16 keys and values without metadata. Sizes count page slack, scales, zero
points, tables, scores and positions. A running request also has an uncompressed end. The model is SmolLM2-135M."""
ANSWERS_NOTE = """The first figure of a cell is the share of tokens that agree, up to and including an answer's first
difference. The second is the share of whole answers (24 or 32 tokens) that agree."""
DECODE_NOTE = """Each cell is the speedup over the fastest stock kernel, at the worse of two shapes (64 x 8K and
16 x 32K tokens)."""
DECODE = {"decode.vs_bf16": "stock bf16", "decode.vs_fp8": "stock fp8"}


def sizes(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Table of sizes."""
    table, notes, names = by_format(board, SIZES, lambda name: shown(board[name]))
    return titled("Size", [SIZES_NOTE, "", *table, *captions(notes)] if table else []), names


def agreement(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Table of the agreement of answers."""

    def cell(name: str) -> str:
        answers = board.get(f"{name}.answers")
        return shown(board[name]) + (f" / {shown(answers)}" if answers else "")

    table, notes, names = by_format(board, ANSWERS, cell)
    text = [ANSWERS_NOTE, "", *table, *captions(notes)] if table else []
    return titled("Agreement of answers", text), names | {f"{name}.answers" for name in names}


def decode(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Table of decode attention against stock, for each GPU model."""
    columns = [(keyed_on(f"{d}.{{}}", c), f"{name}, vs. {DECODE[d]}") for c, name in CARDS.items() for d in DECODE]
    by_column = {}
    for pattern, title in columns:
        if rows := {f: board[pattern.format(f)] for f in FORMATS if pattern.format(f) in board}:
            by_column[title] = rows
    body = []
    for fmt in FORMATS:
        if any(fmt in rows for rows in by_column.values()):
            cells = (spread(rows[fmt]) if fmt in rows else "" for rows in by_column.values())
            body.append([TITLES.get(fmt, fmt), *cells])
    notes = []
    for title, rows in by_column.items():
        baselines = ", ".join(sorted({r["baseline"] for r in rows.values()}))
        notes.append(f"{title} ({worded(baselines)}): {measured(list(rows.values()))}")
    names = {pattern.format(f) for pattern, _ in columns for f in FORMATS}
    table = titled("Decode attention", [DECODE_NOTE, "", *lines(["pages", *by_column], body)] if body else [])
    return [*table, *captions(notes)], names & set(board)


def by_format(board: dict[str, dict], columns: dict[str, str], cell) -> tuple[list[str], list[str], set[str]]:
    """Table with one line per format, notes on how its columns were measured, and names of its figures. `cell`:
    function from a name to the text of a cell."""
    used = {c: [f"{c}.{fmt}" for fmt in FORMATS if f"{c}.{fmt}" in board] for c in columns}
    columns = {c: title for c, title in columns.items() if used[c]}
    rows = []
    for fmt in FORMATS:
        line = [cell(f"{c}.{fmt}") if f"{c}.{fmt}" in board else "" for c in columns]
        if any(line):
            rows.append([TITLES.get(fmt, fmt), *line])
    notes: dict[str, list[str]] = {}  # origin -> columns
    for c, title in columns.items():
        notes.setdefault(measured([board[name] for name in used[c]]), []).append(title)
    names = {name for column in used.values() for name in column}
    joined = [f"{' and '.join(titles)}: {origin}" for origin, titles in notes.items()]
    return lines(["format", *columns.values()], rows), joined, names

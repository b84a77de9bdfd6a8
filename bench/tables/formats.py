"""Tables with one row per page format: sizes, agreement of answers, decode attention."""

from __future__ import annotations

from .text import CARDS, captions, keyed_on, lines, measured, shown, spread, titled

FORMATS = ("bf16", "k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k4v4_half", "mix", "mix_256", "quota", "max")
FORMATS += ("leankv", "kv-compress", "stock")
TITLES = {"stock": "stock SGLang", "k4v4_half": "k4v4, half pruned", "mix": "35 % k8v4, 40 % k4v2, rest pruned",
          "mix_256": "the same mix, blocks of 256 tokens"}  # fmt: skip
TITLES["kv-compress"] = "kv-compress, 4x"
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
ANSWERS_NOTE = """Each cell gives the share of tokens that agree, up to and including an answer's first difference, and
the share of whole answers (24 or 32 tokens) that agree."""
DECODE_NOTE = "Each cell is the speedup over the fastest stock kernel, at the worse of two shapes."
DECODE = {"decode.vs_bf16": "stock bf16", "decode.vs_fp8": "stock fp8"}


def formats(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Tables of sizes and of agreement of answers."""
    sizes, size_notes, size_names = by_format(board, SIZES, lambda name: shown(board[name]))

    def agreement(name: str) -> str:
        answers = board.get(f"{name}.answers")
        return shown(board[name]) + (f" / {shown(answers)}" if answers else "")

    answers, answer_notes, names = by_format(board, ANSWERS, agreement)
    out = [*titled("Size", sizes), *captions(size_notes)]
    if answers:
        out += [*titled("Agreement of answers", [ANSWERS_NOTE, "", *answers]), *captions(answer_notes)]
    return out, size_names | names | {f"{name}.answers" for name in names}


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
        notes.append(f"{title} ({baselines}): {measured(list(rows.values()))}")
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
    notes = [f"{title}: {measured([board[name] for name in used[c]])}" for c, title in columns.items()]
    names = {name for column in used.values() for name in column}
    return lines(["format", *columns.values()], rows), notes, names

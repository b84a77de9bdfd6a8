"""What README and docs show of the scoreboard: tables, and where their figures come from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from bench.common import RESULTS
from bench.e2e import arms
from bench.e2e.plot import points
from bench.quality.tasks import TITLES as QUESTIONS
from bench.revision import card

CARDS = {"h200": "H200", "h100": "H100"}  # the first one's figures have the bare names
KEYED = ("e2e.", "agents.", "decode.", "extend.", "score.", "compaction.")
LONGEST = 60  # characters of a word of a command in the README
PRESETS = {"safe": "`safe` (k8v4)", "balanced": "`balanced` (k4v4)", "max": "`max`", "fp8": "stock fp8"}
FORMATS = ("bf16", "k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k4v4_half", "mix", "mix_256", "quota", "max")
FORMATS += ("leankv", "kv-compress", "stock")
TITLES = {"stock": "stock SGLang", "k4v4_half": "k4v4, half pruned", "mix": "35 % k8v4, 40 % k4v2, rest pruned",
          "mix_256": "the same in blocks of 256 tokens"}  # fmt: skip
TITLES["kv-compress"] = "kv-compress, 4x"
# Scores are grouped by the part of the name before the format; the rest of the names are listed one by one.
SIZES = {
    "serve.ratio_body": "smaller than bf16, packed blocks",
    "serve.ratio_4k": "smaller than bf16, a request of 4k tokens",
}
# Tokens up to the first difference, and whole answers (`.answers` behind the format).
ANSWERS = {
    "serve.cold_warm_agreement": "from the cache and computed, CPU engine",
    "serve.cold_warm_agreement_gpu": "from the cache and computed, GPU",
    "serve.stock_agreement": "against stock, CPU engine",
    "serve.stock_agreement_gpu": "against stock, GPU",
    "serve.devices_agreement": "GPU against CPU",
}
ANSWERS_NOTE = "Tokens equal up to an answer's first difference / answers (24 or 32 tokens) equal as a whole:"
DECODE = {"decode.vs_bf16": "stock bf16", "decode.vs_fp8": "stock fp8"}
MODELS = {"smollm2": "SmolLM2-135M", "qwen-0.5b": "Qwen2.5-Coder-0.5B", "qwen-1.5b": "Qwen2.5-Coder-1.5B"}
SINGLES = {
    "e2e.vs_bf16": "output tokens/s against stock bf16 at equal KV memory, 64 x (4096 in, 512 out)",
    "e2e.vs_fp8": "against stock fp8",
    "e2e.ttft_vs_fp8": "median time to the first token of these sessions, against stock fp8",
    "e2e.unconstrained_vs_bf16": "output tokens/s against stock bf16 with memory to spare, worst of 1, 8, 64 sessions",
    "e2e.unconstrained_vs_bf16_c1": "one session",
    "e2e.unconstrained_vs_bf16_c8": "8 sessions",
    "e2e.unconstrained_vs_bf16_c64": "64 sessions",
    "e2e.first_token.computed_vs_bf16": "time to the first token of one request, computed, of a length without padding",
    "e2e.first_token.computed_at_once_vs_bf16": "computed right behind another request",
    "e2e.first_token.computed_padded_vs_bf16": "computed, a length that stock pads to the next graph",
    "e2e.first_token.computed_padded_at_once_vs_bf16": "the same, right behind another request",
    "e2e.first_token.cached_vs_bf16": "the same prompt again, after a pause",
    "e2e.first_token.cached_at_once_vs_bf16": "the same prompt again, at once",
    "e2e.first_token.appended_vs_bf16": "124 tokens appended to it, after a pause",
    "e2e.first_token.appended_at_once_vs_bf16": "124 tokens appended to it, at once",
    "decode.bandwidth.k8v4": "bytes that decode attention over k8v4 moves, of a plain copy's",
    "decode.worst_vs_bf16": "time of decode attention over k4v4 against stock bf16, worst of batches and lengths",
    "decode.worst_uneven": "time a byte of decode attention with uneven lengths or heads, against even ones, worst",
    "extend.vs_stock.1": "time of 1 new token over 100K cached in k4v4",
    "extend.vs_stock.16": "time of 16 new tokens over 100K cached in k4v4",
    "extend.vs_stock.64": "time of 64 new tokens over 100K cached in k4v4",
    "extend.vs_stock.1k": "time of 1024 new tokens over 100K cached in k4v4",
    "extend.vs_stock.batch": "time of 64 new tokens each for 16 requests at once over 1K to 64K cached, worst",
    "score.prefill_overhead": "attention collected by the last 64 queries of a 16K prompt, of its modelled prefill",
    "score.prefill_overhead_all": "attention collected by all queries of it",
    "score.prefill_overhead_sampled": "attention collected by one query in 16 of it",
    "score.decode_overhead": "attention collected while generating (64 x 8K, one step in 32), of a layer's step",
    "compaction.prefill_overhead": "compaction of a 16K prompt, of its modelled prefill",
    "compaction.decode_overhead": "compaction while decoding 64 sequences, of a modelled step",
    "compaction.decode_overhead_exposed": "the same if nothing hid the host's launches",
    "compaction.leankv_decode_overhead": "LeanKV: a block planned and packed twice while decoding, of a modelled step",
    "sanitizer.memcheck": "compute-sanitizer, memcheck: errors in our kernels",
    "sanitizer.racecheck": "compute-sanitizer, racecheck: errors in our kernels",
    "serve.occupancy": "token slots of packed pages that hold a token, worst format",
    "serve.resident.k4v4": "requests that run at a time in equal memory, prompts of 40 % of it, k4v4",
    "serve.bf16_token_match": "nothing compressed against stock, tokens up to the first difference",
    "serve.bf16_token_match.answers": "nothing compressed against stock, whole answers",
    "serve.page_hash_match": "packed blocks with equal bytes whatever the order of operations",
    "serve.warm_warm_match": "repeated prompts with the same answer from the cache (bf16, k4v4)",
    "defects.open": "known defects that are open",
}


def keyed(name: str, device: str) -> str:
    """The name with its card, where the figure depends on one; the bare name is that of the first of `CARDS`."""
    if not name.startswith(KEYED) or card(device) == next(iter(CARDS)):
        return name
    return f"{name}_{card(device)}"


def shown(row: dict, value: float | None = None) -> str:
    """A value as the tables print it: shares in percent, ratios with their sign."""
    unit, value = row["unit"], row["value"] if value is None else value
    if unit.startswith("share"):
        return f"{100 * value:.1f} %"
    if unit.startswith(("x", "time", "of stock's time")):
        # Next to 1 the third digit says on which side.
        return f"{value:.{3 if abs(value - 1) < 0.02 else 2}f}x"
    if unit.startswith("points"):
        return f"{value:+.1f}"
    if unit.startswith("nats"):
        return f"{value:.2f}"
    return f"{value:.{0 if unit.startswith(('errors', 'tests')) else 3}f} {unit}"


def spread(row: dict) -> str:
    """With the least and the most of its runs, where it has several."""
    if "low" not in row or row["n"] == 1:
        return shown(row)
    return f"{shown(row)} ({shown(row, row['low'])} to {shown(row, row['high'])})"


def short(device: str) -> str:
    return CARDS.get(card(device), "CPU" if device.startswith("CPU") else device)


def lines(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *body, ""]


def measured(rows: list[dict]) -> str:
    """Device, commit and number of runs of some figures, in short."""
    found = dict.fromkeys(f"{short(r['device'])} at {r['commit'][:7]}" for r in rows)
    counts = sorted({r["n"] for r in rows})
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    return f"{', '.join(found)}; {n}"


def by_format(board: dict[str, dict], columns: dict[str, str], cell) -> tuple[list[str], list[str], set[str]]:
    """A table with a line a format; what its columns were measured with; the names in it. `cell`: of a name."""
    used = {c: [f"{c}.{fmt}" for fmt in FORMATS if f"{c}.{fmt}" in board] for c in columns}
    columns = {c: title for c, title in columns.items() if used[c]}
    rows = []
    for fmt in FORMATS:
        line = [cell(f"{c}.{fmt}") if f"{c}.{fmt}" in board else "" for c in columns]
        if any(line):
            rows.append([TITLES.get(fmt, fmt), *line])
    notes = [f"{title}: {measured([board[name] for name in used[c]])}" for c, title in columns.items()]
    names = {name for some in used.values() for name in some}
    return lines(["format", *columns.values()], rows), notes, names


def formats(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Sizes, and agreement of answers."""
    sizes, of_sizes, size_names = by_format(board, SIZES, lambda name: shown(board[name]))

    def both(name: str) -> str:
        whole = board.get(f"{name}.answers")
        return shown(board[name]) + (f" / {shown(whole)}" if whole else "")

    answers, of_answers, names = by_format(board, ANSWERS, both)
    out = [*sizes, *captions(of_sizes)]
    if answers:
        out += [ANSWERS_NOTE, "", *answers, *captions(of_answers)]
    return out, size_names | names | {f"{name}.answers" for name in names}


def captions(notes: list[str]) -> list[str]:
    return [f"<sub>Measured: {'. '.join(notes)}.</sub>", ""] if notes else []


def decode(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Decode attention on each card against stock."""
    columns = [(keyed_on(f"{d}.{{}}", c), f"{name}, against {DECODE[d]}") for c, name in CARDS.items() for d in DECODE]
    found = {title: {f: board[n] for f in FORMATS if (n := pattern.format(f)) in board} for pattern, title in columns}
    found = {title: rows for title, rows in found.items() if rows}
    body = []
    for fmt in FORMATS:
        if any(fmt in rows for rows in found.values()):
            cells = (spread(rows[fmt]) if fmt in rows else "" for rows in found.values())
            body.append([TITLES.get(fmt, fmt), *cells])
    notes = []
    for title, rows in found.items():
        against = ", ".join(sorted({r["baseline"] for r in rows.values()}))
        notes.append(f"{title} ({against}): {measured(list(rows.values()))}")
    names = {pattern.format(f) for pattern, _ in columns for f in FORMATS}
    return [*lines(["decode attention", *found], body), *captions(notes)], names & set(board)


def keyed_on(name: str, which: str) -> str:
    return name if which == next(iter(CARDS)) else f"{name}_{which}"


def presets(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """What is recommended against bf16, a line for each model and preset; and the names of the figures in it."""
    columns = {"ratio_body": "smaller, packed blocks"}
    columns |= {"all.delta": "all tasks"} | {f"{task}.delta": name for task, name in QUESTIONS.items()}
    columns |= {"kl_p99": "KL p99"}
    every = [f"quality.{p}.{m}.{c}" for p in PRESETS for m in MODELS for c in columns]
    used = {n for n in every if n in board}
    rows = []
    for model, title in MODELS.items():
        for preset, name in PRESETS.items():
            found = [board.get(f"quality.{preset}.{model}.{c}") for c in columns]
            if any(found):
                last = next(r for r in reversed(found) if r)
                where = f"{short(last['device'])}, {last['commit'][:7]}"
                rows.append([title, name, *(points_lost(r) if r else "" for r in found), where])
                title = ""
    if not rows:
        return [], used
    text = [QUALITY_NOTE, "", *lines(["model", "preset", *columns.values(), "measured"], rows)]
    return text, used | {f"quality.{p}.{r}" for p in PRESETS for r in ("ratio_body", "ratio_4k")} & set(board)


QUALITY_NOTE = """Answers against stock SGLang in bf16 of the same run, in points of 104 questions a task
(HumanEval 164, tool calls 100), with 95 % intervals of independent questions (Tango's score interval; eight share a
context). An interval that holds 0 shows no difference. *floor*: stock has fewer than one in twenty right, so that there
is nothing to lose. `*`: the preset was chosen on these questions. One run each, greedy. The models' weights are
dequantized from 4-bit GGUF uploads ([which](docs/quality.md#models))."""


def points_lost(row: dict) -> str:
    if not row["unit"].startswith("points"):
        return shown(row)
    if "floor" in row["unit"]:
        return "floor"
    mark = "\\*" if "chosen" in row["unit"] else ""
    return f"{shown(row)}{mark} [{row['low']:+.1f}, {row['high']:+.1f}]"


def agents(board: dict[str, dict], results: Path) -> tuple[list[str], set[str]]:
    """The curve of each card: what comes from the cache, and how long a step takes."""
    out, used = [], {n for n in board if n.startswith("agents.")}
    for which, name in CARDS.items():
        path = results / "e2e" / f"agents_{which}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        found, sessions = points(record["numbers"], "a"), record["numbers"]["sessions"]
        servers = dict.fromkeys(server for rows in found.values() for server in rows)
        rows = [[_server(server, found), *(_step(rows.get(server)) for rows in found.values())] for server in servers]
        shares, head = sessions["shares"], ["server", *(f"{n} agents" for n in found)]
        text = (
            f"Agents on an {name}: prompt tokens from the cache; steps a second; mean / median / p99 seconds a step. "
            f"Histories have {sessions['tokens_mean'] / 1000:.1f}K tokens on average, at most "
            f"{sessions['tokens_longest'] / 1000:.0f}K; {100 * shares['results']:.0f} % of them are real outputs of "
            f"BFCL's functions, {100 * shares['filler']:.0f} % filler. Random weights; pauses of "
            f"{sessions['pause']:g} s on average; {sessions['seconds']:g} s measured at each point behind the ramp-up; "
            f"at {record['commit'][:7]}, n = 1."
        )
        out += [text, "", *lines(head, rows)]
    return out, used


def pictures(results: Path) -> list[str]:
    """What `bench.e2e.plot` drew, of each card."""
    titles = {"serving": "64 sessions in equal KV memory", "agents": "Agents in equal KV memory"}
    found = [(title, f"{bench}_{which}.png", name) for which, name in CARDS.items() for bench, title in titles.items()]
    shown = [f"![{title}, {name}](bench/results/e2e/{file})" for title, file, name in found
             if (results / "e2e" / file).exists()]  # fmt: skip
    return [*shown, ""] if shown else []


def _server(server: str, found: dict[int, dict[str, dict]]) -> str:
    row = next(rows[server] for rows in found.values() if server in rows)
    return server.replace("kvc_", "kvc, ") if server.startswith("kvc") else arms.described(row["options"])


def _step(row: dict | None) -> str:
    if row is None:
        return ""
    times = " / ".join(f"{row[f'step_s_{k}']:.3g}" for k in ("mean", "median", "p99"))
    return f"{100 * row['from_cache']:.0f} %; {row['steps_s']:.1f}; {times}"


def singles(board: dict[str, dict], names: list[str]) -> list[str]:
    """Figures one by one: those of cards side by side, the others below."""
    on_cards, others = [], []
    for name in names:
        title = SINGLES.get(name, f"`{name}`")
        if name.startswith(KEYED):
            rows = [board.get(keyed_on(name, which)) for which in CARDS]
            both = [r for r in rows if r]
            values = [spread(r) if r else "" for r in rows]
            on_cards.append([title, *values, *(_join(both, f) for f in ("baseline", "n", "commit"))])
        else:
            row = board[name]
            others.append([title, spread(row), short(row["device"]), row["baseline"], str(row["n"]), row["commit"][:7]])
    head = ["figure", *CARDS.values(), "against", "n", "commit"]
    return [*lines(head, on_cards), *lines(["figure", "value", "on", "against", "n", "commit"], others)]


def _join(rows: list[dict], field: str) -> str:
    return "; ".join(dict.fromkeys(str(r[field])[: 7 if field == "commit" else None] for r in rows))


def tables(board: dict[str, dict], results: Path = RESULTS) -> str:
    """Markdown: tables by format, answers, agents, single figures, and how all of it was measured."""
    used: set[str] = set()
    text: list[str] = []
    for make in (formats, decode, presets, partial(agents, results=results)):
        part, names = make(board)
        text, used = [*text, *part], used | names
    rest = [_bare(name) for name in board if name not in used]
    text += singles(board, [n for n in SINGLES if n in rest] + [n for n in dict.fromkeys(rest) if n not in SINGLES])
    return "\n".join([*text, *pictures(results), *origins(board)]).strip()


def _bare(name: str) -> str:
    return next((name.removesuffix(f"_{c}") for c in CARDS if name.startswith(KEYED) and name.endswith(f"_{c}")), name)


def origins(board: dict[str, dict]) -> list[str]:
    """For each raw file: which figures, on what, and the commands of its runs."""
    files: dict[str, list[str]] = {}
    for name, row in board.items():
        files.setdefault(row["file"], []).append(name)
    out = ["Measured by:", ""] if files else []
    for file, names in sorted(files.items()):
        row, groups = board[names[0]], sorted({".".join(_bare(n).split(".")[:2]) for n in names})
        if len(groups) > FEW:
            groups = sorted({g.split(".")[0] + ".*" for g in groups})
        calls = "; ".join(f"`{_cut(command)}`" for command in row["commands"])
        if len(row["commands"]) == 1 and "--append" in calls:
            calls += " and earlier calls"
        what = ", ".join(f"`{group}`" for group in groups)
        out.append(f"- {what} on {row['device']} at {row['commit'][:7]} (`{file}`): {calls}")
    return out


FEW = 3  # groups of figures that are named one by one


def _cut(command: str) -> str:
    """A command whose lists are cut: the whole of it is in the file."""
    return " ".join(word if len(word) <= LONGEST else word.split(",")[0] + ",.." for word in command.split(" "))

"""The tables of docs/benchmarks.md, and where their figures come from."""

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
KEYED = ("e2e.", "agents.", "decode.", "extend.", "score.", "compaction.", "papers.longgen.", "papers.rate")
ALIKE = ("agents.restart_warm_hit", "agents.corrupt_served", "agents.round_trips_equal", "agents.demoted_points")
COUNTS = ("errors", "tests", "damaged")  # units of whole numbers
LONGEST = 60  # characters of a word of a command on the page
PRESETS = {"safe": "`safe` (k8v4)", "balanced": "`balanced` (k4v4)", "max": "`max`", "fp8": "stock fp8"}
FORMATS = ("bf16", "k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k4v4_half", "mix", "mix_256", "quota", "max")
FORMATS += ("leankv", "kv-compress", "stock")
TITLES = {"stock": "stock SGLang", "k4v4_half": "k4v4, half pruned", "mix": "35 % k8v4, 40 % k4v2, rest pruned",
          "mix_256": "the same mix, blocks of 256 tokens"}  # fmt: skip
TITLES["kv-compress"] = "kv-compress, 4x"
# Scores are grouped by the part of the name before the format; the rest of the names are listed one by one.
SIZES = {
    "serve.ratio_body": "compression of packed blocks",
    "serve.ratio_4k": "compression of a running 4K-token request",
}
# Tokens up to the first difference, and whole answers (`.answers` behind the format).
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
MODELS = {"smollm2": "SmolLM2-135M", "qwen-0.5b": "Qwen2.5-Coder-0.5B", "qwen-1.5b": "Qwen2.5-Coder-1.5B"}
SINGLES = {
    "e2e.vs_bf16": "output tokens/s vs. stock bf16, equal KV memory, 64 x (4096 in + 512 out)",
    "e2e.vs_fp8": "output tokens/s vs. stock fp8, same load and memory",
    "e2e.ttft_vs_fp8": "median time to first token vs. stock fp8, same load and memory",
    "e2e.unconstrained_vs_bf16": "output tokens/s vs. stock bf16, ample KV memory, worst of 1, 8 and 64 sessions",
    "e2e.unconstrained_vs_bf16_c1": "output tokens/s vs. stock bf16, ample KV memory, 1 session",
    "e2e.unconstrained_vs_bf16_c8": "output tokens/s vs. stock bf16, ample KV memory, 8 sessions",
    "e2e.unconstrained_vs_bf16_c64": "output tokens/s vs. stock bf16, ample KV memory, 64 sessions",
    "e2e.first_token.computed_vs_bf16": "time to first token, cold prompt, length that needs no padding",
    "e2e.first_token.computed_at_once_vs_bf16": "time to first token, cold prompt right behind another request",
    "e2e.first_token.computed_padded_vs_bf16": "time to first token, cold prompt that stock pads to a CUDA graph",
    "e2e.first_token.computed_padded_at_once_vs_bf16": "time to first token, padded cold prompt behind another request",
    "e2e.first_token.cached_vs_bf16": "time to first token, cached prompt after a pause",
    "e2e.first_token.cached_at_once_vs_bf16": "time to first token, cached prompt at once",
    "e2e.first_token.appended_vs_bf16": "time to first token, 124 tokens appended to a cached prompt after a pause",
    "e2e.first_token.appended_at_once_vs_bf16": "time to first token, 124 tokens appended to a cached prompt at once",
    "agents.vs_bf16": "recorded coding agents at the latency targets, vs. stock bf16",
    "agents.vs_fp8": "the same vs. stock fp8",
    "agents.vs_fp8_hicache": "the same vs. stock fp8 with its hierarchical cache",
    "agents.tiers_vs_static": "the same vs. k4v4 without host memory",
    "agents.hit_of_endless_2x": "prefix-cache hit rate with tiers at twice the most agents without",
    "agents.restart_warm_hit": "cached tokens that a server finds again on disk after SIGKILL under load",
    "agents.corrupt_served": "blocks served from files that were cut short or got a wrong bit",
    "agents.round_trips_equal": "answers that stay equal when contexts go to host memory or disk and come back",
    "agents.demoted_points": "exact match of demoted k8v4 contexts against contexts stored as k4v4, points",
    "agents.swap_in_of_pcie": "a prefix of 100K tokens from host memory, time",
    "agents.swap_out_of_pcie": "the same to host memory, time",
    "agents.attention_beside_swap": "decode attention while it comes back, time",
    "agents.decode_slowdown": "one layer of a decode step while it comes back, time",
    "papers.longgen.vs_bf16.k4v4": "output tokens/s vs. stock bf16, 64 x (512 in + 8192 out), k4v4",
    "papers.longgen.vs_bf16.leankv": "the same, leankv",
    "papers.longgen.vs_bf16.kv-compress-8x": "the same, kv-compress in k4v4, budget 8x",
    "papers.longgen.vs_bf16.kv-compress-16x": "the same, budget 16x",
    **{f"papers.rate{r}": f"output tokens/s vs. stock bf16, 64 one-shot prompts of 4096 tokens at {r}x in memory for 6"
       for r in (1, 2, 4, 8, 16, 32, 64)},
    **{f"papers.longest.{k}": f"longest prompt served in equal KV memory vs. stock bf16, {k}"
       for k in ("k4v4", "oneshot-8x", "oneshot-16x", "oneshot-32x")},
    "papers.retraction_recompute": "tokens prefilled again after retractions, with host memory",
    "papers.retraction_recompute_pool": "the same without host memory",
    **{f"quality.k4v2_over_k4v4_kl.{m}": f"mean KL of k4v2 against k4v4's, simulated, {t}" for m, t in MODELS.items()},
    "decode.bandwidth.k8v4": "memory bandwidth of k8v4 decode attention, share of a device copy's",
    "decode.worst_vs_bf16": "k4v4 decode attention time, worst of batch sizes and lengths",
    "decode.worst_uneven": "decode attention time per byte, uneven lengths or heads, worst",
    "extend.vs_stock.1": "attention time, 1 new token over 100K cached in k4v4",
    "extend.vs_stock.16": "attention time, 16 new tokens over 100K cached in k4v4",
    "extend.vs_stock.64": "attention time, 64 new tokens over 100K cached in k4v4",
    "extend.vs_stock.1k": "attention time, 1024 new tokens over 100K cached in k4v4",
    "extend.vs_stock.batch": "attention time, batch of 16, 64 new tokens each over 1K to 64K cached, worst",
    "score.prefill_overhead": "attention scores of the last 64 queries of a 16K prompt, share of a modeled prefill",
    "score.prefill_overhead_all": "attention scores of all its queries, share of a modeled prefill",
    "score.prefill_overhead_sampled": "attention scores of one query in 16, share of a modeled prefill",
    "score.decode_overhead": "attention scores while decoding (64 x 8K, one step in 32), share of a layer's step",
    "compaction.prefill_overhead": "packing a 16K prompt, share of a modeled prefill",
    "compaction.decode_overhead": "packing while decoding 64 sequences, share of a modeled step",
    "compaction.decode_overhead_exposed": "packing while decoding, host launches not hidden, share of a modeled step",
    "compaction.leankv_decode_overhead": "LeanKV, a block packed twice while decoding, share of a modeled step",
    "sanitizer.memcheck": "compute-sanitizer memcheck, errors in this project's kernels",
    "sanitizer.racecheck": "compute-sanitizer racecheck, errors in this project's kernels",
    "serve.occupancy": "token slots of packed pages that hold a token, worst format",
    "serve.resident.k4v4": "concurrent requests in equal memory, prompts of 40 % of it, k4v4",
    "serve.bf16_token_match": "uncompressed pages vs. stock, tokens up to the first difference",
    "serve.bf16_token_match.answers": "uncompressed pages vs. stock, whole answers",
    "serve.page_hash_match": "packed blocks with equal bytes under any order of operations",
    "serve.warm_warm_match": "repeated cached prompts with an unchanged answer (bf16, k4v4)",
    "defects.open": "defects that tests mark as known and open",
}


def keyed(name: str, device: str) -> str:
    """The name with its card, where the figure depends on one; the bare name is that of the first of `CARDS`."""
    if not name.startswith(KEYED) or name in ALIKE or card(device) == next(iter(CARDS)):
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
    return f"{value:.{0 if unit.startswith(COUNTS) else 3}f} {unit}"


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
    out = [*titled("Size", sizes), *captions(of_sizes)]
    if answers:
        out += [*titled("Agreement of answers", [ANSWERS_NOTE, "", *answers]), *captions(of_answers)]
    return out, size_names | names | {f"{name}.answers" for name in names}


def titled(title: str, text: list[str]) -> list[str]:
    """A section of the page, if it has any text."""
    return [f"## {title}", "", *text] if text else []


def captions(notes: list[str]) -> list[str]:
    return [f"<sub>Measured: {'. '.join(notes)}.</sub>", ""] if notes else []


def decode(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """Decode attention on each card against stock."""
    columns = [(keyed_on(f"{d}.{{}}", c), f"{name}, vs. {DECODE[d]}") for c, name in CARDS.items() for d in DECODE]
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
    table = titled("Decode attention", [DECODE_NOTE, "", *lines(["pages", *found], body)] if body else [])
    return [*table, *captions(notes)], names & set(board)


def keyed_on(name: str, which: str) -> str:
    return name if which == next(iter(CARDS)) else f"{name}_{which}"


def presets(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """What is recommended against bf16, a line for each model and preset; and the names of the figures in it."""
    columns = {"ratio_body": "compression"}
    columns |= {"all.delta": "all tasks"} | {f"{task}.delta": name for task, name in QUESTIONS.items()}
    columns |= {"kl_p99": "KL p99"}
    asked = {n.rsplit(".", 2)[1] for n in board if n.startswith("quality.") and n.endswith(".delta")}
    columns = {c: title for c, title in columns.items() if not c.endswith(".delta") or c.split(".")[0] in asked}
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
    sizes = {f"quality.{p}.{r}" for p in PRESETS for r in ("ratio_body", "ratio_4k")} & set(board)
    return titled("Answer quality", text), used | sizes


QUALITY_NOTE = """Each cell is the change in correct answers against stock SGLang in bf16 of the same run, in points. A
task has 104 questions (HumanEval 164, tool calls 100). Brackets hold 95 % intervals (Tango's score interval for
independent questions; eight questions share a context). An interval that contains 0 shows no difference. *floor*:
stock answers fewer than one question in twenty. `*`: the preset was chosen on these questions. Each cell is one greedy
run. The weights are dequantized from 4-bit GGUF uploads ([models](quality.md#models))."""


def points_lost(row: dict) -> str:
    if not row["unit"].startswith("points"):
        return shown(row)
    if "floor" in row["unit"]:
        return "floor"
    mark = "\\*" if "chosen" in row["unit"] else ""
    return f"{shown(row)}{mark} [{row['low']:+.1f}, {row['high']:+.1f}]"


def agents(board: dict[str, dict], results: Path) -> tuple[list[str], set[str]]:
    """The curve of each card: what comes from the cache, and how long a step takes."""
    out, used = [], {n for n in board if n.startswith("agents.curve.")}
    for which, name in CARDS.items():
        out += _replayed(results / "e2e" / f"agent_replay_{which}.json", name)
        path = results / "e2e" / f"agents_{which}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        found, sessions = points(record["numbers"], "a"), record["numbers"]["sessions"]
        servers = dict.fromkeys(server for rows in found.values() for server in rows)
        rows = [[_server(server, found), *(_step(rows.get(server)) for rows in found.values())] for server in servers]
        shares, head = sessions["shares"], ["server", *(f"{n} agents" for n in found)]
        text = (
            f"Each cell gives the prefix-cache hit rate by tokens, steps per second, and the mean / median / p99 "
            f"seconds per step on one {name}. Histories average {sessions['tokens_mean'] / 1000:.1f}K tokens and reach "
            f"{sessions['tokens_longest'] / 1000:.0f}K. {100 * shares['results']:.0f} % of these tokens are outputs of "
            f"BFCL's functions and {100 * shares['filler']:.0f} % are filler. The weights are random. Pauses average "
            f"{sessions['pause']:g} s, and each point covers {sessions['seconds']:g} s after the ramp-up "
            f"({record['commit'][:7]}, n = 1)."
        )
        out += [text, "", *lines(head, rows)]
    return titled("Agents", out), used


def _replayed(path: Path, card_name: str) -> list[str]:
    """Recorded coding agents at each server of one card."""
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    numbers, found = record["numbers"], points(record["numbers"], "a")
    settings, servers = numbers["settings"], dict.fromkeys(s for rows in found.values() for s in rows)
    rows = [[s.replace("_", " "), *(_turn(rows.get(s)) for rows in found.values()), str(numbers["most_agents"][s])]
            for s in servers]  # fmt: skip
    text = (
        f"Recorded coding agents in a closed loop on one {card_name}. Each cell gives the prefix-cache hit rate by "
        f"tokens, the p50 / p90 time to the first token in seconds, and the p90 time per output token in milliseconds. "
        f"The last column has the most agents within 2 s and 25 ms. Each server has the KV memory of "
        f"{settings['tokens']:,} bf16 tokens; `kvc tiers` and SGLang's hierarchical cache (`hicache`) have "
        f"{settings['host_gb']} GB of host memory. Lengths are {settings['length_scale']:g} of the recorded ones, "
        f"pauses {settings['time_scale']:g}. A cache that forgets nothing finds {100 * settings['endless']:.0f} % of "
        f"the tokens. The weights are random. Each point covers {settings['seconds']:g} s behind the ramp-up "
        f"({record['commit'][:7]}, n = 1)."
    )
    return [text, "", *lines(["server", *(f"{n} agents" for n in found), "most"], rows)]


def _turn(row: dict | None) -> str:
    if row is None:
        return ""
    first = " / ".join(f"{row[f'first_token_s_{q}']:.2g}" for q in ("p50", "p90"))
    hit = "" if row["from_cache"] is None else f"{100 * row['from_cache']:.0f} %; "
    return f"{hit}{first} s; {1000 * row['output_token_s_p90']:.0f} ms"


def pictures(results: Path) -> list[str]:
    """What `bench.e2e.plot` drew, of each card."""
    titles = {"serving": "64 sessions in equal KV memory", "agents": "Agents in equal KV memory",
              "agent_replay": "Recorded coding agents"}  # fmt: skip
    found = [(title, f"{bench}_{which}.png", name) for which, name in CARDS.items() for bench, title in titles.items()]
    shown = [f"![{title}, {name}](../bench/results/e2e/{file})" for title, file, name in found
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
        if name.startswith(KEYED) and name not in ALIKE:
            rows = [board.get(keyed_on(name, which)) for which in CARDS]
            both = [r for r in rows if r]
            values = [spread(r) if r else "" for r in rows]
            on_cards.append([title, *values, *(_join(both, f) for f in ("baseline", "n", "commit"))])
        else:
            row = board[name]
            others.append([title, spread(row), short(row["device"]), row["baseline"], str(row["n"]), row["commit"][:7]])
    speed = lines(["figure", *CARDS.values(), "baseline", "n", "commit"], on_cards)
    rest = lines(["figure", "value", "device", "baseline", "n", "commit"], others)
    return [*titled("Speed", speed), *titled("Correctness and memory", rest)]


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
    out = titled("Commands", ["Paths are below `bench/results`.", ""] if files else [])
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

"""Collect the figures of all raw result files into one, and render the README's tables from it.

    python -m bench.scoreboard [--check]

Reads `scores` of every JSON under bench/results, writes bench/results/scoreboard.json (name -> value,
unit, command, commit, device, date) and the tables between the `<!-- scoreboard -->` marks of the README.
Of several measurements of one figure the latest counts. `--check` only says whether both files are up to
date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from bench.common import RESULTS, ROOT
from bench.quality import cells
from bench.quality.merged import merged
from bench.quality.tasks import TITLES as QUESTIONS

LENGTH = 2048  # tokens of the contexts whose figures are shown
LONGEST = 60  # characters of a word of a command in the README
OUT = RESULTS / "scoreboard.json"
README = ROOT / "README.md"
MARK = "<!-- scoreboard -->"
FIELDS = ("command", "commit", "device", "date")
FORMATS = ("bf16", "k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k4v4_half", "mix", "mix_256", "quota", "max")
FORMATS += ("leankv", "kv-compress", "stock")
TITLES = {"stock": "stock SGLang", "k4v4_half": "k4v4, half pruned", "mix": "35 % k8v4, 40 % k4v2, rest pruned",
          "mix_256": "the same in blocks of 256 tokens"}  # fmt: skip
TITLES["kv-compress"] = "kv-compress, 4x"
# Scores are grouped by the part of the name before the format; the rest of the names are listed one by one.
COLUMNS = {
    "serve.ratio_body": "smaller than bf16, packed blocks",
    "serve.ratio_4k": "smaller than bf16, a request of 4k tokens",
    "serve.cold_warm_agreement": "tokens equal from the cache and computed",
    "serve.cold_warm_agreement_gpu": "the same on a GPU",
    "serve.devices_agreement": "tokens equal on the GPU and the CPU",
}
DECODE = {
    "decode.vs_bf16": "decode attention against the fastest stock kernel, bf16 KV",
    "decode.vs_fp8": "against the fastest stock kernel, fp8 KV",
}
MODELS = {"smollm2": "SmolLM2-135M", "qwen-0.5b": "Qwen2.5-Coder-0.5B", "qwen-1.5b": "Qwen2.5-Coder-1.5B"}
QUALITY = [f"quality.{m}.{t}" for m in MODELS for t in ("niah", "kv", "nll")]
RATIOS = {"ratio_body": "smaller, packed blocks", "ratio_4k": "smaller, 4k tokens"}
PRESETS = {"safe": "`safe` (k8v4)", "balanced": "`balanced` (k4v4)", "max": "`max`", "fp8": "stock fp8"}
# The same figure under the name that a preset gives it.
ALIASES = {
    f"quality.{preset}.ratio_4k": f"serve.ratio_4k.{cell}"
    for preset, cell in (("safe", "k8v4"), ("balanced", "k4v4"), ("max", "max"))
}
SINGLES = {
    "e2e.vs_bf16": "output tokens/s against stock bf16 at equal KV memory, 64 x (4096 in, 512 out), H100",
    "e2e.vs_bf16_h200": "the same, H200",
    "e2e.vs_fp8": "against stock fp8, H100",
    "e2e.vs_fp8_h200": "the same, H200",
    "e2e.unconstrained_vs_bf16": "against stock bf16 with memory to spare, worst of 1, 8 and 64 sessions, H100",
    "e2e.unconstrained_vs_bf16_c1": "one session, H100",
    "e2e.unconstrained_vs_bf16_c8": "8 sessions, H100",
    "e2e.unconstrained_vs_bf16_c64": "64 sessions, H100",
    "e2e.unconstrained_vs_bf16_h200": "worst of 1 and 8 sessions, H200",
    "e2e.agents.from_cache.bf16": "tokens of 64 agents' prompts that come from the cache, 8B, 14.6 GB, H100: bf16",
    "e2e.agents.from_cache.fp8": "fp8",
    "e2e.agents.from_cache.kvc_k4v4": "k4v4",
    "e2e.agents.vs_bf16": "steps a second of these agents, k4v4 against stock bf16",
    "e2e.agents.vs_fp8": "against stock fp8",
    "e2e.first_token.computed_vs_bf16": "time to the first token of one request, of stock bf16's, H100: computed",
    "e2e.first_token.computed_at_once_vs_bf16": "a prompt computed right behind another one",
    "e2e.first_token.cached_vs_bf16": "the same prompt again, after a second without requests",
    "e2e.first_token.cached_at_once_vs_bf16": "the same prompt again, at once",
    "e2e.first_token.appended_vs_bf16": "120 tokens appended to it, after a second",
    "e2e.first_token.appended_at_once_vs_bf16": "120 tokens appended to it, at once",
    "decode.bandwidth.k8v4": "bytes that decode attention over k8v4 moves, against a plain copy",
    "decode.worst_vs_bf16": "time of decode attention over k4v4 against stock bf16, worst of batches and lengths",
    "decode.worst_uneven": "time a byte of decode attention with uneven lengths or heads, against even ones, worst",
    "extend.vs_bf16.64": "time of 64 new tokens over 100K cached in k4v4, against FlashInfer over bf16",
    "extend.vs_bf16.1k": "time of 1024 new tokens, likewise",
    "extend.vs_bf16.batch": "time of 64 new tokens each for 16 requests at once over 1K to 64K cached, likewise, worst",
    "sanitizer.memcheck": "compute-sanitizer, memcheck (by value: FlashInfer's kernel under a tool, see the notes)",
    "sanitizer.racecheck": "compute-sanitizer, racecheck, likewise",
    "score.prefill_overhead": "attention collected by the last 64 queries of a 16K prompt, of its prefill",
    "score.prefill_overhead_all": "attention collected by all queries, likewise",
    "score.prefill_overhead_sampled": "attention collected by one query in 16, likewise",
    "score.decode_overhead": "attention collected while generating (64 x 8K, one step in 32), of a layer's step",
    "compaction.prefill_overhead": "compaction of a 16K prompt, of its prefill",
    "compaction.decode_overhead": "compaction while decoding 64 sequences, of a step",
    "compaction.decode_overhead_exposed": "the same if nothing hid the host's launches",
    "compaction.leankv_decode_overhead": "LeanKV: each block planned and packed twice while decoding, of a step",
    "compaction.vs_cpu": "compaction of a 16K prompt, times as fast as plain torch on the CPU",
    "serve.occupancy": "token slots of packed pages that hold a token, worst format",
    "serve.resident.k4v4": "requests that run at a time in equal memory, prompts of 40 % of it, k4v4",
    "serve.agents.from_cache.bf16": "tokens of 16 agents' prompts that come from the cache, a third of the memory that "
    "they need: stock bf16",
    "serve.agents.from_cache.kvc_k4v4": "the same, k4v4",
    "serve.agents.vs_bf16": "steps a second of these agents, k4v4 against stock bf16, CPU engine",
    "serve.bf16_token_match": "answers equal to stock SGLang, nothing compressed",
    "serve.page_hash_match": "packed blocks with equal bytes whatever their history",
    "serve.warm_warm_match": "repeated prompts with the same answer from the cache",
}


def collect(results: Path = RESULTS) -> dict[str, dict]:
    """name -> {value, unit, command, commit, device, date}, the latest of each; of whole servers for each device."""
    board: dict[str, dict] = {}
    for path in sorted(results.rglob("*.json")):
        if path == OUT:
            continue
        record = json.loads(path.read_text())
        if not isinstance(record, dict):
            continue
        for name, score in record.get("scores", {}).items():
            name = _of_device(name, record["device"])
            row = {"value": score["value"], "unit": score["unit"], **{f: record[f] for f in FIELDS}}
            of_preset = name.startswith("quality.") and name.split(".")[1] in PRESETS
            if not of_preset and (name not in board or row["date"] > board[name]["date"]):
                board[name] = row
    board |= _of_presets(results / "quality")
    board |= {name: board[other] for name, other in ALIASES.items() if other in board}
    return dict(sorted(board.items()))


def _of_device(name: str, device: str) -> str:
    """What a whole server gains depends on how fast a card's memory is beside its arithmetic, so each card has its own
    figure; the bare name is the H100's."""
    if not name.startswith("e2e.") or "H100" in device:
        return name
    return f"{name}_{re.sub(r'[^a-z0-9]+', '_', device.removeprefix('NVIDIA ').lower())}"


def _of_presets(folder: Path) -> dict[str, dict]:
    """Points that presets lose against stock, from all runs of a model: one that was measured later than stock, or on
    another device, was asked the same questions."""
    out: dict[str, dict] = {}
    for group in reversed([g for g in merged(folder) if g.length == LENGTH]):  # the first model's sizes count
        for name, (value, unit) in cells.scores(group.rows, group.model).items():
            record = group.source[cells.RECOMMENDED[name.split(".")[1]]]
            out[name] = {"value": value, "unit": unit, **{f: record[f] for f in FIELDS}}
    return out


def shown(row: dict) -> str:
    """A value as the tables print it: shares in percent, ratios with their sign."""
    unit = row["unit"]
    if unit.startswith("share"):
        return f"{100 * row['value']:.1f} %"
    if unit.startswith(("x", "time over")):
        # Next to 1 the third digit says on which side.
        return f"{row['value']:.{3 if abs(row['value'] - 1) < 0.02 else 2}f}x"
    return f"{row['value']:.{0 if unit.startswith('errors') else 3}f} {unit}"


def _by_format(board: dict[str, dict], names: dict[str, str]) -> list[str]:
    """A table with a column for each of `names` that is on the board and a line for each format."""
    columns = [c for c in names if any(name.startswith(c + ".") for name in board)]
    if not columns:
        return []
    lines = ["| format | " + " | ".join(names[c] for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for fmt in FORMATS:
        cells = [shown(board[f"{c}.{fmt}"]) if f"{c}.{fmt}" in board else "" for c in columns]
        if any(cells):
            lines.append(f"| {TITLES.get(fmt, fmt)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _presets(board: dict[str, dict]) -> tuple[list[str], set[str]]:
    """What is recommended against bf16, a line for each model and preset; and the names of the figures in it."""
    columns = {f"{task}.delta": name for task, name in QUESTIONS.items()} | {"kl_p99": "KL p99"}
    every = [f"quality.{p}.{m}.{c}" for p in PRESETS for m in MODELS for c in columns]
    used = {n for n in [*every, *(f"quality.{p}.{r}" for p in PRESETS for r in RATIOS)] if n in board}
    if not used:
        return [], used
    head = ["model", "preset", *RATIOS.values(), *columns.values()]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model, title in MODELS.items():
        for preset, name in PRESETS.items():
            rows = [board.get(f"quality.{preset}.{model}.{c}") for c in columns]
            if any(rows):
                sizes = [board.get(f"quality.{preset}.{r}") for r in RATIOS]
                cells = [_change(r) if r else "" for r in (*sizes, *rows)]
                where = ", CPU engine" if any(r and r["device"].startswith("CPU") for r in rows) else ""
                lines.append(f"| {title} | {name}{where} | " + " | ".join(cells) + " |")
                title = ""
    return [*lines, ""], used


def _change(row: dict) -> str:
    if row["unit"].startswith("points"):
        return f"{row['value']:+.1f}"
    return f"{row['value']:.2f}" if row["unit"].startswith("nats") else shown(row)


def tables(board: dict[str, dict]) -> str:
    """Markdown: one line per format, then the single figures, then where they were measured."""
    presets, of_presets = _presets(board)
    lines = [*_by_format(board, COLUMNS), *_by_format(board, DECODE)]
    if presets:
        title = "Answers against stock SGLang in bf16 on a GPU, in points of at least 100 questions a task"
        title += " (sizes: SmolLM2's):"
        lines += [title, "", *presets]
    singles = [name for name in SINGLES if name in board]
    unshown = {f"{c}.{fmt}" for c in QUALITY for fmt in FORMATS}  # 64 questions; those of the presets are more
    grouped = {f"{c}.{fmt}" for c in (*COLUMNS, *DECODE) for fmt in FORMATS} | unshown
    others = [name for name in board if name not in SINGLES and name not in grouped | of_presets]
    if singles or others:
        lines += ["| figure | value |", "|---|---|"]
        lines += [f"| {SINGLES[name]} | {shown(board[name])} |" for name in singles]
        lines += [f"| `{name}` | {shown(board[name])} |" for name in others]
        lines.append("")
    if board:
        commands = sorted({(_short(r["command"]), r["device"]) for n, r in board.items() if n not in unshown})
        lines += ["Measured by:", "", *(f"- `{command}` on {device}" for command, device in commands)]
    return "\n".join(lines).strip()


def _short(command: str) -> str:
    """A command whose lists are cut: the whole of it is in the file."""
    return " ".join(word if len(word) <= LONGEST else word.split(",")[0] + ",.." for word in command.split(" "))


def render(readme: str, board: dict[str, dict]) -> str:
    """The README with fresh tables. One mark alone gets its partner the first time."""
    block = f"{MARK}\n\n{tables(board)}\n\n{MARK}"
    if readme.count(MARK) == 1:
        return readme.replace(MARK, block)
    if readme.count(MARK) != 2:
        raise SystemExit(
            f"error: the README needs the mark {MARK} once or twice, not {readme.count(MARK)} times"
        )
    return re.sub(f"{MARK}.*{MARK}", lambda _: block, readme, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    board = collect()
    data = json.dumps(board, indent=1) + "\n"
    page = render(README.read_text(), board)
    if args.check:
        fresh = OUT.exists() and OUT.read_text() == data and README.read_text() == page
        print("up to date" if fresh else "stale: run python -m bench.scoreboard")
        return 0 if fresh else 1
    OUT.write_text(data)
    README.write_text(page)
    for name, row in board.items():
        print(f"{name:42} {shown(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables of docs/quality.md, docs/quality-research.md and docs/quality-cells.md from the result files.

    python -m bench.quality.report [--check]

A table replaces the text between two marks like `<!-- policies -->`. `--check` only reports whether tables are up to
date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable

from bench.common import RESULTS, ROOT
from bench.quality import cells, findings, levels, long_contexts, points
from bench.quality.asking import SEEN
from bench.quality.merged import Merged, merged
from bench.quality.tasks import TITLES
from bench.tables.questions import MODELS
from bench.tables.text import points_lost, sha, short
from sglang_kvc.policies.presets import RECOMMENDED
from sglang_kvc.policies.published.presets import PUBLISHED
from sglang_kvc.policies.registry import POLICIES

DOCS = tuple(ROOT / "docs" / f"{name}.md" for name in ("quality", "quality-research", "quality-cells"))
MAIN = 2048  # tokens of a context in the tables of docs/quality.md
MAX_SHARE_GAP = 0.05  # largest difference in the kept share of tokens
MAX_ONE_SHOT_GAP = 0.02  # the same between a press and a one-shot level, whose share depends on the model
# Press of kvpress -> pattern of the cells with the same method and 8 bits
METHODS = {
    "keydiff": r"quota\+budget=\dx\+high=k8v8\+share=uniform",
    "snapkv": r"snapkv\+budget=\dx",
    "h2o": r"h2o\+budget=\dx",
    "pyramidkv": r"pyramid\+budget=\dx",
    "streaming-llm": r"streaming-llm\+budget=\dx",
    "random": r"random\+budget=\dx\+high=k8v8",
    "ada-expected": r"ada-expected\+budget=\dx\+high=k8v8",
}
# Columns of the table of all policies: size of a packed block relative to bf16, and the format of kept tokens.
SIZES = (("2x", "k8v8"), ("4x", "k8v8"), ("8x", "k8v8"), ("8x", "k4v4"))


def numbers(path: str) -> dict | None:
    file = RESULTS / path
    return json.loads(file.read_text())["numbers"] if file.exists() else None


def groups(length: int | None = None, *, others: bool = False) -> list[Merged]:
    """Merged server results by model, for contexts of `length` tokens (default: all lengths). `others`: also for
    contexts other than the first ones."""
    return [g for g in merged(RESULTS / "quality") if length in (None, g.length) and (others or not g.first)]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by_model(pattern: str) -> dict[str, dict]:
    """Model -> numbers of its result file. `pattern`: path with `{}` for the model."""
    return {m: content for m in MODELS if (content := numbers(pattern.format(m)))}


def key_groups() -> str:
    """Table of keys per channel in groups of tokens."""
    return quantizers("quality/key_groups_{}.json")


def quantizers(pattern: str = "quality/quantizers_{}.json") -> str:
    """Table of quantization methods with the KL of each model (mean, p99)."""
    kl = {m: {(r["side"], r["name"]): r for r in n["rows"]} for m, n in by_model(pattern).items()}
    rows = []
    for method in dict.fromkeys(method for results in kl.values() for method in results):
        bits = "/".join(dict.fromkeys(f"{r[method]['bits']:g}" for r in kl.values() if method in r))
        cells = [f"{r[method]['kl_mean']:.4f}, {r[method]['kl_p99']:.3f}" if method in r else "" for r in kl.values()]
        rows.append([*method, bits, *cells])
    return table(["of", "way", "bits", *(MODELS[m] for m in kl)], rows)


def formats() -> str:
    """Table of the results of `sglang-kvc calibrate` for each format."""
    files = by_model("calibrate/{}.json")
    kl = {m: {(r["format"], r.get("key_mode", "channel")): r for r in n["formats"]} for m, n in files.items()}
    rows = []
    for name, mode in dict.fromkeys(key for rows in kl.values() for key in rows):
        cells = (r[name, mode] for r in kl.values())
        rows.append([name, mode, *(f"{c['kl_mean']:.4f}, {c['kl_p99']:.3f} ({c['verdict']})" for c in cells)])
    return table(["format", "keys per", *(MODELS[m] for m in files)], rows)


def _policy_row(name: str, r: dict, tasks: list[str], free: list[str], first: int | None) -> list[str]:
    """Row of a cell. `first`: None for shares of right answers; the number of the first context for points against
    stock of the same run, with interval."""
    out = [f"`{name}`", f"{r['ratio_body']:.2f}x", f"{r['ratio']:.2f}x", f"{100 * r['kept']:.0f}%"]
    for task in tasks:
        t = r.get(task)
        if t is None:
            out.append("")
            continue
        flips = f" (-{t['right_to_wrong']} +{t['wrong_to_right']})" if "right_to_wrong" in t else ""
        if first is not None and flips:
            out.append(points_lost(cells.delta(t, cells.chosen_on(name, task, first)).to_dict()) + flips)
        else:
            out.append(f"{100 * t['em']:.1f}%{flips}")
    out += [f"{r[t]['length_ratio']:.2f}x" if "length_ratio" in r.get(t, {}) else "" for t in free]
    delta, kl = r.get("nll", {}).get("delta"), r.get("kl")
    out.append(f"{delta:+.3f}" if delta is not None else "")
    return [*out, f"{kl['mean']:.4f}, {kl['p99']:.3f}" if kl and kl["p99"] else ""]


def _first(row: dict, tasks: list[str]) -> float:
    return next((row[t]["em"] for t in tasks if t in row), 0.0)


def _title(task: str, of: int, questions: int) -> str:
    return TITLES[task] if of == questions else f"{TITLES[task]} ({of})"


def _cells(group: Merged, rows: dict[str, dict], points: bool = False) -> str:
    """Table of cells of one model, sorted by size and then by quality."""
    tasks = [t for t in group.tasks if any(t in r for r in rows.values())]
    free = [t for t in tasks if any("length_ratio" in r.get(t, {}) for r in rows.values())]
    ranked = sorted(rows.items(), key=lambda c: (round(c[1]["ratio_body"], 1), -_first(c[1], tasks)))
    head = ["cell", "body", "whole request", "tokens kept"]
    head += [_title(t, next(r[t]["of"] for r in rows.values() if t in r), group.questions) for t in tasks]
    head += [*(f"{TITLES[t]}, length" for t in free), "NLL", "KL mean, p99"]
    title = f"{MODELS[group.model]}, {group.length} tokens, {group.questions} questions a task"
    title += f" from context {group.first} on" if group.first else ""
    body = [_policy_row(name, r, tasks, free, group.first if points else None) for name, r in ranked]
    return f"{title}, {_devices(group, rows)}:\n\n{table(head, body)}"


def _devices(group: Merged, names: Iterable[str]) -> str:
    """Devices and commits of the cells `names`."""
    records = [group.source[name][0] for name in names if name in group.source]
    return ", ".join(dict.fromkeys(f"{short(r['device'])} at {sha(r['commit'])}" for r in records))


def presets(length: int = MAIN) -> str:
    """Tables of the presets and fp8 against stock in 16 bits of the same run, with all tasks."""
    names = [cells.STOCK, *cells.RECOMMENDED.values()]
    return "\n\n".join(
        _cells(g, {n: g.rows[n] for n in names if n in g.rows}, points=True) for g in groups(length, others=True)
    )


def longer() -> str:
    """`presets` for contexts of twice the length."""
    return presets(2 * MAIN)


def policies() -> str:
    """Table of all policies and sizes: needles / dictionary, and the mean KL."""
    excluded = ("quota", *cells.RECOMMENDED, "mikv")
    names = ["quota", *(p.name for p in (*PUBLISHED, *RECOMMENDED) if p.name not in excluded)]
    out = []
    for group in groups(MAIN):
        rows = []
        for policy in names:
            line = [_at(group, policy, size, fmt) for size, fmt in SIZES]
            if any(line):
                rows.append([f"`{policy}`", *line])
        stock = _short(group.rows[cells.STOCK])
        head = [f"{MODELS[group.model]} (stock {stock})", *(f"{size}, {fmt}" for size, fmt in SIZES)]
        out.append(table(head, rows))
    return "\n\n".join(out)


def _at(group: Merged, policy: str, size: str, fmt: str) -> str:
    default = POLICIES[policy]().high
    if policy in cells.FIXED_FORMATS:
        name = f"{policy}+budget={size}" if fmt == "k4v4" else ""
    else:
        name = f"{policy}+budget={size}" + ("" if fmt == default else f"+high={fmt}")
    return _short(group.rows[name]) if name in group.rows else ""


def _short(row: dict) -> str:
    marks = " / ".join(f"{100 * row[t]['em']:.0f}" for t in ("niah", "kv"))
    kl = row.get("kl")
    return f"{marks} ({kl['mean']:.3f})" if kl and kl["mean"] else marks


def papers() -> str:
    """Table of the papers' findings, by pair of cells and model."""
    rows = []
    for finding, pairs in findings.FINDINGS.items():
        for better, other in pairs:
            for group in groups(MAIN):
                result = findings.compare(group, better, other)
                if result is None:
                    continue
                shares = [f"{100 * a:.1f}% / {100 * b:.1f}%" for a, b in result["shares"]]
                p = f"+{result['wins']} -{result['losses']}, p = {result['p']:.2g}"
                equal = other == cells.STOCK and result["p"] >= findings.SIGNIFICANCE
                verdict = "holds" if equal else findings.verdict(result)
                rows.append([finding, MODELS[group.model], f"`{better}`, `{other}`", *shares, p, verdict])
                finding = ""
    return table(["finding", "model", "cells", "needles", "dictionary", "sign test", ""], rows)


def everything() -> str:
    """Tables of all cells, one per model and length."""
    return "\n\n".join(_cells(g, g.rows) for g in groups())


def kvpress() -> str:
    """Table of kvpress' figures, and of our figures for the same method, contexts and similar share of tokens."""
    rows, by_key = [], {(g.model, g.length): g for g in groups()}
    for settings, r in _presses():
        group = by_key.get((settings["model"], settings["length"]))
        press = _method(r["press"], settings, r["keep"])
        name = f"`{r['press']}`" + (f", as `{press}`" if press != r["press"] else "")
        scope = settings["scope"] if press != "full" else ""
        cell = _matching_cell(group, press, r["kept"])
        comparison = _comparison(group, cell, r) if group and cell else ["", ""]
        row = [MODELS[settings["model"]], f"{settings['length']}", name, scope, f"{100 * r['kept']:.0f}%"]
        rows.append([*row, str(r["niah"]["of"]), _marks(r), *comparison])
    head = ["model", "tokens", "press", "scope", "kept", "questions", "needles / dictionary", "here (kept)"]
    head.append("sign test")
    return table(head, rows) if rows else ""


def generation() -> str:
    """Table of the KL of each cell from stock along its own answers, smallest first."""
    results = {n: r for f in ("leankv", "max") for n, r in (numbers(f"quality/generation_{f}.json") or {}).items()}
    rows = [
        [f"`{n}`", f"{r['nats']:.4f} +- {r['standard_error']:.4f}", ", ".join(f"{q:.4f}" for q in r["quarters"])]
        for n, r in sorted(results.items(), key=lambda item: item[1]["nats"])
    ]
    return table(["cell", "nats a token", "quarters"], rows)


def one_shot() -> str:
    """Table of one-shot levels, and of kvpress' presses that also see the question and keep as many tokens."""
    rows = []
    for model, title in MODELS.items():
        ours, file = numbers(f"quality/seen_{model}_{MAIN}.json"), RESULTS / f"quality/kvpress_{model}_{MAIN}_seen.json"
        if not ours or not file.exists():
            continue
        presses = [r for r in json.loads(file.read_text())["rows"] if not r.get("error")]
        for cell in sorted(ours["cells"], key=lambda c: ours["cells"][c]["ratio_body"]):
            kept = ours["cells"][cell]["kept"]
            share = "" if cell == cells.STOCK else f"{100 * kept:.0f}%"
            answers = {task: _flat(ours["raw"][cell][task]) for task in findings.TASKS}
            rows.append([title, f"`{cell}`", share, _marks(ours["cells"][cell]), ""])
            for r in presses:
                if abs(r["keep"] - kept) < MAX_ONE_SHOT_GAP:
                    wins, losses = _wins_and_losses(answers, r)
                    test = f"+{wins} -{losses}, p = {findings.sign_test(wins, losses):.2g}"
                    share = "" if r["keep"] == 1 else f"{100 * r['keep']:.0f}%"
                    of, complete = r["niah"]["of"], ours["cells"][cell]["niah"]["of"]
                    marks = _marks(r) + (f" of {of} questions" if of < complete else "")
                    rows.append([title, f"kvpress `{r['press']}`", share, marks, test])
    head = ["model", "", "kept of full blocks", "needles / dictionary", "this project against it, sign test"]
    return table(head, rows) if rows else ""


_ORDER = ("qwen-0.5b", "qwen-1.5b", "smollm2")


def _presses() -> list[tuple[dict, dict]]:
    """(settings, row) of all kvpress results, sorted by model, length, scope and share. If several runs have a row, the
    one with more questions counts."""
    out: dict[tuple, tuple[dict, dict]] = {}
    for path in sorted((RESULTS / "quality").glob("kvpress_*.json")):
        record = json.loads(path.read_text())
        settings = record["settings"]
        if settings.get("protocol") == SEEN:
            continue  # these rows belong to `one_shot`
        for r in (r for r in record["rows"] if not r.get("error")):
            by_block = settings["scope"] == "block" and r["press"] != "full"  # drops nothing at any size
            key = (_ORDER.index(settings["model"]), -settings["length"], by_block, -r["keep"], r["press"])
            if key not in out or r["niah"]["of"] > out[key][1]["niah"]["of"]:
                out[key] = settings, r
    return [out[key] for key in sorted(out)]


def _method(press: str, settings: dict, keep: float) -> str:
    """Method that a press effectively uses. PyramidKV is SnapKV if its last layer, with 1/20 of the mean budget (its
    beta), would keep fewer tokens than the window of 64."""
    tokens = settings["block"] if settings["scope"] == "block" else settings["length"]
    return "snapkv" if press == "pyramidkv" and tokens * keep / 20 < 64 else press


def _matching_cell(group: Merged | None, press: str, kept: float) -> str | None:
    """Cell of the same method with the nearest kept share; None if all are too far."""
    if group is None or press not in METHODS:
        return cells.STOCK if group and press == "full" else None
    gaps = {n: abs(r["kept"] - kept) for n, r in group.rows.items() if re.fullmatch(METHODS[press], n)}
    return min((n for n, gap in gaps.items() if gap < MAX_SHARE_GAP), key=lambda n: gaps[n], default=None)


def _comparison(group: Merged, cell: str, press: dict) -> list[str]:
    """Marks of our cell, and the sign test over common questions."""
    row = group.rows[cell]
    wins, losses = _wins_and_losses({task: group.answers(cell, task) for task in findings.TASKS}, press)
    kept = "" if cell == cells.STOCK else f" ({100 * row['kept']:.0f}%)"
    return [_marks(row) + kept, f"+{wins} -{losses}, p = {findings.sign_test(wins, losses):.2g}"]


def _wins_and_losses(ours: dict[str, list[bool]], press: dict) -> tuple[int, int]:
    """Numbers of questions that only our cell answers correctly, and that only the press does."""
    wins = losses = 0
    for task, answers in ours.items():
        pairs = list(zip(answers, _flat(press[task]["answers"])))
        wins += sum(a and not b for a, b in pairs)
        losses += sum(b and not a for a, b in pairs)
    return wins, losses


def _flat(answers: list[list[bool]]) -> list[bool]:
    return [right for context in answers for right in context]


def _marks(row: dict) -> str:
    return " / ".join(f"{100 * row[t]['em']:.1f}" for t in findings.TASKS)


SECTIONS = {"quantizers": quantizers, "formats": formats, "presets": presets, "longer": longer, "policies": policies}
SECTIONS |= {"papers": papers, "kvpress": kvpress, "cells": everything, "generation": generation}
SECTIONS |= {"key-groups": key_groups, "one-shot": one_shot, "protocols": points.protocols}
SECTIONS |= {"one-shot-levels": levels.table, "longer-contexts": points.longer_contexts}
SECTIONS |= {"longer-ruler": points.longer_ruler}
SECTIONS |= {"leankv-later": points.leankv_later, "leankv-seen": points.leankv_seen}
SECTIONS |= {"kl-by-length": long_contexts.kl_by_length, "depths": long_contexts.needles_by_depth}


def render(text: str) -> str:
    for name, make in SECTIONS.items():
        mark = f"<!-- {name} -->"
        if text.count(mark) == 2:
            block = f"{mark}\n\n{make()}\n\n{mark}"
            text = re.sub(f"{mark}.*{mark}", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for doc in DOCS:
        before = doc.read_text()
        after = render(before)
        if check and before != after:
            print(f"error: {doc.relative_to(ROOT)} is not up to date; run python -m bench.quality.report")
            return 1
        doc.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

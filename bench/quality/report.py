"""The tables of docs/quality.md and docs/quality-cells.md, from the result files.

    python -m bench.quality.report [--check]

Each table stands between two marks like `<!-- policies -->`. `--check` only reports whether they are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable

from bench.common import RESULTS, ROOT
from bench.quality import cells, findings
from bench.quality.asking import SEEN
from bench.quality.merged import Merged, merged
from bench.quality.tasks import TITLES
from bench.tables.questions import MODELS
from bench.tables.text import points_lost, short
from sglang_kvc.policies.presets import RECOMMENDED
from sglang_kvc.policies.published.presets import PUBLISHED
from sglang_kvc.policies.registry import POLICIES

DOCS = (ROOT / "docs" / "quality.md", ROOT / "docs" / "quality-cells.md")
MAIN = 2048  # tokens of a context in the tables of docs/quality.md
NEAR = 0.05  # of all tokens
# Presses of kvpress, and the cells that do the same in 8 bits.
SAME = {
    "keydiff": r"quota\+budget=\dx\+high=k8v8\+share=uniform",
    "snapkv": r"snapkv\+budget=\dx",
    "h2o": r"h2o\+budget=\dx",
    "pyramidkv": r"pyramid\+budget=\dx",
    "streaming-llm": r"streaming-llm\+budget=\dx",
    "random": r"random\+budget=\dx\+high=k8v8",
    "ada-expected": r"ada-expected\+budget=\dx\+high=k8v8",
}
# Columns of the table of all policies: bytes of a packed block against bf16, and the format of what is kept.
SIZES = (("2x", "k8v8"), ("4x", "k8v8"), ("8x", "k8v8"), ("8x", "k4v4"))


def numbers(path: str) -> dict | None:
    file = RESULTS / path
    return json.loads(file.read_text())["numbers"] if file.exists() else None


def groups(length: int | None = None, *, others: bool = False) -> list[Merged]:
    """Merged server results by model; only for contexts of one length if it is given, and with `others` also for
    contexts other than the first ones."""
    found = [g for g in merged(RESULTS / "quality") if length in (None, g.length)]
    return [g for g in found if others or not g.first]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by_model(pattern: str) -> dict[str, dict]:
    """model -> the numbers of the file `pattern` (with `{}` for the model) where there is one."""
    return {m: found for m in MODELS if (found := numbers(pattern.format(m)))}


def key_groups() -> str:
    """Keys per channel in groups of tokens."""
    return quantisers("quality/key_groups_{}.json")


def quantisers(pattern: str = "quality/quantisers_{}.json") -> str:
    """Quantization methods by line, and the KL of each model (mean, p99)."""
    found = by_model(pattern)
    kl = {m: {(r["side"], r["name"]): r for r in n["rows"]} for m, n in found.items()}
    ways = dict.fromkeys(way for rows in kl.values() for way in rows)
    rows = []
    for way in ways:
        bits = "/".join(dict.fromkeys(f"{rows[way]['bits']:g}" for rows in kl.values() if way in rows))
        cells = [f"{r[way]['kl_mean']:.4f}, {r[way]['kl_p99']:.3f}" if way in r else "" for r in kl.values()]
        rows.append([*way, bits, *cells])
    return table(["of", "way", "bits", *(MODELS[m] for m in found)], rows)


def formats() -> str:
    """Results of `sglang-kvc calibrate` for each format."""
    found = by_model("calibrate/{}.json")
    kl = {m: {(r["format"], r.get("key_mode", "channel")): r for r in n["formats"]} for m, n in found.items()}
    rows = []
    for name, mode in dict.fromkeys(key for rows in kl.values() for key in rows):
        cells = (r[name, mode] for r in kl.values())
        rows.append([name, mode, *(f"{c['kl_mean']:.4f}, {c['kl_p99']:.3f} ({c['verdict']})" for c in cells)])
    return table(["format", "keys per", *(MODELS[m] for m in found)], rows)


def _policy_row(name: str, r: dict, tasks: list[str], free: list[str], first: int | None) -> list[str]:
    """With the number of the first context: points against stock of the same run, with their interval, instead of the
    share of right answers."""
    out = [f"`{name}`", f"{r['ratio_body']:.2f}x", f"{r['ratio']:.2f}x", f"{100 * r['kept']:.0f} %"]
    for task in tasks:
        t = r.get(task)
        if t is None:
            out.append("")
            continue
        flips = f" (-{t['right_to_wrong']} +{t['wrong_to_right']})" if "right_to_wrong" in t else ""
        if first is not None and flips:
            out.append(points_lost(cells.lost(t, cells.chosen_on(name, task, first)).to_dict()) + flips)
        else:
            out.append(f"{100 * t['em']:.1f} %{flips}")
    out += [f"{r[t]['length_ratio']:.2f}x" if "length_ratio" in r.get(t, {}) else "" for t in free]
    delta, kl = r.get("nll", {}).get("delta"), r.get("kl")
    out.append(f"{delta:+.3f}" if delta is not None else "")
    return [*out, f"{kl['mean']:.4f}, {kl['p99']:.3f}" if kl and kl["p99"] else ""]


def _first(row: dict, tasks: list[str]) -> float:
    return next((row[t]["em"] for t in tasks if t in row), 0.0)


def _title(task: str, of: int, questions: int) -> str:
    return TITLES[task] if of == questions else f"{TITLES[task]} ({of})"


def _cells(group: Merged, rows: dict[str, dict], points: bool = False) -> str:
    """A table of some cells of one model, from large to small and within that from good to bad."""
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
    """Devices and commits of the cells."""
    records = [group.source[name][0] for name in names if name in group.source]
    return ", ".join(dict.fromkeys(f"{short(r['device'])} at {r['commit'][:7]}" for r in records))


def presets(length: int = MAIN) -> str:
    """The presets and fp8 against stock in 16 bits of the same run, with every task."""
    wanted = [cells.STOCK, *cells.RECOMMENDED.values()]
    some = groups(length, others=True)
    return "\n\n".join(_cells(g, {n: g.rows[n] for n in wanted if n in g.rows}, points=True) for g in some)


def longer() -> str:
    """The same with contexts twice as long."""
    return presets(2 * MAIN)


def policies() -> str:
    """Every policy at every size: needles / dictionary, and the mean KL."""
    elsewhere = ("quota", *cells.RECOMMENDED, "mikv")
    names = ["quota", *(p.name for p in (*PUBLISHED, *RECOMMENDED) if p.name not in elsewhere)]
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
    own = POLICIES[policy]().high
    if policy in cells.FIXED_FORMATS:
        name = f"{policy}+budget={size}" if fmt == "k4v4" else ""
    else:
        name = f"{policy}+budget={size}" + ("" if fmt == own else f"+high={fmt}")
    return _short(group.rows[name]) if name in group.rows else ""


def _short(row: dict) -> str:
    marks = " / ".join(f"{100 * row[t]['em']:.0f}" for t in ("niah", "kv"))
    kl = row.get("kl")
    return f"{marks} ({kl['mean']:.3f})" if kl and kl["mean"] else marks


def papers() -> str:
    """Findings of the papers, pair by pair and model by model."""
    rows = []
    for finding, pairs in findings.FINDINGS.items():
        for better, other in pairs:
            for group in groups(MAIN):
                found = findings.compare(group, better, other)
                if found is None:
                    continue
                shares = [f"{100 * a:.1f} / {100 * b:.1f} %" for a, b in found["shares"]]
                p = f"+{found['wins']} -{found['losses']}, p = {found['p']:.2g}"
                said = "holds" if other == cells.STOCK and found["p"] >= findings.SURE else findings.verdict(found)
                rows.append([finding, MODELS[group.model], f"`{better}`, `{other}`", *shares, p, said])
                finding = ""
    return table(["finding", "model", "cells", "needles", "dictionary", "sign test", ""], rows)


def everything() -> str:
    """One table a model and length: all cells."""
    return "\n\n".join(_cells(g, g.rows) for g in groups())


def kvpress() -> str:
    """kvpress' own figures for the same contexts, and the same method's here at about the same share of tokens."""
    rows, mine = [], {(g.model, g.length): g for g in groups()}
    for settings, r in _presses():
        group = mine.get((settings["model"], settings["length"]))
        press = _does(r["press"], settings, r["keep"])
        name = f"`{r['press']}`" + (f", as `{press}`" if press != r["press"] else "")
        scope = settings["scope"] if press != "full" else ""
        where = [MODELS[settings["model"]], f"{settings['length']}", name, scope]
        marks = _marks(r)
        cell = _ours(group, press, r["kept"])
        here = _beside(group, cell, r) if group and cell else ["", ""]
        rows.append([*where, f"{100 * r['kept']:.0f} %", str(r["niah"]["of"]), marks, *here])
    head = ["model", "tokens", "press", "scope", "kept", "questions", "needles / dictionary", "here (kept)"]
    head.append("sign test")
    return table(head, rows) if rows else ""


def generation() -> str:
    """Each cell's distance from stock along its own answers, nearest first."""
    found = {n: r for f in ("leankv", "max") for n, r in (numbers(f"quality/generation_{f}.json") or {}).items()}
    rows = [
        [f"`{n}`", f"{r['nats']:.4f} +- {r['standard_error']:.4f}", ", ".join(f"{q:.4f}" for q in r["quarters"])]
        for n, r in sorted(found.items(), key=lambda item: item[1]["nats"])
    ]
    return table(["cell", "nats a token", "quarters"], rows)


def one_shot() -> str:
    """One-shot levels, and kvpress' presses that see each question with its context and keep as many tokens."""
    rows = []
    for model, title in MODELS.items():
        ours, file = numbers(f"quality/seen_{model}_{MAIN}.json"), RESULTS / f"quality/kvpress_{model}_{MAIN}_seen.json"
        if not ours or not file.exists():
            continue
        presses = [r for r in json.loads(file.read_text())["rows"] if not r.get("error")]
        for cell in sorted(ours["cells"], key=lambda c: ours["cells"][c]["ratio_body"]):
            mine, kept = ours["cells"][cell], ours["cells"][cell]["kept"]
            share = "" if cell == cells.STOCK else f"{100 * kept:.0f} %"
            answers = {task: _flat(ours["raw"][cell][task]) for task in findings.TASKS}
            rows.append([title, f"`{cell}`", share, _marks(mine), ""])
            for r in presses:
                if abs(r["keep"] - kept) < 0.01:
                    wins, losses = _against(answers, r)
                    test = f"+{wins} -{losses}, p = {findings.sign_test(wins, losses):.2g}"
                    rows.append([title, f"kvpress `{r['press']}`", share, _marks(r), test])
    head = ["model", "", "kept of full blocks", "needles / dictionary", "this project against it, sign test"]
    return table(head, rows) if rows else ""


_ORDER = ("qwen-0.5b", "qwen-1.5b", "smollm2")


def _presses() -> list[tuple[dict, dict]]:
    """(settings, row) of all kvpress results, by model, length, scope and share; of duplicates the run with more
    questions."""
    out: dict[tuple, tuple[dict, dict]] = {}
    for path in sorted((RESULTS / "quality").glob("kvpress_*.json")):
        record = json.loads(path.read_text())
        settings = record["settings"]
        if settings.get("protocol") == SEEN:
            continue  # other tables
        for r in (r for r in record["rows"] if not r.get("error")):
            by_block = settings["scope"] == "block" and r["press"] != "full"  # drops nothing at any size
            key = (_ORDER.index(settings["model"]), -settings["length"], by_block, -r["keep"], r["press"])
            if key not in out or r["niah"]["of"] > out[key][1]["niah"]["of"]:
                out[key] = settings, r
    return [out[key] for key in sorted(out)]


def _does(press: str, settings: dict, keep: float) -> str:
    """The method that a kvpress press amounts to: PyramidKV is SnapKV if its last layer, at 1/20 of the mean (its
    beta), would keep fewer tokens than the window of 64."""
    tokens = settings["block"] if settings["scope"] == "block" else settings["length"]
    return "snapkv" if press == "pyramidkv" and tokens * keep / 20 < 64 else press


def _ours(group: Merged | None, press: str, kept: float) -> str | None:
    """The cell of the same method with the nearest kept share, None if none is near."""
    if group is None or press not in SAME:
        return cells.STOCK if group and press == "full" else None
    near = {n: abs(r["kept"] - kept) for n, r in group.rows.items() if re.fullmatch(SAME[press], n)}
    return min((n for n, far in near.items() if far < NEAR), key=lambda n: near[n], default=None)


def _beside(group: Merged, cell: str, press: dict) -> list[str]:
    """Our cell's marks, and the sign test over common questions: those that only our cell got right, and those that
    only the press got right."""
    row = group.rows[cell]
    wins, losses = _against({task: group.answers(cell, task) for task in findings.TASKS}, press)
    kept = "" if cell == cells.STOCK else f" ({100 * row['kept']:.0f} %)"
    return [_marks(row) + kept, f"+{wins} -{losses}, p = {findings.sign_test(wins, losses):.2g}"]


def _against(ours: dict[str, list[bool]], press: dict) -> tuple[int, int]:
    """Numbers of questions that only our cell, and that only the press, got right."""
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


SECTIONS = {"quantisers": quantisers, "formats": formats, "presets": presets, "longer": longer, "policies": policies}
SECTIONS |= {"papers": papers, "kvpress": kvpress, "cells": everything, "generation": generation}
SECTIONS |= {"key-groups": key_groups, "one-shot": one_shot}


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
            print(f"error: {doc.relative_to(ROOT)} is not what the files say; run python -m bench.quality.report")
            return 1
        doc.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

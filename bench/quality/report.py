"""The tables of docs/quality.md, from the result files.

    python -m bench.quality.report [--check]

Each stands between two marks like `<!-- policies -->`. `--check` only says whether they are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from bench.common import RESULTS, ROOT
from bench.quality.tasks import TITLES
from bench.scoreboard import MODELS

DOC = ROOT / "docs" / "quality.md"


def numbers(path: str) -> dict | None:
    file = RESULTS / path
    return json.loads(file.read_text())["numbers"] if file.exists() else None


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by_model(pattern: str) -> dict[str, dict]:
    """model -> the numbers of the file `pattern` (with `{}` for the model) where there is one."""
    return {m: found for m in MODELS if (found := numbers(pattern.format(m)))}


def quantisers() -> str:
    """Ways to quantise, line by line, and the KL of each model (mean, p99)."""
    found = by_model("quality/quantisers_{}.json")
    kl = {m: {(r["side"], r["name"]): r for r in n["rows"]} for m, n in found.items()}
    ways = dict.fromkeys(way for rows in kl.values() for way in rows)
    rows = []
    for way in ways:
        bits = "/".join(dict.fromkeys(f"{rows[way]['bits']:g}" for rows in kl.values() if way in rows))
        cells = [f"{r[way]['kl_mean']:.4f}, {r[way]['kl_p99']:.3f}" if way in r else "" for r in kl.values()]
        rows.append([*way, bits, *cells])
    return table(["of", "way", "bits", *(MODELS[m] for m in found)], rows)


def formats() -> str:
    """What `sglang-kvc calibrate` found for each format."""
    found = by_model("calibrate/{}.json")
    kl = {m: {(r["format"], r["key_mode"]): r for r in n["formats"]} for m, n in found.items()}
    rows = []
    for name, mode in dict.fromkeys(key for rows in kl.values() for key in rows):
        cells = (r[name, mode] for r in kl.values())
        rows.append([name, mode, *(f"{c['kl_mean']:.4f}, {c['kl_p99']:.3f} ({c['verdict']})" for c in cells)])
    return table(["format", "keys per", *(MODELS[m] for m in found)], rows)


def _policy_row(name: str, r: dict, tasks: list[str], free: list[str]) -> list[str]:
    out = [f"`{name}`", f"{r['ratio_body']:.2f}x", f"{r['ratio']:.2f}x", f"{100 * r['kept']:.0f} %"]
    for task in tasks:
        t = r.get(task)
        if t is None:
            out.append("")
            continue
        flips = f" (-{t['right_to_wrong']} +{t['wrong_to_right']})" if "right_to_wrong" in t else ""
        out.append(f"{100 * t['em']:.1f} %{flips}")
    out += [f"{r[t]['length_ratio']:.2f}x" if "length_ratio" in r.get(t, {}) else "" for t in free]
    delta, kl = r.get("nll", {}).get("delta"), r.get("kl")
    out.append(f"{delta:+.3f}" if delta is not None else "")
    return [*out, f"{kl['mean']:.4f}, {kl['p99']:.3f}" if kl and kl["p99"] else ""]


def _first(row: dict, tasks: list[str]) -> float:
    return next((row[t]["em"] for t in tasks if t in row), 0.0)


def _title(task: str, of: int, questions: int) -> str:
    return TITLES[task] if of == questions else f"{TITLES[task]} ({of})"


def policies() -> str:
    """One table a model: all cells, from large to small and within that from good to bad."""
    out = []
    for path in sorted((RESULTS / "quality").glob("policies_*.json")):
        n = json.loads(path.read_text())["numbers"]
        rows, questions = n["cells"].values(), 8 * n["contexts"]
        tasks = [t for t in TITLES if any(t in r for r in rows)]
        free = [t for t in tasks if any("length_ratio" in r.get(t, {}) for r in rows)]
        ranked = sorted(n["cells"].items(), key=lambda c: (round(c[1]["ratio_body"], 1), -_first(c[1], tasks)))
        out.append(f"{MODELS[n['model']]}, {n['length']} tokens, {questions} questions a task:\n")
        head = ["cell", "body", "whole request", "tokens kept"]
        head += [_title(t, next(r[t]["of"] for r in rows if t in r), questions) for t in tasks]
        head += [*(f"{TITLES[t]}, length" for t in free), "NLL", "KL mean, p99"]
        out.append(table(head, [_policy_row(name, r, tasks, free) for name, r in ranked]) + "\n")
    return "\n".join(out).rstrip()


def kvpress() -> str:
    """kvpress' own figures for the same contexts."""
    rows = []
    for path in sorted((RESULTS / "quality").glob("kvpress_*.json")):
        record = json.loads(path.read_text())
        for r in record["rows"]:
            if not r.get("error"):
                scope, kept = record["settings"]["scope"], f"{100 * r['kept']:.0f} %"
                marks = (f"{100 * r[t]['em']:.1f} %" if t in r else "" for t in ("niah", "kv"))
                rows.append([MODELS[record["settings"]["model"]], r["press"], scope, kept, *marks])
    return table(["model", "press", "scope", "tokens kept", "8 needles", "dictionary"], rows) if rows else ""


SECTIONS = {"quantisers": quantisers, "formats": formats, "policies": policies, "kvpress": kvpress}


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
    before = DOC.read_text()
    after = render(before)
    if check and before != after:
        print(f"error: {DOC.relative_to(ROOT)} is not what the result files say; run python -m bench.quality.report")
        return 1
    DOC.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

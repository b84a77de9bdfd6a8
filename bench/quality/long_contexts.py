"""Plain formats by length of the context: KL, and needles by their depth.

    python -m bench.quality.long_contexts --model qwen-1.5b      # count needles by depth; needs the model's tokenizer

The contexts of `bench.quality.policies` are made again to find the needles in them, and the answers are read from its
result files. `bench.quality.report` renders the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from bench import common, prompts
from bench.common import RESULTS
from bench.quality import fetch
from bench.quality.cells import STOCK
from bench.quality.merged import Merged, merged
from bench.quality.tasks import Context, Maker
from bench.tables.questions import MODELS as TITLES
from bench.tables.text import lines

MODELS = ("qwen-0.5b", "qwen-1.5b")
CELLS = {"k8v4": "`safe` (k8v4)", "k4v4": "`balanced` (k4v4)", "k4v2": "`k4v2`", "stock-fp8": "stock fp8"}
LENGTHS = (8000, 16000, 30000)  # of the tables of needles
PARTS = 4  # of a context, with equally many characters


def depths(text: str, context: Context) -> list[float]:
    """Share of the characters of `text`, the text of `context`, that precede each question's needle."""
    return [text.index(f" is: {question.answer}.") / len(text) for question in context.questions]


def by_part(right: Iterable[bool], depths: Iterable[float]) -> list[list[int]]:
    """Right answers and questions of each quarter of the context, `[PARTS][2]`."""
    counts = [[0, 0] for _ in range(PARTS)]
    for answer, depth in zip(right, depths, strict=True):
        count = counts[min(int(PARTS * depth), PARTS - 1)]
        count[0] += answer
        count[1] += 1
    return counts


def groups(model: str) -> list[Merged]:
    """Results of `model` with needles in the first contexts, short contexts first."""
    return [g for g in reversed(merged()) if g.model == model and not g.first and "niah" in g.tasks]


def kl_by_length() -> str:
    """Table of the mean KL of the plain formats, by length of the context."""
    kl = {
        (g.model, g.length, cell): g.rows[cell]["kl"]["mean"]
        for m in MODELS for g in groups(m) for cell in CELLS
        if g.rows.get(cell, {}).get("kl", {}).get("mean") is not None
    }  # fmt: skip
    lengths = sorted({length for _, length, _ in kl})
    rows = []
    for model in MODELS:
        for cell, name in CELLS.items():
            figures = [f"{kl[model, n, cell]:.4f}" if (model, n, cell) in kl else "" for n in lengths]
            rows.append([TITLES[model], name, *figures])
    return "\n".join(lines(["model", "format", *(f"{n:,}" for n in lengths)], rows)).strip()


def needles_by_depth() -> str:
    """Table of right answers about the needles in each quarter of the context."""
    rows = []
    for model in MODELS:
        path = RESULTS / "quality" / f"depths_{model}.json"
        counts = json.loads(path.read_text())["numbers"]["counts"] if path.exists() else {}
        for cell, name in {STOCK: "stock bf16", **CELLS}.items():
            parts = [counts.get(str(n), {}).get(cell, []) for n in LENGTHS]
            figures = [" / ".join(f"{100 * right / of:.0f}" for right, of in quarters) for quarters in parts]
            if any(figures):
                rows.append([TITLES[model], name, *figures])
    return "\n".join(lines(["model", "format", *(f"{n:,}" for n in LENGTHS)], rows)).strip()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=MODELS, default="qwen-1.5b")
    args = p.parse_args()
    tok = prompts.tokenizer(fetch.MODELS[args.model]())
    maker, counts, sources = Maker(tok, fetch.essays().read_text()), {}, {}
    for group in groups(args.model):
        cells = [cell for cell in (STOCK, *CELLS) if cell in group.rows]
        if group.length not in LENGTHS:
            continue
        contexts = [maker.needles(i, group.length) for i in range(group.questions // 8)]
        found = [depth for c in contexts for depth in depths(tok.decode(c.ids), c)]
        counts[group.length] = {cell: by_part(group.answers(cell, "niah"), found) for cell in cells}
        sources[group.length] = sorted({group.source[cell][1].stem for cell in cells})
    numbers = {"model": args.model, "parts": PARTS, "counts": counts, "sources": sources}
    common.write_result(f"quality/depths_{args.model}", numbers)


if __name__ == "__main__":
    main()

"""Figures and tables as Markdown, and names of figures on each GPU model."""

from __future__ import annotations

import re
from pathlib import Path

from bench.revision import card

CARDS = {"h200": "H200", "h100": "H100"}  # figures of the first one have no suffix
KEYED = ("e2e.", "agents.", "decode.", "extend.", "score.", "compaction.", "papers.longgen", "papers.rate")
ALIKE = ("agents.restart_warm_hit", "agents.corrupt_served", "agents.round_trips_equal", "agents.demoted_points",
         "agents.off_overhead")  # fmt: skip
COUNTS = ("errors", "tests", "damaged")  # units of whole numbers
# Commits that need SGLang 0.5.17. All others need 0.5.23.
SGLANG_0_5_17 = {"0202c94", "035f475", "0405790", "0cdda11", "10f4e35", "15841d7", "16af457", "1896ee6", "3a9f727",
                 "43abc81", "4a5132a", "5058eef", "56bdc97", "6fc5ee7", "82b12db", "88fefa0", "8ac1948", "9781a59",
                 "9f87f3f", "a270797", "a6648af", "bea661c", "c2bd238", "cc5136d", "e0c98c7", "eda1195", "f61627c",
                 "f9094e5"}  # fmt: skip
# Names of servers in result files -> words.
WORDS = {
    "stock_fp8_hicache": "stock fp8 with `hicache`",
    "stock_fp8": "stock fp8",
    "stock_bf16": "stock bf16",
    "fp8_e4m3": "fp8",
    "kvc_tiers": "`k4v4`, host memory",
    "kvc_disk": "`k4v4`, host memory and disk",
    "kvc": "`k4v4`",
}
# Origin of a figure of another run, in parentheses
ANOTHER_RUN = re.compile(r" \((?:printed line of the )?same command[^)]*\)")


def keyed(name: str, device: str) -> str:
    """Name with the GPU model as a suffix, if the figure depends on it and it is not the first of `CARDS`."""
    if not name.startswith(KEYED) or name in ALIKE or card(device) == next(iter(CARDS)):
        return name
    return f"{name}_{card(device)}"


def keyed_on(name: str, model: str) -> str:
    return name if model == next(iter(CARDS)) else f"{name}_{model}"


def bare(name: str) -> str:
    return next((name.removesuffix(f"_{c}") for c in CARDS if name.startswith(KEYED) and name.endswith(f"_{c}")), name)


def shown(row: dict, value: float | None = None) -> str:
    """Text of a value: shares in percent, ratios with an x, points with a sign."""
    unit, value = row["unit"], row["value"] if value is None else value
    if unit.startswith(("share", "of an endless cache's hit rate", "of the tokens")):
        return f"{100 * value:.1f}%"
    if unit.startswith(("x", "time", "of stock's time", "of the time")):
        # Close to 1, two decimals could hide on which side a value is.
        return f"{value:.{3 if abs(value - 1) < 0.02 else 2}f}x"
    if unit.startswith("points"):
        return f"{value:+.1f}"
    if unit.startswith("nats"):
        return f"{value:.2f}"
    if unit.startswith("microseconds"):
        return f"{value:.0f} microseconds"
    unit = unit.replace("failed by value", "tests failed on their values")
    return f"{value:.0f} {unit}" if unit.startswith(COUNTS) else f"{value:.4g} {unit}"


def spread(row: dict) -> str:
    """Text of a value, with the limits over its runs if there are several."""
    if "low" not in row or row["n"] == 1:
        return shown(row)
    return f"{shown(row)} ({shown(row, row['low'])} to {shown(row, row['high'])})"


def points_lost(row: dict) -> str:
    if not row["unit"].startswith("points"):
        return shown(row)
    if "floor" in row["unit"]:
        return "floor"
    mark = "\\*" if "chosen" in row["unit"] else ""
    return f"{shown(row)}{mark} [{row['low']:+.1f}, {row['high']:+.1f}]"


def short(device: str) -> str:
    return CARDS.get(card(device), "CPU" if device.startswith("CPU") else device)


def sha(commit: str) -> str:
    """Short commit, with the release of SGLang if it is not the current one."""
    return f"{commit[:7]} (SGLang 0.5.17)" if commit[:7] in SGLANG_0_5_17 else commit[:7]


def worded(text: str) -> str:
    """Text with the names of servers and page sizes of result files in words."""
    text = re.sub(r"\bfa3[_ ]page[_ ]?(\d+)", lambda m: f"fa3, pages of {m[1]} token{'s'[: m[1] != '1']}", text)
    for name, words in WORDS.items():
        text = re.sub(rf"(?<![`\w]){name}(?![`\w])", words, text)
    return ANOTHER_RUN.sub("", text)


def lines(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *body, ""]


def titled(title: str, text: list[str], level: int = 2) -> list[str]:
    """A section of the page, if it has any text."""
    return [f"{'#' * level} {title}", "", *text] if text else []


def pictures(results: Path, bench: str, title: str) -> list[str]:
    """Links to the plots of `bench.e2e.plot` of a benchmark, for each GPU model."""
    links = [f"![{title}, {name}](../bench/results/e2e/{bench}_{card}.png)" for card, name in CARDS.items()
             if (results / "e2e" / f"{bench}_{card}.png").exists()]  # fmt: skip
    return [*links, ""] if links else []


def captions(notes: list[str]) -> list[str]:
    return [f"<sub>Measured: {'. '.join(notes)}.</sub>", ""] if notes else []


def measured(rows: list[dict]) -> str:
    """Text with devices, commits and numbers of runs of figures."""
    origins = dict.fromkeys(f"{short(r['device'])} at {sha(r['commit'])}" for r in rows)
    counts = sorted({r["n"] for r in rows})
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    return f"{', '.join(origins)}; {n}"

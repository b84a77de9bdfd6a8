"""Figures and tables as Markdown, and names of figures on each GPU model."""

from __future__ import annotations

from bench.revision import card

CARDS = {"h200": "H200", "h100": "H100"}  # figures of the first one have no suffix
KEYED = ("e2e.", "agents.", "decode.", "extend.", "score.", "compaction.", "papers.longgen", "papers.rate")
ALIKE = ("agents.restart_warm_hit", "agents.corrupt_served", "agents.round_trips_equal", "agents.demoted_points",
         "agents.off_overhead")  # fmt: skip
COUNTS = ("errors", "tests", "damaged")  # units of whole numbers


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
    if unit.startswith("share"):
        return f"{100 * value:.1f} %"
    if unit.startswith(("x", "time", "of stock's time")):
        # Close to 1, two decimals could hide on which side a value is.
        return f"{value:.{3 if abs(value - 1) < 0.02 else 2}f}x"
    if unit.startswith("points"):
        return f"{value:+.1f}"
    if unit.startswith("nats"):
        return f"{value:.2f}"
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


def lines(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    body = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *body, ""]


def titled(title: str, text: list[str]) -> list[str]:
    """A section of the page, if it has any text."""
    return [f"## {title}", "", *text] if text else []


def captions(notes: list[str]) -> list[str]:
    return [f"<sub>Measured: {'. '.join(notes)}.</sub>", ""] if notes else []


def measured(rows: list[dict]) -> str:
    """Text with devices, commits and numbers of runs of figures."""
    origins = dict.fromkeys(f"{short(r['device'])} at {r['commit'][:7]}" for r in rows)
    counts = sorted({r["n"] for r in rows})
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    return f"{', '.join(origins)}; {n}"

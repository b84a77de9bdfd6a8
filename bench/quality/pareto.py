"""Table and plots of a result file of `bench.quality.policies`.

    python -m bench.quality.pareto bench/results/quality/policies_qwen-0.5b_2048.json [--over running]
    python -m bench.quality.pareto bench/results/quality/seen_qwen-0.5b_2048.json \\
        [--kvpress bench/results/quality/kvpress_qwen-0.5b_2048_seen.json]

The plot shows quality over bytes per token, one point per cell; the upper left is best. The line is the Pareto front:
the cells that no other cell beats in both. `body` counts packed blocks, `running` all blocks of a request of the
measured length, both with all overheads. The second form shows one-shot levels, and presses of kvpress that keep as
many tokens in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from bench.quality.tasks import TITLES

OVER = {"body": ("bytes_body", "ratio_body"), "running": ("bytes", "ratio")}


def _exact(task: str) -> Callable[[dict], float | None]:
    return lambda row: row[task]["em"] if task in row else None


# Axis label -> function that reads the value of a row, whether more is better
PANELS = {
    **{f"{title}, exact match": (_exact(task), True) for task, title in TITLES.items()},
    "KL to bf16, mean nats per token": (lambda r: r["kl"]["mean"] if r.get("kl") else None, False),
}
MIN_KL = 1e-4  # lower end of the logarithmic axis


def table(rows: dict[str, dict], head: bool = True) -> str:
    """Text table with one line per cell."""
    lines, tasks = [], [t for t in TITLES if any(t in r for r in rows.values())]
    if head:
        line = f"{'cell':36} {'B/token':>8} {'body':>6} {'e2e':>6} {'kept':>6} {'packed':>6}  "
        line += "".join(f"{TITLES[t]:>13}  " for t in tasks)
        lines.append(line + f"{'NLL diff':>8} {'KL mean':>8} {'KL p99':>8}")
    for name, r in rows.items():
        kl, packed = r.get("kl") or {}, r["packed"]
        line = f"{name:36} {r['bytes_body']:8.0f} {r['ratio_body']:5.2f}x {r['ratio']:5.2f}x {100 * r['kept']:4.0f} % "
        line += f"{'' if packed is None else f'{100 * packed:.0f} %':>6}  "
        for task in tasks:
            t = r.get(task, {})
            flips = f"-{t['right_to_wrong']}+{t['wrong_to_right']}" if "right_to_wrong" in t else ""
            line += f"{100 * t['em']:5.1f} % {flips:>6} " if t else " " * 15
        line += "".join(f" {x:8.4f}" if x is not None else " " * 9 for x in (r.get("nll", {}).get("delta"), *_kl(kl)))
        lines.append(line.rstrip())
    return "\n".join(lines)


def _kl(kl: dict) -> tuple[float | None, float | None]:
    return kl.get("mean"), kl.get("p99")


def front(points: dict[str, tuple[float, float]], more: bool) -> list[str]:
    """Names of the cells that no other cell beats in both bytes and quality, by ascending bytes."""
    out, best = [], None
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1] if more else points[n][1])):
        y = points[name][1]
        if best is None or (y > best if more else y < best):
            best = y
            out.append(name)
    return out


def plot(record: dict, png: Path, size: str = "body") -> None:
    """Plot one panel per metric. Colors show policies, labels settings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    numbers, (field, _) = record["numbers"], OVER[size]
    rows = numbers["cells"]
    families = list(dict.fromkeys(_family(n) for n in rows))
    colors = dict(zip(families, pyplot.get_cmap("tab20").colors * 2))
    panels = {t: p for t, p in PANELS.items() if any(p[0](r) is not None for r in rows.values())}
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(7 * len(panels), 7.5), layout="constrained", squeeze=False
    )
    for axis, (title, (read, more)) in zip(axes[0], panels.items()):
        points = {n: (r[field], read(r)) for n, r in rows.items() if read(r) is not None}
        if not more:
            points = {n: (x, max(y, MIN_KL)) for n, (x, y) in points.items() if n != numbers["reference"]}
            axis.set_yscale("log")
        for family in families:
            members = [p for n, p in points.items() if _family(n) == family]
            if members:
                axis.scatter(*zip(*members), color=colors[family], label=family, s=46, zorder=3)
        best = front(points, more)
        if best:
            axis.plot(*zip(*(points[n] for n in best)), color="0.6", linewidth=1, zorder=1)
        for n in best:
            axis.annotate(n, points[n], fontsize=7, xytext=(4, 4), textcoords="offset points")
        axis.set(title=title, xlabel=f"bytes per token, {size}", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"{numbers['model']}, contexts of {numbers['length']} tokens, {record['device']}")
    figure.savefig(png, dpi=110)
    pyplot.close(figure)


def presses(rows: dict[str, dict], record: dict) -> dict[str, dict]:
    """Rows of kvpress' presses. Kept tokens have 16 bits, like those of `stock` in `rows`."""
    size, out = rows["stock"]["bytes_body"], {}
    for r in record["rows"]:
        if not r.get("error") and r["press"] != "full":
            marks = {task: r[task] for task in TITLES if task in r}
            out[f"kvpress {r['press']}+keep={r['keep']:g}"] = {"bytes_body": r["keep"] * size, **marks}
    return out


def _family(name: str) -> str:
    """Policy of a cell. All formats without pruning are one family, and all levels of one kind another."""
    policy = name.split("+")[0]
    if "@" in name:
        return name.split("@")[1].partition(":")[0]
    return "quantize" if policy == "bf16" or re.fullmatch(r"k\d+v\d+", policy) else policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--over", choices=list(OVER), default="body")
    parser.add_argument("--kvpress", type=Path, help="result file of kvpress_run with protocol seen")
    parser.add_argument("--png", type=Path, help="default: next to the result file")
    args = parser.parse_args()
    record = json.loads(args.results.read_text())
    print(table(record["numbers"]["cells"]))
    if args.kvpress:
        cells = record["numbers"]["cells"]
        cells |= presses(cells, json.loads(args.kvpress.read_text()))
    png = args.png or args.results.with_name(f"{args.results.stem}_{args.over}.png")
    plot(record, png, args.over)
    print(f"written: {png}")


if __name__ == "__main__":
    main()

"""Charts of server benchmarks: bars for one load, or curves over the number of agents or the compression rate.

    python -m bench.e2e.plot e2e/serving_h200 e2e/agents_h200 e2e/rates_h100
"""

from __future__ import annotations

import argparse
import json

from bench.common import RESULTS
from bench.e2e import arms

# Figure, factor, format and title of each panel.
BARS = (
    ("output_tok_s", 1, "%.0f", "output tokens / s"),
    ("ttft_ms_median", 1e-3, "%.1f", "median time to first token, s"),
)
CURVES = (
    ("from_cache", 100, "prompt tokens from the cache, %"),
    ("step_s_mean", 1, "mean step time, s"),
    ("step_s_p99", 1, "p99 step time, s"),
)
RATES = (
    ("running_most", "running requests, most"),
    ("output_tok_s", "output tokens / s"),
)
OURS, STOCK = "#2a7f62", ("#9aa5b1", "#5b6b7b", "#c3a26b", "#8b6bab", "#b5564e")


def label(server: str, row: dict) -> str:
    if server.startswith("kvc_"):
        return server.replace("kvc_", "kvc, ")
    return arms.describe(row["options"]).replace(", ", ",\n", 1)


def points(numbers: dict, mark: str) -> dict[int, dict[str, dict]]:
    """Number of sessions -> server -> row, for the runs named `server.<mark><number>`."""
    out: dict[int, dict[str, dict]] = {}
    for name, row in numbers.items():
        server, _, point = name.rpartition(".")
        if server and point[:1] == mark and point[1:].isdigit():
            out.setdefault(int(point[1:]), {})[server] = row
    return dict(sorted(out.items()))


def bars(record: dict, pyplot):
    """Bar charts of the runs with the largest number of sessions."""
    sessions, rows = max(points(record["numbers"], "c").items())
    rows = {server: row for server, row in rows.items() if not arms.is_variant(server, f"{arms.BF16}_free")}
    order = sorted(rows, key=lambda server: (server.startswith("kvc"), rows[server]["output_tok_s"]))
    colors = [OURS if server.startswith("kvc") else STOCK[0] for server in order]
    figure, axes = pyplot.subplots(1, len(BARS), figsize=(5 + len(order), 3.2))
    for axis, (key, scale, text, title) in zip(axes, BARS):
        drawn = axis.bar([label(s, rows[s]) for s in order], [rows[s][key] * scale for s in order], color=colors)
        axis.bar_label(drawn, fmt=text, fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="x", labelsize=7)
    figure.suptitle(f"{sessions} concurrent sessions on one {record['device']}, in equal KV memory", fontsize=10)
    return figure, axes


def curves(record: dict, pyplot):
    rows_by_agents = points(record["numbers"], "a")
    servers = list(dict.fromkeys(server for rows in rows_by_agents.values() for server in rows))
    colors = iter(STOCK)
    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(12, 3.6))
    for server in servers:
        rows_of_server = {agents: rows[server] for agents, rows in rows_by_agents.items() if server in rows}
        color = OURS if server.startswith("kvc") else next(colors)
        for axis, (key, scale, _) in zip(axes, CURVES):
            text = label(server, next(iter(rows_of_server.values()))).replace("\n", " ")
            values = [row[key] * scale for row in rows_of_server.values()]
            axis.plot(list(rows_of_server), values, "o-", color=color, label=text)
    for axis, (_, _, title) in zip(axes, CURVES):
        axis.set_title(title, fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(rows_by_agents), [str(n) for n in rows_by_agents])
        axis.set_ylim(bottom=0)
    axes[0].set_xlabel("agents", fontsize=9)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"Agents on one {record['device']}, in equal KV memory", fontsize=10)
    return figure, axes


def rates(record: dict, pyplot):
    """Curves of one-shot prompts over their compression rate. A line shows stock bf16."""
    rows = {}
    for name, row in record["numbers"].items():
        server, _, rate = name.partition(".rate")
        rows.setdefault(server, {})[int(rate)] = row
    ours = rows.pop("kvc")
    figure, axes = pyplot.subplots(1, len(RATES), figsize=(8, 3.2))
    for axis, (key, title) in zip(axes, RATES):
        axis.plot(list(ours), [row[key] for row in ours.values()], "o-", color=OURS, label="kvc, k4v4")
        for server, runs in rows.items():
            axis.axhline(runs[1][key], color=STOCK[1], linestyle=":", label=label(server, runs[1]).replace("\n", " "))
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(ours), [f"{rate}x" for rate in ours])
        axis.set_ylim(bottom=0)
    axes[0].set_xlabel("rate", fontsize=9)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"64 one-shot prompts on one {record['device']}, in equal KV memory", fontsize=10)
    return figure, axes


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="result files below bench/results, without .json")
    for name in parser.parse_args().names:
        record = json.loads((RESULTS / f"{name}.json").read_text())
        by_rate = any(".rate" in key for key in record["numbers"])
        draw = rates if by_rate else curves if points(record["numbers"], "a") else bars
        figure, axes = draw(record, pyplot)
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(RESULTS / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()

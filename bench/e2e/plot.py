"""The servers' measurements as pictures: what a load took, and what agents waited for.

    python -m bench.e2e.plot [--name e2e/serving | e2e/agents]
"""

from __future__ import annotations

import argparse
import json

from bench.common import RESULTS

NAMES = {"bf16": "stock, bf16", "fp8": "stock, fp8", "bf16_free": "stock, bf16,\nall it needs"}
# Figure, factor, format and title of each panel, by what follows a server's name in a run's.
PANELS = {
    ".c": (
        ("output_tok_s", 1, "%.0f", "output tokens / s"),
        ("ttft_ms_median", 1e-3, "%.1f", "median time to first token, s"),
    ),
    ".a": (
        ("from_cache", 100, "%.0f", "tokens of prompts that come from the cache, %"),
        ("step_s_mean", 1, "%.1f", "mean time of a step, s"),
    ),
}
TITLES = {
    ".c": "{most} sessions at once on one {device}, 8B Llama, 14.6 GB of KV unless said",
    ".a": "{most} agents with histories of up to 14k tokens on one {device}, 8B Llama, 14.6 GB of KV",
}


def label(server: str) -> str:
    return NAMES.get(server, server.replace("kvc_", "kvc, "))


def rows(numbers: dict) -> tuple[str, int, dict[str, dict]]:
    """(".c" or ".a", the most sessions or agents, server -> its run with so many)."""
    runs = {run: r for run, r in numbers.items() if isinstance(r, dict) and "profile" not in r}
    mark = next(mark for mark in PANELS if all(mark in run for run in runs))
    most = max(int(run.rsplit(mark, 1)[1]) for run in runs)
    return mark, most, {run.rsplit(mark, 1)[0]: r for run, r in runs.items() if run.endswith(f"{mark}{most}")}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="e2e/serving")
    name = parser.parse_args().name
    record = json.loads((RESULTS / f"{name}.json").read_text())
    mark, most, found = rows(record["numbers"])
    panels = PANELS[mark]
    order = sorted(found, key=lambda server: (server.startswith("kvc"), found[server][panels[0][0]]))
    colours = ["#2a7f62" if server.startswith("kvc") else "#9aa5b1" for server in order]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(9, 3.2))
    for axis, (key, scale, text, title) in zip(axes, panels):
        bars = axis.bar([label(s) for s in order], [found[s][key] * scale for s in order], color=colours)
        axis.bar_label(bars, fmt=text, fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(TITLES[mark].format(most=most, device=record["device"]), fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()

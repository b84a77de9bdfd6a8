"""The serving measurement as a picture: output tokens per second, and time to the first token.

    python -m bench.e2e.plot [--name e2e/serving]
"""

from __future__ import annotations

import argparse
import json

from bench.common import RESULTS

NAMES = {"bf16": "stock, bf16", "fp8": "stock, fp8", "bf16_free": "stock, bf16,\nall it needs"}


def label(run: str) -> str:
    return NAMES.get(run, run.replace("kvc_", "kvc, "))


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="e2e/serving")
    name = parser.parse_args().name
    record = json.loads((RESULTS / f"{name}.json").read_text())
    runs = {run: r for run, r in record["numbers"].items() if "profile" not in r}
    most = max(int(run.rsplit(".c", 1)[1]) for run in runs)
    rows = {run.rsplit(".c", 1)[0]: r for run, r in runs.items() if run.endswith(f".c{most}")}
    order = sorted(rows, key=lambda run: (run.startswith("kvc"), rows[run]["output_tok_s"]))
    colours = ["#2a7f62" if run.startswith("kvc") else "#9aa5b1" for run in order]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for axis, key, scale, title in (
        (axes[0], "output_tok_s", 1, "output tokens / s"),
        (axes[1], "ttft_ms_median", 1e-3, "median time to first token, s"),
    ):
        values = [rows[run][key] * scale for run in order]
        bars = axis.bar([label(run) for run in order], values, color=colours)
        axis.bar_label(bars, fmt="%.0f" if scale == 1 else "%.1f", fontsize=9)
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    title = f"{most} sessions at once on one {record['device']}, 8B Llama, 14.6 GB of KV unless said"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()

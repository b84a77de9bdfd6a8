"""Summary of a torch trace: kernels on the device and CUDA calls on the host.

    python -m bench.e2e.trace FILE.trace.json.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
NAME = 160  # maximum characters of a name; names of templates can have thousands


def largest_totals(events: list[dict], limit: int) -> list[dict[str, Any]]:
    """Name, count, total ms and maximum ms of the `limit` names with the largest total."""
    by_name: dict[str, list[float]] = {}
    for e in events:
        by_name.setdefault(e["name"], []).append(e["dur"])
    order = sorted(by_name, key=lambda name: -sum(by_name[name]))
    return [
        {
            "name": name[:NAME],
            "count": len(by_name[name]),
            "total_ms": round(sum(by_name[name]) / 1e3, 4),
            "max_ms": round(max(by_name[name]) / 1e3, 4),
        }
        for name in order[:limit]
    ]


def profile(path: Path | str, limit: int = 40) -> dict[str, Any]:
    """Up to `limit` `kernels` and a quarter as many `calls` with the largest total time. `busy_ms` is the sum over all
    kernels, `span_ms` the time from the start of the first kernel to the end of the last."""
    with gzip.open(path, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    calls = largest_totals([e for e in events if e.get("cat") in CALLS], limit // 4)
    events = [e for e in events if e.get("cat") in ON_DEVICE]
    first, last = min((e["ts"] for e in events), default=0.0), max((e["ts"] + e["dur"] for e in events), default=0.0)
    return {
        "span_ms": round((last - first) / 1e3, 4),
        "busy_ms": round(sum(e["dur"] for e in events) / 1e3, 4),
        "kernels": largest_totals(events, limit),
        "calls": calls,
    }


def table(summary: dict[str, Any]) -> str:
    """The profile as a table."""
    lines = [f"{'total ms':>10}{'count':>8}  kernel"]
    lines += [f"{k['total_ms']:10.3f}{k['count']:8}  {k['name'][:80]}" for k in summary["kernels"]]
    lines += [f"{k['total_ms']:10.3f}{k['count']:8}  host: {k['name'][:74]}" for k in summary["calls"]]
    return "\n".join([*lines, f"{summary['busy_ms']:10.3f} busy of {summary['span_ms']:.3f}"])


if __name__ == "__main__":
    print(table(profile(sys.argv[1])))

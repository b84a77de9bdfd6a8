"""Summary of a torch trace: the device's kernels and the host's calls.

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
NAME = 160  # characters of a name; templates spell out pages of types


def longest(events: list[dict], most: int) -> list[dict[str, Any]]:
    """Name, count, total and longest ms of the `most` names that took longest."""
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
        for name in order[:most]
    ]


def profile(path: Path | str, most: int = 40) -> dict[str, Any]:
    """`kernels` on the device and `calls` of the host, as in `longest`; `busy_ms` of all kernels together, `span_ms`
    from the first to the last."""
    with gzip.open(path, "rt") as file:
        events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    calls = longest([e for e in events if e.get("cat") in CALLS], most // 4)
    events = [e for e in events if e.get("cat") in ON_DEVICE]
    first, last = min((e["ts"] for e in events), default=0.0), max((e["ts"] + e["dur"] for e in events), default=0.0)
    return {
        "span_ms": round((last - first) / 1e3, 4),
        "busy_ms": round(sum(e["dur"] for e in events) / 1e3, 4),
        "kernels": longest(events, most),
        "calls": calls,
    }


def table(found: dict[str, Any]) -> str:
    """The profile as text."""
    lines = [f"{'total ms':>10}{'count':>8}  kernel"]
    lines += [f"{k['total_ms']:10.3f}{k['count']:8}  {k['name'][:80]}" for k in found["kernels"]]
    lines += [f"{k['total_ms']:10.3f}{k['count']:8}  host: {k['name'][:74]}" for k in found["calls"]]
    return "\n".join([*lines, f"{found['busy_ms']:10.3f} busy of {found['span_ms']:.3f}"])


if __name__ == "__main__":
    print(table(profile(sys.argv[1])))

"""Commit, GPU model and folder of result files.

This module only needs the standard library, because some benchmarks run without the package.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# KVC_RESULTS: another folder for result files.
RESULTS = Path(os.environ.get("KVC_RESULTS") or ROOT / "bench" / "results").resolve()
CODE = ("sglang_kvc", "kernels", "patches", "bench/*.py")


def commit() -> str:
    """Commit of the code, with `+changes` if the files differ from it. KVC_COMMIT overrides it, for copies without a
    history; "unknown" if there is neither."""
    if "KVC_COMMIT" in os.environ:
        return os.environ["KVC_COMMIT"]
    try:
        changed = _git("status", "--porcelain", "--", *CODE)
        return _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def card(device: str) -> str:
    """Short device name for the names of files and figures: `h200` for `NVIDIA H200`, `h100` for `NVIDIA H100 80GB
    HBM3`, `cpu` for a processor."""
    if device.startswith("CPU"):
        return "cpu"
    model = re.search(r"\b[A-Z]+\d+\b", device)
    return model[0].lower() if model else re.sub(r"\W+", "_", device.removeprefix("NVIDIA ").lower())


def _git(*args: str) -> str:
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

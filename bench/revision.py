"""Which code was measured. Of the standard library alone: some harnesses run where the package is not installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("sglang_kvc", "kernels", "patches", "bench/*.py")


def commit() -> str:
    """The commit of the code measured, with a mark where measured files differ from it; KVC_COMMIT where the tree was
    copied without its history, "unknown" without either."""
    if "KVC_COMMIT" in os.environ:
        return os.environ["KVC_COMMIT"]
    try:
        changed = _git("status", "--porcelain", "--", *CODE)
        return _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    command = ["git", "-C", str(ROOT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

"""What a user gets from `pip install`: every package of ours, and nothing under a name that is not ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import bench.quality.report
import bench.scoreboard

ROOT = Path(__file__).resolve().parents[2]
HOMES = {"sglang_kvc": ROOT, "kvc_kernels": ROOT / "kernels", "kvc_patches": ROOT / "patches"}


def test_every_package_is_installed():
    """The list in pyproject.toml is written by hand (Python 3.10 has no reader for it in its library)."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'"([\w.]+)"', re.search(r"^packages = \[(.*?)\]", text, re.S | re.M)[1])
    found = [
        ".".join(path.parent.relative_to(home).parts)
        for name, home in HOMES.items()
        for path in (home / name).rglob("__init__.py")
    ]
    assert sorted(listed) == sorted(found)


def test_scoreboard_and_readme_show_the_committed_results():
    board = bench.scoreboard.collect()
    readme = bench.scoreboard.README.read_text()
    assert bench.scoreboard.render(readme, board) == readme, "stale: run python -m bench.scoreboard"


@pytest.mark.parametrize("doc", bench.quality.report.DOCS, ids=lambda doc: doc.stem)
def test_the_quality_pages_show_the_committed_results(doc):
    page = doc.read_text()
    assert bench.quality.report.render(page) == page, "stale: run python -m bench.quality.report"

"""The result of `pip install`: all of this project's packages, and no foreign names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import bench.scoreboard
from sglang_kvc.errors import flag
from sglang_kvc.options.server_args import KVC_OPTIONS
from sglang_kvc.options.unsupported_args import ARG_REFUSALS

ROOT = Path(__file__).resolve().parents[1]
HOMES = {"sglang_kvc": ROOT, "kvc_kernels": ROOT / "kernels", "kvc_patches": ROOT / "patches"}


def test_every_package_is_installed():
    """The list in pyproject.toml is written by hand."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    existing = [
        ".".join(path.parent.relative_to(home).parts)
        for name, home in HOMES.items()
        for path in (home / name).rglob("__init__.py")
    ]
    assert sorted(listed) == sorted(existing)


def test_scoreboard_readme_and_docs_show_committed_results(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scoreboard", "--check"])
    assert bench.scoreboard.main() == 0, capsys.readouterr().out


def test_options_page_names_every_option_and_refusal():
    page = (ROOT / "docs" / "options.md").read_text()
    flags = [flag(name.removeprefix("kvc_")) for name in KVC_OPTIONS]
    flags += ["--" + refusal.name.replace("_", "-") for refusal in ARG_REFUSALS]
    assert [name for name in flags if not re.search(rf"`{name}[`= ]", page)] == []

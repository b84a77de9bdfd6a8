"""Number of known open defects, which are tests marked `xfail`.

    python -m bench.defects
"""

from __future__ import annotations

import ast
from pathlib import Path

from bench.common import Score, write_result
from bench.revision import ROOT


def marked(source: str) -> list[int]:
    """Lines of a test file with `pytest.mark.xfail` or `pytest.xfail`."""
    return sorted(n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute) and n.attr == "xfail")


def known(folder: Path = ROOT / "tests") -> list[str]:
    files = sorted(folder.rglob("*.py"))
    return [f"{file.relative_to(folder.parent)}:{line}" for file in files for line in marked(file.read_text())]


def main() -> None:
    defects = known()
    unit = "tests marked as known defects"
    write_result("defects", {"tests": defects}, scores={"defects.open": Score(len(defects), unit)})


if __name__ == "__main__":
    main()

"""Number of known open defects, which are tests marked `xfail`.

    python -m bench.defects [--quick]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path

from bench.common import Score, write_result
from bench.revision import ROOT


def marked(source: str) -> list[int]:
    """Lines of a test file with `pytest.mark.xfail` or `pytest.xfail`."""
    return sorted(n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute) and n.attr == "xfail")


def known(folder: Path = ROOT / "tests") -> list[str]:
    files = sorted(folder.rglob("*.py"))
    return [f"{file.relative_to(folder.parent)}:{line}" for file in files for line in marked(file.read_text())]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="print the tests, no result file")
    args = parser.parse_args(argv)
    defects = known()
    for defect in defects:
        print(defect)
    if not args.quick:
        unit = "tests marked as known defects"
        write_result("defects", {"tests": defects}, scores={"defects.open": Score(len(defects), unit)})


if __name__ == "__main__":
    main()

"""Supported SGLang release, and number of refused server options.

    python -m bench.refused [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.common import Score, write_result
from kvc_patches.registry import SGLANG_VERSION
from sglang_kvc.options.unsupported_args import ARG_REFUSALS


def release(version: str) -> float:
    """`0.5.23` as 5.23."""
    return float(version.removeprefix("0."))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="print the options, no result file")
    args = parser.parse_args(argv)
    refused = ["--" + refusal.name.replace("_", "-") for refusal in ARG_REFUSALS]
    print(*refused, sep="\n")
    if not args.quick:
        scores = {
            "current.sglang": Score(release(SGLANG_VERSION), "SGLang's release 0.x as x"),
            "current.refused_options": Score(len(refused), "options refused, some only for some values"),
        }
        write_result("refused", {"sglang": SGLANG_VERSION, "options": refused}, scores=scores)


if __name__ == "__main__":
    main()

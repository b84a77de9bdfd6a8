"""Supported SGLang release, and number of refused server options.

    python -m bench.refused
"""

from __future__ import annotations

from bench.common import Score, write_result
from kvc_patches.registry import SGLANG_VERSION
from sglang_kvc.options.unsupported_args import ARG_REFUSALS


def release(version: str) -> float:
    """`0.5.23` as 5.23."""
    return float(version.removeprefix("0."))


def main() -> None:
    refused = ["--" + refusal.name.replace("_", "-") for refusal in ARG_REFUSALS]
    scores = {
        "current.sglang": Score(release(SGLANG_VERSION), "SGLang's release 0.x as x"),
        "current.refused_options": Score(len(refused), "options refused, some only for some values"),
    }
    write_result("refused", {"sglang": SGLANG_VERSION, "options": refused}, scores=scores)


if __name__ == "__main__":
    main()

"""The ladder: the list of formats through which a cold block moves down, and what each step costs."""

from __future__ import annotations

from collections.abc import Sequence

from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import BlockFormat

# Mean KL in nats per token against bf16, the mean of Qwen2.5-Coder-0.5B and 1.5B at 2048 tokens
# (bench/results/quality/policies_qwen-*_2048.json). No server measured k4v8. Its loss is the given share of k4v4's, the
# mean of both models in bench/results/calibrate/qwen-*.json.
LOSS = {"k8v8": 0.00028, "k8v4": 0.0012, "k4v8": 0.75 * 0.0053, "k4v4": 0.0053, "k4v2": 0.015, "k2v2": 0.15}


def is_below(low: str, high: str) -> bool:
    """Whether the packed format `low` has fewer key bits or value bits than the packed format `high`, and none more."""
    a, b = FORMATS[low], FORMATS[high]
    return a != b and b.packed and a.key_bits <= b.key_bits and a.value_bits <= b.value_bits


def steps(high: str, floor: str | None) -> tuple[str, ...]:
    """Names of the formats below `high` down to `floor`, each below the one before: k8v8, k8v4, k4v4, k4v2, k2v2."""
    out: list[str] = []
    if floor in FORMATS and high in FORMATS:
        for name in FORMATS:  # in the order of their bits
            if is_below(name, out[-1] if out else high) and (name == floor or is_below(floor, name)):
                out.append(name)
    return tuple(out)


def next_lower(block_formats: Sequence[BlockFormat], ladder: Sequence[int]) -> tuple[int, ...]:
    """The format id that cold blocks of every format id move to, 0 for none. `ladder`: format ids of the ladder, high
    first. A step that saves no pages is skipped.
    """
    out = [0] * len(block_formats)
    for i, high in enumerate(ladder):
        fewer = (low for low in ladder[i + 1 :] if block_formats[low].pages < block_formats[high].pages)
        out[high] = next(fewer, 0)
    return tuple(out)


def step_cost(high: BlockFormat, low: BlockFormat) -> float:
    """Loss that a move from `high` to `low` adds, per page that it saves."""
    return (LOSS[low.high.name] - LOSS[high.high.name]) / (high.pages - low.pages)

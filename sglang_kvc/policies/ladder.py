"""The ladder: the list of formats through which a cold block moves down."""

from __future__ import annotations

from collections.abc import Sequence

from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import BlockFormat


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

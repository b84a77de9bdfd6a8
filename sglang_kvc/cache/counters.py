"""Totals of one server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since start, for the log line and the metrics."""

    compactions: int = 0  # blocks compacted
    compaction_ms: float = 0.0  # host time of compactions: their launches on a GPU, the work itself on a CPU
    transfer_ms: float = 0.0  # host time of copies to and from host memory, likewise
    evicted_blocks: int = 0
    demoted_blocks: int = 0  # moves to a lower format; also counted as compactions
    recomputed_tokens: int = 0  # of prompts whose prefixes were dropped before
    canceled_loads: int = 0  # whose memory was needed before they began

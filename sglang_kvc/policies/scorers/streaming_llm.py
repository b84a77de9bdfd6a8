"""StreamingLLM (arXiv 2309.17453): attention sinks and the latest tokens, by position alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Scorer


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """`s_i = i`: later tokens rank higher. The sinks are the policy's `sinks`, the recent tokens its window.

    Assumed: every block has the same number of pages and keeps its own latest tokens, where the paper drops the middle
    of the sequence. Positions are not renumbered.
    """

    name: ClassVar[str] = "streaming-llm"

    def score(self, evidence) -> torch.Tensor:
        layout, positions = evidence.layout, evidence.positions()
        n, p = positions.shape
        # Offsets within the block: positions above 2^24 would be equal in fp32.
        offsets = torch.arange(p, device=positions.device, dtype=torch.float32)
        return offsets.expand(n, layout.layers, layout.heads, p)

"""A quota rung: a fixed number of pages per block, for which heads and layers compete by a key-based score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.layout import BF16, FORMATS, PoolLayout, Rung

from .base import Evidence, Policy


@dataclass(frozen=True)
class Quota(Policy):
    """Keep the fraction `keep` of a block's pages; ranked over all its heads and layers in units of pages.

    The score is KeyDiff's: a key unlike the others of its block and head matters, `s_i = -cos(k_i, mean_j k_j)`. It
    needs keys only, so the result is a function of the block's own rows. The ranking in pages follows KV-Compress
    (section 4.2): a page is worth its best token, every head keeps at least one page.
    """

    name: ClassVar[str] = "quota"
    high: str = "k4v4"
    keep: float = 0.5

    def formats(self) -> list[str]:
        return [self.high]

    def ladder(self, layout: PoolLayout) -> tuple[Rung, ...]:
        fmt = FORMATS[self.high]
        heads = layout.layers * layout.heads
        pages = max(heads, round(self.keep * layout.block_pages(fmt)))
        return (Rung(BF16, pages=layout.block_pages_bf16), Rung(fmt, pages=pages))

    def score(self, keys: torch.Tensor) -> torch.Tensor:
        """`keys` fp32 `[n, L, H, P, D]` -> fp32 `[n, L, H, P]`, higher is kept."""
        unit = torch.nn.functional.normalize(keys, dim=-1)
        centre = torch.nn.functional.normalize(unit.mean(dim=-2, keepdim=True), dim=-1)
        return -(unit * centre).sum(-1)

    def plan(self, evidence: Evidence, rung: Rung) -> torch.Tensor:
        page_tokens = evidence.layout.page(rung.high).tokens
        return ops.quota(self.score(evidence.keys()), rung.pages, page_tokens)

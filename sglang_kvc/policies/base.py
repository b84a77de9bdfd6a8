"""`Policy`: the choice of tokens that a block keeps, and of their tiers. `Evidence`: the inputs of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.formats import Format
from kvc_kernels.layout import BlockFormat, PoolLayout
from kvc_kernels.ops import STRIDES
from kvc_kernels.store import PageStore

if TYPE_CHECKING:
    from ..calibration.tensors import Calibration

BLOCK, SEQUENCE = "block", "sequence"
LOSSLESS = "lossless"  # request quality: uncompressed
EVIDENCE = 64  # minimum decode queries that read a block before a policy with a lag plans it


def with_evidence(sampling: ops.ScoreSampling | None, lag: int) -> ops.ScoreSampling | None:
    """`sampling` with a decode stride at which `EVIDENCE` steps are sampled in `lag` tokens; a `lag` of 0 changes
    nothing."""
    if sampling is None or not lag:
        return sampling
    stride = max(s for s in STRIDES if s == 1 or s * EVIDENCE <= lag)
    return replace(sampling, decode_stride=min(sampling.decode_stride, stride))


@dataclass(frozen=True)
class Evidence:
    """Inputs of a plan of n blocks at `from_format`. Tensors are computed on demand.

    `blocks`, `starts`, `lengths` and `prompts` are int64 `[n]`: block ids, positions of their first tokens, the length
    N of the sequence that pushed the block out of its window while generating (0: the prompt did), and the tokens of
    the prompt of the request that wrote the block. `sampling` says which attention scores were collected, None if none
    were. `calibration` holds the tensors that a policy loaded, if any.
    """

    store: PageStore
    blocks: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor
    from_format: int = 0
    sampling: ops.ScoreSampling | None = None
    calibration: Calibration | None = None

    @property
    def layout(self) -> PoolLayout:
        return self.store.layout

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (with their rotary embedding) and values of one layer, dequantized, fp32 `[n, H, P, D]` each."""
        return ops.load_dense(self.store, layer, self.blocks, self.from_format)[:2]

    @cached_property
    def _places(self) -> ops.TokenPlaces | None:
        """Places of the tokens of packed blocks."""
        return ops.token_places(self.store, self.blocks, self.from_format) if self.from_format else None

    def tiers(self) -> torch.Tensor:
        """Tiers int8 `[n, L, H, P]`: 2 high, 1 low, 0 pruned; all 2 while a block is uncompressed."""
        return ops.block_tiers(self.store, self.blocks, self.from_format, self._places)

    def mean_attention_scores(self) -> torch.Tensor:
        """Mean attention scores: the average probability that later queries gave each token, fp32 `[n, L, H, P]`."""
        sampling = self.sampling or ops.ScoreSampling()
        return ops.mean_attention_scores(
            self.store, self.blocks, self.starts, self.prompts, sampling, self.from_format
        )

    def attention_scores(self) -> torch.Tensor:
        """Attention scores, summed over queries as the policy's `ScoreSampling` says, fp32 `[n, L, H, P]`."""
        return ops.block_scores(self.store, self.blocks, self.from_format, self._places)

    def query_counts(self) -> torch.Tensor:
        """Counted queries that met each token, at least 1, fp32 `[n, 1, 1, P]`."""
        sampling = self.sampling or ops.ScoreSampling()
        counts = ops.queries_of_tokens(self.store, self.blocks, self.starts, self.prompts, sampling)
        return counts.clamp(min=1)[:, None, None].float()

    def thresholds(self, alpha: ops.Thresholds, block_format: BlockFormat) -> torch.Tensor:
        """Tiers int8 `[n, L, H, P]` by mean attention scores against thresholds (LeanKV)."""
        sampling = self.sampling or ops.ScoreSampling()
        return ops.plan_thresholds(
            self.store, self.blocks, self.starts, self.lengths, self.prompts, alpha, sampling,
            from_format=self.from_format, to=block_format
        )

    def positions(self) -> torch.Tensor:
        """Position of every token in its sequence, fp32 `[n, P]`."""
        offsets = torch.arange(self.layout.block_tokens, device=self.starts.device)
        return (self.starts[:, None] + offsets).float()


@dataclass(frozen=True)
class Policy:
    """Base of all policies. A subclass is one file and one line in `registry.POLICIES`.

    Its fields are the settings that it reads from `KvcConfig`, under the same names, with its own defaults.
    `scope` says what a block's content depends on: "block" (its rows and the policy alone, so that sharing it under the
    prefix cache is safe) or "sequence" (attention scores from later tokens of the request that filled it).
    """

    name: ClassVar[str]
    scope: ClassVar[str] = BLOCK
    # Whether every token of a block is kept, in one format, so that its index in the block gives its position.
    # Then a compaction does not ask for its plan, which is None.
    keeps_all: ClassVar[bool] = False
    # Default number of latest tokens of a running sequence that stay uncompressed.
    default_window: ClassVar[int] = 64
    # Minimum tokens of a page in the first format. Small pages let heads differ finely, large pages are read faster.
    # None: the page size with the least waste.
    page_tokens: ClassVar[int | None] = None
    # Whether this is a preset, a composition under its own name. Messages suggest its base policy instead.
    preset: ClassVar[bool] = False

    @property
    def score_sampling(self) -> ops.ScoreSampling | None:
        """Attention scores to collect into the score segment of the pages; None: none."""
        return None

    @property
    def collects_scores(self) -> bool:
        return self.score_sampling is not None

    @property
    def counts_last_queries(self) -> bool:
        """Whether only a prompt's last queries count for attention scores. Blocks of a prompt that is aborted before
        those queries then have no scores. Otherwise the query of a block's last token always counts."""
        return self.score_sampling is not None and self.score_sampling.window is not None

    @property
    def needs(self) -> tuple[str, ...]:
        """Tensors that the calibration file must hold."""
        return ()

    def formats(self) -> list[str]:
        """Names of the formats of planned blocks, high first. They decide the page size."""
        raise NotImplementedError

    def check(self, layout: PoolLayout) -> None:
        """Raise ValueError, in one sentence, when the policy cannot serve a model of this geometry."""

    def block_formats(self, layout: PoolLayout) -> tuple[BlockFormat, ...]:
        """Storage of a block from high to low; format id 0 is uncompressed. ValueError when the settings allow none."""
        raise NotImplementedError

    def assumed_block_ratio(self, layout: PoolLayout) -> float:
        """Number of packed blocks that are assumed to take the memory of an uncompressed one, where the data decide
        their size; inf: unknown. If blocks are smaller, the pool runs short of block ids before it runs short of
        pages."""
        return math.inf

    def format_id_of(self, level: str | None) -> int:
        """Format id of a request's packed blocks; 0: they stay uncompressed. `level`: request quality."""
        return 0 if level == LOSSLESS else 1

    @property
    def default_level(self) -> str | None:
        """Format name that means "server default" when a request asks for it. None for policies that use more than one
        format."""
        return None

    def fake_quant_format(self, format_id: int = 1) -> Format | None:
        """Format of every token of a block at `format_id`. None if tokens differ in format, and at 0."""
        return None

    @property
    def unplanned_format(self) -> int:
        """Format id at which blocks are packed with all their tokens before they are planned: those of an incomplete
        prompt, and with `--kvc-lag` those of an answer. 0: a block is planned when it is packed. Policies of `sequence`
        scope need such a format, because attention from later tokens of a prompt decides about its first blocks."""
        return 0

    def prompt_format(self, format_id: int) -> int:
        """Format id at which blocks of an incomplete prompt are packed, in a request of `format_id`."""
        return (self.unplanned_format or format_id) if format_id else 0

    @property
    def answer_format(self) -> int:
        """Format id of blocks of an answer that were planned together; 0: each block is planned alone."""
        return 0

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        """Format ids that packed blocks are planned from and to, as their sequence grows or ends."""
        return ()

    @property
    def ladder(self) -> tuple[int, ...]:
        """Format ids that cold blocks move down, the server's own first; empty: a packed block keeps its format."""
        return ()

    def plan(self, evidence: Evidence, block_format: BlockFormat) -> torch.Tensor | None:
        """Tiers int8 `[n, L, H, P]` of the blocks at `block_format`, never above their present tiers. None: every token
        high, which is faster than a tensor of 2s."""
        raise NotImplementedError

    def answer_pages(self, layout: PoolLayout, planned: int, unplanned: int) -> int:
        """Total pages of `planned` blocks of an answer, given `unplanned` later blocks that still have all tokens."""
        raise NotImplementedError

    def compete(self, evidence: Evidence, block_format: BlockFormat, pages: int, answers: int = 1) -> torch.Tensor:
        """Tiers int8 `[n, L, H, P]` of n blocks, as in `plan`. They are the blocks of `answers` answers, one after the
        other, n / `answers` of each. The blocks of each answer keep `pages` pages together."""
        raise NotImplementedError

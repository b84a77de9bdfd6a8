"""What a policy is, and what it may look at when it plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from kvc_kernels import ops
from kvc_kernels.layout import Format, PoolLayout, Rung
from kvc_kernels.store import PageStore
from sglang_kvc.options.request_quality import LOSSLESS

if TYPE_CHECKING:
    from ..calibration.tensors import Calibration

BLOCK, SEQUENCE = "block", "sequence"


@dataclass(frozen=True)
class Evidence:
    """What a policy may look at when it plans n blocks; tensors are made only when asked for.

    `starts[n]` is the position in the sequence of each block's first token; `lengths[n]` the length N of the sequence
    that pushed the block out of its window while generating, 0 when the prompt phase did. All are at `from_rung`.
    `observe`: which attention was collected, None: none was. `calibration` is what a policy loaded for this model, if
    it needs any.
    """

    store: PageStore
    blocks: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    from_rung: int = 0
    observe: ops.Observe | None = None
    calibration: Calibration | None = None

    @property
    def layout(self) -> PoolLayout:
        return self.store.layout

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (with their rotary embedding) and values of one layer as stored, fp32 `[n, H, P, D]` each."""
        return ops.load_dense(self.store, layer, self.blocks, self.from_rung)[:2]

    def tiers(self) -> torch.Tensor:
        """int8 `[n, L, H, P]`: 2 high, 1 low, 0 pruned; all 2 while a block is uncompressed."""
        return ops.block_tiers(self.store, self.blocks, self.from_rung)

    def significance(self) -> torch.Tensor:
        """Mean attention probability that each token received from later queries, fp32 `[n, L, H, P]`."""
        seen = self.observe or ops.Observe()
        return ops.significance(self.store, self.blocks, seen.window, self.from_rung, seen.stride)

    def received(self) -> torch.Tensor:
        """Attention that each token received, added up as the policy's `Observe` says, fp32 `[n, L, H, P]`."""
        return ops.block_scores(self.store, self.blocks, self.from_rung)

    def thresholds(self, alpha: ops.Thresholds, rung: Rung) -> torch.Tensor:
        """Tiers int8 `[n, L, H, P]` by `significance` against thresholds: LeanKV's plan, on a GPU one kernel."""
        plan = ops.plan_thresholds
        if self.store.device.type == "cuda":
            from kvc_kernels.tiering.thresholds_kernel import plan_thresholds_triton as plan
        seen = self.observe or ops.Observe()
        return plan(
            self.store, self.blocks, self.starts, self.lengths, alpha, seen, from_rung=self.from_rung, to=rung
        )

    def positions(self) -> torch.Tensor:
        """Position of every token in its sequence, fp32 `[n, P]`."""
        offsets = torch.arange(self.layout.block_tokens, device=self.starts.device)
        return (self.starts[:, None] + offsets).float()


@dataclass(frozen=True)
class Policy:
    """Base of all policies. A subclass is one file and one line in `registry.POLICIES`.

    Its fields are the settings that it reads from `KvcConfig`, under the same names; their defaults are its own.
    `scope` says what a block's content depends on: "block" (its own rows and the policy alone: safe to share under the
    prefix cache) or "sequence" (attention by later tokens of the request that filled it).
    """

    name: ClassVar[str]
    scope: ClassVar[str] = BLOCK
    # Whether every token of a block is kept, in one format: then its place in the block is its place in the sequence.
    keeps_all: ClassVar[bool] = False
    # Whether packed blocks are planned again as their sequence grows.
    replans: ClassVar[bool] = False
    # Latest tokens of a running sequence that stay uncompressed, unless the user says otherwise.
    default_window: ClassVar[int] = 64
    # Tokens of a page in the first format, or as many more as another format needs: small pages let heads differ
    # finely, large ones are read faster. None: the size that wastes least.
    page_tokens: ClassVar[int | None] = None
    # Whether this is a composition under a name of its own: messages then suggest what it is composed of.
    preset: ClassVar[bool] = False

    @property
    def collects(self) -> ops.Observe | None:
        """The attention to collect while queries are alive, into the scores segment of the pages; None: none."""
        return None

    @property
    def observes(self) -> bool:
        return self.collects is not None

    @property
    def needs(self) -> tuple[str, ...]:
        """Tensors that the calibration file must hold."""
        return ()

    def formats(self) -> list[str]:
        """Names of the packed formats that the ladder uses, high first."""
        raise NotImplementedError

    def check(self, layout: PoolLayout) -> None:
        """ValueError, in one sentence, when the policy cannot serve a model of this geometry."""

    def ladder(self, layout: PoolLayout) -> tuple[Rung, ...]:
        """Rungs from high to low; rung 0 is uncompressed. ValueError when there is no such ladder."""
        raise NotImplementedError

    def rung_of(self, level: str | None) -> int:
        """The rung that blocks of a request go to: 0 stays uncompressed. `level`: see `options.request_quality`."""
        return 0 if level == LOSSLESS else 1

    @property
    def own_level(self) -> str | None:
        """The format whose name a request may give for what the server does anyway; None where that is more than to
        store all tokens in one format."""
        return None

    def stored_as(self, rung: int = 1) -> Format | None:
        """The format that every token of a block at `rung` will have, None where that is decided by what they hold,
        and at rung 0."""
        return None

    def plan(self, evidence: Evidence, rung: Rung) -> torch.Tensor | None:
        """Tiers int8 `[n, L, H, P]` that the blocks shall have at `rung`. Never above their present tier. None: all of
        every block high, which moves faster than a tensor that says so."""
        raise NotImplementedError

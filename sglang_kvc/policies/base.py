"""What a policy is: a scorer (how important is a token for a head), a budget and a ladder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvc_kernels import ops
from kvc_kernels.layout import Format, PoolLayout, Rung
from kvc_kernels.store import PageStore

BLOCK, SEQUENCE = "block", "sequence"


@dataclass(frozen=True)
class Evidence:
    """What a policy may look at when it plans n blocks; tensors are made only when asked for.

    `starts[n]` is the position in the sequence of each block's first token; `lengths[n]` the length N of the sequence
    that pushed the block out of its window while generating, 0 when the prompt phase did. All are at `from_rung`.
    """

    store: PageStore
    blocks: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    from_rung: int = 0
    window: int | None = None

    @property
    def layout(self) -> PoolLayout:
        return self.store.layout

    def keys(self) -> torch.Tensor:
        """Post-RoPE keys as stored, fp32 `[n, L, H, P, D]`."""
        layers = [ops.load_dense(self.store, i, self.blocks)[0] for i in range(self.layout.layers)]
        return torch.stack(layers, dim=1)

    def tiers(self) -> torch.Tensor:
        """int8 `[n, L, H, P]`: 2 high, 1 low, 0 pruned; all 2 while a block is uncompressed."""
        return ops.block_tiers(self.store, self.blocks, self.from_rung)

    def significance(self) -> torch.Tensor:
        """Mean attention probability that each token received from later queries, fp32 `[n, L, H, P]`."""
        return ops.significance(self.store, self.blocks, self.window, self.from_rung)

    def positions(self) -> torch.Tensor:
        """Position of every token in its sequence, fp32 `[n, P]`."""
        offsets = torch.arange(self.layout.block_tokens, device=self.starts.device)
        return (self.starts[:, None] + offsets).float()


@dataclass(frozen=True)
class Policy:
    """Base of all policies. A subclass is one file and one line in `registry.POLICIES`.

    `scope` says what a block's content depends on: "block" (its own rows and the policy alone: safe to share under the
    prefix cache) or "sequence" (attention by later tokens of the request that filled it).
    """

    name: ClassVar[str]
    scope: ClassVar[Literal["block", "sequence"]] = BLOCK
    # Whether attention must be collected while queries are alive, into the scores segment of the pages.
    observes: ClassVar[bool] = False
    # Whether packed blocks are planned again as their sequence grows.
    replans: ClassVar[bool] = False
    # Latest tokens of a running sequence that stay uncompressed, unless the user says otherwise.
    default_window: ClassVar[int] = 64

    @property
    def observe_window(self) -> int | None:
        """Collect from the last w queries of each forward only; None collects from all."""
        return None

    def formats(self) -> list[str]:
        """Names of the packed formats that the ladder uses, high first."""
        raise NotImplementedError

    def ladder(self, layout: PoolLayout) -> tuple[Rung, ...]:
        """Rungs from high to low; rung 0 is uncompressed."""
        raise NotImplementedError

    def stored_as(self) -> Format | None:
        """The format that every token of a packed block will have, None where that is decided by what they hold."""
        return None

    def plan(self, evidence: Evidence, rung: Rung) -> torch.Tensor:
        """Tiers int8 `[n, L, H, P]` that the blocks shall have at `rung`. Never above their present tier."""
        raise NotImplementedError

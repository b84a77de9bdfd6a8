"""Queue of page-state changes, filled by the scheduler's CPU code and flushed on the forward stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvc_kernels.ops import LastQueries

    from .one_shot import Plan
    from .transfers import Loading


NO_GROUPS = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class Take:
    """Give uncompressed pages to `blocks`."""

    blocks: np.ndarray


@dataclass(frozen=True)
class Release:
    """Return all pages of `blocks`."""

    blocks: np.ndarray


@dataclass(frozen=True)
class Compact:
    """Move `blocks` from one block format to another, or re-plan them at the same one. Arrays are `[n]`.

    starts: position of each block's first token.
    lengths: length N of the sequence whose window the block left while decoding, 0 in the prompt phase.
    generations: generation of each block when this was queued. The block may be freed and taken again before the
        compact runs.
    groups: `[g, 2]`, number of blocks and of pages of each run of blocks that compete for pages. Empty: every block is
        planned alone. Blocks of a group that were planned before are already at `to_format`, which has the same pages.
    """

    blocks: np.ndarray
    from_format: int
    to_format: int
    starts: np.ndarray
    lengths: np.ndarray
    generations: np.ndarray
    groups: np.ndarray = field(default_factory=lambda: NO_GROUPS)


@dataclass(frozen=True)
class Save:
    """Copy `blocks[n]` to `units[n, k]` of the host memory."""

    blocks: np.ndarray
    units: np.ndarray


@dataclass(frozen=True)
class Load:
    """Give `blocks[n]` pages at `format_id`, and fill them from `units[n, k]` of the host memory. `loading` says when
    the copies have ended."""

    blocks: np.ndarray
    format_id: int
    units: np.ndarray
    loading: Loading


@dataclass(frozen=True)
class PackPrompt:
    """Pack the tokens that a one-shot prompt keeps into a few blocks, and free the others.

    blocks: all blocks that hold tokens of the prompt. The first `packed` of them were packed during the prefill, the
        others are uncompressed. The last one may be partly filled.
    full: number of full blocks.
    tokens: tokens in the full blocks.
    into: blocks of the result. Each is one of `blocks` or has no pages.
    row: row of `req_to_token`, which then has a gap of `gap` places after `into`.
    """

    blocks: np.ndarray
    packed: int
    full: int
    tokens: int
    into: np.ndarray
    to_format: int
    plan: Plan
    queries: LastQueries
    row: int
    gap: int


@dataclass(frozen=True)
class Thin:
    """Pack uncompressed blocks of a one-shot prompt: every head keeps its best tokens in fewer blocks. The other blocks
    are freed.

    blocks: all blocks that hold tokens of the prompt, in order. The first `packed` of them were packed before, the next
        `count` are packed now, and the rest stays uncompressed.
    tokens: tokens in all blocks, including the probe at the end.
    into: blocks of the result. Each is one of those that are packed now or has no pages.
    row: row of `req_to_token`, which then has a gap of `gap` places after the packed blocks.
    """

    blocks: np.ndarray
    packed: int
    count: int
    tokens: int
    into: np.ndarray
    to_format: int
    queries: LastQueries
    row: int
    gap: int


@dataclass(frozen=True)
class EndGap:
    """Forget the gap of `row`. Its request has ended and all of its `blocks` were released."""

    row: int
    blocks: np.ndarray


Op = Take | Release | Compact | Save | Load | PackPrompt | Thin | EndGap


@dataclass
class _Merge:
    """Operations of one kind that run as one. `blocks` holds the ids of all their blocks."""

    ops: list[Op]
    blocks: set[int]

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self.blocks.update(op.blocks.tolist())

    def merged(self) -> Op:
        if len(self.ops) == 1:
            return self.ops[0]
        names = [name for name, value in vars(self.ops[0]).items() if isinstance(value, np.ndarray)]
        return replace(self.ops[0], **{n: np.concatenate([getattr(op, n) for op in self.ops]) for n in names})


@dataclass
class OpLog:
    """Operations in the order in which the CPU queued them. Operations of one kind are merged, so that a flush runs
    each kind once for all requests.

    The order is the contract: the ledger charges every operation under the assumption that all earlier ones have run.
    Merging neighbors keeps the order. A compaction may also run before earlier operations on other blocks, because it
    draws on the reserve only and leaves no fewer pages free. It never runs before an earlier `Take`, which may take its
    blocks.
    """

    _merges: list[_Merge] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._merges)

    def push(self, op: Op) -> None:
        if isinstance(op, Compact):
            merge = self._merge_of(op)
        elif isinstance(op, (Take, Release)):
            merge = self._merges[-1] if self._merges and type(op) is type(self._merges[-1].ops[0]) else None
        else:
            merge = None
        if merge is None:
            merge = _Merge([], set())
            self._merges.append(merge)
        merge.add(op)

    def _merge_of(self, op: Compact) -> _Merge | None:
        """The last compaction between the same block formats, if `op` may run with it."""
        blocks = op.blocks.tolist()
        for earlier in reversed(self._merges):
            first = earlier.ops[0]
            if isinstance(first, Take) or not earlier.blocks.isdisjoint(blocks):
                return None
            if isinstance(first, Compact) and (op.from_format, op.to_format) == (first.from_format, first.to_format):
                return earlier
        return None

    def drain(self) -> list[Op]:
        merges, self._merges = self._merges, []
        return [m.merged() for m in merges]

    def clear(self) -> None:
        self._merges.clear()

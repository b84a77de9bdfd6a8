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
    prompts: tokens of the prompt of the request that wrote the block.
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
    prompts: np.ndarray
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
    """Operations of one kind that run as one. `blocks` holds the ids of all their blocks, `units` the units of host
    memory that they read or write."""

    ops: list[Op]
    blocks: set[int]
    units: set[int]

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self.blocks.update(op.blocks.tolist())
        if isinstance(op, PackPrompt | Thin):
            self.blocks.update(op.into.tolist())
        elif isinstance(op, Save | Load):
            self.units.update(op.units.ravel().tolist())

    def is_like(self, op: Op) -> bool:
        """Whether one operation can replace `op` and those of this merge."""
        first = self.ops[0]
        if isinstance(op, Compact) and isinstance(first, Compact):
            return (op.from_format, op.to_format) == (first.from_format, first.to_format)
        if isinstance(op, Save) and isinstance(first, Save):
            return op.units.shape[1] == first.units.shape[1]
        return isinstance(op, Take | Release) and type(op) is type(first)

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
    Merging neighbors keeps the order. Two kinds may also run before earlier operations on other blocks:

    - A compaction draws on the reserve only and leaves no fewer pages free. It never runs before an earlier `Take`,
      which may take its blocks.
    - A save takes and returns no pages. It never runs before an earlier save of its units. The tree's locks keep the
      units of a queued load until its copies have ended, so no save can have them.
    """

    _merges: list[_Merge] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._merges)

    def push(self, op: Op) -> None:
        merge, at = self._place(op)
        if merge is None:
            merge = _Merge([], set(), set())
            self._merges.insert(at, merge)
        merge.add(op)

    def _place(self, op: Op) -> tuple[_Merge | None, int]:
        """The merge that `op` joins; None: it begins one, at the index that follows."""
        merges, end = self._merges, len(self._merges)
        if not isinstance(op, Compact | Save):
            return (merges[-1], end) if merges and merges[-1].is_like(op) else (None, end)
        saves = isinstance(op, Save)
        blocks, units = op.blocks.tolist(), op.units.ravel().tolist() if isinstance(op, Save) else []
        for at in range(end, 0, -1):
            earlier = merges[at - 1]
            after_take = not saves and isinstance(earlier.ops[0], Take)
            if after_take or not earlier.blocks.isdisjoint(blocks):
                return None, at if saves else end
            if earlier.is_like(op):
                return earlier, at
            if not earlier.units.isdisjoint(units):
                return None, at
        # Behind the first saves, because a queued load may make the host wait for one of them.
        first = next((i for i, merge in enumerate(merges) if not isinstance(merge.ops[0], Save)), end)
        return None, first if saves else end

    def drain(self) -> list[Op]:
        merges, self._merges = self._merges, []
        return [m.merged() for m in merges]

    def clear(self) -> None:
        self._merges.clear()

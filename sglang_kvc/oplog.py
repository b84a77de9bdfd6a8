"""The one queue of page-state changes, filled by the scheduler's CPU code and flushed on the forward stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np


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
    """Move `blocks` from one rung to another (or re-plan them at the same one).

    `lengths[i]` is the length N of the sequence that pushed block i out of its window, 0 when its prompt did;
    `generations[i]` that of the block when this was decided: it may be freed and taken anew before this has run.
    """

    blocks: np.ndarray
    from_rung: int
    to_rung: int
    starts: np.ndarray
    lengths: np.ndarray
    generations: np.ndarray


Op = Take | Release | Compact


@dataclass
class OpLog:
    """Operations in the order in which the CPU decided them, those of one kind merged: a flush does each at once, for
    all requests.

    The order is the contract: the ledger charged every operation assuming that all earlier ones have run. Merging keeps
    neighbours in order; and a compaction may run earlier than it was queued, before releases and compactions of other
    blocks, because it draws on the reserve alone and leaves no fewer pages free than there were. It stays behind a
    taking, which may be that of its own blocks.
    """

    ops: list[Op] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ops)

    def push(self, op: Op) -> None:
        if isinstance(op, Compact):
            at = self._place(op)
        else:
            at = len(self.ops) - 1 if self.ops and type(op) is type(self.ops[-1]) else None
        if at is None:
            self.ops.append(op)
        else:
            self.ops[at] = _merged(self.ops[at], op)

    def _place(self, op: Compact) -> int | None:
        """The last compaction between the same rungs, if `op` may run with it."""
        for at in range(len(self.ops) - 1, -1, -1):
            earlier = self.ops[at]
            if isinstance(earlier, Take) or np.isin(op.blocks, earlier.blocks).any():
                return None
            if isinstance(earlier, Compact) and (op.from_rung, op.to_rung) == (earlier.from_rung, earlier.to_rung):
                return at
        return None

    def drain(self) -> list[Op]:
        ops, self.ops = self.ops, []
        return ops

    def clear(self) -> None:
        self.ops.clear()


def _merged(first: Op, second: Op) -> Op:
    blocks = np.concatenate([first.blocks, second.blocks])
    if not isinstance(first, Compact):
        return type(first)(blocks)
    names = "starts", "lengths", "generations"
    rest = {n: np.concatenate([getattr(op, n) for op in (first, second)]) for n in names}
    return replace(first, blocks=blocks, **rest)

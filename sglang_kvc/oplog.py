"""The one queue of page-state changes, filled by the scheduler's CPU code and flushed on the forward stream."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    `lengths[i]` is the length N of the sequence that pushed block i out of its window, 0 when its prompt did.
    """

    blocks: np.ndarray
    from_rung: int
    to_rung: int
    starts: np.ndarray
    lengths: np.ndarray


Op = Take | Release | Compact


@dataclass
class OpLog:
    """Operations in the order in which the CPU decided them; neighbours of one kind are merged.

    The order is the whole contract: the ledger charged every operation assuming that all earlier ones have run.
    """

    ops: list[Op] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ops)

    def push(self, op: Op) -> None:
        last = self.ops[-1] if self.ops else None
        if type(op) is type(last) and isinstance(op, Take | Release):
            self.ops[-1] = type(op)(np.concatenate([last.blocks, op.blocks]))
        elif isinstance(op, Compact) and isinstance(last, Compact):
            if (op.from_rung, op.to_rung) == (last.from_rung, last.to_rung):
                self.ops[-1] = Compact(
                    np.concatenate([last.blocks, op.blocks]),
                    op.from_rung,
                    op.to_rung,
                    np.concatenate([last.starts, op.starts]),
                    np.concatenate([last.lengths, op.lengths]),
                )
            else:
                self.ops.append(op)
        else:
            self.ops.append(op)

    def drain(self) -> list[Op]:
        ops, self.ops = self.ops, []
        return ops

    def clear(self) -> None:
        self.ops.clear()

"""Re-planning: when packed blocks of running sequences are planned again. The length of a sequence alone decides.

If attention from later tokens decides what blocks keep, those of an incomplete prompt are packed with all their tokens
and planned when the prompt is complete.

With `--kvc-lag`, a block is packed with all its tokens when it leaves the window, and planned when `lag` tokens follow
it, or when its last request ends. When `lag` tokens follow it, `EVIDENCE` decode queries have read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .blocks import State

if TYPE_CHECKING:
    from .runtime import Runtime
    from .sequence import Sequence

TURNS = 16  # turns per block of growth; 16 suffice for 2^16 blocks before the window
COMPETE_EVERY = 4  # growth of an answer, in blocks, between two plans


def places_to_replan(lengths: np.ndarray, window: int, block_tokens: int) -> np.ndarray:
    """Index of the packed block to plan again in each sequence, now that `lengths` tokens are written (int64 `[n]`);
    -1: none.

    Block b leaves the window, or the lag, when b + 1 blocks precede the window. It is planned again when that number
    reaches 2 (b + 1), 4 (b + 1) and so on. Thresholds and attention scores depend on the length, so a small growth
    changes little. n blocks have fewer than n turns in total. The k-th turns of a block boundary come k * P / 16 tokens
    after it, so one step plans at most one block per request. Only the length decides, so other running requests do not
    change how a sequence is packed.
    """
    blocks, rest = np.divmod(lengths - window, block_tokens)
    turn, offset = np.divmod(rest, max(1, block_tokens // TURNS))
    due = (offset == 0) & (turn > 0) & (blocks > 0) & (blocks % (1 << turn) == 0)
    return np.where(due, (blocks >> turn) - 1, -1)


class Replanning:
    """Queues re-plans of packed blocks.

    lags: whether blocks are planned later than they leave the window.
    lag: number of tokens that follow a block when it is planned: the window, or a longer `--kvc-lag`.
    planned_again: whether planned blocks are planned again as their sequence doubles.
    """

    def __init__(self, runtime: Runtime):
        policy, config = runtime.policy, runtime.config
        self.runtime, self.block_tokens = runtime, runtime.layout.block_tokens
        self.lags, self.lag = config.lag > 0, max(config.window, config.lag)
        self.unplanned_format, self.answer_format = policy.unplanned_format, policy.answer_format
        self.planned_again = (1, 1) in policy.moves

    @property
    def max_unplanned(self) -> int:
        """Maximum tokens of a sequence with a complete prompt in packed blocks that are not planned yet."""
        if not self.lags:
            return 0
        return self.lag + (COMPETE_EVERY * self.block_tokens if self.answer_format else 0)

    def first_unplanned(self, seq: Sequence, length: int) -> int:
        """Index of the first block that is packed but not planned when it leaves the window, at `length` written
        tokens."""
        if not self.lags or seq.format_id != 1:
            return len(seq.blocks)
        return seq.prompt // self.block_tokens if self.answer_format else max(0, length - self.lag) // self.block_tokens

    def slide(self, seq: Sequence, length: int) -> tuple[list[int], list[int]]:
        """Blocks that leave the window of `seq` at `length` written tokens: those to plan, and those to plan later."""
        first = max(0, self.first_unplanned(seq, length) - seq.window_start)
        left = seq.slide(length)
        return left[:first], left[first:]

    def queue_turns(self, seqs: list[Sequence], lengths: np.ndarray) -> None:
        """Queue the re-plans that are due before the next decode step of `seqs`, of which `lengths` tokens are
        written."""
        if self.lags:
            blocks, rest = np.divmod(lengths - self.lag, self.block_tokens)
            turns = ((rest == 0) & (blocks > 0)).nonzero()[0]
            if self.answer_format:
                for i in turns.tolist():
                    self._compete(seqs[i], int(lengths[i]), int(blocks[i]))
            elif len(turns):
                ids = [seqs[i].blocks[blocks[i] - 1] for i in turns.tolist()]
                self._queue(ids, self.unplanned_format, 1, lengths[turns])
        if self.planned_again:
            places = places_to_replan(lengths, self.lag, self.block_tokens)
            if not len(turns := (places >= 0).nonzero()[0]):
                return
            self.replan([seqs[i].blocks[places[i]] for i in turns.tolist()], lengths[turns])

    def queue_held(self, ids: list[int] | np.ndarray, lengths: int | np.ndarray = 0) -> None:
        """Queue plans for those of the blocks `ids`, which a window just left, that were packed while their prompt was
        incomplete. Other requests may use them."""
        if self.unplanned_format:
            self._queue(ids, self.unplanned_format, None, lengths)

    def queue_ended(self, ids: list[int] | np.ndarray, length: int) -> None:
        """Queue plans for those of the blocks `ids` of an ended request that are not planned yet. With a lag, another
        request that uses a block plans it later."""
        if self.unplanned_format:
            self._queue(ids, self.unplanned_format, 0 if self.lags else None, length)

    def replan(self, ids: list[int] | np.ndarray, length: int | np.ndarray) -> int:
        """Queue re-plans for those of `ids` that are packed and used by one sequence only; returns how many. `length`
        is that of the sequence, or of each block's."""
        sources = [source for source, to in self.runtime.policy.moves if to == 1]
        return sum(self._queue(ids, source, 1, length) for source in sources)

    def _queue(self, ids: list[int] | np.ndarray, from_format: int, users: int | None, length: int | np.ndarray) -> int:
        """Queue plans for those of `ids` that are packed at `from_format`, that counted queries have read, that lie in
        no window and that `users` sequences use (None: any number); returns how many."""
        ids, blocks = np.asarray(ids, dtype=np.int64), self.runtime.blocks
        due = (blocks.state[ids] == State.PACKED) & (blocks.format_id[ids] == from_format)
        due &= (blocks.window_count[ids] == 0) & ~blocks.unread[ids]
        if users is not None:
            due &= blocks.ref_count[ids] == users
        lengths = (np.zeros_like(ids) + length)[due]
        return self.runtime.queue_move(ids[due], from_format=from_format, to_format=1, lengths=lengths)

    def _compete(self, seq: Sequence, length: int, end: int) -> None:
        """Each time that `COMPETE_EVERY` more blocks have passed the lag, queue one plan of the answer's blocks up to
        index `end`, which have passed it. No other request uses them, because the tree takes over an answer at its
        end."""
        first = seq.prompt // self.block_tokens
        planned, layout, policy = end - first, self.runtime.layout, self.runtime.policy
        if seq.format_id != 1 or planned <= 0 or planned % COMPETE_EVERY:
            return
        pages = policy.answer_pages(layout, planned, seq.window_start - end)
        ids = np.array(seq.blocks[first:end], dtype=np.int64)
        if pages < planned * self.runtime.store.block_formats[self.unplanned_format].pages:
            self.runtime.queue_move(
                ids, from_format=self.unplanned_format, to_format=self.answer_format,
                lengths=np.full_like(ids, length), groups=np.array([[planned, pages]]),
            )  # fmt: skip

"""CPU record of one running request: the blocks that hold its tokens, and the first block of its recent window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvc_kernels.store import SCRATCH_BLOCK

from .blocks import Blocks, State
from .one_shot import OneShotPrompt
from .thinning import probe_tokens


def extend_each(seqs: list[Sequence], rows: np.ndarray, ids: list[int]) -> None:
    """Append one block that was just taken to each of `seqs`, which are not empty and have these `rows`."""
    records, table, blocks = seqs[0].records, seqs[0].records.sequences, np.array(ids)
    for seq, block in zip(seqs, ids):
        seq.blocks.append(block)
    table.room[rows] += seqs[0].block_tokens
    table.last_block[rows] = blocks
    records.ref_count[blocks] = records.window_count[blocks] = 1


@dataclass(eq=False)
class Sequence:
    """Blocks of a request in order; the radix tree owns the first `shared` of them, which the request locks.

    records: the records of all blocks, including this sequence's ref counts.
    row: its row of `records.sequences`, where `length` lies.
    block_tokens: P.
    window: tokens of the recent window.
    blocks: block ids.
    window_start: index of the first block that lies in the window or is not full. While a prompt whose blocks are
        planned at its end is incomplete, that is the prompt's first new block, or an unread one before it.
    format_id: format of the blocks before the window, from the request's quality. 0: blocks are never compacted.
    prompt: tokens prefilled.
    whole_prompt: tokens of the whole prompt, of which a chunked prefill has written `prompt`.
    packed: blocks from `window_start` on that are packed: the request found them so in the tree, or `hold` returned
        them. The state of a block in the window of another sequence does not change.
    one_shot: the record of a request with a budget for its whole prompt, which shares no block. `blocks` names the
        scratch block at places of its gap.
    """

    records: Blocks
    block_tokens: int
    window: int
    row: int
    blocks: list[int]
    shared: int = 0
    window_start: int = 0
    format_id: int = 1
    prompt: int = 0
    whole_prompt: int = 0
    packed: int = 0
    one_shot: OneShotPrompt | None = None

    @classmethod
    def admit(
        cls, records: Blocks, block_tokens: int, window: int, prefix_blocks: np.ndarray, length: int, format_id: int = 1
    ) -> Sequence:
        """Start a request that has `length` cached tokens in `prefix_blocks` (int64)."""
        row, blocks = records.sequences.take(), prefix_blocks.tolist()
        seq = cls(records, block_tokens, window, row, blocks, shared=len(blocks), format_id=format_id)
        records.sequences.length[row] = length
        records.sequences.room[row] = len(blocks) * block_tokens
        unread = np.flatnonzero(records.unread[prefix_blocks])[:1].tolist()  # this prompt's queries will read them
        seq._start_window(min([len(blocks), max(0, length - window) // block_tokens, *unread]))
        records.ref_count[prefix_blocks] += 1
        records.window_count[prefix_blocks[seq.window_start :]] += 1
        seq.packed = records.count_packed(seq.blocks[seq.window_start :])
        return seq

    def new_block_starts(self, length: int) -> list[int]:
        """Start positions of the blocks that must be taken to hold `length` tokens."""
        return list(range(len(self.blocks) * self.block_tokens, length, self.block_tokens))

    def extend(self, ids: list[int]) -> None:
        """Append blocks that were just taken."""
        self.blocks.extend(ids)
        self.records.sequences.room[self.row] = len(self.blocks) * self.block_tokens
        self.records.sequences.last_block[self.row] = self.blocks[-1]
        self.records.ref_count[ids] += 1
        self.records.window_count[ids] += 1

    def fill(self, length: int) -> None:
        """Record that `length` tokens are written or about to be. Blocks that were already full do not change."""
        p, num_tokens = self.block_tokens, self.records.num_tokens
        for i in range(self.length // p, len(self.blocks)):
            num_tokens[self.blocks[i]] = min(p, length - i * p)
        self.records.sequences.length[self.row] = length

    def cut(self, length: int) -> list[int]:
        """Keep `length` tokens; returns the blocks after them, which are uncompressed and not shared."""
        p, table = self.block_tokens, self.records.sequences
        count = -(-length // p)
        dropped, self.blocks[count:] = self.blocks[count:], []
        table.length[self.row], table.room[self.row] = length, count * p
        table.last_block[self.row] = self.blocks[-1]
        self.records.num_tokens[self.blocks[-1]] = length - (count - 1) * p
        return dropped

    @property
    def length(self) -> int:
        """Tokens written or about to be."""
        return int(self.records.sequences.length[self.row])

    @property
    def decoding(self) -> bool:
        """Whether the last allocated forward decodes a token; otherwise it prefills."""
        return self.length > self.prompt

    @property
    def packs_at_end(self) -> bool:
        """Whether its prompt is a one-shot prompt whose final packing is not queued yet."""
        return self.one_shot is not None and not self.one_shot.packed

    @property
    def stays_uncompressed(self) -> bool:
        """Whether none of its prompt is packed before the prompt is complete."""
        return self.one_shot is not None and not self.one_shot.packed and not self.one_shot.segment_blocks

    @property
    def gap(self) -> int:
        """Number of places without tokens; the kept tokens lie in the blocks before them."""
        return 0 if self.one_shot is None else self.one_shot.dropped

    @property
    def missing(self) -> int:
        """Number of places without blocks, at the end of the gap."""
        return 0 if self.one_shot is None else self.one_shot.dropped - self.one_shot.num_spare

    def probe_tokens(self, first: int, end: int, tokens: int) -> int:
        """`thinning.probe_tokens` of its prompt."""
        return probe_tokens(0 if self.one_shot is None else self.one_shot.segment_blocks, first, end, tokens)

    def owned(self) -> list[int]:
        """The blocks of all places that have one."""
        if not self.missing:
            return self.blocks
        end = self.one_shot.first + self.gap  # type: ignore[union-attr]  # only these have a gap
        return self.blocks[: end - self.missing] + self.blocks[end:]

    def open_gap(self, first: int, end: int, num_spare: int = 0) -> None:
        """Mark the places `first` .. `end` - 1, which lie before the window, as a gap without tokens. The first
        `num_spare` of them keep their blocks for later tokens; the other places have no blocks."""
        self.blocks[first + num_spare : end] = [SCRATCH_BLOCK] * (end - first - num_spare)
        prompt = self.one_shot
        prompt.first, prompt.dropped, prompt.num_spare = first, end - first, num_spare  # type: ignore[union-attr]

    def open_tokens(self) -> int:
        """Tokens of its uncompressed blocks. Packed blocks of a cached prefix stay packed, in the window too."""
        return (len(self.blocks) - self.window_start - self.packed) * self.block_tokens

    def open_blocks(self, length: int) -> list[int]:
        """Indices of the full blocks of the first `length` tokens that stay uncompressed after the next flush."""
        return self.records.open_indices(self.blocks[: length // self.block_tokens])

    def slide(self, length: int) -> list[int]:
        """Move the window to the end of `length` written tokens; returns the blocks that left it."""
        first = max(0, length - self.window) // self.block_tokens
        left = self.blocks[self.window_start : first]
        if left:
            for block in left:  # one in a decode step, for which an array would cost more
                self.records.window_count[block] -= 1
            self._start_window(first)
            if self.packed:
                self.packed -= self.records.count_packed(left)
        return left

    def hold(self, length: int) -> np.ndarray:
        """The uncompressed blocks of an incomplete prompt that the last tokens of `length` written ones do not cover,
        int64. The caller packs them now and plans them when the prompt is complete. Until then they count as part of
        the window, so that no other sequence plans them. Blocks in windows of other sequences are left out."""
        end = max(0, length - self.window) // self.block_tokens
        behind = np.array(self.blocks[self.window_start : end], dtype=np.int64)
        held = behind[(self.records.state[behind] == State.OPEN) & (self.records.window_count[behind] == 1)]
        self.packed += len(held)
        return held

    def _start_window(self, first: int) -> None:
        self.window_start = first
        self.records.sequences.due[self.row] = self.window + (first + 1) * self.block_tokens

    def replace_with_shared(self, tree_blocks: np.ndarray) -> list[int]:
        """Take the tree's `tree_blocks` for the first blocks; returns the request's copies that they replace."""
        records, n = self.records, len(tree_blocks)
        changed = [i for i in range(self.shared, n) if self.blocks[i] != tree_blocks[i]]
        duplicates = [self.blocks[i] for i in changed]
        for i in changed:
            new = int(tree_blocks[i])
            records.ref_count[new] += 1
            if i >= self.window_start:
                records.window_count[new] += 1
                self.packed += records.count_packed([new])
            self.blocks[i] = new
        self.shared = n
        return duplicates

    def release(self) -> None:
        """End the request. The caller frees its blocks or leaves them to the tree."""
        self.records.ref_count[self.owned()] -= 1
        self.records.window_count[self.blocks[self.window_start :]] -= 1
        self.records.sequences.give_back(self.row)

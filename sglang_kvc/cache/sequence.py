"""CPU record of one running request: which blocks its tokens lie in, and from which block on they are pinned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .runtime import Runtime

TURNS = 16  # parts of a block's time; each has one turn, so 2^16 blocks behind the window could have theirs


@dataclass
class Sequence:
    """Blocks of a request in order, the first `shared` of them owned by the radix tree (locked by the request).

    Blocks from index `pinned_from` on lie in the request's window or are not full yet: they stay uncompressed. The
    others go to `rung`, which its level says; 0: no block of it is ever compacted. `prompt`: tokens prefilled.
    `length`: tokens written or about to be. `packed`: blocks from `pinned_from` on that were already packed when the
    request adopted them; a block's state does not change while a request pins it.
    """

    blocks: list[int]
    shared: int = 0
    pinned_from: int = 0
    rung: int = 1
    prompt: int = 0
    length: int = 0
    packed: int = 0

    @classmethod
    def admit(cls, runtime: Runtime, prefix_blocks: np.ndarray, length: int, rung: int = 1) -> Sequence:
        """A request starts with `length` cached tokens in `prefix_blocks`."""
        seq = cls(prefix_blocks.tolist(), shared=len(prefix_blocks), rung=rung, length=length)
        seq.pinned_from = min(len(seq.blocks), max(0, length - runtime.config.window) // runtime.layout.block_tokens)
        runtime.blocks.users[prefix_blocks] += 1
        runtime.blocks.pins[prefix_blocks[seq.pinned_from :]] += 1
        seq.packed = runtime.blocks.count_packed(seq.blocks[seq.pinned_from :])
        return seq

    def missing(self, length: int, block_tokens: int) -> list[int]:
        """Start positions of the blocks that must be taken to hold `length` tokens."""
        return list(range(len(self.blocks) * block_tokens, length, block_tokens))

    def extend(self, runtime: Runtime, ids: list[int]) -> None:
        self.blocks.extend(ids)
        runtime.blocks.users[ids] += 1
        runtime.blocks.pins[ids] += 1

    def fill(self, runtime: Runtime, length: int) -> None:
        """`length` tokens are written or about to be; whole blocks before the earlier length do not change."""
        p, filled = runtime.layout.block_tokens, runtime.blocks.filled
        for i in range(self.length // p, len(self.blocks)):
            filled[self.blocks[i]] = min(p, length - i * p)
        self.length = length

    def open_tokens(self, runtime: Runtime) -> int:
        """Tokens of its uncompressed blocks; those of a cached prefix that were packed stay so, window or not."""
        return (len(self.blocks) - self.pinned_from - self.packed) * runtime.layout.block_tokens

    def slide(self, runtime: Runtime, length: int) -> list[int]:
        """Move the window: `length` tokens are written. Returns the blocks that it left behind."""
        first = max(0, length - runtime.config.window) // runtime.layout.block_tokens
        left = self.blocks[self.pinned_from : first]
        if left:
            runtime.blocks.pins[left] -= 1
            self.pinned_from = first
            if self.packed:
                self.packed -= runtime.blocks.count_packed(left)
        return left

    def revisit(self, runtime: Runtime, length: int) -> list[int]:
        """Packed blocks that are to be planned again, none or one: `length` tokens are written.

        Block b, which left the window when b + 1 blocks lay behind it, has its turns when 2 (b + 1), 4 (b + 1), .. do:
        a plan's thresholds go by the length, and so does what a token receives, so that a little more of it changes
        little. Of n blocks all turns together are fewer than n. Those of one border are spread over the steps behind
        it, for requests of one length come to them together. The length alone decides: the same sequence is packed
        alike, whatever runs beside it.
        """
        p = runtime.layout.block_tokens
        behind, past = divmod(length - runtime.config.window, p)
        turn, early = divmod(past, max(1, p // TURNS))
        if early or turn == 0 or behind < 1 or behind % (1 << turn):
            return []
        return self.blocks[(behind >> turn) - 1 : behind >> turn]

    def adopt(self, runtime: Runtime, tree_blocks: np.ndarray) -> list[int]:
        """The tree now owns the first blocks as `tree_blocks`; returns this request's own copies that it replaced."""
        n = len(tree_blocks)
        changed = [i for i in range(self.shared, n) if self.blocks[i] != tree_blocks[i]]
        duplicates = [self.blocks[i] for i in changed]
        for i in changed:
            new = int(tree_blocks[i])
            runtime.blocks.users[new] += 1
            if i >= self.pinned_from:
                runtime.blocks.pins[new] += 1
                self.packed += runtime.blocks.count_packed([new])
            self.blocks[i] = new
        self.shared = n
        return duplicates

    def leave(self, runtime: Runtime) -> None:
        """The request is gone; its blocks are freed or left to the tree by the caller."""
        ids = np.asarray(self.blocks, dtype=np.int64)
        runtime.blocks.users[ids] -= 1
        runtime.blocks.pins[ids[self.pinned_from :]] -= 1

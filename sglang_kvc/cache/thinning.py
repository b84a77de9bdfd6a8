"""Thinning: how the cache holds a one-shot prompt that does not fit uncompressed.

Such a prompt is packed during its prefill, a *segment* of SEGMENT blocks at a time. Until the prompt is complete, each
segment keeps as many blocks as an empty server has room for: all of them, or fewer, in which every head keeps its best
tokens. The number depends only on the prompt's length and the server's settings, so an answer does not depend on other
requests.

The question, which decides what the best tokens are, comes at the end of a prompt. Each chunk therefore ends with a
*probe*: a copy of the prompt's last tokens, whose queries rank the tokens so far, as in FINCH (arXiv 2408.00167).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .one_shot import Budget

if TYPE_CHECKING:
    from .capacity import Capacity

SEGMENT = 8  # blocks
PROBE = 128  # tokens
WHOLE = 0  # value of `stays` for a prompt that is uncompressed until it is complete


def probe_tokens(stays: int, first: int, end: int, tokens: int) -> int:
    """Number of tokens at the end of the chunk `first` .. `end` - 1, of a prompt of `tokens` tokens, that are replaced
    by the prompt's last tokens. The next chunk begins with the replaced tokens and overwrites these rows."""
    thinned = 0 < stays < SEGMENT and end < tokens
    return min(PROBE, (end - first) // 2) if thinned else 0


def held_blocks(stays: int, full: int) -> int:
    """Blocks that hold the `full` full blocks of a thinned prompt when it is complete."""
    return stays * (full // SEGMENT) + full % SEGMENT


class OneShotRoom:
    """Memory needs of one-shot prompts, in the tokens of `capacity`. Every method takes the prompt's `budget`, the
    `format_id` of the kept tokens, and the tokens of a chunk (None without chunked prefill)."""

    def __init__(self, capacity: Capacity):
        self.capacity = capacity
        self.block_tokens = capacity.layout.block_tokens
        # SGLang keeps one more block free, and never gives all memory to a request.
        self.room = capacity.sizing.capacity_tokens - self.block_tokens - 2
        self.block_ids = capacity.blocks.num_blocks - 3

    def stays(self, budget: Budget, tokens: int, format_id: int, chunk: int | None) -> int | None:
        """Number of blocks that each segment of a prompt of `tokens` tokens keeps until the prompt is complete. WHOLE:
        it is not packed earlier. None: it does not fit."""
        if chunk is None or tokens <= self.room - self.block_tokens:
            return WHOLE if tokens <= self.room else None
        counts = range(SEGMENT, self._least(budget, format_id) - 1, -1)
        return next((n for n in counts if tokens <= self._longest(n, format_id, chunk)), None)

    def check_read(self, budget: Budget, tokens: int, format_id: int, chunk: int | None) -> None:
        """ValueError, in one sentence, if chunks of the prompt have probes and its client asks for more than the
        answer."""
        if 0 < (self.stays(budget, tokens, format_id, chunk) or WHOLE) < SEGMENT:
            raise ValueError(
                f"A one-shot prompt of {tokens} tokens is computed in chunks that end with its last tokens, so it can "
                f"neither be given as embeddings nor have log-probabilities or hidden states of its tokens; ask for "
                f"none, or use a prompt of up to {self.room - self.block_tokens} tokens."
            )

    def need(self, budget: Budget, tokens: int, answer: int, format_id: int, chunk: int | None) -> float:
        """Maximum memory that a prompt of `tokens` tokens with an answer of `answer` needs; more than exists if it
        never fits.

        The maximum is just before the packing, which is queued before the second token of the answer takes a block, or
        at the end of the answer."""
        stays = self.stays(budget, tokens, format_id, chunk)
        if stays is None:
            return tokens + self.capacity.sizing.capacity_tokens
        before = tokens if stays == WHOLE else self._packed_on_arrival(tokens, stays, format_id, chunk or 0)
        kept, _ = self._kept(budget, tokens, format_id, stays)
        return max(before + min(answer, self.block_tokens), kept + self.capacity.growth_tokens(answer, format_id, 0))

    def longest(self, budget: Budget, format_id: int, chunk: int | None, tokens: int | None = None) -> int:
        """Tokens, with the answer, of the longest request whose prompt has `tokens` tokens; None: any prompt. A
        retracted request returns with its answer as part of its prompt, so no request may be longer than the longest
        prompt."""
        if chunk is None:
            return self.room
        most = self._longest(self._least(budget, format_id), format_id, chunk)
        if tokens is None:
            return most
        if (stays := self.stays(budget, tokens, format_id, chunk)) is None:
            return 0
        kept, blocks = self._kept(budget, tokens, format_id, stays)
        rest, p = self.room - kept, self.block_tokens
        answer = rest if rest < p else p + (rest - p) / self.capacity.packed_tokens(1, format_id)
        return int(tokens + min(answer, most - tokens, (self.block_ids - blocks) * p))

    def _least(self, budget: Budget, format_id: int) -> int:
        """Minimum number of blocks that a segment may keep: those that the budget will pay for."""
        if budget.ratio is not None:
            share = 1 / budget.ratio / self.capacity.packed_tokens(1, format_id)
        else:  # a thinned prompt is longer than `room` less a block
            share = budget.tokens / (self.room - self.block_tokens)  # type: ignore[operator]  # one of both is set
        return math.ceil(SEGMENT * min(1, share))

    def _open(self, chunk: int) -> int:
        """Maximum tokens that are uncompressed at a time: a chunk, and a segment that is not complete."""
        return chunk + SEGMENT * self.block_tokens

    def _packed_on_arrival(self, tokens: int, stays: int, format_id: int, chunk: int) -> float:
        open_tokens = min(tokens, self._open(chunk))
        return open_tokens + self.capacity.packed_tokens((tokens - open_tokens) * stays / SEGMENT, format_id)

    def _longest(self, stays: int, format_id: int, chunk: int) -> int:
        """Tokens of the longest prompt whose segments keep `stays` blocks each."""
        p, open_tokens = self.block_tokens, self._open(chunk)
        packed = (self.room - p - open_tokens) / self.capacity.packed_tokens(stays / SEGMENT, format_id)
        blocks = (self.block_ids - SEGMENT - open_tokens // p - 1) * SEGMENT // stays
        return max(self.room - p, min(open_tokens + int(packed), blocks * p))

    def _kept(self, budget: Budget, tokens: int, format_id: int, stays: int) -> tuple[float, int]:
        """Memory of a packed prompt with its open block, and its number of blocks."""
        layout, p = self.capacity.layout, self.block_tokens
        full, tail = divmod(tokens, p)
        fmt = self.capacity.block_formats[format_id].high
        plan = budget.plan(layout, fmt, full, tokens) if full else None
        if plan is None:
            return self.capacity.packed_tokens(full * p, format_id) + tail, full + 1
        blocks = plan.kept_blocks if stays == WHOLE else min(plan.kept_blocks, held_blocks(stays, full))
        return self.capacity.tokens_of_pages(plan.pages) + tail, blocks + 1

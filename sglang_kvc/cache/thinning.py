"""Thinning: how the cache holds a one-shot prompt that does not fit uncompressed.

Such a prompt is packed during its prefill, a *segment* of SEGMENT blocks at a time. Until the prompt is complete, each
segment keeps as many blocks as an empty server has room for. If these are not all, every head fills them with its best
tokens. The number depends only on the prompt's length and the server's settings, so other requests do not change an
answer.

The question, which decides what the best tokens are, comes at the end of a prompt. Each chunk therefore ends with a
*probe*: a copy of the prompt's last tokens, whose queries rank the tokens so far, as in FINCH (arXiv 2408.00167).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .one_shot import MOST_TAIL, Budget

if TYPE_CHECKING:
    from .capacity import Capacity

SEGMENT = 8  # blocks
PROBE = 128  # tokens
UNTHINNED = 0  # `segment_blocks` of a prompt that is uncompressed until it is complete


def probe_tokens(segment_blocks: int, first: int, end: int, tokens: int) -> int:
    """Number of tokens at the end of the chunk `first` .. `end` - 1, of a prompt of `tokens` tokens, that are replaced
    by the prompt's last tokens. The next chunk begins with the replaced tokens and overwrites these rows."""
    thinned = 0 < segment_blocks < SEGMENT and end < tokens
    return min(PROBE, (end - first) // 2) if thinned else 0


def thinned_blocks(segment_blocks: int, full: int) -> int:
    """Blocks that hold the `full` full blocks of a thinned prompt when it is complete."""
    return segment_blocks * (full // SEGMENT) + full % SEGMENT


class OneShotRoom:
    """Memory needs of one-shot prompts, in the tokens of `capacity`. Every method takes the prompt's `budget`, the
    `format_id` of the kept tokens, and the tokens of a chunk (None without chunked prefill)."""

    def __init__(self, capacity: Capacity):
        self.capacity = capacity
        self.block_tokens = capacity.layout.block_tokens
        # SGLang keeps one more block free, and never gives all memory to a request.
        self.room = capacity.sizing.capacity_tokens - self.block_tokens - 2
        self.block_ids = capacity.blocks.num_blocks - 3

    def segment_blocks(self, budget: Budget, tokens: int, format_id: int, chunk: int | None) -> int | None:
        """Number of blocks that each segment of a prompt of `tokens` tokens keeps until the prompt is complete.
        UNTHINNED: the prompt is not packed before. None: it does not fit."""
        if chunk is None or tokens <= self.room - self.block_tokens:
            return UNTHINNED if tokens <= self.room else None
        counts = range(SEGMENT, self._min_segment_blocks(budget, format_id) - 1, -1)
        return next((n for n in counts if tokens <= self._longest(n, format_id, chunk)), None)

    def longest_whole(self, format_id: int, chunk: int | None) -> int:
        """Tokens of the longest prompt that keeps all of them until it is complete, so that its chunks have no probes.
        A retracted request returns with its answer as part of its prompt."""
        return self.room if chunk is None else self._longest(SEGMENT, format_id, chunk)

    def check_read(self, budget: Budget, tokens: int, format_id: int, chunk: int | None) -> None:
        """Refuse images and embeddings as input, and log-probabilities or hidden states of the prompt as output:
        ValueError, in one sentence, if chunks of the prompt end with probes."""
        if 0 < (self.segment_blocks(budget, tokens, format_id, chunk) or UNTHINNED) < SEGMENT:
            raise ValueError(
                f"A one-shot prompt of {tokens} tokens is computed in chunks that end with its last tokens, so it can "
                f"have neither images nor embeddings as input, nor log-probabilities or hidden states of its tokens "
                f"as output; use none of them, or a prompt of up to {self.longest_whole(format_id, chunk)} tokens."
            )

    def need(
        self, budget: Budget, tokens: int, answer: float, format_id: int, chunk: int | None, written: int = 0
    ) -> float:
        """Maximum memory that a prompt of `tokens` tokens with an answer of `answer` needs; above the capacity if it
        never fits. The last `written` tokens of the prompt are packed as an answer.

        The maximum is just before the packing, which is queued before the second token of the answer takes a block, or
        at the end of the answer."""
        segment_blocks = self.segment_blocks(budget, tokens, format_id, chunk)
        if segment_blocks is None:
            return tokens + self.capacity.sizing.capacity_tokens
        before = self._before_packing(tokens, segment_blocks, format_id, chunk)
        kept, _ = self._kept(budget, tokens - written, format_id, segment_blocks)
        grown = self.capacity.growth_tokens(written + answer, format_id, 0)
        return max(before + min(answer, self.block_tokens), kept + grown)

    def longest(self, budget: Budget, format_id: int, chunk: int | None, tokens: int | None = None) -> int:
        """Tokens, with the answer, of the longest request whose prompt has `tokens` tokens; None: any prompt. A
        retracted request returns with its answer as part of its prompt, so no request may be longer than the longest
        prompt."""
        if chunk is None:
            return self.room
        longest_prompt = self._longest(self._min_segment_blocks(budget, format_id), format_id, chunk)
        if tokens is None:
            return longest_prompt
        if (segment_blocks := self.segment_blocks(budget, tokens, format_id, chunk)) is None:
            return 0
        kept, blocks = self._kept(budget, tokens, format_id, segment_blocks)
        rest, p = self.room - kept, self.block_tokens
        answer = rest if rest < p else p + (rest - p) / self.capacity.packed_tokens(1, format_id)
        return int(tokens + min(answer, longest_prompt - tokens, (self.block_ids - blocks) * p))

    def _min_segment_blocks(self, budget: Budget, format_id: int) -> int:
        """Minimum number of blocks that a segment may keep: those that the budget allows in the end."""
        if budget.ratio is not None:
            share = 1 / budget.ratio / self.capacity.packed_tokens(1, format_id)
        else:  # a thinned prompt is longer than `room` less a block
            share = budget.tokens / (self.room - self.block_tokens)  # type: ignore[operator]  # one of both is set
        return math.ceil(SEGMENT * min(1, share))

    def _open(self, chunk: int) -> int:
        """Maximum tokens that are uncompressed at a time: a chunk, and a segment that is not complete."""
        return chunk + SEGMENT * self.block_tokens

    def _before_packing(self, tokens: int, segment_blocks: int, format_id: int, chunk: int | None) -> float:
        """Memory of a complete prompt before its final packing."""
        if segment_blocks == UNTHINNED:
            return tokens
        open_tokens = min(tokens, self._open(chunk or 0))
        return open_tokens + self.capacity.packed_tokens((tokens - open_tokens) * segment_blocks / SEGMENT, format_id)

    def _longest(self, segment_blocks: int, format_id: int, chunk: int) -> int:
        """Tokens of the longest prompt whose segments keep `segment_blocks` blocks each."""
        p, open_tokens = self.block_tokens, self._open(chunk)
        packed = (self.room - p - open_tokens) / self.capacity.packed_tokens(segment_blocks / SEGMENT, format_id)
        blocks = (self.block_ids - SEGMENT - open_tokens // p - 1) * SEGMENT // segment_blocks
        return max(self.room - p, min(open_tokens + int(packed), blocks * p))

    def _kept(self, budget: Budget, tokens: int, format_id: int, segment_blocks: int) -> tuple[float, int]:
        """Memory of a packed prompt with its open block, and its number of blocks."""
        layout, p = self.capacity.layout, self.block_tokens
        full, tail = divmod(tokens, p)
        fmt = self.capacity.block_formats[format_id].high
        plan = budget.plan(layout, fmt, full, tokens, MOST_TAIL) if full else None  # the tail is not known yet
        if plan is None:
            return self.capacity.packed_tokens(full * p, format_id) + tail, full + 1
        blocks = plan.kept_blocks
        if segment_blocks != UNTHINNED:
            blocks = min(blocks, thinned_blocks(segment_blocks, full))
        return self.capacity.tokens_of_pages(plan.pages) + tail, blocks + 1

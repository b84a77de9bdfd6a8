"""One-shot prompts: a request sets a budget of pages for its whole prompt, whose blocks no other request uses.

When the prompt is complete, its heads, layers and positions compete by the attention of its last queries (KV-Compress,
arXiv 2410.00161). A prompt that does not fit uncompressed is first thinned (`thinning`). `Budget` is the client's
request, `Plan` the sizes that the CPU knows when it queues the packing, and `OneShotPrompt` the record of one request.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvc_kernels.formats import Format
from kvc_kernels.layout import RING_ENTRY_BYTES, PoolLayout
from kvc_kernels.ops import LastQueries

if TYPE_CHECKING:
    from .runtime import Runtime

PREFIX = "one-shot"
WINDOW = 8  # queries at the end of a prompt that rank its tokens: KVC-w8
MOST_TAIL = 12  # tokens after the last message of a chat: its end, and what opens the answer
POOL = 7  # neighbors over which scores are pooled, as the paper does for KVC-w
REACH = 48  # tokens after a token that share its score: a long value follows what the question attends to
SHARE = 0.1  # the share of its score that these tokens get
SINKS = 4  # first tokens of a prompt, which every head keeps
HEAD_LIMIT = 4  # maximum pages of a head, as a multiple of the average
RATIOS = (1.0, 64.0)
MIN_TOKENS = 65  # a smaller number is a ratio without its x: pages hold about as many tokens


def chat_tail(tokens: Sequence[int], ends: Collection[int]) -> int:
    """Number of last `tokens` that a chat template adds after the last message: the mark of its end, one of `ends`, and
    what opens the answer. They ask nothing, so their queries do not rank the prompt's tokens. 0: it is no chat, or the
    answer is already begun."""
    last = tokens[-MOST_TAIL:]
    return next((len(last) - i for i in reversed(range(len(last))) if last[i] in ends), 0)


@dataclass(frozen=True)
class Budget:
    """Exactly one of `ratio` (times smaller than K and V in 16 bits, dropped tokens and all metadata counted) and
    `tokens` (kept per head on average)."""

    ratio: float | None = None
    tokens: int | None = None

    @classmethod
    def parse(cls, text: str, option: str | None = None) -> Budget:
        """'one-shot:16x' or 'one-shot:1024'; the value of a server `option` may omit 'one-shot:'. ValueError, in one
        sentence, for anything else."""
        prefix = f"(?:{PREFIX}:)?" if option else f"{PREFIX}:"
        m = re.fullmatch(rf"{prefix}(?:(\d{{1,3}}(?:\.\d+)?)x|(\d{{1,9}}))", text.strip().lower())
        why = "is not a budget"
        if m and m[1]:
            if RATIOS[0] <= float(m[1]) <= RATIOS[1]:
                return cls(ratio=float(m[1]))
            why = "is out of range"
        elif m:
            if int(m[2]) >= MIN_TOKENS:
                return cls(tokens=int(m[2]))
            why = "is too small a number of tokens, and lacks the x of a ratio"
        given = f"{option} {reprlib.repr(text)}" if option else f"custom_params asks for {reprlib.repr(text)}, which"
        example = "" if option else f"{PREFIX}:"
        raise ValueError(
            f'{given} {why}; give a ratio to bf16 from {RATIOS[0]:g} to {RATIOS[1]:g}, like "{example}16x", or the '
            f'tokens that a head keeps on average, {MIN_TOKENS} or more, like "{example}1024".'
        )

    def __str__(self) -> str:
        return f"{PREFIX}:{self.tokens}" if self.ratio is None else f"{PREFIX}:{self.ratio:g}x"

    def plan(self, layout: PoolLayout, fmt: Format, blocks: int, tokens: int, tail: int = 0) -> Plan | None:
        """Sizes for a prompt of `tokens` tokens with `blocks` full blocks, stored in `fmt`; None: all of it is kept.

        A head keeps at least the pages of the sinks, of the last queries' own tokens and of the `tail` tokens after
        them, so a short prompt may miss its ratio.
        """
        page_tokens, heads = layout.page(fmt).tokens, layout.layers * layout.heads
        per_block = layout.block_tokens // page_tokens
        last = max(0, WINDOW + tail - (tokens - blocks * layout.block_tokens))
        floor = -(-(SINKS + last) // page_tokens)
        if self.ratio is None:
            budget_pages = self.tokens * heads / page_tokens  # type: ignore[operator]  # one of both is set
            kept_blocks, pages = self._kept_blocks(budget_pages, heads, per_block, blocks), int(budget_pages)
        else:
            num_bytes = 4 * heads * layout.head_dim * layout.block_tokens * blocks / self.ratio
            page_bytes = layout.page_bytes + RING_ENTRY_BYTES
            kept_blocks = self._kept_blocks(num_bytes / page_bytes, heads, per_block, blocks)
            pages = int((num_bytes - kept_blocks * layout.block_meta_bytes) // page_bytes)
        pages = max(pages, floor * heads)
        if pages >= blocks * per_block * heads:
            return None
        return Plan(pages, kept_blocks, floor, last)

    @staticmethod
    def _kept_blocks(pages: float, heads: int, per_block: int, blocks: int) -> int:
        return max(1, min(blocks, int(np.ceil(HEAD_LIMIT * pages / heads / per_block))))


@dataclass(frozen=True)
class Plan:
    """Sizes of a packed prompt.

    pages: in total, over all layers and local heads.
    kept_blocks: number of blocks that the kept tokens fill, from the prompt's first; no head keeps more than they hold.
    floor: minimum pages of a head.
    last: number of last tokens of the full blocks whose queries rank all tokens, or that follow these; they are always
        kept.
    """

    pages: int
    kept_blocks: int
    floor: int
    last: int


@dataclass
class OneShotPrompt:
    """The record of one request.

    format_id: format of the kept tokens and of the answer.
    row: the request's row of `req_to_token`, -1 before it has one.
    queries: its last query rows, from the first forward of the prompt until that is packed.
    packed: whether the packing of the whole prompt is queued; the answer is then packed like any other.
    tokens: length of the prompt, whose last queries rank it. In a thinned prompt that is computed again after a
        retraction, it includes the answer so far: chunks end with copies of the last tokens of both.
    tail: number of its last tokens that a chat template added (`chat_tail`).
    segment_blocks: blocks that each segment keeps until the prompt is complete; 0: it is uncompressed until then.
    reserved: number of first places of the sequence that keep their blocks until then.
    first, dropped, num_spare: the gap: first place, number of places without tokens, and how many of these, from the
        first on, have blocks.
    """

    budget: Budget
    format_id: int
    tokens: int
    tail: int = 0
    segment_blocks: int = 0
    reserved: int = 0
    row: int = -1
    queries: LastQueries | None = field(default=None, repr=False)
    packed: bool = False
    first: int = 0
    dropped: int = 0
    num_spare: int = 0


def why_unserved(layout: PoolLayout, fmt: Format, *, windowed: bool) -> str | None:
    """The reason why no one-shot prompt can be packed in `fmt`; None: it can."""
    if windowed:
        return "this model has sliding windows, which need every token at its place"
    if layout.block_tokens % layout.page(fmt).tokens:
        return f"pages of {layout.page(fmt).tokens} tokens do not divide blocks of {layout.block_tokens} tokens"
    return None


def check_served(runtime: Runtime, *, in_session: bool, returns_experts: bool = False) -> None:
    """ValueError, in one sentence, where this server or a session cannot serve a one-shot prompt."""
    why = why_unserved(runtime.layout, runtime.store.block_formats[1].high, windowed=runtime.windowed)
    if why is None and in_session:
        why = "the next turn of a session reads the prompt, too"
    elif why is None and returns_experts:
        why = "SGLang stores routed experts by slot, and other requests reuse slots of the prompt"
    if why is None:
        return
    raise ValueError(
        f"A {PREFIX} prompt cannot be served, because {why}; drop it from custom_params to use the server's default."
    )

"""One-shot prompts: a request whose whole prompt keeps a budget of pages, for this request alone.

The heads, layers and positions of the prompt compete when it is complete, by the attention of its last queries
(KV-Compress, arXiv 2410.00161). A prompt that does not fit uncompressed is thinned before (`thinning`). `Budget` is
what the client asks for, `Plan` the sizes that the CPU knows when it queues the packing, and `OneShotPrompt` the record
of one request.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvc_kernels.layout import RING_ENTRY_BYTES, Format, PoolLayout
from kvc_kernels.ops import LastQueries

if TYPE_CHECKING:
    from .runtime import Runtime

PREFIX = "one-shot"
WINDOW = 8  # queries at the end of a prompt that rank its tokens: KVC-w8
POOL = 7  # neighbors over which scores are pooled, as the paper does for KVC-w
REACH = 48  # tokens behind a token that share its score: a long value follows what the question attends to
SHARE = 0.1  # of a score that they get
SINKS = 4  # first tokens of a prompt, which every head keeps
MOST = 4  # times the average that one head may keep
RATIOS = (1.0, 64.0)


@dataclass(frozen=True)
class Budget:
    """Exactly one of `ratio` (times smaller than K and V in 16 bits, dropped tokens and all metadata counted) and
    `tokens` (kept per head on average)."""

    ratio: float | None = None
    tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """'one-shot:16x' or 'one-shot:1024'. ValueError, in one sentence, for anything else."""
        m = re.fullmatch(rf"{PREFIX}:(?:(\d{{1,3}}(?:\.\d+)?)x|(\d{{1,9}}))", text.strip().lower())
        why = "is no budget"
        if m and m[1]:
            if RATIOS[0] <= float(m[1]) <= RATIOS[1]:
                return cls(ratio=float(m[1]))
            why = "is out of range"
        elif m:
            if int(m[2]):
                return cls(tokens=int(m[2]))
            why = "keeps nothing"
        raise ValueError(
            f"custom_params asks for {reprlib.repr(text)}, which {why}; give a ratio to bf16 from {RATIOS[0]:g} to "
            f'{RATIOS[1]:g}, like "{PREFIX}:16x", or the tokens that a head keeps on average, like "{PREFIX}:1024".'
        )

    def __str__(self) -> str:
        return f"{PREFIX}:{self.tokens}" if self.ratio is None else f"{PREFIX}:{self.ratio:g}x"

    def plan(self, layout: PoolLayout, fmt: Format, blocks: int, tokens: int) -> Plan | None:
        """Sizes for a prompt of `tokens` tokens with `blocks` full blocks, stored in `fmt`; None: all of it is kept.

        A head keeps at least the pages of the sinks and of the last queries' own tokens, so a short prompt may miss its
        ratio.
        """
        page_tokens, heads = layout.page(fmt).tokens, layout.layers * layout.heads
        per_block = layout.block_tokens // page_tokens
        last = max(0, WINDOW - (tokens - blocks * layout.block_tokens))
        floor = -(-(SINKS + last) // page_tokens)
        if self.ratio is None:
            wanted = self.tokens * heads / page_tokens  # type: ignore[operator]  # one of both is set
            kept, pages = self._blocks(wanted, heads, per_block, blocks), int(wanted)
        else:
            num_bytes = 4 * heads * layout.head_dim * layout.block_tokens * blocks / self.ratio
            page_bytes = layout.page_bytes + RING_ENTRY_BYTES
            kept = self._blocks(num_bytes / page_bytes, heads, per_block, blocks)
            pages = int((num_bytes - kept * layout.block_meta_bytes) // page_bytes)
        pages = max(pages, floor * heads)
        if pages >= blocks * per_block * heads:
            return None
        return Plan(pages, kept, floor, last)

    @staticmethod
    def _blocks(pages: float, heads: int, per_block: int, most: int) -> int:
        return max(1, min(most, int(np.ceil(MOST * pages / heads / per_block))))


@dataclass(frozen=True)
class Plan:
    """Sizes of a packed prompt.

    pages: in total, over all layers and local heads.
    kept_blocks: first blocks of the prompt, which hold all that is kept; no head keeps more than they hold.
    floor: pages that every head keeps.
    last: tokens of the full blocks whose queries rank the others, which are always kept.
    """

    pages: int
    kept_blocks: int
    floor: int
    last: int


@dataclass
class OneShotPrompt:
    """The record of one request.

    format_id: storage of what is kept, and of the answer.
    row: the request's row of `req_to_token`, -1 before it has one.
    queries: its last query rows, from the first forward of the prompt until that is packed.
    packed: whether the packing of the whole prompt is queued; the answer is then packed like any other.
    tokens: length of the prompt.
    stays: blocks of each segment that stay until the prompt is complete; 0: it is uncompressed until then.
    reserved: first places of the sequence whose blocks stay until then.
    first, dropped, held: the gap, places of the sequence without tokens, of which the first `held` have blocks.
    """

    budget: Budget
    format_id: int
    tokens: int
    stays: int = 0
    reserved: int = 0
    row: int = -1
    queries: LastQueries | None = field(default=None, repr=False)
    packed: bool = False
    first: int = 0
    dropped: int = 0
    held: int = 0


def check_served(runtime: Runtime, *, in_session: bool, returns_experts: bool = False) -> None:
    """ValueError, in one sentence, where this server or a session cannot serve a one-shot prompt."""
    layout, fmt = runtime.layout, runtime.store.block_formats[1].high
    if runtime.windowed:
        why = "this model has sliding windows, which need every token at its place"
    elif layout.block_tokens % layout.page(fmt).tokens:
        why = f"pages of {layout.page(fmt).tokens} tokens do not divide blocks of {layout.block_tokens} tokens"
    elif in_session:
        why = "the next turn of a session reads the prompt, too"
    elif returns_experts:
        why = "routed experts are kept by slot, and slots of the prompt are given to others"
    else:
        return
    raise ValueError(
        f"A {PREFIX} prompt cannot be served, because {why}; leave it out for what the server was started with."
    )

"""Capacity: how much memory a prompt, a running request or an eviction needs, and how much there is.

The unit is the token of an uncompressed block, the one SGLang counts in. A packed token costs a fraction of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvc_kernels.layout import BlockFormat, PoolLayout

from ..policies import Policy
from .blocks import NO_BLOCKS, Blocks, State
from .ledger import Ledger
from .one_shot import Budget
from .sequence import Sequence
from .sizing import Sizing
from .thinning import OneShotRoom

MEAN_BLOCKS = 256  # blocks after which the mean size of a block forgets earlier ones
RATIO_STEP = 0.1  # relative fall of SGLang's new-token ratio after which a refused prompt is tried again


@dataclass
class Capacity:
    """Answers from the ledger, the block records, sizes of earlier blocks and fixed facts. Nothing here changes a block
    or asks the device.

    block_formats: `block_formats[0]` is uncompressed.
    window: tokens of the recent window.
    """

    ledger: Ledger
    blocks: Blocks
    layout: PoolLayout
    sizing: Sizing
    block_formats: tuple[BlockFormat, ...]
    policy: Policy
    window: int
    max_unplanned: int = 0  # maximum tokens of a sequence in packed blocks that are not planned yet
    _mean_pages: dict[int, float] = field(default_factory=dict)  # of a block, by format id, where the data decide
    _exact_need: int | None = None  # set inside `exact_need`
    _full_at: int = 0  # reachable tokens at the last refusal
    _ratio_at_refusal: float = 0.0

    # ---- room

    def available_tokens(self, pages: int = 0, blocks: int = 0) -> int:
        """Tokens that an allocation gets now, as if `blocks` more blocks with `pages` pages were free."""
        return self._tokens(self.ledger.free + pages, self.blocks.free_count + blocks)

    def reachable_tokens(self, pages: int = 0, blocks: int = 0) -> int:
        """Tokens available after evicting all unlocked blocks, as if `blocks` more blocks with `pages` pages were
        unlocked. Rounded down once (twice would lose a block)."""
        return self._tokens(self.ledger.reachable + pages, self.blocks.free_count + self.ledger.idle_blocks + blocks)

    def unlocked_by_end(self, seqs: list[Sequence], kept: np.ndarray) -> tuple[int, int]:
        """Pages and number of the blocks that no running request uses any more when `seqs` end, without the blocks
        `kept` (int64)."""
        owned = [np.array(seq.owned(), dtype=np.int64) for seq in seqs]
        ids, uses = np.unique(np.concatenate([NO_BLOCKS, *owned]), return_counts=True)
        ids = np.setdiff1d(ids[uses == self.blocks.ref_count[ids]], kept)
        return int(self.ledger.charge[ids].sum()), len(ids)

    @property
    def free_pages_and_ids(self) -> tuple[int, int]:
        """Free pages and free block ids."""
        return self.ledger.free, self.blocks.free_count

    def evictable_tokens(self) -> int:
        """Tokens that eviction can add to `available_tokens`."""
        return max(0, self.reachable_tokens() - self.available_tokens())

    def _tokens(self, pages: int, block_ids: int) -> int:
        blocks = min(pages // self.layout.block_pages_bf16, block_ids)
        return max(0, min(blocks * self.layout.block_tokens, self.sizing.capacity_tokens))

    def tokens_of_pages(self, pages: int) -> float:
        """Memory of `pages` pages."""
        return pages * self.layout.block_tokens / self.layout.block_pages_bf16

    def reaches(self, pages: int, block_ids: int) -> bool:
        """Whether evicting all unlocked blocks makes room for blocks with `pages` pages in total."""
        free, idle = self.blocks.free_count, self.ledger.idle_blocks
        return pages <= self.ledger.reachable and block_ids <= free + idle

    def missing_tokens(self, pages: int, block_ids: int) -> int:
        """Tokens to evict so that `block_ids` blocks with `pages` pages in total can be taken; 0 if they fit now."""
        short = max(0, pages - self.ledger.free)
        blocks = max(-(-short // self.layout.block_pages_bf16), block_ids - self.blocks.free_count, 0)
        return blocks * self.layout.block_tokens

    def missing_pages(self, tokens: int, *, evict: bool = False) -> int:
        """Pages to free so that blocks of `tokens` tokens can be taken, regardless of free block ids. `evict`: after
        evicting all unlocked blocks."""
        free = self.ledger.reachable if evict else self.ledger.free
        return -(-tokens // self.layout.block_tokens) * self.layout.block_pages_bf16 - free

    # ---- growth

    def packed_tokens(self, tokens: float, format_id: int) -> float:
        """Maximum memory of `tokens` tokens that are packed at `format_id`."""
        if not 0 < format_id < len(self.block_formats):
            return tokens
        return tokens * self.block_formats[format_id].pages / self.layout.block_pages_bf16

    def expected_tokens(self, tokens: float, format_id: int) -> float:
        """Memory of `tokens` tokens of answers that are packed at `format_id`. If the data decide the size, it is the
        mean of earlier blocks."""
        if not 0 < format_id < len(self.block_formats):
            return tokens
        return tokens * self._mean_block_pages(format_id) / self.layout.block_pages_bf16

    @property
    def packed_capacity(self) -> float:
        """Tokens that the memory holds if all are packed in the server's own format."""
        return self.sizing.capacity_tokens / self.expected_tokens(1, 1)

    def _mean_block_pages(self, format_id: int) -> float:
        """Mean pages of earlier blocks at `format_id`. Before the first one, it is the maximum, or less if the data
        decide the tier of each token: half of the tokens are then expected in each tier."""
        if (mean := self._mean_pages.get(format_id)) is not None:
            return mean
        fmt = self.block_formats[format_id]
        if fmt.exact or fmt.low is None:
            return fmt.pages
        return min(fmt.pages, (self.layout.block_pages(fmt.high) + self.layout.block_pages(fmt.low)) / 2)

    def observe_pages(self, format_id: int, pages: np.ndarray) -> None:
        """Enter the sizes `pages` (int64 `[n]`) of n blocks that were just packed at `format_id` into its mean. The
        last `MEAN_BLOCKS` blocks have most of the weight."""
        mean = self._mean_block_pages(format_id)
        self._mean_pages[format_id] = mean + (float(pages.mean()) - mean) * min(1.0, len(pages) / MEAN_BLOCKS)

    def growth_tokens(self, tokens: float, format_id: int, open_tokens: int, prompt: int = 0) -> float:
        """Memory that a sequence with `open_tokens` uncompressed tokens needs to grow by `tokens`, of which `prompt`
        belong to its prompt.

        One more block and the rest of the window stay uncompressed. Blocks that leave the window are packed, with a lag
        at first with all their tokens. Tokens of a prompt are charged the maximum before it is complete, because a
        prefill cannot be retracted between two chunks.
        """
        first = self.layout.block_tokens + max(0, self.window - open_tokens)
        if tokens <= first:
            return tokens
        unplanned = min(tokens - first, self.max_unplanned) if format_id == 1 else 0
        packed = self.packed_tokens(unplanned, self.policy.unplanned_format)
        rest = tokens - first - unplanned
        most = min(rest, prompt)
        packed += self.packed_tokens(most, self.policy.prompt_format(format_id))
        return first + packed + self.expected_tokens(rest - most, format_id)

    def running_tokens(self, seq: Sequence | None, tokens: float, format_id: int) -> float:
        """Memory that a running request needs to grow by `tokens`. `seq` is None if the request has just ended, because
        SGLang still counts it."""
        open_tokens = seq.open_tokens() if self.window and seq is not None else self.window
        return self.growth_tokens(tokens, format_id, open_tokens)

    def new_block_tokens(self, seqs: list[Sequence], lengths: list[int] | np.ndarray) -> int:
        """Tokens of the blocks to take so that `seqs` hold `lengths` tokens; no spare block per request."""
        p, table = self.layout.block_tokens, self.blocks.sequences
        missing = -(-np.asarray(lengths) // p) * p - table.room[table.rows_of(seqs)]
        return int(np.maximum(missing, 0).sum())

    # ---- prompts

    @cached_property
    def one_shot(self) -> OneShotRoom:
        """Memory needs of one-shot prompts."""
        return OneShotRoom(self)

    def prompt_tokens(
        self, new: int, answer: float, format_id: int, chunk: int | None, budget: Budget | None = None, written: int = 0
    ) -> float:
        """Memory that a prompt of `new` uncached tokens needs at most, with that expected for an answer of `answer`.

        Two chunks and the window are uncompressed at a time, because a chunk is packed when the CPU has its result,
        after the launch of the next chunk. `chunk` is None without chunked prefill. `budget`: the budget of a one-shot
        prompt, the last `written` tokens of which are packed as an answer.
        """
        if budget is not None:
            return self.one_shot.need(budget, new, answer, format_id, chunk, written)
        unpacked = new if chunk is None else min(new, 2 * chunk + self.window)
        return unpacked + self.growth_tokens(new - unpacked + answer, format_id, unpacked, new - unpacked)

    def rest_tokens(self, seq: Sequence, rest: int, answer: float, format_id: int, chunk: int | None) -> float:
        """Memory that a partly prefilled prompt needs at most for its `rest` other tokens, in whole blocks, with that
        expected for an answer of `answer`."""
        p = self.layout.block_tokens
        if seq.stays_uncompressed:
            return rest + min(answer, p) + p
        return self.prompt_tokens(rest, answer, format_id, chunk) + p

    def longest_request(self, format_id: int, chunk: int | None) -> int:
        """Tokens of the longest request that an empty server admits, however they are divided into prompt and answer.

        SGLang admits a request only if one more page is free, and a page here is a block. With chunked prefill, the
        request may be longer than what fits uncompressed. Its packed tokens are counted at the larger maximum of those
        of a prompt and of an answer. A cached prefix leaves a fractional number of free blocks, which is rounded down.
        """
        p = self.layout.block_tokens
        room = self.sizing.capacity_tokens - p - 2
        if chunk is not None:
            max_open = 2 * chunk + self.window + p
            packed = max(self.packed_tokens(1, f) for f in (format_id, self.policy.prompt_format(format_id)))
            room = max(room, max_open + int((room - p - max_open) / packed))
        return max(1, min(room, (self.blocks.num_blocks - 3) * p))

    def prompt_ever_fits(self, new: int, format_id: int, chunk: int | None, budget: Budget | None = None) -> bool:
        """Whether an empty server admits a prompt of `new` tokens. SGLang requires one more free block, and never uses
        all memory."""
        need = self.prompt_tokens(new, 0, format_id, chunk, budget) + self.layout.block_tokens
        return need < self.sizing.capacity_tokens

    def chunk_credit(self, need: int, shortage: int, running: int, stays_uncompressed: bool = False) -> int | None:
        """Tokens that the next chunk of a prompt may draw from the reserve for answers; None: the chunk waits.

        `need`: tokens of its new blocks. `shortage`: tokens that SGLang would cut from it to keep the reserve. A chunk
        draws on the reserve only until it is packed, so it is not cut while each of the `running` requests can still
        get a block. `stays_uncompressed`: the chunk is packed only when its prompt is complete.
        """
        room = self.reachable_tokens()
        if need > room:
            return None
        others_can_grow = need + running * self.layout.block_tokens <= room
        return max(0, shortage) if others_can_grow and not stays_uncompressed else 0

    # ---- staging: fake-quantized copies of cached blocks that running windows keep uncompressed

    def staged_tokens(self, prefix: np.ndarray, format_id: int) -> int:
        """Tokens that a prompt at `format_id` stages of its cached blocks `prefix` (int64): those of uncompressed
        blocks, if its queries see blocks in the server's own fake-quantized format."""
        if not self.sizing.staged_tokens:
            return 0
        default = self.policy.fake_quant_format(self.policy.format_id_of(None))
        if self.policy.fake_quant_format(format_id) is not default:
            return 0
        return int(np.count_nonzero(self.blocks.state[prefix] == State.OPEN)) * self.layout.block_tokens

    def may_stage(self, staged: int, admitted: Iterable[int]) -> bool:
        """Whether a prompt that stages `staged` tokens may join a prefill whose prompts stage `admitted`. The reserved
        memory bounds the sum; a single prompt is always admitted."""
        if not staged:
            return True
        others = list(admitted)
        return not others or sum(others) + staged <= self.sizing.staged_tokens

    def crowds(self, share: float, need: float, hits: np.ndarray, claimed: float = 0) -> bool:
        """Whether running requests would hold more than `share` of the memory with a prompt that takes `need` tokens
        and uses the cached blocks `hits` (int64). `claimed`: tokens that other prompts of the same pass take."""
        idle = hits[self.ledger.idle[hits]]
        pages = self.ledger.limit - self.ledger.reachable + int(self.ledger.charge[idle].sum())
        return self.tokens_of_pages(pages) + claimed + need > share * self.tokens_of_pages(self.ledger.limit)

    # ---- eviction, refusal

    @contextlib.contextmanager
    def exact_need(self, tokens: int) -> Iterator[None]:
        """Context in which an eviction makes room for exactly `tokens`, without the slack that its caller asks for."""
        self._exact_need = tokens
        try:
            yield
        finally:
            self._exact_need = None

    def eviction_goal(self, requested: int) -> int:
        """Tokens that `available_tokens` must reach for an eviction of `requested` tokens."""
        goal = self.available_tokens() + requested
        return goal if self._exact_need is None else min(goal, self._exact_need)

    def remember_refusal(self, ratio: float, claimed: float = 0) -> None:
        """Record the room at which a request was just refused. `ratio`: share of their longest answers that the running
        requests are expected to write (SGLang's new-token ratio). `claimed`: tokens that loads will take next."""
        self._full_at, self._ratio_at_refusal = int(self.reachable_tokens() - claimed), ratio

    def forget_refusal(self) -> None:
        """Make `has_room_again` true: a transfer has ended, and the prompt that waits for its blocks may need less room
        than the one that was refused."""
        self._full_at = -self.layout.block_tokens

    def has_room_again(self, ratio: float) -> bool:
        """Whether at least one block became free since the last refusal, or the reserve for answers became smaller.
        Each refusal resets the marks, so the scheduler does not scan its queue in every step."""
        freed = self.reachable_tokens() >= self._full_at + self.layout.block_tokens
        return freed or ratio <= (1 - RATIO_STEP) * self._ratio_at_refusal

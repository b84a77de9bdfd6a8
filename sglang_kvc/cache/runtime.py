"""Runtime: one server's compressed cache, which owns the page store, the ledger, the block records and the op queue.

The scheduler's CPU code takes and frees blocks (`grow`, `free`) and reports written tokens to `packing`, which
fills the queue. The forward stream calls `flush` once at the start of every forward. The two share only the queue, so
stream order makes the reuse of pages safe.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvc_kernels.formats import Format
from kvc_kernels.layout import PoolLayout
from kvc_kernels.store import PageStore

from ..policies import SEQUENCE, Policy
from .blocks import NO_BLOCKS, Blocks, State
from .capacity import Capacity
from .counters import Counters
from .demotion import Demotion
from .host_tier import HostTier
from .identity import file_digest
from .ledger import Ledger
from .one_shot import Budget, OneShotPrompt
from .op_queue import NO_GROUPS, Compact, EndGap, Load, OpLog, PackPrompt, Release, Save, Take, Thin
from .page_ops import PageOps, PendingCounts
from .replanning import Replanning
from .running_share import RunningShare
from .sequence import Sequence, extend_each
from .sizing import Sizing
from .thinning import UNTHINNED, thinned_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..options.config import KvcConfig

_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process, None before its pool is built."""
    return _current


def install(runtime: Runtime | None) -> None:
    """Make `runtime` the one of this process."""
    global _current
    _current = runtime


@dataclass
class Runtime:
    """See the module docstring. All block ids that cross its interface are CPU ints or numpy arrays.

    step: number of launched forwards; stamps page counts that are on their way.
    processed: number of forwards whose results the CPU has processed.
    extending: id and sequence of every request in the extend batch allocated last, in order, which the next extend
        forward runs. Requests may share an id. In a mixed batch, decoding requests come last. If decode steps run as
        prefills, all may be decoding.
    reduce_max: reduces a vector of page counts to its maximum over the tensor-parallel ranks (identity on one rank).
    """

    config: KvcConfig
    policy: Policy
    layout: PoolLayout
    sizing: Sizing
    store: PageStore
    ledger: Ledger
    blocks: Blocks
    log: OpLog = field(default_factory=OpLog)
    counters: Counters = field(default_factory=Counters)
    step: int = 0
    processed: int = 0
    pending: deque[PendingCounts] = field(default_factory=deque)
    extending: list[tuple[str, Sequence]] = field(default_factory=list)
    reduce_max: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts
    host_tier: HostTier | None = None
    gap_blocks: int = 0  # places without a block, over all running sequences
    prompt_limit: int = sys.maxsize  # tokens of the longest prompt that SGLang accepts
    chunks_prompts: bool = True  # False: the scheduler ignores the option for chunked prefill with this model
    generates: bool = True  # False: the model embeds prompts
    decodes_as_extend: bool = False  # decode steps may run as prefills of one token (DP attention)
    windowed: bool = False  # the model has layers with sliding windows
    cleared: int = 0  # times that the cache or the disk was emptied
    weights_changed: bool = False  # since the last reset
    weights_released: bool = False  # by `--enable-memory-saver`
    released: bool = False  # the page store's memory is released, and nothing may touch it
    weights: Callable[[], bytes] = lambda: b""  # identifies the weights
    model: Callable[[], str] = lambda: ""  # identifies everything else that K and V are computed from
    _inexact_queued: bool = False  # a compaction is queued whose size depends on the data

    def __post_init__(self) -> None:
        self.replanning = Replanning(self)
        self.capacity = Capacity(
            self.ledger, self.blocks, self.layout, self.sizing, self.store.block_formats, self.policy,
            self.config.window, self.replanning.max_unplanned
        )
        self.page_ops = PageOps(self.store, self.policy, self.sizing.reserve_pages)
        self.demotion = Demotion(self)
        self.running_share = RunningShare(self.config.running_share)
        self.calibration_digest = file_digest(self.config.calibration)  # the file may change while the server runs

    def attach_host_tier(self) -> None:
        """Allocate the host memory of `config.host_memory` bytes."""
        self.host_tier = HostTier(self, self.config.host_memory)
        self.page_ops.transfers = self.host_tier.transfers

    # ---- sequences (scheduler side)

    def new_sequence(
        self, prefix_blocks: np.ndarray = NO_BLOCKS, length: int = 0, format_id: int = 1
    ) -> Sequence:
        """The record of a request that starts with `length` cached tokens in `prefix_blocks` (int64)."""
        p, window = self.layout.block_tokens, self.config.window
        return Sequence.admit(self.blocks, p, window, prefix_blocks, length, format_id)

    def new_one_shot(
        self, budget: Budget, tokens: int, format_id: int = 1, chunk: int | None = None, tail: int = 0,
        written: int = 0
    ) -> Sequence:
        """The record of a request with a budget for its prompt of `tokens` tokens, in chunks of `chunk` tokens. A chat
        template added the last `tail` tokens. Its prefill continues with `written` tokens of an answer.

        It starts without cached tokens."""
        seq = Sequence.admit(self.blocks, self.layout.block_tokens, self.config.window, NO_BLOCKS, 0, format_id=0)
        segment_blocks = self.capacity.one_shot.segment_blocks(budget, tokens + written, format_id, chunk) or UNTHINNED
        reserved = thinned_blocks(segment_blocks, tokens // self.layout.block_tokens)
        seq.one_shot = OneShotPrompt(budget, format_id, tokens, tail, segment_blocks, reserved)
        return seq

    def grow(self, seqs: list[Sequence], lengths: list[int]) -> bool:
        """Take the blocks that `seqs` need to hold `lengths` tokens, all or none; returns whether they fit."""
        starts = [seq.new_block_starts(n) for seq, n in zip(seqs, lengths)]
        ids = self.take([start for new in starts for start in new])
        if ids is None:
            return False
        at = 0
        for seq, new, n in zip(seqs, starts, lengths):
            if new:
                seq.extend(ids[at : at + len(new)])
                if self.policy.collects_scores:
                    self.blocks.prompt[ids[at : at + len(new)]] = seq.whole_prompt
                at += len(new)
            self._note_reads(seq, len(new), n)
            seq.fill(n)
        return True

    def _note_reads(self, seq: Sequence, new: int, length: int) -> None:
        """Record which blocks the counted queries of a prefill of `seq` to `length` tokens read. The last `new` blocks
        are new."""
        if not self.policy.counts_last_queries:
            return
        sampling = self.policy.score_sampling
        counted = sampling.counted(length, length - seq.length, seq.whole_prompt)
        if length // sampling.stride > (length - counted) // sampling.stride:
            self.blocks.unread[seq.blocks] = False
        elif new and length < seq.whole_prompt:
            self.blocks.unread[seq.blocks[-new:]] = True

    def grow_by_one(self, seqs: list[Sequence], lengths: np.ndarray) -> np.ndarray | None:
        """Take the blocks that `seqs` need for one more token, all or none. lengths: int64 `[n]`, including that token.

        Each sequence must hold one token less. Returns each new token's slot, int64 `[n]`; None if they do not fit.
        """
        p, table = self.layout.block_tokens, self.blocks.sequences
        rows = table.rows_of(seqs)
        room = table.room[rows]
        growing = (lengths > room).nonzero()[0]
        if len(growing):
            ids = self.take(room[growing].tolist())
            if ids is None:
                return None
            extend_each([seqs[i] for i in growing.tolist()], rows[growing], ids)
            room = table.room[rows]
        last, filled = table.last_block[rows], lengths - room + p
        table.length[rows] = lengths
        self.blocks.num_tokens[last] = filled
        return last * p + (filled - 1)

    def sequences_of(self, rids: list[str]) -> list[Sequence | None]:
        """The sequence of each request of a prefill; None for requests of the engine's own warm-up, which no scheduler
        allocated. RuntimeError if the last allocation was for other requests or in another order."""
        allocated = [rid for rid, _ in self.extending]
        if rids == allocated:
            return [seq for _, seq in self.extending]
        if not set(rids).isdisjoint(allocated):
            raise RuntimeError(
                f"a forward extends {len(rids)} requests but the last allocation was for {len(allocated)} others; "
                "--kv-backend kvc needs both to be the same batch"
            )
        return [None] * len(rids)

    def fake_quant_format(self, seqs: list[Sequence | None]) -> list[Format | None]:
        """The format in which each request's queries see full blocks fake-quantized; None: unchanged, as in a decode
        step."""
        default = self.policy.format_id_of(None)  # a warm-up asks for no level
        return [
            None if seq is not None and seq.decoding
            else self.policy.fake_quant_format(default if seq is None else seq.format_id)
            for seq in seqs
        ]  # fmt: skip

    @property
    def salt_only(self) -> bool:
        """Whether blocks depend on a request's attention and are shared only among requests with one salt."""
        return self.policy.scope == SEQUENCE and self.config.isolates_salts

    # ---- blocks (scheduler side)

    def take(self, starts: list[int]) -> list[int] | None:
        """One uncompressed block per entry of `starts` (position of its first token), None if they do not fit."""
        if not starts:
            return []
        if len(starts) * self.layout.block_tokens > self.capacity.available_tokens():
            return None
        ids = self.blocks.take(len(starts), starts)
        array = np.asarray(ids, dtype=np.int64)
        self.ledger.take(array, self.layout.block_pages_bf16)
        self.log.push(Take(array))
        return ids

    def free(self, ids: list[int] | np.ndarray) -> None:
        """Return blocks. Forwards in flight may read them until the next flush."""
        array = np.asarray(ids, dtype=np.int64)
        if len(array) == 0:
            return
        self.blocks.give_back(array)
        self.ledger.drop(array)
        self.log.push(Release(array))

    def queue_due(self, ids: list[int] | np.ndarray, format_id: int = 1, length: int | np.ndarray = 0) -> int:
        """Queue the full blocks among `ids` that are open and in no window, to be packed at `format_id`; returns how
        many. Unread ones keep all their tokens.

        `length` is N of the sequence, or of each block's, while it decodes, 0 in the prompt phase.
        """
        if len(ids) == 0 or not 0 < format_id < len(self.store.block_formats):
            return 0
        array = np.asarray(ids, dtype=np.int64)
        due = (self.blocks.state[array] == State.OPEN) & (self.blocks.window_count[array] == 0)
        if not isinstance(length, np.ndarray):
            length = np.full(len(array), length)
        unread, moved = self.blocks.unread[array], 0
        for part, to_format in ((due & ~unread, format_id), (due & unread, self.policy.unplanned_format)):
            moved += self.queue_move(array[part], from_format=0, to_format=to_format, lengths=length[part])
        return moved

    def cut(self, seq: Sequence, length: int) -> None:
        """Drop all tokens of `seq` after the first `length`; their blocks must be private."""
        self.free(seq.cut(length))

    def free_sequence(self, seq: Sequence) -> None:
        """Return the blocks of an ended sequence that the tree did not take over."""
        self.free(seq.owned()[seq.shared :])
        if seq.gap:
            self.gap_blocks -= seq.missing
            self.log.push(EndGap(seq.one_shot.row, NO_BLOCKS))  # type: ignore[union-attr]  # only these have a gap

    def queue_move(
        self, due: np.ndarray, *, from_format: int, to_format: int, lengths: np.ndarray, groups: np.ndarray = NO_GROUPS
    ) -> int:
        """Queue the blocks `due` to be moved between two formats; returns how many. See `Compact`."""
        if len(due) == 0:
            return 0
        target = self.store.block_formats[to_format]
        # An exact size is credited now. Otherwise the upper bound is charged until the count comes back. A move never
        # takes more pages than it leaves, so the present charge covers a re-plan.
        self.ledger.lower(due, target.pages)
        blocks = self.blocks
        self.log.push(Compact(
            due, from_format, to_format, blocks.start[due], lengths, blocks.prompt[due], blocks.generation[due], groups
        ))  # fmt: skip
        self._inexact_queued |= not target.exact
        self.blocks.state[due] = State.PACKED
        self.blocks.format_id[due] = to_format
        self.counters.compactions += len(due)
        return len(due)

    def reset(self) -> None:
        """Forget everything (flush_cache; nothing is running)."""
        self.running_share = RunningShare(self.config.running_share)
        self.page_ops.synchronize()
        for queued in (self.log, self.pending, self.extending):
            queued.clear()
        self._inexact_queued = self.weights_changed = False
        self.gap_blocks = 0
        self.cleared += 1
        self.page_ops.gaps.reset()
        if self.host_tier is not None:
            self.host_tier.reset()
        self.blocks.reset()
        self.ledger.reset()
        if not self.released:
            self.store.reset()

    def release(self) -> None:
        """Stop touching the page store, because its memory is about to be released (`--enable-memory-saver`). Nothing
        is running, and a reset follows."""
        self.page_ops.synchronize()
        self.released = True

    def resume(self) -> None:
        """Start with an empty page store, whose memory is back at the same addresses with undefined content."""
        self.store.erase()
        self.page_ops.synchronize()
        self.released = False

    # ---- queue (forward stream) and page counts

    def flush(self, *, all_loads: bool = False) -> None:
        """Apply all queued operations in order. Called on the forward stream before any layer runs. Copies of a long
        load are spread over several flushes, unless `all_loads`."""
        self._inexact_queued = False
        began = time.perf_counter()
        for op in self.log.drain():
            self.pending += self.page_ops.run(op, self.step)
            began, spent = (now := time.perf_counter()), 1e3 * (now - began)
            if isinstance(op, Compact | PackPrompt | Thin):
                self.counters.compaction_ms += spent
            elif isinstance(op, Save | Load):
                self.counters.transfer_ms += spent
        if self.host_tier is not None:
            self.host_tier.transfers.end_batch()
        if self.page_ops.loads_left:
            self.page_ops.launch_loads(all_of_them=all_loads)
            self.counters.transfer_ms += 1e3 * (time.perf_counter() - began)

    def harvest(self, step: int) -> None:
        """Enter the page counts of compactions up to those at the start of forward `step`, whose results the CPU has
        processed.

        Counts of blocks that were freed in the meantime are dropped: their generation has moved on.
        """
        ready = []
        while self.pending and self.pending[0].step <= step:
            ready.append(self.pending.popleft())
        if not ready:
            return
        counts = self.reduce_max(torch.cat([p.counts for p in ready]).to(torch.int64)).numpy()
        at = 0
        for p in ready:
            pages = counts[at : at + len(p.blocks)]
            at += len(p.blocks)
            same = self.blocks.generation[p.blocks] == p.generation
            self.ledger.lower(p.blocks[same], pages[same])
            self.capacity.observe_pages(p.format_id, pages)

    @property
    def unsettled(self) -> bool:
        """Whether operations are queued, copies of loads are to be launched, or page counts are on their way."""
        return bool(len(self.log) or self.pending or self.page_ops.loads_left)

    @property
    def overcharged(self) -> bool:
        """Whether settling may lower charges: page counts are on their way, or a queued compaction will yield some."""
        return self._inexact_queued or bool(self.pending)

    def settle(self) -> None:
        """Flush and harvest with a sync: at idle, and before a retraction.

        The device is also synchronized before the flush, because a forward on another stream may still read what the
        queue changes."""
        self.page_ops.synchronize()
        self.flush(all_loads=True)
        self.page_ops.synchronize()
        self.harvest(self.step)

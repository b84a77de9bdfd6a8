"""One server's compressed cache: page store, ledger, block records and the operation queue, behind a few verbs.

The scheduler's CPU code calls `take`, `free`, `queue_due`; the forward stream calls `flush` once at the start of every
forward. Between the two there is only the queue, so stream order makes the reuse of pages safe.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.layout import Format, PoolLayout
from kvc_kernels.store import PageStore

from ..options.config import SALT, KvcConfig
from ..policies import SEQUENCE, Evidence, Policy, make_policy
from .blocks import Blocks, State
from .capacity import Capacity
from .ledger import Ledger
from .op_queue import Compact, OpLog, Release, Take
from .sequence import Sequence
from .sizing import Sizing, make_layout, size_server

if TYPE_CHECKING:
    from collections.abc import Callable

NO_BLOCKS = np.empty(0, dtype=np.int64)
_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process, None before its pool was built."""
    return _current


def install(runtime: Runtime | None) -> None:
    global _current
    _current = runtime


@dataclass
class Counters:
    """Totals since start, for the log line and the metrics."""

    compactions: int = 0  # blocks compacted
    compaction_ms: float = 0.0  # host time of the flushes that compacted (CPU: the work itself)
    evicted_blocks: int = 0


@dataclass
class PendingCounts:
    """Page counts of a threshold compaction, on their way from the device."""

    step: int
    blocks: np.ndarray
    generation: np.ndarray
    counts: torch.Tensor


@dataclass
class Runtime:
    """See the module docstring. All block ids that cross its interface are CPU ints or numpy arrays."""

    config: KvcConfig
    policy: Policy
    layout: PoolLayout
    sizing: Sizing
    store: PageStore
    ledger: Ledger
    blocks: Blocks
    log: OpLog = field(default_factory=OpLog)
    counters: Counters = field(default_factory=Counters)
    step: int = 0  # forwards launched; stamps counts that are still under way
    processed: int = 0  # forwards whose results the CPU has seen
    pending: deque[PendingCounts] = field(default_factory=deque)
    # Id and sequence of every request in the extend batch that was allocated last, in its order. The next extend
    # forward is that batch's and names its requests by id, which several may have.
    extending: list[tuple[str, Sequence]] = field(default_factory=list)
    # Reduces a vector of page counts to its maximum over the tensor-parallel ranks (identity on one rank).
    reduce_max: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts
    _open_queued: bool = False  # a compaction is queued whose outcome depends on the data

    def __post_init__(self) -> None:
        self.capacity = Capacity(
            self.ledger, self.blocks, self.layout, self.sizing, self.store.ladder, self.policy, self.config.window
        )

    @classmethod
    def build(
        cls,
        config: KvcConfig,
        *,
        num_bytes: int,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Runtime:
        """Size and allocate everything. ValueError (one sentence) if `num_bytes` is too small or the policy does not
        fit the model."""
        policy = make_policy(config)
        layout = make_layout(config, policy, layers=layers, heads=heads, head_dim=head_dim)
        policy.check(layout)
        ladder = policy.ladder(layout)
        sizing = size_server(num_bytes, config, policy, layout, ladder, dtype.itemsize)
        store = PageStore.create(
            layout,
            ladder,
            num_pages=sizing.num_pages,
            num_blocks=sizing.num_blocks,
            dtype=dtype,
            device=device,
        )
        return cls(
            config,
            policy,
            layout,
            sizing,
            store,
            Ledger(sizing.num_blocks, sizing.chargeable_pages),
            Blocks(sizing.num_blocks),
        )

    # ---- block life cycle (scheduler side)

    def new_sequence(self, prefix_blocks: np.ndarray = NO_BLOCKS, length: int = 0, rung: int = 1) -> Sequence:
        """The record of a request that starts with `length` cached tokens in `prefix_blocks`."""
        return Sequence.admit(
            self.blocks, self.layout.block_tokens, self.config.window, prefix_blocks, length, rung
        )

    def take(self, starts: list[int]) -> list[int] | None:
        """One uncompressed block per entry of `starts` (position of its first token), None if they do not fit."""
        if not starts:
            return []
        if len(starts) * self.layout.block_tokens > self.capacity.available_tokens():
            return None
        ids = self.blocks.take(len(starts), starts)
        array = np.asarray(ids, dtype=np.int64)
        self.ledger.set(array, self.layout.block_pages_bf16)
        self.log.push(Take(array))
        return ids

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
                at += len(new)
            seq.fill(n)
        return True

    def free(self, ids: list[int] | np.ndarray) -> None:
        """Return whole blocks; what is in flight on the device still reads them until the next flush."""
        array = np.asarray(ids, dtype=np.int64)
        if len(array) == 0:
            return
        self.blocks.give_back(array)
        self.ledger.drop(array)
        self.log.push(Release(array))

    def queue_due(self, ids: list[int] | np.ndarray, rung: int = 1, length: int = 0) -> int:
        """Queue those of `ids` that are uncompressed, complete and in nobody's window for `rung`; returns how many.

        `ids` must be blocks that are full. `length` is N of the sequence while generating, 0 in the prompt phase.
        """
        if not 0 < rung < len(self.store.ladder):
            return 0
        array = np.asarray(ids, dtype=np.int64)
        due = array[(self.blocks.state[array] == State.OPEN) & (self.blocks.window_count[array] == 0)]
        self._queue(due, from_rung=0, to_rung=rung, length=length)
        return len(due)

    def replan(self, ids: list[int] | np.ndarray, length: int) -> int:
        """Queue those of `ids`, blocks of one sequence, that are packed and in no other's use to be planned again, now
        that it is `length` tokens long; returns how many."""
        array = np.asarray(ids, dtype=np.int64)
        rung = len(self.store.ladder) - 1
        own = (self.blocks.state[array] == State.PACKED) & (self.blocks.ref_count[array] == 1)
        due = array[own & (self.blocks.rung[array] == rung)]
        self._queue(due, from_rung=rung, to_rung=rung, length=length)
        return len(due)

    def _queue(self, due: np.ndarray, *, from_rung: int, to_rung: int, length: int) -> None:
        if len(due) == 0:
            return
        target = self.store.ladder[to_rung]
        # A fixed outcome is credited now. An open one is charged its upper bound until the count comes back; moves
        # never take more pages than they leave, so a re-plan is covered by the present charge.
        self.ledger.set(due, np.minimum(self.ledger.charge[due], target.pages))
        lengths = np.full(len(due), length, dtype=np.int64)
        generations = self.blocks.generation[due].copy()
        self.log.push(Compact(due, from_rung, to_rung, self.blocks.start[due], lengths, generations))
        self._open_queued |= not target.exact
        self.blocks.state[due] = State.PACKED
        self.blocks.rung[due] = to_rung
        self.counters.compactions += len(due)

    def sequences_of(self, rids: list[str]) -> list[Sequence | None]:
        """The sequence of each request of an extend forward; None for those of the engine's own warm-up, which no
        scheduler allocated. RuntimeError if some of them, but not these in this order, were allocated last."""
        known = [rid for rid, _ in self.extending]
        if rids == known:
            return [seq for _, seq in self.extending]
        if not set(rids).isdisjoint(known):
            raise RuntimeError(
                f"a forward extends {len(rids)} requests but the last allocation was for {len(known)} others; "
                "--kv-backend kvc needs both to be the same batch"
            )
        return [None] * len(rids)

    def stored_as(self, seqs: list[Sequence | None]) -> list[Format | None]:
        """For each request: as what its full blocks are seen by queries behind them, None as they are."""
        default = self.policy.rung_of(None)  # a warm-up asks for no level
        return [self.policy.stored_as(default if seq is None else seq.rung) for seq in seqs]

    def reset(self) -> None:
        """Forget everything (flush_cache; nothing is running)."""
        self._synchronize()
        self.log.clear()
        self.pending.clear()
        self.extending.clear()
        self._open_queued = False
        self.blocks.reset()
        self.ledger.reset()
        self.store.reset()

    # ---- device side

    def flush(self) -> None:
        """Apply all queued operations in order. Called on the forward stream before any layer runs."""
        if not len(self.log):
            return
        began = time.perf_counter()
        compacted = self._open_queued = False
        for op in self.log.drain():
            if isinstance(op, Take):
                self._ring.take_bf16(self.store, self._to_device(op.blocks))
            elif isinstance(op, Release):
                self._ring.release(self.store, self._to_device(op.blocks))
            else:
                self._compact(op)
                compacted = True
        if compacted:
            self.counters.compaction_ms += 1e3 * (time.perf_counter() - began)

    @functools.cached_property
    def _move(self) -> Callable[..., torch.Tensor]:
        """The compaction of this device: one kernel on a GPU, plain torch elsewhere; both write the same bytes."""
        if self.store.device.type == "cuda":
            from kvc_kernels.compact.launch import compact_triton

            return compact_triton
        return ops.compact

    @functools.cached_property
    def _ring(self) -> ModuleType:
        """Taking and returning of whole blocks on this device: a few kernels on a GPU, plain torch elsewhere."""
        if self.store.device.type == "cuda":
            from kvc_kernels.pages import kernel as ring_triton

            return ring_triton
        return ops

    def _to_device(self, ids: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(ids)
        if self.store.device.type == "cpu":
            return host
        return host.pin_memory().to(self.store.device, non_blocking=True)

    def _compact(self, op: Compact) -> None:
        """Plan and move, in waves whose destination pages fit the reserve."""
        target = self.store.ladder[op.to_rung]
        wave = max(1, self.sizing.reserve_pages // target.pages)
        for at in range(0, len(op.blocks), wave):
            ids = op.blocks[at : at + wave]
            blocks = self._to_device(ids)
            evidence = Evidence(
                self.store,
                blocks,
                self._to_device(op.starts[at : at + wave]),
                self._to_device(op.lengths[at : at + wave]),
                op.from_rung,
                self.observe,
            )
            tiers = self.policy.plan(evidence, target)
            counts = self._move(self.store, blocks, op.to_rung, tiers, from_rung=op.from_rung)
            if not target.exact:
                host = self._to_host(counts)
                self.pending.append(PendingCounts(self.step, ids, op.generations[at : at + wave], host))

    def _to_host(self, counts: torch.Tensor) -> torch.Tensor:
        if not counts.is_cuda:
            return counts
        host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        return host.copy_(counts, non_blocking=True)

    def harvest(self, step: int) -> None:
        """Enter the page counts of compactions that ran before forward `step`, whose results the CPU has seen.

        Counts of blocks that were freed meanwhile are dropped: their generation has moved on.
        """
        ready = []
        while self.pending and self.pending[0].step <= step:
            ready.append(self.pending.popleft())
        if not ready:
            return
        counts = self.reduce_max(torch.cat([p.counts for p in ready]).to(torch.int64)).numpy()
        at = 0
        for p in ready:
            mine = counts[at : at + len(p.blocks)]
            at += len(p.blocks)
            same = self.blocks.generation[p.blocks] == p.generation
            self.ledger.set(p.blocks[same], np.minimum(mine[same], self.ledger.charge[p.blocks[same]]))

    @property
    def unsettled(self) -> bool:
        return bool(len(self.log) or self.pending)

    @property
    def overcharged(self) -> bool:
        """Whether settling may free memory: page counts are under way, or compactions that yield some are queued."""
        return self._open_queued or bool(self.pending)

    def settle(self) -> None:
        """Flush and harvest with a sync: at idle, and before giving up on memory.

        Of the whole device, and ahead of the flush, too: this may be another stream than that of a forward which still
        reads what the queue changes, and whose counts are harvested.
        """
        self._synchronize()
        self.flush()
        self._synchronize()
        self.harvest(self.step)

    def _synchronize(self) -> None:
        if self.store.device.type == "cuda":
            torch.cuda.synchronize(self.store.device)

    # ---- attention

    @property
    def salt_only(self) -> bool:
        """Whether blocks carry evidence of other requests, and are shared only between requests with the same salt."""
        return self.policy.scope == SEQUENCE and self.config.trust == SALT

    @functools.cached_property
    def observe(self) -> ops.Observe | None:
        return self.policy.collects

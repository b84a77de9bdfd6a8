"""Disk tier: stored blocks are written to a record store, and read back if no faster tier has them.

Separate threads write and read the store. The scheduler's thread only starts these operations and checks for their end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .block_store import BlockStore, Stored
from .use_order import BLOCK_NS

if TYPE_CHECKING:
    from .host_tier import HostTier

MAX_WRITES = 256  # writes under way
MAX_WAITING = 2  # waiting writes for each unit of host memory; each stored block has at least one unit
LOOKUP_SECONDS = 2.0  # a prompt waits at most this long for a lookup, and a flush for writes
STALL_SECONDS = 60.0  # a prompt waits for reads until none of them has begun or ended for this long
USE_SECONDS = 1.0  # uses of a block within this time count once
SAVE_SECONDS = 60.0  # uses are saved this often; a killed server loses those after the last time


@dataclass(eq=False)
class _Write:
    """A stored block, and its generation, whose record is written under `key`. use: its last use. cleared: how often
    the store had been cleared."""

    i: int
    generation: int
    key: bytes
    use: int
    cleared: int


@dataclass(eq=False)
class Fetch:
    """Reads under way, from the store into the stored blocks `ids` of host memory.

    The reads begin when all saves below the number `after` have ended, since those may write to the same memory.
    moved: time at which one of them last began or ended."""

    ids: np.ndarray
    keys: list[bytes]
    sizes: list[int]
    after: int
    reads: list[Future[Stored | None]] = field(default_factory=list)
    moved: float | None = None
    abandoned: bool = False
    copying: threading.Lock = field(default_factory=threading.Lock)

    @property
    def finished(self) -> bool:
        return bool(self.reads) and all(read.done() for read in self.reads)

    @property
    def found(self) -> int:
        """Number of blocks, from the first on, whose records were intact. Reads that have not ended found nothing."""
        intact = (read.done() and not read.cancelled() and read.result() is not None for read in self.reads)
        return next((i for i, is_intact in enumerate(intact) if not is_intact), len(self.reads))

    def abandon(self) -> None:
        """Let reads that have not ended write nothing to host memory from now on."""
        for read in self.reads:
            read.cancel()
        with self.copying:
            self.abandoned = True


class Lookup:
    """A lookup of a prompt's records in the store, which is abandoned after `LOOKUP_SECONDS`."""

    def __init__(self, answer: Future[list[int]]):
        self.answer, self.until = answer, time.monotonic() + LOOKUP_SECONDS

    @property
    def finished(self) -> bool:
        return self.answer.done() or time.monotonic() > self.until

    @property
    def sizes(self) -> list[int]:
        """Bytes of the records, from the first on; empty if there was no answer."""
        return self.answer.result() if self.answer.done() else []


class DiskTier:
    """Moves records between `tier`'s host memory and `store`."""

    def __init__(self, tier: HostTier, store: BlockStore):
        self.tier, self.store = tier, store
        self._readers = ThreadPoolExecutor(store.threads, "kvc-disk-read")
        self._writers = ThreadPoolExecutor(store.threads, "kvc-disk-write")
        self._lookup_thread = ThreadPoolExecutor(1, "kvc-disk-lookup")
        self._lookups: deque[Lookup] = deque()
        self._writes: dict[bytes, _Write] = {}  # waiting or under way
        self._waiting: deque[_Write] = deque()
        self._writing: deque[tuple[Future, _Write]] = deque()
        self._cleared = 0  # how often the store was cleared
        self._use_time, self._save_at = 0, time.monotonic() + SAVE_SECONDS
        self._epoch = time.time_ns() - time.monotonic_ns()  # the clock may be set back while the server runs
        self._fetches: deque[Fetch] = deque()  # whose reads are not submitted
        self._moved = time.monotonic()  # when any read began or ended last
        self._hanging: list[Future] = []  # reads that were abandoned and may not have ended
        self.written_blocks = 0  # since start

    # ---- uses

    def use_time(self) -> int:
        """The time of a use that happens now. It changes once in `USE_SECONDS`, so that callers can skip blocks that
        they have touched at this time."""
        now = self._epoch + time.monotonic_ns()
        if now - self._use_time > 1e9 * USE_SECONDS:
            self._use_time = now
        return self._use_time

    def touch(self, keys: Sequence[bytes], use: int) -> None:
        """Note a use of adjacent blocks of a prompt, of the first one at `use`."""
        if self._writes:
            for i, key in enumerate(keys):
                if (write := self._writes.get(key)) is not None:
                    write.use = use - BLOCK_NS * i
        self.store.touch(keys, use)

    # ---- to the disk

    def write_behind(self, ids: np.ndarray, keys: Sequence[bytes], first: int = 0) -> bool:
        """Write the stored blocks `ids` under `keys` when their records are in host memory. A block that leaves host
        memory earlier is not written. Returns whether any is new. first: blocks before them in their prompt."""
        generations, use, before = self.tier.generation[ids].tolist(), self.use_time(), len(self._waiting)
        for at, (i, generation, key) in enumerate(zip(ids.tolist(), generations, keys), first):
            if self.store.record_bytes(key) is None:
                self._writes[key] = _Write(i, generation, key, use - BLOCK_NS * at, self._cleared)
                self._waiting.append(self._writes[key])
        any_new = len(self._waiting) > before
        if len(self._waiting) > MAX_WAITING * self.tier.memory.num_units:  # the store is slow or hangs
            self._drop_outdated()
        return any_new

    def _drop_outdated(self) -> None:
        """Forget waiting writes of blocks that have left host memory."""
        waiting, self._waiting = self._waiting, deque()
        for write in waiting:
            if self.tier.generation[write.i] == write.generation:
                self._waiting.append(write)
            else:
                self._end_write(write)

    def poll(self) -> None:
        """Start reads and writes, collect finished writes, and save uses. The scheduler calls this in every turn."""
        while self._fetches and self._fetches[0].after <= self.tier.transfers.num_saved():
            fetch = self._fetches.popleft()
            parts = zip(fetch.ids.tolist(), fetch.keys, fetch.sizes)
            fetch.reads = [self._readers.submit(self._read, fetch, i, key, size) for i, key, size in parts]
            self._moved = time.monotonic()
        while self._writing and self._writing[0][0].done():
            future, write = self._writing.popleft()
            self.written_blocks += future.exception() is None and future.result()
            self._end_write(write)
        while self._waiting and len(self._writing) < MAX_WRITES:
            write = self._waiting[0]
            if self.tier.generation[write.i] != write.generation:
                self._end_write(write)
            elif self.tier.is_saved(write.i):
                self._writing.append((self._writers.submit(self._write, self.store, write), write))
            else:
                break
            self._waiting.popleft()
        if time.monotonic() > self._save_at:
            self._save_at = time.monotonic() + SAVE_SECONDS
            self._writers.submit(self.store.save_uses)

    def _end_write(self, write: _Write) -> None:
        if self._writes.get(write.key) is write:
            del self._writes[write.key]

    def _write(self, store: BlockStore, write: _Write) -> bool:
        """Write a copy of a record, unless its block left host memory while it was copied; returns whether it is
        stored.

        Host memory thus never waits for a disk, and all ranks have the same room in it whatever their disks do."""
        tier, i = self.tier, write.i
        stored = Stored(*(int(facts[i]) for facts in (tier.format_id, tier.pages, tier.start, tier.prompt)))
        units = tier.units[i]
        record = tier.memory.data.numpy()[units[units >= 0]].ravel()
        if tier.generation[i] != write.generation or write.cleared != self._cleared:
            return False
        use = write.use
        written = store.write(write.key, stored, record[: tier.layout.record.num_bytes(stored.pages)], use)
        if written and write.use != use:  # used in the meantime
            store.touch([write.key], write.use)
        if written and write.cleared != self._cleared:  # the store was cleared in the meantime
            store.remove(write.key)
            return False
        return written

    # ---- from the disk

    def record_sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of the records of `keys`, up to the first missing one. None is found while an abandoned read hangs."""
        return [] if self._hangs() else self._find(keys)

    def _hangs(self) -> bool:
        self._hanging = [read for read in self._hanging if not read.done()]
        return bool(self._hanging)

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        """Look the records of `keys` up. The store may take its time to answer."""
        tier, sizes = self.tier, self.store.find(keys)
        min_size, max_size = tier.layout.record.num_bytes(0), tier.units.shape[1] * tier.layout.unit_bytes
        for n, (key, size) in enumerate(zip(keys, sizes)):
            if not min_size <= size <= max_size:
                self.store.forget(key, "its size is wrong")
                return sizes[:n]
        return sizes

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """Start `record_sizes` in a thread. While an earlier lookup is overdue or an abandoned read hangs, no lookup
        starts and the result is empty."""
        while self._lookups and self._lookups[0].answer.done():
            self._lookups.popleft()
        if not (self._lookups and self._lookups[0].finished) and not self._hangs():
            lookup = Lookup(self._lookup_thread.submit(self._find, list(keys)))
            self._lookups.append(lookup)
            return lookup
        no_records: Future[list[int]] = Future()
        no_records.set_result([])
        return Lookup(no_records)

    def fetch(self, keys: Sequence[bytes], sizes: Sequence[int], room: Sequence[int]) -> Fetch:
        """Read the records of `keys`, which have `sizes` bytes, into host memory for records of `room` bytes. The
        caller has checked that it is free."""
        fetch = Fetch(self.tier.reserve(room), list(keys), list(sizes), self.tier.transfers.next_batch)
        self._fetches.append(fetch)
        return fetch

    def ended(self, fetch: Fetch) -> bool:
        """Whether the reads have ended, or make no progress for `STALL_SECONDS`. Reads that have not begun wait for
        those of other prompts, whose progress counts."""
        if not fetch.reads or fetch.finished:
            return fetch.finished
        moved = self._moved if fetch.moved is None else fetch.moved
        return time.monotonic() - moved > STALL_SECONDS

    def abandon(self, fetch: Fetch) -> None:
        """Give up reads that have not ended. Their blocks can be freed at once."""
        fetch.abandon()
        self._hanging += [read for read in fetch.reads if not read.done()]

    def _read(self, fetch: Fetch, i: int, key: bytes, size: int) -> Stored | None:
        """Read a record, and copy it to host memory unless its fetch was abandoned in the meantime.

        A read that hangs thus never writes to memory that has been given to other blocks."""
        tier = self.tier
        fetch.moved = self._moved = time.monotonic()
        units = np.empty((-(-size // tier.memory.unit_bytes), tier.memory.unit_bytes), dtype=np.uint8)
        stored = self.store.read(key, units.ravel()[:size])
        fetch.moved = self._moved = time.monotonic()
        if stored is None:
            return None
        with fetch.copying:
            if fetch.abandoned:
                return None
            tier.memory.data.numpy()[tier.units[i][: len(units)]] = units
            tier.format_id[i], tier.pages[i] = stored.format_id, stored.pages
            tier.start[i], tier.prompt[i] = stored.start, stored.prompt
        return stored

    # ---- records

    def synchronize(self) -> None:
        """Wait for writes under way, up to `LOOKUP_SECONDS`, and forget everything that has not begun. A later write
        finds that its block has left host memory."""
        self._fetches.clear()
        wait([write for write, _ in self._writing], LOOKUP_SECONDS)
        self._forget_writes()

    def clear(self) -> bool:
        """Remove all records; returns whether the store could. Blocks that wait for their write are not written any
        more. Writes that take more than `LOOKUP_SECONDS` to end remove their record themselves."""
        self._cleared += 1
        wait([write for write, _ in self._writing if not write.cancel()], LOOKUP_SECONDS)
        self._forget_writes()
        return self.store.clear()

    def _forget_writes(self) -> None:
        for writes in (self._waiting, self._writing, self._writes):
            writes.clear()

    def close(self) -> None:
        for threads in (self._readers, self._writers, self._lookup_thread):
            threads.shutdown(wait=False, cancel_futures=True)

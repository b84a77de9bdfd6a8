"""Disk tier: stored blocks are written to files behind host memory, and read back where no tier above has them.

Files are written and read by threads of their own. The scheduler's thread only starts them and looks what has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .disk_store import DiskStore, Stored

if TYPE_CHECKING:
    from .host_tier import HostTier

THREADS = 4  # that read; as many write
MOST_WRITES = 256  # blocks on their way to the disk


@dataclass
class Fetch:
    """Records on their way from files to the stored blocks `ids` of host memory.

    The reads begin when all saves below the number `after` have ended, since those may write to the same memory."""

    ids: np.ndarray
    keys: list[bytes]
    sizes: list[int]
    after: int
    reads: list[Future[Stored | None]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.reads) and all(read.done() for read in self.reads)

    @property
    def found(self) -> int:
        """Blocks from the first on whose files were right."""
        wrong = (i for i, read in enumerate(self.reads) if read.result() is None)
        return next(wrong, len(self.reads))


class DiskTier:
    """Moves records between `tier`'s host memory and `store`."""

    def __init__(self, tier: HostTier, store: DiskStore):
        self.tier, self.store = tier, store
        self._readers = ThreadPoolExecutor(THREADS, "kvc-disk-read")
        self._writers = ThreadPoolExecutor(THREADS, "kvc-disk-write")
        self._waiting: deque[tuple[int, int, bytes]] = deque()  # stored block, its generation, key
        self._writing: deque[Future] = deque()
        self._fetches: deque[Fetch] = deque()  # whose reads have not begun

    # ---- to the disk

    def write_behind(self, ids: np.ndarray, keys: Sequence[bytes]) -> None:
        """Write the stored blocks `ids` under `keys` when their records are in host memory. A block that leaves host
        memory earlier is not written."""
        generations = self.tier.generation[ids].tolist()
        self._waiting.extend(
            (i, generation, key)
            for i, generation, key in zip(ids.tolist(), generations, keys)
            if self.store.record_bytes(key) is None
        )

    def poll(self) -> None:
        """Begin reads and writes, and end writes. Called by the scheduler in every turn."""
        while self._fetches and self._fetches[0].after <= self.tier.transfers.num_saved():
            fetch = self._fetches.popleft()
            parts = zip(fetch.ids.tolist(), fetch.keys, fetch.sizes)
            fetch.reads = [self._readers.submit(self._read, i, key, size) for i, key, size in parts]
        while self._writing and self._writing[0].done():
            self._writing.popleft()
        while self._waiting and len(self._writing) < MOST_WRITES:
            i, generation, key = self._waiting[0]
            if self.tier.generation[i] == generation:
                if not self.tier.is_saved(i):
                    return
                self._writing.append(self._writers.submit(self._write, self.store, i, generation, key))
            self._waiting.popleft()

    def _write(self, store: DiskStore, i: int, generation: int, key: bytes) -> None:
        """Write a copy of a record, unless its block left host memory while it was copied.

        Host memory thus never waits for a disk, and all ranks have the same room in it whatever their disks do."""
        tier = self.tier
        stored = Stored(int(tier.format_id[i]), int(tier.pages[i]), int(tier.start[i]))
        units = tier.units[i]
        record = tier.memory.data.numpy()[units[units >= 0]].ravel()
        if tier.generation[i] == generation:
            store.write(key, stored, record[: tier.layout.record.num_bytes(stored.pages)])

    # ---- from the disk

    def known(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of the records of `keys`, up to the first one that has no file."""
        record, out = self.tier.layout.record, []
        least, most = record.num_bytes(0), record.num_bytes(record.pool.block_pages_bf16)
        for key in keys:
            size = self.store.record_bytes(key)
            if size is not None and not least <= size <= most:
                self.store.forget(key, "its size is wrong")
                size = None
            if size is None:
                break
            out.append(size)
        return out

    def fetch(self, keys: Sequence[bytes], sizes: Sequence[int], room: Sequence[int]) -> Fetch:
        """Read the files of `keys`, whose records have `sizes` bytes, into room for records of `room` bytes. The caller
        has seen that host memory has it."""
        fetch = Fetch(self.tier.reserve(room), list(keys), list(sizes), self.tier.transfers.num_queued)
        self._fetches.append(fetch)
        return fetch

    def _read(self, i: int, key: bytes, size: int) -> Stored | None:
        tier = self.tier
        units = tier.units[i][tier.units[i] >= 0]
        data = tier.memory.data.numpy()
        record = data[units[0]][:size] if len(units) == 1 else np.empty(size, dtype=np.uint8)
        stored = self.store.read(key, record)
        if stored is None:
            return None
        if len(units) > 1:
            rest = np.resize(record, len(units) * tier.memory.unit_bytes).reshape(len(units), -1)
            data[units] = rest
        tier.format_id[i], tier.pages[i], tier.start[i] = stored.format_id, stored.pages, stored.start
        return stored

    # ---- records

    def synchronize(self) -> None:
        """Wait for all files that are under way; what waits is forgotten."""
        self._waiting.clear()
        self._fetches.clear()
        wait(self._writing)
        self._writing.clear()

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)

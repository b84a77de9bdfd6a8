"""Host tier: scheduler state of blocks in host memory, and of blocks being copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .blocks import State
from .host_memory import HostMemory
from .op_queue import Load, Save
from .sizing import HostLayout
from .transfers import Loading, Transfers

if TYPE_CHECKING:
    from .disk_tier import DiskTier
    from .runtime import Runtime


class HostTier:
    """Blocks in host memory, as records with the bytes that they have on the device.

    A stored block has an id, the number of its first unit. Page state changes only through the operation queue: a save
    is queued before the release of its block, and a load takes pages like any other operation.
    """

    def __init__(self, runtime: Runtime, num_bytes: int):
        store = runtime.store
        self.runtime = runtime
        self.layout = HostLayout.of(store.layout, store.block_formats, runtime.sizing.num_bytes)
        self.memory = HostMemory(num_bytes, self.layout.unit_bytes, page_locked=store.on_gpu)
        self.transfers = Transfers(store, self.layout, self.memory)
        n, max_units = self.memory.num_units, self.layout.units_for(store.layout.block_pages_bf16)
        self.units = np.full((n, max_units), -1, dtype=np.int64)
        self.format_id = np.zeros(n, dtype=np.int8)
        self.pages = np.zeros(n, dtype=np.int64)
        self.start = np.zeros(n, dtype=np.int64)
        self.prompt = np.zeros(n, dtype=np.int64)
        self.generation = np.zeros(n, dtype=np.int64)  # rises when a stored block is freed
        self.save_number = np.zeros(n, dtype=np.int64)  # number of the save that writes the record
        self.disk: DiskTier | None = None
        self.stored = 0  # blocks in host memory
        self.saved_blocks = self.loaded_blocks = 0  # totals since start
        self._unsaved = 0  # planned saves whose stored block was freed first, since `take_unsaved`
        self.arrived_bytes, self.load_ms = 0, 0.0  # bytes of finished loads since start, and their time on the device
        self.loading: deque[Loading] = deque()
        # Blocks, their stored blocks and the generations of these, of saves that are not in the operation queue yet.
        self._planned: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def units_of(self, blocks: np.ndarray) -> np.ndarray:
        """Units that the records of `blocks` take, by the pages that the ledger charges for them."""
        record, charge = self.layout.record, self.runtime.ledger.charge[blocks]
        return -(-(record.num_bytes(0) + charge * record.pool.page_bytes) // self.layout.unit_bytes)

    # ---- from the device

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """Queue copies of `blocks` (packed or full, in no window); returns the ids of the stored blocks, int64 `[n]`.

        The caller has checked that `units_of(blocks)` units are free.
        """
        ids = self.plan_save(blocks)
        self.queue_saves()
        return ids

    def plan_save(self, blocks: np.ndarray) -> np.ndarray:
        """Like `save`, but the caller calls `queue_saves` before it releases any of `blocks`."""
        ids = self._take(self.units_of(blocks))
        self.save_number[ids] = self.transfers.queue_save()
        self.saved_blocks += len(ids)
        self._planned.append((blocks, ids, self.generation[ids]))
        return ids

    def queue_saves(self) -> None:
        """Queue the planned copies, one operation per size of record. A stored block that was freed in the meantime is
        not copied, because another one may have its units."""
        if not self._planned:
            return
        blocks, ids, generations = map(np.concatenate, zip(*self._planned))
        self._planned.clear()
        kept = self.generation[ids] == generations
        self._unsaved += len(ids)
        blocks, ids = blocks[kept], ids[kept]
        self._unsaved -= len(ids)
        records = self.runtime.blocks
        self.format_id[ids] = records.format_id[blocks]
        self.pages[ids] = self.runtime.ledger.charge[blocks]
        self.start[ids], self.prompt[ids] = records.start[blocks], records.prompt[blocks]
        widths = (self.units[ids] >= 0).sum(1)
        for k in np.unique(widths).tolist():
            same = widths == k
            self.runtime.log.push(Save(blocks[same], self.units[ids[same], :k]))

    def take_unsaved(self) -> int:
        """Number of blocks that were not copied for this reason since the last call."""
        unsaved, self._unsaved = self._unsaved, 0
        return unsaved

    def _take(self, needed: np.ndarray) -> np.ndarray:
        """Ids, int64 `[n]`, of stored blocks with `needed[n]` units each."""
        has = np.arange(self.units.shape[1]) < needed[:, None]
        units = np.full(has.shape, -1, dtype=np.int64)
        units[has] = self.memory.take(int(needed.sum()))
        ids = units[:, 0].copy()
        self.units[ids] = units
        self.stored += len(ids)
        return ids

    def is_saved(self, i: int) -> bool:
        """Whether the record of stored block `i` is in host memory. Its save may still be queued."""
        return int(self.save_number[i]) < self.transfers.num_saved()

    # ---- from files

    def units_of_bytes(self, sizes: Sequence[int]) -> np.ndarray:
        """Units of records of these sizes, int64 `[n]`."""
        return -(-np.asarray(sizes, dtype=np.int64) // self.layout.unit_bytes)

    def reserve(self, sizes: Sequence[int]) -> np.ndarray:
        """Ids of stored blocks for records of these sizes, which the caller fills. It has checked that they fit.

        Saves that are queued or under way may still write these units; the caller waits for them."""
        ids = self._take(self.units_of_bytes(sizes))
        self.save_number[ids] = -1  # no save fills them
        return ids

    # ---- to the device

    def pages_of(self, ids: np.ndarray) -> int:
        """Pages that the stored blocks `ids` take on the device."""
        return int(self.pages[ids].sum())

    def load(self, ids: np.ndarray) -> Loading:
        """Queue loads of the stored blocks `ids`, which keep their records. The caller has checked that `pages_of(ids)`
        pages and enough block ids are free. It owns the new blocks."""
        runtime = self.runtime
        blocks = np.array(runtime.blocks.take(len(ids), self.start[ids].tolist()), dtype=np.int64)
        runtime.blocks.format_id[blocks], runtime.blocks.prompt[blocks] = self.format_id[ids], self.prompt[ids]
        runtime.blocks.state[blocks] = np.where(self.format_id[ids] > 0, State.PACKED, State.OPEN)
        runtime.blocks.num_tokens[blocks] = runtime.layout.block_tokens
        runtime.ledger.set(blocks, self.pages[ids])
        loading = Loading(blocks)
        self.loaded_blocks += len(ids)
        widths = (self.units[ids] >= 0).sum(1)
        for format_id, width in sorted({*zip(self.format_id[ids].tolist(), widths.tolist())}):
            same = (self.format_id[ids] == format_id) & (widths == width)
            loading.queued += 1
            runtime.log.push(Load(blocks[same], format_id, self.units[ids[same], :width], loading))
        self.loading.append(loading)
        return loading

    def arrived(self) -> int:
        """Number of finished loads before the oldest one that is still under way."""
        n = 0
        for loading in self.loading:
            if not loading.finished:
                break
            n += 1
        return n

    def take_arrived(self) -> None:
        """Remove the oldest load, which has finished, from `loading`."""
        loading = self.loading.popleft()
        self.arrived_bytes += loading.num_bytes
        self.load_ms += loading.milliseconds

    # ---- records

    def free(self, ids: np.ndarray) -> None:
        self.generation[ids] += 1  # before anything may write to the units: a thread that copies a record checks it
        self.stored -= len(ids)
        units = self.units[ids]
        self.memory.give_back(units[units >= 0])
        self.units[ids] = -1

    def reset(self) -> None:
        """Forget everything; nothing is running. Files stay."""
        self.transfers.synchronize()
        if self.disk is not None:
            self.disk.synchronize()
        self.generation += 1
        self.memory.reset()
        self.loading.clear()
        self._planned.clear()
        self.units[:] = -1
        self.stored = 0

"""Device side of the host tier: copies of records between the page store and host memory, on separate streams."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.store import PageStore

from .host_memory import HostMemory, runs
from .sizing import LOAD_BUFFERS, SAVE_BUFFERS, HostLayout

# Buffers of loads that one flush launches. A launch takes the scheduler's thread 0.1 to 0.4 ms, so a long load in one
# flush would hold up the decode steps of other requests. The limit also spreads a load over several decode steps, and
# each is slowed less: at 56 MiB a buffer, the bus is busy for about 8 ms of a step.
BUFFERS_PER_FLUSH = 8


@dataclass
class Loading:
    """A load under way: blocks being copied from the host to the device.

    queued: number of operations that are not launched yet. began: CUDA event at the first copy. events: CUDA events at
    the ends of the launched operations. On the CPU, where a load ends at once, there are none. in_use: tensors that a
    stream still reads. num_bytes: bytes that it copies.
    """

    blocks: np.ndarray
    queued: int = 0
    num_bytes: int = 0
    began: Any = None
    events: list[Any] = field(default_factory=list)
    in_use: list[torch.Tensor] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return not self.queued and all(event.query() for event in self.events)

    @property
    def milliseconds(self) -> float:
        """Time of a finished load on the device, from its first copy to its last page; 0 on the CPU."""
        return max((self.began.elapsed_time(event) for event in self.events), default=0.0)


@dataclass(frozen=True)
class Saved:
    """A finished copy of one buffer to the host, and its time: on the device, or on a CPU that of the host."""

    blocks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Saving:
    """Part of a save, in one buffer, that may still run to `units[n, k]`.

    number: that of its save. began, ended: CUDA events at its ends; `began` is None unless saves are timed.
    """

    units: np.ndarray
    number: int
    began: Any
    ended: Any


@dataclass
class _Fill:
    """Blocks `ids` int64 `[n]` that have pages and are filled from `units[n, k]` of the host memory. The first `done`
    of them are launched. taken: event after which the blocks have their pages, None on the CPU."""

    ids: torch.Tensor
    units: np.ndarray
    loading: Loading
    taken: Any
    done: int = 0


class Transfers:
    """Saves and loads in the order in which the operation queue runs them, called on the forward stream.

    Events get their stream, and streams are set by `set_stream`. Otherwise torch looks up the current stream each time,
    which took more than a third of the launches of a load.

    A save copies records into a buffer on the forward stream, which is fast. A separate stream copies them from there
    to the host. The blocks may therefore be released right after the save. The forward stream waits only if all buffers
    are still in use. A load takes pages on the forward stream. One stream copies records into buffers, and another
    moves them from there into the pages. Before the CPU has seen the end of the load, no forward reads the blocks, and
    they are not released.

    The saves that one flush launches have the same number: that of their batch.
    """

    def __init__(self, store: PageStore, layout: HostLayout, memory: HostMemory):
        self.store, self.layout, self.memory = store, layout, memory
        self.on_gpu = store.on_gpu
        new = partial(torch.cuda.Stream, store.device) if self.on_gpu else lambda: None
        self.save_stream, self.load_stream, self.move_stream = new(), new(), new()
        self.save_buffers, self.load_buffers = self._buffers(SAVE_BUFFERS), self._buffers(LOAD_BUFFERS)
        self.timed = False  # whether `take_saved` gives the saves that have ended
        self.saving: deque[_Saving] = deque()
        self.saved: list[Saved] = []
        self.fills: deque[_Fill] = deque()  # launched in part or not at all
        self.batch = 0  # number of the saves that the next flush launches
        self._queued = False  # whether there are any
        self.bytes_saved = self.bytes_loaded = 0

    def _buffers(self, n: int) -> deque[tuple[torch.Tensor, Any, Any]]:
        """Buffers that are used in turn, each with the events of the last time it was filled and emptied."""
        new = torch.cuda.Event if self.on_gpu else lambda: None
        size, device = self.layout.buffer_bytes, self.store.device
        n = n if self.on_gpu else 1
        return deque((torch.empty(size, dtype=torch.uint8, device=device), new(), new()) for _ in range(n))

    def _event(self, stream: Any = None, *, timing: bool = False) -> Any:
        """An event recorded now on `stream`, or on the current one; None on the CPU."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def _now(self, stream: Any) -> Any:
        """The time on `stream`: an event, or on the CPU that of the host's clock in seconds."""
        return self._event(stream, timing=True) if self.on_gpu else time.perf_counter()

    def _rows(self, buffer: torch.Tensor, units_each: int) -> torch.Tensor:
        """`buffer` viewed as records of `units_each` units, uint8 `[n, bytes]`."""
        stride = units_each * self.memory.unit_bytes
        n = len(buffer) // stride
        return buffer[: n * stride].view(n, stride)

    def save(self, blocks: np.ndarray, units: np.ndarray) -> None:
        """Copy `blocks[n]` to `units[n, k]` of the host memory."""
        units_each = units.shape[1]
        self.bytes_saved += units.size * self.memory.unit_bytes
        ids, at = self.store.upload(blocks), 0
        forward = torch.cuda.current_stream() if self.on_gpu else None
        with torch.cuda.stream(forward):
            while at < len(blocks):
                buffer, filled, emptied = self.save_buffers[0]
                self.save_buffers.rotate(-1)
                rows = self._rows(buffer, units_each)
                part = slice(at, at + len(rows))
                rows = rows[: len(blocks[part])]
                at += len(rows)
                if self.on_gpu:
                    emptied.wait(forward)
                ops.write_records(self.store, ids[part], rows)
                if self.on_gpu:
                    filled.record(forward)
                    filled.wait(self.save_stream)
                began = self._now(self.save_stream) if self.timed else None
                torch.cuda.set_stream(self.save_stream)
                self._copy(units[part], rows, to_host=True)
                torch.cuda.set_stream(forward)
                if self.on_gpu:
                    emptied.record(self.save_stream)
                    ended = self._event(self.save_stream, timing=self.timed)
                    self.saving.append(_Saving(units[part], self.batch, began, ended))
                elif self.timed:
                    self._note_saved(units[part], time.perf_counter() - began)

    def queue_save(self) -> int:
        """Note that a save is queued; returns its number."""
        self._queued = True
        return self.batch

    def end_batch(self) -> None:
        """Note that no save is queued any more."""
        self.batch, self._queued = self.next_batch, False

    @property
    def next_batch(self) -> int:
        """A number above those of all saves so far."""
        return self.batch + self._queued

    def num_saved(self) -> int:
        """A number below which all saves have ended."""
        while self.saving and self.saving[0].ended.query():
            save = self.saving.popleft()
            if save.began is not None:
                self._note_saved(save.units, save.began.elapsed_time(save.ended) / 1e3)
        return self.saving[0].number if self.saving else self.batch

    def _note_saved(self, units: np.ndarray, seconds: float) -> None:
        self.saved.append(Saved(len(units), units.size * self.memory.unit_bytes, seconds))

    def take_saved(self) -> list[Saved]:
        """Saves that have ended since the last call, one entry per buffer. Only if `timed`."""
        self.num_saved()
        saved, self.saved = self.saved, []
        return saved

    def _wait_saved(self, first_units: np.ndarray) -> None:
        """Make the host wait until the records at `first_units` are complete."""
        self.num_saved()
        for save in self.saving:
            if np.isin(first_units, save.units[:, 0]).any():
                save.ended.synchronize()

    def load(self, blocks: np.ndarray, format_id: int, units: np.ndarray, loading: Loading) -> None:
        """Give `blocks[n]` pages, to be filled from `units[n, k]` by `launch_fills`."""
        loading.num_bytes += units.size * self.memory.unit_bytes
        self.bytes_loaded += units.size * self.memory.unit_bytes
        self._wait_saved(units[:, 0])
        ids = self.store.upload(blocks)
        ops.take_stored(self.store, ids, format_id, self.store.upload(self.counts(units[:, 0])))
        self.fills.append(_Fill(ids, units, loading, self._event()))

    def launch_fills(self, *, all_of_them: bool) -> None:
        """Launch the copies of loads: all of them, or as many as a flush may."""
        if not self.fills:
            return
        left = math.inf if all_of_them else BUFFERS_PER_FLUSH
        with torch.cuda.stream(self.move_stream):
            while self.fills and left > 0:
                self._fill_next(self.fills[0])
                left -= 1
                if self.fills[0].done == len(self.fills[0].units):
                    self._end(self.fills.popleft())

    def _fill_next(self, fill: _Fill) -> None:
        """Copy as many records as a buffer holds. Only the first part waits for the forward stream, where a decode step
        may be queued in front of it."""
        if self.on_gpu and not fill.done:
            fill.taken.wait(self.move_stream)
        buffer, filled, emptied = self.load_buffers[0]
        self.load_buffers.rotate(-1)
        rows = self._rows(buffer, fill.units.shape[1])
        part = slice(fill.done, fill.done + len(rows))
        rows = rows[: len(fill.units[part])]
        fill.done += len(rows)
        if self.on_gpu:
            emptied.wait(self.load_stream)
            fill.loading.began = fill.loading.began or self._event(self.load_stream, timing=True)
        torch.cuda.set_stream(self.load_stream)
        self._copy(fill.units[part], rows, to_host=False)
        torch.cuda.set_stream(self.move_stream)
        if self.on_gpu:
            filled.record(self.load_stream)
            filled.wait(self.move_stream)
        ops.read_records(self.store, fill.ids, rows, first=part.start)
        if self.on_gpu:
            emptied.record(self.move_stream)

    def _end(self, fill: _Fill) -> None:
        fill.loading.queued -= 1
        if self.on_gpu:
            fill.loading.events.append(self._event(self.move_stream, timing=True))
            fill.loading.in_use.append(fill.ids)

    def _copy(self, units: np.ndarray, rows: torch.Tensor, *, to_host: bool) -> None:
        """Copy records between `rows[n, bytes]` on the device and `units[n, k]` of the host memory."""
        on_device = rows.view(-1, self.memory.unit_bytes)
        for at, first, n in runs(units.ravel()):
            host, device = self.memory.data[first : first + n], on_device[at : at + n]
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source, non_blocking=True)

    def counts(self, first_units: np.ndarray) -> np.ndarray:
        """Token counts int16 `[n, L, H, 2]` of records that are in host memory, by their first units."""
        pool, at = self.store.layout, self.layout.record.offsets["counts"]
        size = 4 * pool.layers * pool.heads
        count_bytes = self.memory.data[:, at : at + size].numpy()[first_units]
        return count_bytes.view(np.int16).reshape(len(first_units), pool.layers, pool.heads, 2)

    def synchronize(self) -> None:
        """Wait for all copies, and forget queued ones."""
        self.end_batch()
        self.fills.clear()
        if self.on_gpu:
            for stream in (self.save_stream, self.load_stream, self.move_stream):
                stream.synchronize()
            self.num_saved()
            self.saving.clear()

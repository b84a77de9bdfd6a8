"""Device side of the host tier: copies of records between the page store and host memory, on streams of their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.store import PageStore

from .host_memory import HostMemory, runs
from .sizing import SAVE_BUFFERS, HostLayout


@dataclass
class Loading:
    """Blocks on their way from the host to the device.

    queued: operations that have not been launched. events: CUDA events at the ends of the others (none on the CPU,
    where a load ends at once). kept: tensors that a stream still reads.
    """

    blocks: np.ndarray
    queued: int = 0
    events: list[Any] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return not self.queued and all(event.query() for event in self.events)


class Transfers:
    """Saves and loads in the order in which the operation queue runs them, called on the forward stream.

    A save copies records into a buffer on the forward stream, which is fast, and from there to the host on a stream of
    its own. Its blocks may therefore be released right behind it. The forward stream waits only where all buffers are
    still on their way. A load takes pages on the forward stream, and fills them on a stream of its own; no forward
    reads the blocks before the CPU has seen the end of the load.
    """

    def __init__(self, store: PageStore, layout: HostLayout, memory: HostMemory):
        self.store, self.layout, self.memory = store, layout, memory
        self.on_gpu, size = store.on_gpu, layout.buffer_bytes
        self.load_buffer = torch.empty(size, dtype=torch.uint8, device=store.device)
        buffers = [torch.empty(size, dtype=torch.uint8, device=store.device) for _ in range(SAVE_BUFFERS)]
        if self.on_gpu:
            self.save_stream, self.load_stream = (torch.cuda.Stream(store.device) for _ in range(2))
            self.buffers = deque((buffer, torch.cuda.Event()) for buffer in buffers)
        else:
            self.buffers = deque((buffer, None) for buffer in buffers[:1])
        # Event, first units and number of each save that may not have ended.
        self.saving: deque[tuple[Any, np.ndarray, int]] = deque()
        self.num_queued = self.num_launched = 0  # save operations since start
        self.bytes_saved = self.bytes_loaded = 0

    def _rows(self, buffer: torch.Tensor, units_each: int) -> torch.Tensor:
        """`buffer` as records of `units_each` units, uint8 `[n, bytes]`."""
        stride = units_each * self.memory.unit_bytes
        n = len(buffer) // stride
        return buffer[: n * stride].view(n, stride)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(values)
        return host.pin_memory().to(self.store.device, non_blocking=True) if self.on_gpu else host

    def save(self, blocks: np.ndarray, units: np.ndarray) -> None:
        """Copy `blocks[n]` to `units[n, k]` of the host memory."""
        units_each = units.shape[1]
        self.bytes_saved += units.size * self.memory.unit_bytes
        ids, at = self._to_device(blocks), 0
        places = ops.record_places(self.store, ids)
        while at < len(blocks):
            buffer, sent = self.buffers[0]
            self.buffers.rotate(-1)
            rows = self._rows(buffer, units_each)
            part = slice(at, at + len(rows))
            rows = rows[: len(blocks[part])]
            at += len(rows)
            if self.on_gpu:
                torch.cuda.current_stream().wait_event(sent)
            ops.write_records(self.store, ids[part], rows, places.part(part))
            if not self.on_gpu:
                self._copy(units[part], rows, to_host=True)
                continue
            self.save_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.save_stream):
                self._copy(units[part], rows, to_host=True)
                sent.record()
                ended = torch.cuda.Event()
                ended.record()
            self.saving.append((ended, units[part, 0], self.num_launched))
        self.num_launched += 1

    def queued(self) -> int:
        """Number of a save that is queued now."""
        self.num_queued += 1
        return self.num_queued - 1

    def num_saved(self) -> int:
        """All saves below this number have ended."""
        while self.saving and self.saving[0][0].query():
            self.saving.popleft()
        return self.saving[0][2] if self.saving else self.num_launched

    def _wait_saved(self, first_units: np.ndarray) -> None:
        """Wait on the host until the records at `first_units` are there."""
        self.num_saved()
        for ended, units, _ in self.saving:
            if np.isin(first_units, units).any():
                ended.synchronize()

    def load(self, blocks: np.ndarray, format_id: int, units: np.ndarray, loading: Loading) -> None:
        """Give `blocks[n]` pages, and fill them from `units[n, k]`."""
        self.bytes_loaded += units.size * self.memory.unit_bytes
        self._wait_saved(units[:, 0])
        ids = self._to_device(blocks)
        ops.take_stored(self.store, ids, format_id, self._to_device(self.counts(units[:, 0])))
        loading.queued -= 1
        if not self.on_gpu:
            self._fill(ids, units)
            return
        self.load_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.load_stream):
            self._fill(ids, units)
            done = torch.cuda.Event()
            done.record()
        loading.events.append(done)
        loading.kept.append(ids)

    def _fill(self, ids: torch.Tensor, units: np.ndarray) -> None:
        rows, places = self._rows(self.load_buffer, units.shape[1]), ops.record_places(self.store, ids)
        for at in range(0, len(units), len(rows)):
            part = slice(at, at + len(rows))
            some = rows[: len(units[part])]
            self._copy(units[part], some, to_host=False)
            ops.read_records(self.store, ids[part], some, places.part(part))

    def _copy(self, units: np.ndarray, rows: torch.Tensor, *, to_host: bool) -> None:
        """Copy records between `rows[n, bytes]` on the device and `units[n, k]` of the host memory."""
        on_device = rows.view(-1, self.memory.unit_bytes)
        for at, first, n in runs(units.ravel()):
            there, here = self.memory.data[first : first + n], on_device[at : at + n]
            if to_host:
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)

    def counts(self, first_units: np.ndarray) -> np.ndarray:
        """Token counts int16 `[n, L, H, 2]` of records that are in host memory, by their first units."""
        pool, at = self.store.layout, self.layout.record.offsets["counts"]
        size = 4 * pool.layers * pool.heads
        found = self.memory.data[:, at : at + size].numpy()[first_units]
        return found.view(np.int16).reshape(len(first_units), pool.layers, pool.heads, 2)

    def synchronize(self) -> None:
        """Wait for all copies; what is queued is forgotten."""
        self.num_launched = self.num_queued
        if self.on_gpu:
            self.save_stream.synchronize()
            self.load_stream.synchronize()
            self.saving.clear()

"""Host memory for records of blocks: page-locked bytes in units of one size."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch


class HostMemory:
    """`num_units` units of `unit_bytes` bytes, `data` uint8 `[num_units, unit_bytes]`.

    A record takes whole units, which need not be neighbors. Units are handed out in the order in which they were freed.
    Units that were freed together are therefore mostly adjacent, and one copy moves many of them.
    """

    def __init__(self, num_bytes: int, unit_bytes: int, *, page_locked: bool):
        self.unit_bytes = unit_bytes
        self.num_units = num_bytes // unit_bytes
        self.data = torch.empty((self.num_units, unit_bytes), dtype=torch.uint8)
        if page_locked and self.num_units:
            _lock_pages(self.data)
        self.reset()

    def reset(self) -> None:
        self._free = deque(range(self.num_units))

    @property
    def free_units(self) -> int:
        return len(self._free)

    def take(self, n: int) -> np.ndarray:
        """`n` units, int64; the caller has checked that they are free."""
        return np.array([self._free.popleft() for _ in range(n)], dtype=np.int64)

    def give_back(self, units: np.ndarray) -> None:
        self._free.extend(units.tolist())


def _lock_pages(data: torch.Tensor) -> None:
    """Page-lock `data` for the life of the tensor, so that the GPU can copy from and to it directly.

    Memory that is freed while it is registered stays registered. Whatever is allocated at its addresses later can
    neither be registered nor copied across the end of the old range.

    Several threads first touch the pages. Otherwise the driver maps them in one thread, which takes 0.7 s per GiB.
    """
    data.fill_(0)
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(data.data_ptr(), data.numel(), 0)
    if int(error):
        raise RuntimeError(
            f"the host memory of {data.numel() / 2**30:.1f} GiB cannot be page-locked (CUDA error {int(error)}); give "
            "less --kvc-host-memory, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(data, cudart.cudaHostUnregister, data.data_ptr()).atexit = False  # the driver does it at exit


def runs(units: np.ndarray) -> list[tuple[int, int, int]]:
    """(index, first unit, length) of each run of consecutive units in `units`."""
    found, begin, values = [], 0, units.tolist()  # arrays are short, so a loop is faster than numpy
    for at, (unit, following) in enumerate(zip(values, [*values[1:], None]), 1):
        if following != unit + 1:
            found.append((begin, values[begin], at - begin))
            begin = at
    return found

"""The device state of one pool: pages, block table, free ring, headers. Created once, never resized.

Only operations in this package write it, and the runtime calls those in one order on one stream, so that stream
order alone makes the reuse of a page safe.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .common.upload import upload
from .layout import BlockFormat, PoolLayout

SCRATCH_BLOCK = 0  # block 0 backs padded rows and dummy runs; all its table entries name page 0
SCRATCH_PAGE = 0


@dataclass
class PageStore:
    """Tensors of one pool. L layers, H local KV heads, D head_dim, P block tokens, E table entries a head.

    | tensor         | shape, dtype                    | meaning                                          |
    |----------------|---------------------------------|--------------------------------------------------|
    | `pages`        | uint8 `[num_pages, page_bytes]` | all layers, heads and formats                    |
    | `table`        | int32 `[num_blocks, L, H, E]`   | page ids: high from the left, low from the right |
    | `counts`       | int16 `[num_blocks, L, H, 2]`   | tokens stored high, low (unused in bf16 blocks)  |
    | `format_id`    | int8 `[num_blocks]`             | index into `block_formats`; 0: bf16; -1: free    |
    | `headers`      | fp16 `[num_blocks, L, H, 2, D]` | key channels: scale on the 8-bit grid, zero      |
    | `query_counts` | int32 `[num_blocks]`            | queries after the block that its scores cover    |
    | `ring`         | int32 `[num_pages]`             | ring buffer of free pages                        |
    | `cursor`       | int64 `[2]`                     | pages ever taken (head), ever returned (tail)    |

    The free pages are `ring[head % n] .. ring[(tail - 1) % n]`. The scale of b-bit keys is the 8-bit scale times
    255 / (2^b - 1): 1, 17, 85 are whole numbers, so going from 8 to 4 to 2 bits maps codes to codes and the header
    stays frozen.
    """

    layout: PoolLayout
    block_formats: tuple[BlockFormat, ...]
    dtype: torch.dtype
    pages: torch.Tensor
    table: torch.Tensor
    counts: torch.Tensor
    format_id: torch.Tensor
    headers: torch.Tensor
    query_counts: torch.Tensor
    ring: torch.Tensor
    cursor: torch.Tensor

    @classmethod
    def create(
        cls,
        layout: PoolLayout,
        block_formats: tuple[BlockFormat, ...],
        *,
        num_pages: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> PageStore:
        """Allocate all tensors. `dtype` is the model dtype (bf16 or fp16), which "bf16" pages hold."""
        shape = (num_blocks, layout.layers, layout.heads)
        store = cls(
            layout=layout,
            block_formats=block_formats,
            dtype=dtype,
            pages=torch.zeros((num_pages, layout.page_bytes), dtype=torch.uint8, device=device),
            table=torch.zeros((*shape, layout.head_pages_bf16), dtype=torch.int32, device=device),
            counts=torch.zeros((*shape, 2), dtype=torch.int16, device=device),
            format_id=torch.empty(num_blocks, dtype=torch.int8, device=device),
            headers=torch.zeros((*shape, 2, layout.head_dim), dtype=torch.float16, device=device),
            query_counts=torch.zeros(num_blocks, dtype=torch.int32, device=device),
            ring=torch.empty(num_pages, dtype=torch.int32, device=device),
            cursor=torch.zeros(2, dtype=torch.int64, device=device),
        )
        store.reset()
        return store

    def reset(self) -> None:
        """Free every page and every block. Block 0 and page 0 stay reserved as the sink of padded rows."""
        n = self.ring.numel()
        torch.arange(1, n, out=self.ring[: n - 1])
        self.cursor[0] = 0
        self.cursor[1] = n - 1
        self.format_id.fill_(-1)
        self.format_id[SCRATCH_BLOCK] = 0
        self.table[SCRATCH_BLOCK] = SCRATCH_PAGE
        self.counts.zero_()
        self.query_counts.zero_()

    def erase(self) -> None:
        """`reset` for tensors with undefined content, after their memory was released and mapped again."""
        for tensor in self._tensors:
            tensor.zero_()
        self.reset()

    @property
    def device(self) -> torch.device:
        return self.pages.device

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU: copies from the host go through pinned memory, and the device runs
        asynchronously."""
        return self.pages.is_cuda

    @property
    def use_kernels(self) -> bool:
        """Whether operations on this store run as kernels (see `common.dispatch`). Tests override it for a store on the
        CPU, to run kernels under Triton's interpreter."""
        return self.pages.is_cuda

    def upload(self, values: np.ndarray | torch.Tensor) -> torch.Tensor:
        """`values` on the device, in their dtype, without waiting for it."""
        return upload(values, self.device, dtype=None)

    def __copy__(self) -> PageStore:
        """A store with the same tensors and no bound launches, because the tensors of a copy may be replaced."""
        return replace(self)

    @cached_property
    def launch_constants(self) -> dict[tuple, Any]:
        """Cached launches and constants of launches, by operation and block format."""
        return {}

    @cached_property
    def like(self) -> torch.Tensor:
        """A tensor of the model dtype. Pages are bytes, and a kernel argument cannot be a bare pointer type."""
        return torch.empty(16, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the pool."""
        return sum(t.nbytes for t in self._tensors)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """All tensors of the pool, without `like`."""
        return [getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)]

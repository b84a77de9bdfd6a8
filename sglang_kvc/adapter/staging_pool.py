"""Host memory between records and a storage backend of SGLang, with the interface of SGLang's host pools."""

from __future__ import annotations

import mmap

import numpy as np
import torch


class StagingPool:
    """`num_pages` pages of `page_bytes` bytes, uint8 `[num_pages, 2, page_bytes / 2]`.

    It imitates a host pool of layout `page_first` with pages of one token: the halves of a page take the places of K
    and V, and an index is a page number. Adjacent pages are contiguous in memory.
    """

    layout, page_size, dtype, pin_memory, allocator = "page_first", 1, torch.uint8, False, None

    def __init__(self, num_pages: int, page_bytes: int):
        self.size = self.logical_size = self.page_num = num_pages
        self.size_per_token = page_bytes
        memory = mmap.mmap(-1, num_pages * page_bytes)  # aligned for direct I/O, and zero-filled
        self.kv_buffer = torch.frombuffer(memory, dtype=torch.uint8).view(num_pages, 2, page_bytes // 2)

    def value(self, first: int, n: int) -> np.ndarray:
        """The bytes of `n` pages from `first` on, uint8 `[n * page_bytes]`."""
        return self.kv_buffer[first : first + n].numpy().reshape(-1)

    # ---- the interface of a host pool that backends use

    def get_size_per_token(self) -> int:
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        return self.size_per_token // 2

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and bytes of both halves of each page."""
        pointers = [self.kv_buffer[i, half].data_ptr() for i in indices.tolist() for half in (0, 1)]
        return pointers, [self.size_per_token // 2] * len(pointers)

    def get_data_page(self, index, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[int(index)]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[int(index)].view(-1).copy_(data_page)

    def is_stride_page_aligned(self, alignment: int) -> bool:
        return not (self.size_per_token // 2 % alignment or self.kv_buffer.data_ptr() % alignment)

"""SGLang's paged allocator without its Triton kernels: `--page-size` above 1 for the stock cache on a CPU.

Written against SGLang 0.5.17: `PagedTokenToKVPoolAllocator.alloc_extend`, `.alloc_decode`, `alloc_extend_naive`.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Same slots for the same requests, in plain torch."""

    free_pages: torch.Tensor

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=None
    ):
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._room(num_new_pages):
            return None
        out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, out, self.page_size, self.device)
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self._room(num_new_pages):
            return None
        fresh = seq_lens % self.page_size == 1
        out = (last_loc + 1).to(torch.int64)
        out[fresh] = self.free_pages[:num_new_pages] * self.page_size
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def _room(self, num_new_pages: int) -> bool:
        if self.need_sort and num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        return num_new_pages <= len(self.free_pages)

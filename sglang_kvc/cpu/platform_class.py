"""The platform class. `platform.activate` is another module, so that asking imports nothing of SGLang.

Imports inside methods: SGLang loads the class before the modules that they name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU as an out-of-tree platform: ops dispatch to their native torch form."""

    # OOT, not CPU: the in-tree CPU platform dispatches to kernels of a build that is not installed.
    _enum = PlatformEnum.OOT

    def get_device(self, local_rank: int) -> str:
        # SGLang's default for --device.
        return "cpu"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        # /start_profile calls this. The base class raises, which would end the server.
        return "CPU"

    def get_torch_profiler_activity(self):
        return torch.profiler.ProfilerActivity.CPU

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> Callable:
        return _allocator


def _allocator(size: int, page_size: int, **kwargs):
    """SGLang asks the platform at every page size, though its allocator for pages of one token needs no Triton."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    from sglang_kvc.cpu.stock_allocator import TorchPagedAllocator

    if page_size == 1:
        return TokenToKVPoolAllocator(size, **kwargs)
    return TorchPagedAllocator(size, page_size=page_size, **kwargs)

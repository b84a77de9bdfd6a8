"""The platform class itself; apart from `platform.activate`, so that asking costs no SGLang import."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that SGLang knows nothing about: ops dispatch to their native torch form."""

    # OOT, not CPU: the in-tree CPU platform would dispatch to kernels that are not there.
    _enum = PlatformEnum.OOT

    def get_device(self, local_rank: int) -> str:
        # SGLang, told of no device, takes this for the name that --device gives.
        return "cpu"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        # Asked for on /start_profile; the base class raises, which would end the server.
        return "CPU"

    def get_torch_profiler_activity(self):
        import torch

        return torch.profiler.ProfilerActivity.CPU

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> Callable:
        return _allocator


def _allocator(size: int, page_size: int, **kwargs):
    """SGLang asks the platform at every page size; it has an allocator of its own for pages of one token."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    from sglang_kvc.cpu.stock_allocator import TorchPagedAllocator

    if page_size == 1:
        return TokenToKVPoolAllocator(size, **kwargs)
    return TorchPagedAllocator(size, page_size=page_size, **kwargs)

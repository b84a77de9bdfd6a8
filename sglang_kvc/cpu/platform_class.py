"""The platform class. `platform.activate` is in another module, so that asking it does not import SGLang."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU as an out-of-tree platform: ops dispatch to their native torch form."""

    # OOT, not CPU: the in-tree CPU platform dispatches to kernels of a build that is not installed.
    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int = 0) -> str:
        # SGLang's default for --device.
        return "cpu"

    def get_torch_profiler_activity_str(self) -> str:
        # /start_profile calls this. The base class raises, which would end the server.
        return "CPU"

    def get_torch_profiler_activity(self):
        return torch.profiler.ProfilerActivity.CPU

    def get_default_attention_backend(self) -> str:
        return "torch_native"

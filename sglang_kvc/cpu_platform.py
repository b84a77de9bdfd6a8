"""Serving without a GPU: an SGLang platform on which every operation falls back to native torch.

SGLang's own CPU engine needs a build of its kernels that no package registry ships. An out-of-tree platform does not.
Entry point of group `sglang.srt.platforms`; written against SGLang 0.5.17: `CpuDeviceMixin`, `SRTPlatform`.
"""

from __future__ import annotations


def activate() -> str | None:
    """The platform's class path where there is no accelerator, else None, so that SGLang picks its own."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.version.hip is not None:
        return None
    return "sglang_kvc.cpu_platform_class:TorchCpuPlatform"

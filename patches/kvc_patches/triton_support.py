"""`utils.common.support_triton`: without a GPU SGLang takes its torch paths for row writes and positions."""

from __future__ import annotations

from .registry import hook


def around_support_triton(orig, backend):
    if backend == "kvc":
        import torch

        return torch.cuda.is_available()
    return orig(backend)


def register() -> None:
    hook("sglang.srt.utils.common.support_triton", "around", "backend", around_support_triton)

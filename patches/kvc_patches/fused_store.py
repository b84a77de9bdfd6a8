"""`models.utils`: turns off fused RoPE-and-store, which would bypass our pages."""

from __future__ import annotations

from .lookup import current
from .registry import hook


def around_enable_fused_set_kv_buffer(orig, forward_batch):
    return False if current() is not None else orig(forward_batch)


def register() -> None:
    hook(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        "around",
        "forward_batch",
        around_enable_fused_set_kv_buffer,
    )

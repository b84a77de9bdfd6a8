"""Copies host numbers to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(
    values: Sequence[int] | np.ndarray | torch.Tensor, device: torch.device, dtype: torch.dtype | None = torch.int32
) -> torch.Tensor:
    """`values` as a tensor of `dtype` (None: their own) on `device`. To a GPU they go through pinned memory, in stream
    order."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

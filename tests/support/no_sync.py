"""A check that plain torch operations would not make the host wait for a GPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoSync(TorchDispatchMode):
    """Fails on operations that would synchronize a CUDA stream: reading a value, or a shape that depends on data."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(x in name for x in self.FORBIDDEN), name
        if "index" in name and isinstance(args[1] if len(args) > 1 else None, (list, tuple)):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))

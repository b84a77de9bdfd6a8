"""Plans: which token of which head is stored high (2), low (1) or pruned (0). Tensors int8 `[n, L, H, P]`."""

from __future__ import annotations

import torch

from ..layout import PoolLayout

HIGH, LOW, PRUNED = 2, 1, 0


def keep_all(n: int, layout: PoolLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """Tiers int8 `[n, L, H, P]` that keep every token high: for rungs that only quantise."""
    shape = (n, layout.layers, layout.heads, layout.block_tokens)
    return torch.full(shape, HIGH, dtype=torch.int8, device=device)

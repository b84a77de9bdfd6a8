"""Rows of new tokens as models pass them: views of various strides and addresses."""

import torch

LAYOUTS = ("contiguous", "packed", "padded", "odd address")
ALIGNED = LAYOUTS[:2]  # rows that begin at multiples of 16 bytes


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of `x[N, H, D]` in new memory.

    "packed": tokens are three times as far apart, like those of a slice of q, k and v; "padded": heads are D + 4
    numbers apart; "odd address": contiguous, but one number after an aligned address.
    """
    n, h, d = x.shape
    first, token, head = {
        "contiguous": (0, h * d, d),
        "packed": (h * d, 3 * h * d, d),
        "padded": (0, h * (d + 4), d + 4),
        "odd address": (1, h * d, d),
    }[layout]
    return x.new_empty(first + n * token).as_strided((n, h, d), (token, head, 1), first).copy_(x)

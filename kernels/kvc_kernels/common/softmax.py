"""Explicit attention probabilities: masks, a softmax that tolerates empty rows, weights of new tokens.

`window` everywhere: the number of tokens before its own that a query sees, as in SGLang's layers and FlashInfer; -1:
all.
"""

from __future__ import annotations

import torch

MAX_ELEMENTS = 1 << 23  # upper bound of the elements of one mask or probability matrix


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dim. Rows that see nothing (a head with every token pruned) are 0 rather than NaN."""
    top = logits.amax(-1, keepdim=True)
    e = torch.exp(logits - top.clamp_(min=torch.finfo(torch.float32).min))
    return e / e.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)


def causal_mask(start: int, rows: int, slots: int, new: int, device, window: int = -1) -> torch.Tensor:
    """Causal mask bool `[rows, slots]` of new tokens start..start+rows of `new`, which are the last slots."""
    at = torch.arange(slots - new + start, slots - new + start + rows, device=device).unsqueeze(-1)
    slot = torch.arange(slots, device=device)
    return slot <= at if window < 0 else (slot <= at) & (slot >= at - window)


def query_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    valid: torch.Tensor | None,
    at: int,
    rows: int,
    scale: float,
    logit_cap: float,
    window: int = -1,
) -> torch.Tensor:
    """Probabilities fp32 `[H, G, rows, S]` of new tokens at..at+rows, `q[Hq, new, D]`, `k[H, S, D]`."""
    new, slots = q.shape[1], k.shape[1]
    grouped = q[:, at : at + rows].float().unflatten(0, (k.shape[0], -1)) * scale
    logits = grouped.flatten(1, 2) @ k.float().transpose(1, 2)
    if logit_cap > 0:
        logits = torch.tanh_(logits / logit_cap).mul_(logit_cap)
    logits = logits.view(k.shape[0], -1, rows, slots)
    logits.masked_fill_(~causal_mask(at, rows, slots, new, q.device, window), -torch.inf)
    if valid is not None:
        logits.masked_fill_(~valid[:, None, None], -torch.inf)
    return softmax(logits)

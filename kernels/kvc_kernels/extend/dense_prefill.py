"""Attention over dense rows by a library's prefill kernel: FlashAttention 3 on Hopper, FlashInfer on other GPUs.

Two forms share one interface across libraries. The ragged form attends new tokens to themselves. The paged form
attends runs of new tokens to blocks in dense buffers `[slots, P, H, D]`. Both plan once a forward, from host lists,
and run once a layer; log-sum-exps are to base 2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from .dense_fa3 import Fa3Ragged
from .dense_flashinfer import RaggedPrefill

LIBRARIES: dict[str, type] = {"fa3": Fa3Ragged, "flashinfer": RaggedPrefill}  # in order of preference


def ragged_prefill(
    device: torch.device, library: str = "auto", *, query_heads: int, heads: int, head_dim: int, dtype: torch.dtype
) -> Fa3Ragged | RaggedPrefill | None:
    """The ragged form of `library`: "fa3", "flashinfer", "none", or "auto" for the first that works on this device.

    None if no library works; Triton kernels then do all the work. ValueError for an unknown name.
    """
    if library not in ("auto", "none", *LIBRARIES):
        raise ValueError(f"prefill library {library!r} is none of auto, none, {', '.join(LIBRARIES)}")
    for name, form in LIBRARIES.items():
        if library in ("auto", name) and form.available(device):
            prefill = _tried(
                f"{name}'s ragged prefill",
                lambda form=form: form(device, query_heads=query_heads, heads=heads, head_dim=head_dim, dtype=dtype),
                _run_ragged,
            )
            if prefill is not None:
                return prefill
    return None


def paged_prefill(ragged, device: torch.device, page: int, *, window: int = -1):
    """The paged form of the library that `ragged` came from, for pages of `page` tokens; None without one.

    `window` >= 0: a query sees its own token and `window` tokens before it.
    """
    if ragged is None:
        return None
    return _tried("paged prefill", lambda: ragged.paged(device, page, window=window), _run_paged)


def _tried(what: str, make: Callable, run: Callable):
    """Result of `make` after one run, so that it compiles at start-up and not in the first request."""
    try:
        prefill = make()
        run(prefill)
    except Exception as error:
        warnings.warn(f"{what} does not work on this machine and is not used: {error}", stacklevel=3)
        return None
    return prefill


def _run_ragged(prefill) -> None:
    prefill.plan([1])
    query_heads, heads, head_dim = prefill.heads
    q, k = (torch.zeros((1, n, head_dim), dtype=prefill.dtype, device=prefill.device) for n in (query_heads, heads))
    prefill.run(q, k, k, scale=1.0, logit_cap=0.0, lse=True)


def _run_paged(prefill) -> None:
    prefill.plan([1, 1], [[0], [0, 0]], [1, prefill.page])
    query_heads, heads, head_dim = prefill.heads
    q = torch.zeros((2, query_heads, head_dim), dtype=prefill.dtype, device=prefill.device)
    k = torch.zeros((1, prefill.page, heads, head_dim), dtype=prefill.dtype, device=prefill.device)
    into = torch.empty_like(q), q.new_empty((2, query_heads), dtype=torch.float32)
    prefill.run(q, k, k, into, scale=1.0, logit_cap=0.0)

"""Prefill over dense rows by FlashAttention 3, in the build that `sgl_kernel` ships for Hopper; nothing is compiled.

FlashAttention returns natural log-sum-exps `[Hq, N]`. They are stored in base 2 as `[N, Hq]`, which our kernels read.
"""

from __future__ import annotations

import numpy as np
import torch

from ..common.unpack_kernel import LOG2E
from ..common.upload import upload


def _load():
    """The module with FlashAttention's entry points. ImportError where this machine has no build of it."""
    from sgl_kernel import flash_attn

    return flash_attn


def _store_lse(lse: torch.Tensor, out: torch.Tensor) -> None:
    """Natural `lse` fp32 `[Hq, N]` -> base-2 `out` fp32 `[N, Hq]`."""
    torch.mul(lse.t(), LOG2E.value, out=out)


class Fa3Ragged:
    """Causal attention of new tokens: `q[N, Hq, D]` over `k`, `v` `[N, H, D]`."""

    def __init__(self, device: torch.device, *, query_heads: int, heads: int, head_dim: int, dtype: torch.dtype):
        self.heads, self.dtype, self.device = (query_heads, heads, head_dim), dtype, device
        self.module = _load()
        self.starts, self.longest = torch.zeros(1, dtype=torch.int32, device=device), 0

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether this is a Hopper GPU with a build of FlashAttention 3."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            return False
        try:
            _load()
        except ImportError:
            return False
        return True

    def paged(self, device: torch.device, page: int, *, causal: bool = True, window: int = -1, first=None):
        """A paged form for the same heads; `first` is not needed."""
        return Fa3Paged(self, page, causal=causal, window=window)

    def plan(self, extend_lens: list[int]) -> None:
        """`extend_lens[B]`: new tokens of each request. Does not sync."""
        starts = np.concatenate(([0], np.cumsum(extend_lens))).astype(np.int32)
        self.starts, self.longest = upload(starts, self.device), max(extend_lens, default=0)

    def run(self, q, k, v, *, scale: float, logit_cap: float, lse: bool, into: tuple | None = None):
        """Output `[N, Hq, D]`, and with `lse` also the log-sum-exp fp32 `[N, Hq]`; both go to `into` if it is given."""
        with_lse = lse or (into is not None and into[1] is not None)
        out = self.module.flash_attn_varlen_func(
            q, k, v, self.starts, self.starts, self.longest, self.longest, softmax_scale=scale, causal=True,
            softcap=logit_cap, return_softmax_lse=with_lse, out=None if into is None else into[0],
        )  # fmt: skip
        if not with_lse:
            return out
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if into is None else into[1]
        _store_lse(out[1], sums)
        return out[0], sums


class Fa3Paged:
    """Attention of runs of new tokens to blocks in dense buffers. If causal, the last block ends with the run itself.

    The buffers `k`, `v` `[slots, P, H, D]` serve as FlashAttention's paged cache with pages of P tokens. A run's page
    table is its list of slots; tables of different runs may share slots.
    """

    def __init__(self, like: Fa3Ragged, page: int, *, causal: bool = True, window: int = -1):
        self.heads, self.dtype, self.device, self.module = like.heads, like.dtype, like.device, like.module
        self.page, self.causal, self.window = page, causal, window

    def plan(self, tokens: list[int], slots: list[list[int]] | list[np.ndarray], last: list[int]) -> None:
        """Run i of `tokens[i]` new tokens sees the blocks in `slots[i]`, and `last[i]` tokens of the last block. All
        arguments are on the host; does not sync."""
        n, width = len(tokens), max(map(len, slots))
        table = np.zeros((n, width), dtype=np.int32)
        for row, run_slots in zip(table, slots):
            row[: len(run_slots)] = run_slots
        starts = np.concatenate(([0], np.cumsum(tokens)))
        seen = [(len(run_slots) - 1) * self.page + tail for run_slots, tail in zip(slots, last)]
        lists = upload(np.concatenate((starts, seen, table.ravel()), dtype=np.int32, casting="unsafe"), self.device)
        self.starts, self.seen, table = lists.split((n + 1, n, n * width))
        self.table, self.longest = table.view(n, width), max(tokens)

    def run(self, q, k, v, into: tuple, *, scale: float, logit_cap: float) -> None:
        """Write the output and, if it is not None, the log-sum-exp to `into`."""
        out, sums = into
        result = self.module.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=self.seen, page_table=self.table, cu_seqlens_q=self.starts,
            max_seqlen_q=self.longest, softmax_scale=scale, causal=self.causal,
            window_size=(self.window, 0 if self.window >= 0 else -1), softcap=logit_cap, num_splits=1,
            return_softmax_lse=sums is not None, out=out,
        )  # fmt: skip
        if sums is not None:
            _store_lse(result[1], sums)

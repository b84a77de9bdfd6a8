"""Append of new K/V rows to the uncompressed pages of open blocks: one launch a layer, suitable for CUDA graphs."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..common.bound_launch import BoundLaunch
from ..common.dependent_launch import launch_options
from ..formats import BF16
from ..layout import PoolLayout
from ..store import PageStore


# Decode passes blocks and offsets as slices of one tensor, prefill as two tensors. They must share one compiled kernel.
@triton.jit(do_not_specialize=["head0"], do_not_specialize_on_alignment=["blocks", "offsets"])
def _append_kernel(
    head0, k, v, k_stride_n, k_stride_h, v_stride_n, v_stride_h, pages, table, blocks, offsets, like,
    page_bytes: tl.constexpr, LH: tl.constexpr, E: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    T: tl.constexpr, VOFF: tl.constexpr, SOFF: tl.constexpr, SCORED: tl.constexpr,
    HP: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):
    """grid (N,): all heads of one token. `head0` = layer * H; HP, DP: H and D rounded up to powers of two; `like`:
    `PageStore.like`.
    """
    if PDL:
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + n).to(tl.int64)
    offset = tl.load(offsets + n).to(tl.int32)
    h = tl.arange(0, HP)
    d = tl.arange(0, DP)
    ok = (h < H)[:, None] & (d < D)[None, :]
    page = tl.load(table + (block * LH + head0 + h) * E + offset // T, mask=h < H, other=0).to(tl.int64)
    slot = offset % T
    base = pages + page * page_bytes
    dtype = like.dtype.element_ty
    row = base.to(tl.pointer_type(dtype)) + slot * D
    x = tl.load(k + n * k_stride_n + h[:, None] * k_stride_h + d[None, :], mask=ok)
    tl.store(row[:, None] + d[None, :], x.to(dtype), mask=ok)
    y = tl.load(v + n * v_stride_n + h[:, None] * v_stride_h + d[None, :], mask=ok)
    tl.store((row + VOFF // 2)[:, None] + d[None, :], y.to(dtype), mask=ok)
    if SCORED:
        # A reused page still holds the scores of its previous owner.
        tl.store((base + SOFF).to(tl.pointer_type(tl.float32)) + slot, tl.zeros([HP], tl.float32), mask=h < H)


class LayerAppend:
    """`append` for the layers of a forward, as a kernel: `plan` once a forward, `run` for each layer."""

    def __init__(self, store: PageStore):
        self.store, self._options = store, {"num_warps": 2, **launch_options(store.device)}
        self._constants = *_constants(store.layout), self._options.pop("PDL")

    def plan(self, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Plan for tokens `offsets[N]` of bf16 `blocks[N]`, int32 or int64. Rows of padded requests have block 0."""
        store = self.store
        self._launch = BoundLaunch(
            _append_kernel, store.pages, store.table, blocks, offsets, store.like, *self._constants, **self._options
        )

    def run(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k`, `v` `[N, H, D]`: views with any token and head stride."""
        n, dtype = k.shape[0], self.store.dtype
        if n:
            self._launch((n, 1, 1), layer * self.store.layout.heads, _rows(k, dtype), _rows(v, dtype))


def append_triton(
    store: PageStore,
    layer: int,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """`append` for one layer, as a kernel; see `LayerAppend`."""
    append = LayerAppend(store)
    append.plan(blocks, offsets)
    append.run(layer, k, v)


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


@lru_cache
def _constants(g: PoolLayout) -> tuple[int, ...]:
    page = g.page(BF16)
    return (
        g.page_bytes, g.layers * g.heads, g.head_pages_bf16, g.heads, g.head_dim,
        page.tokens, page.offset("value_codes"), page.offset("scores"), g.has_scores,
        triton.next_power_of_2(g.heads), triton.next_power_of_2(g.head_dim),
    )  # fmt: skip

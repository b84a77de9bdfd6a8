"""Fake-quantized rows of uncompressed blocks of a layer: one launch, into reused buffers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.bound_launch import BoundLaunch
from ..common.quant_kernel import ROUNDER, grid, half_range, rounded
from ..formats import BF16, Format
from ..store import PageStore

INTERPRET = triton.knobs.runtime.interpret
CTA_ELEMENTS = 16384  # key elements per CTA: 64 registers per thread
V_STEP = 64  # tokens per CTA of values


@triton.jit
def round_to(x, dtype: tl.constexpr, ASM: tl.constexpr):
    """fp32 to the nearest number of the model dtype, ties to even."""
    if not ASM and dtype == tl.bfloat16:  # the interpreter cuts the low bits off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _by_token(x, BITS: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr):
    """fp32 `[STEP, D]` quantized in GROUPS runs of features a token, and back."""
    x = tl.reshape(x, (STEP, GROUPS, D // GROUPS))
    scale, zero = half_range(tl.min(x, 2), tl.max(x, 2), (1 << BITS) - 1)
    less, zero, inverse, top = grid(scale, zero, 1, BITS)
    code = rounded(x, less[:, :, None], zero[:, :, None], inverse[:, :, None], top[:, :, None]) - ROUNDER
    return tl.reshape(code * -less[:, :, None] + zero[:, :, None], (STEP, D))


@triton.jit
def _rows_of(pages, entries, t, live, page_bytes: tl.constexpr, T: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr):
    """Pointers `[N]` to the key rows of tokens t."""
    page = tl.load(entries + t // T, mask=live, other=0).to(tl.int64)
    return (pages + page * page_bytes).to(tl.pointer_type(dtype)) + (t % T) * D


@triton.jit
def _keys(
    pages, entries, out, stored, exact, tokens, page_bytes: tl.constexpr, dtype: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, T: tl.constexpr, KB: tl.constexpr, STEP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Keys of one head of one block, STEP tokens at a time. `out` at this head; see `_fake_quant_kernel`."""
    d = tl.arange(0, D)
    t = tl.arange(0, STEP)
    lo = tl.full([D], float("inf"), tl.float32)
    hi = tl.full([D], float("-inf"), tl.float32)
    x = tl.zeros([STEP, D], tl.float32)
    for t0 in tl.static_range(0, P, STEP):
        live = t0 + t < P
        rows = _rows_of(pages, entries, t0 + t, live, page_bytes, T, D, dtype)
        raw = tl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0)
        if exact >= 0:
            at = out + ((exact * P + t0 + t) * (H * D))[:, None] + d[None, :]
            # Bytes after a block's tokens may be NaN.
            tl.store(at, tl.where((t0 + t < tokens)[:, None], raw, 0.0).to(dtype), mask=live[:, None])
        x = raw.to(tl.float32)
        lo = tl.minimum(lo, tl.min(tl.where(live[:, None], x, float("inf")), 0))
        hi = tl.maximum(hi, tl.max(tl.where(live[:, None], x, float("-inf")), 0))
    if stored >= 0:
        scale, zero = half_range(lo, hi, 255)
        # On the grid of KB bits the scale is 1, 17 or 85 times as large: exact in fp32.
        less, low, inverse, top = grid(scale, zero, 255 // ((1 << KB) - 1), KB)
        for t0 in tl.static_range(0, P, STEP):
            live = t0 + t < P
            if STEP < P:  # else the rows are still here
                rows = _rows_of(pages, entries, t0 + t, live, page_bytes, T, D, dtype)
                x = tl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            code = rounded(x, less[None, :], low[None, :], inverse[None, :], top[None, :]) - ROUNDER
            y = code * -less[None, :] + low[None, :]
            at = out + ((stored * P + t0 + t) * (H * D))[:, None] + d[None, :]
            tl.store(at, round_to(y, dtype, ASM), mask=live[:, None])


@triton.jit(do_not_specialize=["layer", "row_stride"])
def _fake_quant_kernel(
    layer, pages, table, row_blocks, row_stride, items, k_out, v_out,
    L: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, page_bytes: tl.constexpr,
    T: tl.constexpr, VOFF: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr,
    K_STEP: tl.constexpr, V_STEP: tl.constexpr, ASM: tl.constexpr,
):
    """grid (n, H, 1 + P / V_STEP): keys of one head of one block, or V_STEP of its values. items int32 `[n, 8]`: row of
    row_blocks, place in it, slot of the fake-quantized rows, slot of the exact rows (either may be -1), tokens of
    the block. Outputs `[slots, P, H, D]` in the model dtype.
    """
    item = items + tl.program_id(0) * 8
    h = tl.program_id(1)
    block = tl.load(row_blocks + tl.load(item).to(tl.int64) * row_stride + tl.load(item + 1)).to(tl.int64)
    stored = tl.load(item + 2).to(tl.int64)
    exact = tl.load(item + 3).to(tl.int64)
    tokens = tl.load(item + 4)
    entries = table + ((block * L + layer) * H + h) * E
    dtype: tl.constexpr = k_out.dtype.element_ty
    if tl.program_id(2) == 0:
        _keys(
            pages, entries, k_out + h * D, stored, exact, tokens, page_bytes, dtype, H, D, P, T, KB, K_STEP,
            ASM,
        )
    else:
        d = tl.arange(0, D)
        t = (tl.program_id(2) - 1) * V_STEP + tl.arange(0, V_STEP)
        live = t < P
        rows = _rows_of(pages, entries, t, live, page_bytes, T, D, dtype)
        raw = tl.load((rows + VOFF // 2)[:, None] + d[None, :], mask=live[:, None], other=0.0)
        at = v_out + h * D + (t.to(tl.int64) * (H * D))[:, None] + d[None, :]
        if exact >= 0:
            tl.store(at + exact * (P * H * D), tl.where((t < tokens)[:, None], raw, 0.0).to(dtype), mask=live[:, None])
        if stored >= 0:
            y = _by_token(raw.to(tl.float32), VB, GROUPS, V_STEP, D)
            tl.store(at + stored * (P * H * D), round_to(y, dtype, ASM), mask=live[:, None])


class DenseRows:
    """`k`, `v` `[slots, P, H, D]` in the model dtype, for one layer at a time; they grow to the largest forward."""

    def __init__(self, store: PageStore):
        g = store.layout
        shape = (2, 0, g.block_tokens, g.heads, g.head_dim)
        self.k, self.v = torch.empty(shape, dtype=store.dtype, device=store.device)

    def reserve(self, slots: int) -> None:
        if self.k.shape[0] < slots:
            self.k, self.v = self.k.new_empty((2, slots, *self.k.shape[1:]))


class FakeQuantRows(DenseRows):
    """Rows of uncompressed blocks, fake-quantized with the bits of `fake_quantize`, and exact: `plan` once a forward,
    `fill` once a layer, after its rows were appended.
    """

    def __init__(self, store: PageStore, fmt: Format):
        super().__init__(store)
        self.store, self.format, self.n = store, fmt, 0

    def plan(self, row_blocks: torch.Tensor, items: torch.Tensor, slots: int) -> None:
        """Plan slots: for block `row_blocks[items[i, 0], items[i, 1]]`, slot items[i, 2] takes the fake-quantized rows,
        slot items[i, 3] the first items[i, 4] exact rows and zeros after them; -1 is no slot. `items` int32 `[n, 8]`
        on the device.
        """
        store, g, fmt, self.n = self.store, self.store.layout, self.format, len(items)
        self.reserve(slots)
        plain, padded = g.page(BF16), triton.next_power_of_2(g.block_tokens)
        k_step, v_step = min(padded, CTA_ELEMENTS // g.head_dim), min(padded, V_STEP)
        self._grid = self.n, g.heads, 1 + triton.cdiv(g.block_tokens, v_step)
        # Without fused multiply-add, because the reference rounds the product and the sum separately.
        self._launch = BoundLaunch(
            _fake_quant_kernel, store.pages, store.table, row_blocks, row_blocks.stride(0), items, self.k, self.v,
            g.layers, g.heads, g.head_dim, g.head_pages_bf16, g.block_tokens, g.page_bytes, plain.tokens,
            plain.offset("value_codes"), fmt.key_bits, fmt.value_bits, g.page(fmt).value_groups,
            k_step, v_step, not INTERPRET, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip

    def fill(self, layer: int) -> None:
        if self.n:
            self._launch(self._grid, layer)

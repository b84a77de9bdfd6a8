"""Rows as their packed block will return them, for the due blocks of a layer: one launch, into reused buffers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import BF16, TOKEN, Format
from ..store import PageStore
from .compact_pack_triton import encode, half_range

INTERPRET = triton.knobs.runtime.interpret
STEP = 32  # tokens a program holds at a time


@triton.jit
def _round(x, dtype: tl.constexpr, ASM: tl.constexpr):
    """fp32 to the nearest number of the model dtype, ties to even."""
    if not ASM and dtype == tl.bfloat16:  # the interpreter cuts the low bits off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _by_token(x, BITS: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr):
    """fp32 `[STEP, D]` quantised in GROUPS runs of features a token, and back."""
    x = tl.reshape(x, (STEP, GROUPS, D // GROUPS))
    scale, zero = half_range(tl.min(x, 2), tl.max(x, 2), (1 << BITS) - 1)
    s = tl.broadcast_to(scale.to(tl.float32)[:, :, None], (STEP, GROUPS, D // GROUPS))
    z = tl.broadcast_to(zero.to(tl.float32)[:, :, None], (STEP, GROUPS, D // GROUPS))
    return tl.reshape(encode(x, s, z, BITS).to(tl.float32) * s + z, (STEP, D))


@triton.jit(do_not_specialize=["layer", "row_stride"])
def _stored_kernel(
    pages, table, row_blocks, row_stride, items, k_out, v_out, layer,
    L: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, page_bytes: tl.constexpr,
    T: tl.constexpr, VOFF: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr,
    TOKEN_KEYS: tl.constexpr, STEP: tl.constexpr, ASM: tl.constexpr,
):
    """grid (n, H): one head of one block. items int32 `[n, 2]`: row of row_blocks, place in it. Outputs
    `[n, P, H, D]` in the model dtype.
    """
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    request = tl.load(items + 2 * i).to(tl.int64)
    block = tl.load(row_blocks + request * row_stride + tl.load(items + 2 * i + 1)).to(tl.int64)
    entries = table + ((block * L + layer) * H + h) * E
    dtype = k_out.dtype.element_ty
    t = tl.arange(0, STEP)
    d = tl.arange(0, D)
    scale = tl.zeros([D], tl.float16)
    zero = tl.zeros([D], tl.float16)
    if not TOKEN_KEYS:
        lo = tl.full([D], float("inf"), tl.float32)
        hi = tl.full([D], float("-inf"), tl.float32)
        for t0 in range(0, P, STEP):
            live = t0 + t < P
            page = tl.load(entries + (t0 + t) // T, mask=live, other=0).to(tl.int64)
            rows = (pages + page * page_bytes).to(tl.pointer_type(dtype)) + ((t0 + t) % T) * D
            k = tl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            lo = tl.minimum(lo, tl.min(tl.where(live[:, None], k, float("inf")), 0))
            hi = tl.maximum(hi, tl.max(tl.where(live[:, None], k, float("-inf")), 0))
        scale, zero = half_range(lo, hi, 255)
    for t0 in range(0, P, STEP):
        live = t0 + t < P
        page = tl.load(entries + (t0 + t) // T, mask=live, other=0).to(tl.int64)
        rows = (pages + page * page_bytes).to(tl.pointer_type(dtype)) + ((t0 + t) % T) * D
        k = tl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        v = tl.load((rows + VOFF // 2)[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        if TOKEN_KEYS:
            k = _by_token(k, KB, 1, STEP, D)
        else:
            # On the grid of KB bits the scale is 1, 17 or 85 times as large: exact in fp32.
            grid = scale.to(tl.float32) * (255 // ((1 << KB) - 1))
            s = tl.broadcast_to(grid[None, :], (STEP, D))
            z = tl.broadcast_to(zero.to(tl.float32)[None, :], (STEP, D))
            k = encode(k, s, z, KB).to(tl.float32) * s + z
        v = _by_token(v, VB, GROUPS, STEP, D)
        to = ((i * P + t0 + t) * H + h)[:, None] * D + d[None, :]
        tl.store(k_out + to, _round(k, dtype, ASM), mask=live[:, None])
        tl.store(v_out + to, _round(v, dtype, ASM), mask=live[:, None])


class StoredRows:
    """The rows of some uncompressed full blocks as `as_stored` gives them, bit for bit: `plan` once a forward, `fill`
    once a layer, after its rows were appended.

    `k`, `v` `[slots, P, H, D]` in the model dtype hold one layer at a time; they grow to the most blocks of a forward.
    """

    def __init__(self, store: PageStore, fmt: Format):
        self.store, self.format, self.n = store, fmt, 0
        g = store.layout
        shape = (2, 0, g.block_tokens, g.heads, g.head_dim)
        self.k, self.v = torch.empty(shape, dtype=store.dtype, device=store.device)

    def plan(self, row_blocks: torch.Tensor, items: torch.Tensor) -> None:
        """Slot i takes block `row_blocks[items[i, 0], items[i, 1]]`; int32 on the device, `items` `[n, 2]`."""
        self._rows, self._items, self.n = row_blocks, items, len(items)
        if self.k.shape[0] < self.n:
            self.k, self.v = self.k.new_empty((2, self.n, *self.k.shape[1:]))

    def fill(self, layer: int) -> None:
        store, g, fmt = self.store, self.store.layout, self.format
        if not self.n:
            return
        plain = g.page(BF16)
        # Without fused multiply-add, for the reference multiplies and adds one after the other.
        _stored_kernel[(self.n, g.heads)](
            store.pages, store.table, self._rows, self._rows.stride(0), self._items, self.k, self.v, layer, g.layers,
            g.heads, g.head_dim, g.head_pages_bf16, g.block_tokens, g.page_bytes, plain.tokens,
            plain.offset("value_codes"), fmt.key_bits, fmt.value_bits, g.page(fmt).value_groups, g.key_mode == TOKEN,
            STEP, not INTERPRET, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

"""Blocks of any format unpacked to dense rows, for kernels that read only those: one launch per layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.format_class import KEY_BITS, TOKENS, VALUE_BITS, VALUE_CODES, VALUE_META, format_classes
from ..store import PageStore
from .body_kernel import locate
from .fake_quant_kernel import round_to

INTERPRET = triton.knobs.runtime.interpret
TILE = 64  # tokens per program


@triton.jit
def _fields(x, f: tl.constexpr, BITS: tl.constexpr):
    """fp32 codes of field f of bytes x."""
    return ((x >> (BITS * f)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _unpack_keys(
    base, slot, live, header, to, D: tl.constexpr, KB: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    DK: tl.constexpr = D * KB // 8
    dk = tl.arange(0, DK)
    codes = tl.load((base + slot * DK)[:, None] + dk[None, :], mask=live[:, None], other=0)
    for f in tl.static_range(8 // KB):
        # On the grid of KB bits the scale is 1, 17 or 85 times as large: exact in fp32.
        grid = tl.load(header + f * DK + dk).to(tl.float32) * (255 // ((1 << KB) - 1))
        s = tl.broadcast_to(grid[None, :], (N, DK))
        z = tl.broadcast_to(tl.load(header + D + f * DK + dk).to(tl.float32)[None, :], (N, DK))
        y = _fields(codes, f, KB) * s + z
        tl.store(to[:, None] + (f * DK + dk)[None, :], round_to(y, to.dtype.element_ty, ASM), mask=live[:, None])


@triton.jit
def _unpack_values(
    base, slot, live, to, D: tl.constexpr, VB: tl.constexpr, T: tl.constexpr, VOFF: tl.constexpr,
    VMETA: tl.constexpr, ASM: tl.constexpr,
):
    DV: tl.constexpr = D * VB // 8
    RUN: tl.constexpr = 32 if VB == 2 else D  # features that share a scale
    dv = tl.arange(0, DV)
    codes = tl.load((base + slot + VOFF)[:, None] + (dv * T)[None, :], mask=live[:, None], other=0)
    meta = (base + VMETA).to(tl.pointer_type(tl.float16)) + slot
    for f in tl.static_range(8 // VB):
        at = meta[:, None] + ((f * DV + dv) // RUN * (2 * T))[None, :]
        s = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
        z = tl.load(at + T, mask=live[:, None], other=0.0).to(tl.float32)
        y = _fields(codes, f, VB) * s + z
        tl.store(to[:, None] + (f * DV + dv)[None, :], round_to(y, to.dtype.element_ty, ASM), mask=live[:, None])


@triton.jit(do_not_specialize=["layer", "row_stride", "first"])
def _unpack_kernel(
    pages, table, headers, format_id, class_of_format, row_blocks, row_stride, items, first, k_out, v_out, layer,
    L: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, page_bytes: tl.constexpr,
    CLASSES: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """grid (n, H, P / N): rows of N tokens of one head of one block into its slot of k_out, v_out `[slots, P, H, D]`.

    items int32 `[.., 4]` from entry `first` on: row of row_blocks, place in it, slot, tokens of the block (zeros after
    them). class_of_format int32 `[formats]`: index in CLASSES of the format of all tokens of such a block.
    """
    i = tl.program_id(0)
    h = tl.program_id(1)
    item = items + (first + i) * 4
    block = tl.load(row_blocks + tl.load(item).to(tl.int64) * row_stride + tl.load(item + 1)).to(tl.int64)
    head = (block * L + layer) * H + h
    cls = tl.load(class_of_format + tl.maximum(tl.load(format_id + block).to(tl.int32), 0))
    t0 = tl.program_id(2) * N
    t = tl.arange(0, N)
    live = t0 + t < P
    to = ((tl.load(item + 2).to(tl.int64) * P + t0 + t) * H + h) * D
    for c in tl.static_range(len(CLASSES)):
        if cls == c:
            if CLASSES[c][KEY_BITS] == 16:
                base, slot = locate(pages, table + head * E, page_bytes, t0, P, t, CLASSES[c][TOKENS], 1, 1)
                row = base.to(tl.pointer_type(k_out.dtype.element_ty)) + slot * D
                d = tl.arange(0, D)
                # Bytes after a block's tokens may be NaN.
                stored = t0 + t < tl.load(item + 3)
                x = tl.load(row[:, None] + d[None, :], mask=stored[:, None], other=0.0)
                tl.store((k_out + to)[:, None] + d[None, :], x, mask=live[:, None])
                x = tl.load((row + CLASSES[c][VALUE_CODES] // 2)[:, None] + d[None, :], mask=stored[:, None], other=0.0)
                tl.store((v_out + to)[:, None] + d[None, :], x, mask=live[:, None])
            else:
                base, slot = locate(pages, table + head * E, page_bytes, t0, P, t, CLASSES[c][TOKENS], 1, 16)
                _unpack_keys(
                    base, slot, live, headers + head * (2 * D), k_out + to, D, CLASSES[c][KEY_BITS], N, ASM,
                )
                _unpack_values(
                    base, slot, live, v_out + to, D, CLASSES[c][VALUE_BITS], CLASSES[c][TOKENS],
                    CLASSES[c][VALUE_CODES], CLASSES[c][VALUE_META], ASM
                )


class UnpackedRows:
    """Rows of blocks that keep every token in one format: those that `load_dense` gives, in the model dtype."""

    def __init__(self, store: PageStore):
        self.store, self.classes = store, format_classes(store)
        by_format = [(c.key_bits, c.value_bits, c.side) for c in self.classes]
        classes = [by_format.index((r.high.key_bits, r.high.value_bits, 0)) for r in store.block_formats]
        self.class_of_format = torch.tensor(classes, dtype=torch.int32, device=store.device)

    def fill(self, layer: int, row_blocks: torch.Tensor, items: torch.Tensor, first: int, n: int, k, v) -> None:
        """`items[first : first + n]` of one layer into `k`, `v` `[slots, P, H, D]`; for both see `_unpack_kernel`."""
        store, g = self.store, self.store.layout
        # Without fused multiply-add: the rows are then those that `fake_quantize` gives, bit for bit.
        _unpack_kernel[(n, g.heads, triton.cdiv(g.block_tokens, TILE))](
            store.pages, store.table, store.headers, store.format_id, self.class_of_format, row_blocks,
            row_blocks.stride(0),
            items, first, k, v, layer, g.layers, g.heads, g.head_dim, g.head_pages_bf16, g.block_tokens, g.page_bytes,
            self.classes, TILE, not INTERPRET, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

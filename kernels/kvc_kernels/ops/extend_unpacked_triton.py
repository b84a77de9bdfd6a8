"""Long appends over long packed prefixes: blocks unpacked into a reused buffer, a piece at a time, for FlashInfer.

Where a thousand new tokens look at each cached one, attention is bound by arithmetic and unpacking is small beside it,
so the fastest dense kernel wins. The buffer has a fixed size: a long prefix is taken in passes, joined by log-sum-exp.
It serves ladders that keep every token of a block; pruned heads have lengths that the host does not know.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import TOKEN
from ..store import PageStore
from .extend_body_triton import locate
from .extend_flashinfer_triton import RaggedPrefill, StagedPrefill
from .extend_join_triton import join
from .stored_triton import round_to

INTERPRET = triton.knobs.runtime.interpret
TILE = 64  # tokens a program
PASS_TOKENS = 16384
LEAST_NEW, LEAST_PREFIX = 512, 2048  # below, our kernel over packed pages is as fast
MOST_PLANS = 8  # FlashInfer plans of a forward: one for each (new tokens, blocks) of a pass


@triton.jit
def _fields(x, f: tl.constexpr, BITS: tl.constexpr):
    """fp32 codes of field f of bytes x."""
    return ((x >> (BITS * f)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _unpack_keys(
    base, slot, live, header, to, D: tl.constexpr, KB: tl.constexpr, T: tl.constexpr, KMETA: tl.constexpr,
    TOKEN_KEYS: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    DK: tl.constexpr = D * KB // 8
    dk = tl.arange(0, DK)
    codes = tl.load((base + slot * DK)[:, None] + dk[None, :], mask=live[:, None], other=0)
    for f in tl.static_range(8 // KB):
        if TOKEN_KEYS:
            meta = (base + KMETA).to(tl.pointer_type(tl.float16)) + slot
            s = tl.broadcast_to(tl.load(meta, mask=live, other=0.0).to(tl.float32)[:, None], (N, DK))
            z = tl.broadcast_to(tl.load(meta + T, mask=live, other=0.0).to(tl.float32)[:, None], (N, DK))
        else:
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
    pages, table, headers, rung, rung_class, row_blocks, row_stride, items, first, k_out, v_out, layer,
    L: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, page_bytes: tl.constexpr,
    CLASSES: tl.constexpr, TOKEN_KEYS: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):
    """grid (n, H, P / N): rows of N tokens of one head of one block into its slot of k_out, v_out `[slots, P, H, D]`.

    items int32 `[.., 2]` from entry `first` on: row of row_blocks, place in it. rung_class int32 `[rungs]`: index in
    CLASSES, as in `_extend_kernel`, of the format that all tokens of a block at this rung have.
    """
    i = tl.program_id(0)
    h = tl.program_id(1)
    item = items + (first + i) * 2
    block = tl.load(row_blocks + tl.load(item).to(tl.int64) * row_stride + tl.load(item + 1)).to(tl.int64)
    head = (block * L + layer) * H + h
    cls = tl.load(rung_class + tl.maximum(tl.load(rung + block).to(tl.int32), 0))
    t0 = tl.program_id(2) * N
    t = tl.arange(0, N)
    live = t0 + t < P
    to = ((i.to(tl.int64) * P + t0 + t) * H + h) * D
    for c in tl.static_range(len(CLASSES)):
        if cls == c:
            if CLASSES[c][0] == 16:
                base, slot = locate(pages, table + head * E, page_bytes, t0, P, t, CLASSES[c][2], 1, 1)
                row = base.to(tl.pointer_type(k_out.dtype.element_ty)) + slot * D
                d = tl.arange(0, D)
                x = tl.load(row[:, None] + d[None, :], mask=live[:, None], other=0.0)
                tl.store((k_out + to)[:, None] + d[None, :], x, mask=live[:, None])
                x = tl.load((row + CLASSES[c][5] // 2)[:, None] + d[None, :], mask=live[:, None], other=0.0)
                tl.store((v_out + to)[:, None] + d[None, :], x, mask=live[:, None])
            else:
                base, slot = locate(pages, table + head * E, page_bytes, t0, P, t, CLASSES[c][2], 1, 16)
                _unpack_keys(
                    base, slot, live, headers + head * (2 * D), k_out + to, D, CLASSES[c][0], CLASSES[c][2],
                    CLASSES[c][4], TOKEN_KEYS, N, ASM,
                )
                _unpack_values(
                    base, slot, live, v_out + to, D, CLASSES[c][1], CLASSES[c][2], CLASSES[c][5], CLASSES[c][6], ASM
                )


class UnpackedPrefix:
    """`plan` once a forward; if it takes the forward, `run` for each layer."""

    def __init__(self, store: PageStore, classes: tuple[tuple[int, ...], ...], ragged: RaggedPrefill):
        """`classes`: as `ExtendAttention` describes them to its kernels, bf16 first."""
        g, device = store.layout, store.device
        self.store, self.classes, self.ragged = store, classes, ragged
        by_format = [(c[0], c[1], c[3]) for c in classes]
        found = [by_format.index((r.high.key_bits, r.high.value_bits, 0)) for r in store.ladder]
        self.rung_class = torch.tensor(found, dtype=torch.int32, device=device)
        self.slots = max(1, PASS_TOKENS // g.block_tokens)
        self.k, self.v = torch.empty((2, 0, g.block_tokens, g.heads, g.head_dim), dtype=store.dtype, device=device)
        self.lse = torch.empty(0, dtype=torch.float32, device=device)
        self.prefills: list[StagedPrefill] = []

    @classmethod
    def create(cls, store: PageStore, classes, ragged: RaggedPrefill | None) -> UnpackedPrefix | None:
        """None without FlashInfer, or where a block may keep fewer than all of its tokens in one format."""
        if ragged is None or any(r.low is not None for r in store.ladder):
            return None
        return cls(store, classes, ragged)

    def plan(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        skip: list[list[int]] | None = None,
    ) -> bool:
        """Whether this forward is taken: every prefix in it is long, of whole blocks, and under many new tokens.

        Lengths on the host, `row_blocks[B, NB]` int32 on the device; `skip[B]`: places of blocks that are attended to
        elsewhere. Does not sync.
        """
        p, items, passes, start = self.store.layout.block_tokens, [], [], 0
        for r, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
            if prefix and new:
                if prefix % p or prefix < LEAST_PREFIX or new < LEAST_NEW:
                    return False
                left = set(skip[r]) if skip else ()
                places = [j for j in range(prefix // p) if j not in left]
                for at in range(0, len(places), self.slots):
                    some = places[at : at + self.slots]
                    passes.append((start, new, len(items), len(some)))
                    items += [(r, j) for j in some]
            start += new
        shapes = sorted({(new, n) for _, new, _, n in passes})
        if not passes or len(shapes) > MOST_PLANS:
            return False
        host = torch.tensor(items, dtype=torch.int32)
        if self.store.device.type == "cuda":
            host = host.pin_memory()
        self._items, self._rows, self._passes = host.to(self.store.device, non_blocking=True), row_blocks, passes
        while len(self.prefills) < len(shapes):
            self.prefills.append(self._prefill())
        self._plans = dict(zip(shapes, self.prefills))
        for (new, n), prefill in self._plans.items():
            prefill.plan([new], [list(range(n))], [p])
        if not len(self.k):
            self.k, self.v = self.k.new_empty((2, self.slots, *self.k.shape[1:]))
        heads = self.ragged.heads[0]
        if self.lse.numel() < start * heads:
            self.lse = self.lse.new_empty(start * heads)
        return True

    def _prefill(self) -> StagedPrefill:
        first = self.prefills[0] if self.prefills else None
        return StagedPrefill(
            self.ragged, self.store.device, self.store.layout.block_tokens, causal=False,
            workspace=first and first.workspace,
        )  # fmt: skip

    def _unpack(self, layer: int, first: int, n: int) -> None:
        """Blocks of items first .. first + n - 1 into slots 0 .. n - 1."""
        store, g = self.store, self.store.layout
        # Without fused multiply-add: the rows are then those that `as_stored` gives, bit for bit.
        _unpack_kernel[(n, g.heads, triton.cdiv(g.block_tokens, TILE))](
            store.pages, store.table, store.headers, store.rung, self.rung_class, self._rows, self._rows.stride(0),
            self._items, first, self.k, self.v, layer, g.layers, g.heads, g.head_dim, g.head_pages_bf16, g.block_tokens,
            g.page_bytes, self.classes, g.key_mode == TOKEN, TILE, not INTERPRET, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def run(self, layer: int, q, own: tuple, out, out_lse, *, scale: float, logit_cap: float) -> None:
        """Add the planned prefixes to `own` (output and LSE of all new tokens so far), into `out`, `out_lse`.

        The rows of requests without a prefix are copied; what `own` holds is lost.
        """
        o, lse = own
        part = self.lse[: lse.numel()].view(lse.shape)
        if out_lse is None:
            out_lse = part
        done, passes = 0, self._passes
        for i, (start, new, first, n) in enumerate(passes):
            if start > done:
                self._copy(slice(done, start), own, out, out_lse)
            mine, last = slice(start, start + new), i + 1 == len(passes) or passes[i + 1][0] != start
            self._unpack(layer, first, n)
            into = out[mine], part[mine]
            self._plans[new, n].run(q[mine], self.k, self.v, into, scale=scale, logit_cap=logit_cap)
            to = (out[mine], out_lse[mine]) if last else (o[mine], lse[mine])
            join(o[mine], lse[mine], *into, *to)
            done = start + new
        if done < len(q):
            self._copy(slice(done, len(q)), own, out, out_lse)

    @staticmethod
    def _copy(rows: slice, own: tuple, out, out_lse) -> None:
        out[rows].copy_(own[0][rows])
        out_lse[rows].copy_(own[1][rows])

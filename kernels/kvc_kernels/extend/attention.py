"""Prefill with cached prefix: attention of new tokens to the prefix in pages and to themselves.

`ExtendAttention` plans once a forward, from lengths on the host, and runs once a layer. A CTA of the Triton kernel
takes a tile of query rows (new token x query head of one group) of one KV head and one KV split of the prefix, class by
class (a class is a format and its side of the table). The first split also takes the new tokens, from the dense inputs.
The states of the splits are merged by log-sum-exp. Only the lists of blocks grow with the prefix.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.format_class import KEY_BITS, SIDE, TOKENS, VALUE_BITS, VALUE_CODES, VALUE_META, format_classes
from ..common.unpack_kernel import NEG
from ..decode.planner import CHUNK
from ..formats import Format
from ..store import PageStore
from . import hopper as hopper_module
from .body_kernel import causal_tiles, list_tiles, load_q, packed_tiles, plain_tiles
from .dense_prefill import ragged_prefill
from .few_tokens import FewTokenExtend
from .merge_kernel import merge_splits_kernel
from .planner import ExtendPlan
from .staged import StagedExtend
from .steps import ExtendSteps
from .unpacked import UnpackedPrefix

INTERPRET = triton.knobs.runtime.interpret
# A prefill library attends new tokens to themselves if that is more than this share of the work over the prefix and
# more than this many products per head. Otherwise further tiles of the Triton kernel cost less than another launch.
NEW_SHARE, NEW_MIN_PRODUCTS = 0.1, 256 * 256 / 2
WIDE_SHARED = 106_496  # shared memory of a CTA, in bytes, with the default tuning and head_dim 256


@dataclass(frozen=True)
class Tuning:
    """Launch parameters; the defaults are the fastest measured (docs/kernels/prefill.md)."""

    rows: int = 64  # query rows per CTA
    warps: int = 4
    tile: int = 64  # keys per iteration
    stages: int = 2
    programs_per_sm: int = 2

    @classmethod
    def best(cls, head_dim: int, shared: int) -> Tuning:
        """Tuning for `shared` bytes of shared memory per CTA: 99 KB except on data center GPUs."""
        return cls(stages=1) if head_dim > 128 and shared < WIDE_SHARED else cls()


@triton.jit(do_not_specialize=["layer", "scale", "cap", "NB"])
def _extend_kernel(
    q, q_stride_n, q_stride_h, k, k_stride_n, k_stride_h, v, v_stride_n, v_stride_h, out, new_o, new_lse,
    part_o, part_lse, out_lse, scratch, items, lists, sizes, NB, pages, table, counts, headers, staged, staged_k,
    staged_v, layer, scale, cap,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr,
    page_bytes: tl.constexpr, CLASSES: tl.constexpr, CHUNK: tl.constexpr, MAX_TILES: tl.constexpr,
    WIDTH: tl.constexpr, NEW_TOKENS: tl.constexpr, CAPPED: tl.constexpr, BM: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, STAGED: tl.constexpr, LSE: tl.constexpr, ASM: tl.constexpr,
):
    """grid (items * H,). items int32 `[n, 8]`: see `ExtendPlan`. An item without other splits writes out `[N, Hq, D]`
    (with LSE also out_lse fp32 `[N, Hq]`); the rest write part_o fp32 `[slots, H, BM, D]` and part_lse fp32
    `[slots, H, BM]`. All log-sum-exps are to base 2.

    With NEW_TOKENS, this kernel also attends new tokens to themselves. Otherwise new_o `[N, Hq, D]` and new_lse fp32
    `[N, Hq]` are that state, and the first split of the prefix starts from it. With STAGED, a request also sees all
    tokens of its staged blocks: staged int32 `[requests, 2]` (first slot, number) of staged_k, staged_v `[slots, P, H,
    D]`.
    """
    pid = tl.program_id(0)
    h = pid % H
    item = items + (pid // H) * 8
    request = tl.load(item)
    start = tl.load(item + 1)
    row0 = tl.load(item + 2)
    rows = tl.load(item + 3)
    share_from = tl.load(item + 4)
    share_to = tl.load(item + 5)
    share_of = tl.load(item + 6)
    slot = tl.load(item + 7)
    is_first = (share_from == 0).to(tl.int32)
    last = (tl.minimum(row0 + BM, rows) + G - 1) // G  # of the new tokens that the tile sees
    head = (layer * H + h).to(tl.int64)
    tile_list = scratch + pid.to(tl.int64) * (CHUNK * MAX_TILES)
    row = row0 + tl.arange(0, BM)
    valid = row < rows
    token = row // G
    hq = h * G + row % G
    q_rows = q + (start + token).to(tl.int64) * q_stride_n + hq * q_stride_h
    acc = ()
    for _ in tl.static_range(D // WIDTH):
        acc = acc + (tl.zeros([BM, WIDTH], tl.float32),)
    m = tl.full([BM], NEG, tl.float32)
    l = tl.zeros([BM], tl.float32)
    w = tl.arange(0, WIDTH)
    place = (start + token).to(tl.int64) * (H * G) + hq
    if not NEW_TOKENS:
        has_new = valid & (is_first == 1)
        m = tl.load(new_lse + place, mask=has_new, other=NEG)
        l = tl.where(has_new, 1.0, 0.0)
        acc = ()
        for j in tl.static_range(D // WIDTH):
            x = tl.load(new_o + place[:, None] * D + (j * WIDTH + w)[None, :], mask=has_new[:, None], other=0.0)
            acc = acc + (x.to(tl.float32),)
    for c in tl.static_range(len(CLASSES)):
        n = tl.load(sizes + request * len(CLASSES) + c)
        ahead = (last + P - 1) // P if NEW_TOKENS and c == len(CLASSES) - 1 else 0
        lo = tl.maximum(((n + ahead).to(tl.int64) * share_from // share_of).to(tl.int32) - ahead, 0)
        hi = tl.maximum(((n + ahead).to(tl.int64) * share_to // share_of).to(tl.int32) - ahead, 0)
        entries = lists + (request * len(CLASSES) + c).to(tl.int64) * NB
        first_page = table + head * E + CLASSES[c][SIDE] * (E - 1)
        if hi > lo:
            if CLASSES[c][KEY_BITS] == 16:
                qc = load_q(q_rows, valid, q.dtype.element_ty, D, 1)
            else:
                qc = load_q(q_rows, valid, tl.float16, D, 8 // CLASSES[c][KEY_BITS])
            for at in range(lo, hi, CHUNK):
                n_blocks = tl.minimum(hi - at, CHUNK)
                tl.debug_barrier()
                n_tiles = list_tiles(
                    tile_list, entries + at, n_blocks, counts + head * 2 + CLASSES[c][SIDE], L * H * 2,
                    CHUNK, TILE, MAX_TILES, CLASSES[c][KEY_BITS] == 16, 0,
                )
                tl.debug_barrier()
                if CLASSES[c][KEY_BITS] == 16:
                    acc, m, l = plain_tiles(
                        acc, m, l, qc[0], tile_list, n_tiles, pages, page_bytes, first_page, L * H * E, scale, cap,
                        D, CLASSES[c][TOKENS], CLASSES[c][VALUE_CODES], WIDTH, CAPPED, TILE, STAGES, ASM,
                    )
                else:
                    acc, m, l = packed_tiles(
                        acc, m, l, qc, tile_list, n_tiles, pages, page_bytes, first_page, L * H * E,
                        headers + head * (2 * D), L * H * 2 * D, scale, cap, D, CLASSES[c][KEY_BITS],
                        CLASSES[c][VALUE_BITS], CLASSES[c][TOKENS], 1 - 2 * CLASSES[c][SIDE],
                        CLASSES[c][VALUE_CODES], CLASSES[c][VALUE_META], WIDTH, CAPPED, TILE, STAGES, ASM,
                    )
    if STAGED:
        qc = load_q(q_rows, valid, q.dtype.element_ty, D, 1)
        n = tl.load(staged + request * 2 + 1) * P * is_first
        at = tl.load(staged + request * 2).to(tl.int64) * (P * H * D) + h * D
        acc, m, l = causal_tiles(
            acc, m, l, qc[0], staged_k + at, staged_v + at, H * D, H * D, token * 0 + n, n, scale, cap,
            D, WIDTH, CAPPED, TILE, STAGES, ASM,
        )
    if NEW_TOKENS:
        qc = load_q(q_rows, valid, q.dtype.element_ty, D, 1)
        acc, m, l = causal_tiles(
            acc, m, l, qc[0], k + start.to(tl.int64) * k_stride_n + h * k_stride_h,
            v + start.to(tl.int64) * v_stride_n + h * v_stride_h, k_stride_n, v_stride_n, token, last * is_first, scale,
            cap,
            D, WIDTH, CAPPED, TILE, STAGES, ASM,
        )
    divisor = tl.where(l > 0, l, 1.0)
    if slot < 0:
        for j in tl.static_range(D // WIDTH):
            x = (acc[j] / divisor[:, None]).to(out.dtype.element_ty)
            tl.store(out + place[:, None] * D + (j * WIDTH + w)[None, :], x, mask=valid[:, None])
        if LSE:
            tl.store(out_lse + place, tl.where(l > 0, m + tl.log2(divisor), NEG), mask=valid)
    else:
        i = (slot.to(tl.int64) * H + h) * BM + tl.arange(0, BM)
        for j in tl.static_range(D // WIDTH):
            tl.store(part_o + i[:, None] * D + (j * WIDTH + w)[None, :], acc[j] / divisor[:, None])
        tl.store(part_lse + i, tl.where(l > 0, m + tl.log2(divisor), NEG))


class ExtendAttention:
    """Plan and buffers of prefill attention over one store: `plan` once a forward, `run` for each layer.

    `plan` chooses `steps`, which name the engine of the prefix, the engine of the new tokens, and their merge.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        query_heads: int,
        max_blocks: int | None = None,
        tuning: Tuning | None = None,
        dense: str = "auto",
        hopper: bool | None = None,
        fake_quant_format: Format | None = None,
        whole: bool | None = None,
        appended: bool = False,
    ):
        """`max_blocks`: maximum blocks of a request, so that the plan's kernel is compiled once. `dense`: library of
        `ragged_prefill` for the new tokens. `hopper`: whether to use the Hopper kernel, None: if it supports the store.
        `fake_quant_format`: as in `ops.extend_attention`. `whole`: packed blocks keep all of their tokens;
        `fake_quant_format` implies it. `appended`: new rows are in their pages before `run`, which the decode kernel
        needs to take few new tokens.
        """
        layout = store.layout
        if query_heads % layout.heads:
            raise ValueError(f"{query_heads} query heads are not a multiple of {layout.heads} KV heads")
        self.store = store
        self.group = query_heads // layout.heads
        self._sms, shared = 1, WIDE_SHARED
        if store.device.type == "cuda":
            card = torch.cuda.get_device_properties(store.device)
            self._sms, shared = card.multi_processor_count, card.shared_memory_per_block_optin
        self.tuning = tuning or Tuning.best(layout.head_dim, shared)
        self._plan = ExtendPlan(store, self.group, max_blocks=max_blocks)
        self._tile = min(self.tuning.tile, triton.next_power_of_2(layout.block_tokens))
        self._max_tiles = triton.next_power_of_2(-(-layout.block_tokens // self._tile))
        self._classes = format_classes(store)
        self._width = min(self._features_per_field(f) for f, _ in self._plan.classes)
        self._hopper = None
        if hopper or (hopper is None and store.device.type == "cuda"):
            if hopper_module.supports(store):
                self._hopper = hopper_module.HopperExtend(store, self.group, self._classes)
        self.ragged = ragged_prefill(
            store.device, dense, query_heads=query_heads, heads=layout.heads, head_dim=layout.head_dim,
            dtype=store.dtype,
        )  # fmt: skip
        dev = store.device
        self._few_rows = self._hopper is not None and hopper_module.supports_few(self._classes)
        self._staged = None
        if fake_quant_format is not None:
            self._staged = StagedExtend(store, fake_quant_format, self.ragged, query_heads=query_heads)
        self._unpacked = None
        # The Hopper kernel is also faster than a library over unpacked rows.
        if self._hopper is None and (fake_quant_format is not None if whole is None else whole):
            self._unpacked = UnpackedPrefix.create(store, self.ragged)
        self._few = None
        if appended and max_blocks:
            self._few = FewTokenExtend(store, query_heads=query_heads, max_blocks=max_blocks)
        self._scratch = torch.empty(0, dtype=torch.int64, device=dev)
        self._part_o = torch.empty(0, dtype=torch.float32, device=dev)
        self._part_lse = torch.empty(0, dtype=torch.float32, device=dev)

    def _features_per_field(self, fmt: Format) -> int:
        """Number of consecutive features of a value in `fmt` that lie in one bit field and share a scale."""
        head_dim = self.store.layout.head_dim
        if not fmt.packed:
            return head_dim
        field = head_dim * fmt.value_bits // 8
        return min(field, 32) if fmt.value_bits == 2 else field

    def plan(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        waiting: list[list[int]] | None = None,
        formats: list[Format | None] | None = None,
        whole: bool = True,
    ) -> None:
        """`row_blocks` int32 `[B, NB]` on the device, lengths on the host. Does not sync.

        `waiting[B]`, with `fake_quant_format`: places of the full blocks of each prefix that are still uncompressed.
        `formats[B]`: `fake_quant_format` of each request, by default that of the operation. Only the operation's format
        is staged: a request with another format sees its own new blocks exact. `whole`: packed blocks of this forward
        keep all of their tokens; it only matters if the operation was created with `whole`.
        """
        if self._staged is not None:
            row_blocks, prefix_lens, extend_lens = self._staged.plan(
                row_blocks, prefix_lens, extend_lens, waiting, formats
            )
        lists = row_blocks, prefix_lens, extend_lens
        self.steps = steps = self._choose(*lists, whole)
        if steps.new == "ragged":
            self.ragged.plan(extend_lens)
        if steps.prefix == "decode":
            self._few.plan(*lists)
        elif steps.prefix in ("hopper", "triton"):
            programs = self._sms * (1 if steps.prefix == "hopper" else self.tuning.programs_per_sm)
            skip_full = self._staged.skips if steps.staged else None
            few = steps.prefix == "hopper" and steps.rows == hopper_module.FEW_ROWS
            self._plan.update(
                *lists, rows=steps.rows, programs=programs, new_tokens=steps.new == "prefix", skip_full=skip_full,
                most_tokens=hopper_module.FEW_TOKENS if few else None,
            )  # fmt: skip
            self._reserve()
            if steps.prefix == "hopper":
                self._hopper.plan(self._plan, steps.rows, self._part_o, self._part_lse)

    def _choose(
        self, row_blocks: torch.Tensor, prefix_lens: list[int], extend_lens: list[int], whole: bool
    ) -> ExtendSteps:
        """The steps of a forward whose staged blocks are planned. Plans the unpacked prefix if it is chosen."""
        staged = self._staged is not None and self._staged.groups is not None
        if not staged and self._few is not None and self._few.fits(prefix_lens, extend_lens):
            return ExtendSteps("decode")
        among_new = sum(n * n / 2 for n in extend_lens)
        over_prefix = sum(p * n for p, n in zip(prefix_lens, extend_lens))
        new = "prefix"
        if staged:
            new = "paged" if self._staged.prefill is not None else "prefix"
        elif self.ragged is not None and among_new > max(NEW_SHARE * over_prefix, NEW_MIN_PRODUCTS):
            new = "ragged"
        if not over_prefix and new != "prefix":
            return ExtendSteps(None, new, staged)
        # Only the Triton kernel reads both staged rows and pages.
        rows_and_pages = staged and new == "prefix"
        if self._unpacked is not None and whole and not rows_and_pages:
            skip = self._staged.waits if staged else None
            if self._unpacked.plan(row_blocks, prefix_lens, extend_lens, skip):
                return ExtendSteps("unpacked", "paged" if staged else "ragged", staged)
        if self._hopper is not None and not rows_and_pages:
            widest = max(extend_lens, default=0) * self.group
            few = self._few_rows and widest <= hopper_module.FEW_ROWS
            rows = hopper_module.FEW_ROWS if few else 256 if widest > 128 else 128
            return ExtendSteps("hopper", new, staged, rows=rows)
        return ExtendSteps("triton", new, staged, rows=self.tuning.rows)

    def _reserve(self) -> None:
        """Grow the buffers to the plan. New tokens of a forward and CTAs that run at a time bound them."""
        layout, plan, hopper = self.store.layout, self._plan, self.steps.prefix == "hopper"
        words = 0 if hopper else plan.n_items * layout.heads * CHUNK * self._max_tiles
        if self._scratch.numel() < words:
            self._scratch = self._scratch.new_empty(words)
        rows = plan.n_slots * layout.heads * self.steps.rows
        if self._part_lse.numel() < rows:
            self._part_lse = self._part_lse.new_empty(rows)
        parts = rows * layout.head_dim // (2 if hopper else 1)  # the Hopper kernel's partial results are fp16
        if self._part_o.numel() < parts:
            self._part_o = self._part_o.new_empty(parts)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        logit_cap: float = 0.0,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`q[N, Hq, D]`, new rows `k`, `v` `[N, H, D]` (any token and head stride) -> `[N, Hq, D]` in q's dtype.

        With `return_lse` also the log-sum-exp to base 2, fp32 `[N, Hq]`.
        """
        steps, new_state = self.steps, None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        if not q.shape[0]:
            return (out, lse) if return_lse else out
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if steps.prefix == "decode":
            self._few.run(layer, q, out, lse, scale=scale, logit_cap=logit_cap)
            return (out, lse) if return_lse else out
        if steps.staged:
            self._staged.fill(layer)
        if steps.new == "ragged":
            new_state = self.ragged.run(
                q, k, v, scale=scale, logit_cap=logit_cap, lse=return_lse or steps.merge is not None
            )
            if steps.prefix is None:
                return new_state
        elif steps.new == "paged":
            into = (out, lse) if steps.prefix is None else None
            new_state = self._staged.run(q, into, scale=scale, logit_cap=logit_cap)
        if steps.prefix == "unpacked":
            self._unpacked.run(layer, q, new_state, out, lse, scale=scale, logit_cap=logit_cap)
        elif steps.prefix is not None:
            self._attend(layer, q, k, v, out, lse, new_state, scale, logit_cap)
        return (out, lse) if return_lse else out

    def _attend(self, layer: int, q, k, v, out, lse, new_state, scale: float, logit_cap: float) -> None:
        """Fill `out`, and `lse` if given, by a kernel over pages; `new_state` is None, or (output, LSE) of the new
        tokens among themselves."""
        store, layout, plan, t, steps = self.store, self.store.layout, self._plan, self.tuning, self.steps
        out_lse = self._part_lse if lse is None else lse
        if steps.prefix == "hopper":
            self._hopper.launch(layer, q, k, v, out, lse, new_state, scale, logit_cap)
            return
        new_o, new_lse = new_state or (out, self._part_lse)
        staged = steps.staged and new_state is None
        rows = (self._staged.sees, self._staged.rows.k, self._staged.rows.v) if staged else (plan.sizes, k, v)
        _extend_kernel[(plan.n_items * layout.heads,)](
            q, q.stride(0), q.stride(1), k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), out,
            new_o, new_lse, self._part_o, self._part_lse, out_lse, self._scratch, plan.items, plan.lists,
            plan.sizes, plan.max_blocks, store.pages, store.table, store.counts, store.headers, *rows, layer, scale,
            logit_cap, layout.layers, layout.heads, self.group, layout.head_dim, layout.head_pages_bf16,
            layout.block_tokens, layout.page_bytes, self._classes, CHUNK, self._max_tiles, self._width,
            new_state is None, logit_cap > 0, steps.rows, self._tile, t.stages,
            staged, lse is not None, not INTERPRET, num_warps=t.warps,
        )  # fmt: skip
        if plan.n_merges:
            rows = min(16, steps.rows)
            merge_splits_kernel[(plan.n_merges, steps.rows // rows, layout.heads)](
                self._part_o, self._part_lse, plan.merges, out, out_lse, layout.heads, self.group, layout.head_dim,
                steps.rows, rows, lse is not None, num_warps=4,
            )  # fmt: skip

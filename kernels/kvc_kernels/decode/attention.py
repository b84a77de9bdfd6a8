"""Decode attention over mixed-precision pages: `plan` once per step, then one launch and a merge per layer.

A program (CTA) takes one (work item, KV head). A work item is a KV split: a run of blocks of one request in one format
class, a format and its side of the block table. Every program thus knows its precision at compile time, and a layer's
bf16 tails, high pages and low pages share one launch. Partial results are merged by log-sum-exp.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..common.dependent_launch import launch_options
from ..common.format_class import (
    KEY_BITS,
    SIDE,
    STAGES,
    TILE_PAGES,
    TILE_TOKENS,
    TOKENS,
    VALUE_BITS,
    VALUE_CODES,
    VALUE_META,
    FormatClass,
    format_class,
    format_tiers,
)
from ..common.unpack_kernel import CODE_UNIT, LOG2E, NEG
from ..compact.write_kernel import padded
from ..layout import Format
from ..store import PageStore
from .body_kernel import P_SHIFT, _list_tiles, packed_part, plain_part
from .merge_kernel import merge_kernel
from .planner import CHUNK, DecodePlan

try:
    from .gluon.kernel import decode_kernel as gluon_kernel
except ImportError:  # Gluon is experimental in Triton 3.6; without it the Triton kernel runs
    gluon_kernel = None

INTERPRET = triton.knobs.runtime.interpret
GLUON_TILE_BYTES = 12288  # bytes of shared memory; with 12 CTAs per SM each has 17 KB
GLUON_REGISTERS = 168  # 12 CTAs of one warp fit an SM
STAGED_BYTES = 9000  # larger tiles are not double-buffered, so that 8 CTAs fit an SM


@dataclass(frozen=True)
class Tuning:
    """Launch parameters. The defaults are the fastest measured (docs/kernels/decode.md)."""

    engine: str = "auto"  # "gluon" with 4-bit keys or two tiers on Hopper, else "triton"; only it has warps, stages
    warps: int = 1
    tile: int = 0  # tokens; 0: by the size of a token
    plain_tile: int = 16
    stages: int = 0  # 0: by the bytes of a tile
    max_registers: int | None = None


@triton.jit
def _zero_products(
    qz, q, zeros, header_stride, entries, n, factor,
    D: tl.constexpr, NQ: tl.constexpr, KB: tl.constexpr, CHUNK: tl.constexpr,
):
    """qz fp32 `[CHUNK, NQ]` = factor * q . zero of each block's header, by a small MMA whose rows are the blocks."""
    DK: tl.constexpr = D * KB // 8
    NF: tl.constexpr = 8 // KB
    j = tl.arange(0, CHUNK)
    dk = tl.arange(0, DK)
    block = tl.load(entries + j, mask=j < n, other=0) >> 32
    s = tl.zeros([CHUNK, NQ], tl.float32)
    for k in tl.static_range(NF):
        at = zeros + (block * header_stride)[:, None] + ((NF - 1 - k) * DK + dk)[None, :]
        zero = tl.load(at, mask=(j < n)[:, None], other=0.0)
        s += tl.dot(zero, q[k]) * (1 << (KB * (NF - 1 - k)))
    heads = tl.arange(0, NQ)
    tl.store(qz + j[:, None] * NQ + heads[None, :], s * factor)


@triton.jit
def _unseen(entries, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """Number of tokens that the window hides in an item's first tile; only the first block can begin inside the window.
    """
    if WINDOWED:
        return ((tl.load(entries) >> 16) & 0xFFFF).to(tl.int32) % TILE
    else:
        return 0


@triton.jit
def _plain_program(
    q_row, live, out, ml, words, tile_pages, entries, blocks, pages, table, row, scale, cap, last, hidden,
    page_bytes: tl.constexpr, ROW_STRIDE: tl.constexpr, NQ: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    T: tl.constexpr, SPAN: tl.constexpr, VOFF: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, WINDOWED: tl.constexpr,
    MULTI: tl.constexpr,
):
    """One work item of uncompressed blocks. `row`: offset of this layer and head in a block's table.

    MULTI: of the item's block number `last`, a query row does not see the last `hidden[NQ]` tokens.
    """
    d = tl.arange(0, D)
    q = tl.load(q_row[None, :] + d[:, None], mask=live[None, :], other=0.0)
    acc = tl.zeros([D, NQ], tl.float32)
    m = tl.full([NQ], NEG, tl.float32)
    l = tl.zeros([16 * WARPS, NQ], tl.float32)
    unseen = _unseen(entries, TILE, WINDOWED)
    for first in range(0, blocks, CHUNK):
        n = tl.minimum(blocks - first, CHUNK)
        tiles = _list_tiles(
            words, tile_pages, entries + first, n, table, 0, table + row, ROW_STRIDE,
            CHUNK, TILE, padded(P // TILE), T, 1, SPAN, True, WINDOWED, WARPS > 1,
        )
        tl.debug_barrier()
        acc, m, l = plain_part(
            acc, m, l, q, words, tile_pages, tiles, pages, page_bytes, scale, cap,
            unseen, last - first, hidden, D, NQ, T, SPAN, VOFF, CAPPED, TILE, STAGES, WARPS, ASM, WINDOWED, MULTI,
        )
        tl.debug_barrier()
        if WINDOWED:
            unseen = unseen * 0
    tl.store(out[None, :] + d[:, None], acc, mask=live[None, :])
    tl.store(ml, m - P_SHIFT, mask=live)
    tl.store(ml + 1, tl.sum(l, 0), mask=live)


@triton.jit
def _packed_program(
    q_row, live, out, ml, words, tile_pages, qz, entries, blocks, pages, table, counts, headers, head, scale, cap,
    page_bytes: tl.constexpr, LH: tl.constexpr, E: tl.constexpr, NQ: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, SIDE: tl.constexpr,
    VOFF: tl.constexpr, VMETA: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One work item of packed blocks in one format. `head` = layer * H + KV head."""
    DK: tl.constexpr = D * KB // 8
    DV: tl.constexpr = D * VB // 8
    ROWS: tl.constexpr = DV if VB > 2 or DV < 32 else 32
    ROW_GROUP: tl.constexpr = D if VB > 2 else 32
    dk = tl.arange(0, DK)
    q = ()
    for k in tl.static_range(8 // KB):
        at = q_row[None, :] + ((8 // KB - 1 - k) * DK + dk)[:, None]
        x = tl.load(at, mask=live[None, :], other=0.0).to(tl.float32)
        u = x * (1.0 / (1 << (KB * (8 // KB - 1 - k))))
        q = q + (u.to(tl.float16),)
    acc = ()
    for _ in tl.static_range((DV // ROWS) * (8 // VB)):
        acc = acc + (tl.zeros([ROWS, NQ], tl.float32),)
    zs = ()
    for _ in tl.static_range(D // ROW_GROUP):
        zs = zs + (tl.zeros([16 * WARPS, NQ], tl.float32),)
    m = tl.full([NQ], NEG, tl.float32)
    l = tl.zeros([16 * WARPS, NQ], tl.float32)
    row = table + head * E + SIDE * (E - 1)
    header = headers + head * (2 * D)
    unseen = _unseen(entries, TILE, WINDOWED)
    for first in range(0, blocks, CHUNK):
        n = tl.minimum(blocks - first, CHUNK)
        tiles = _list_tiles(
            words, tile_pages, entries + first, n, counts + head * 2 + SIDE, LH * 2, row, LH * E,
            CHUNK, TILE, padded(P // TILE), T, 1 - 2 * SIDE, SPAN, False, WINDOWED, WARPS > 1,
        )
        factor = scale if CAPPED else scale * LOG2E
        _zero_products(qz, q, header + D, LH * 2 * D, entries + first, n, factor, D, NQ, KB, CHUNK)
        tl.debug_barrier()
        acc, m, l, zs = packed_part(
            acc, m, l, zs, q, words, tile_pages, qz, tiles,
            pages, page_bytes, header, LH * 2 * D, scale, cap, unseen,
            D, NQ, KB, VB, T, SPAN, VOFF, VMETA, CAPPED, TILE, STAGES, WARPS, ASM, WINDOWED,
        )
        tl.debug_barrier()
        if WINDOWED:
            unseen = unseen * 0
    rows = tl.arange(0, ROWS)
    for r in tl.static_range(DV // ROWS):
        for f in tl.static_range(8 // VB):
            zero = tl.sum(zs[(f * DV + r * ROWS) // ROW_GROUP], 0)
            if VB == 2:
                field = acc[r * 4 + f]
            elif f == 8 // VB - 1:
                # `nested`: field f = F[n-1-f] - F[n-f], and F[n] = 0.
                field = acc[0] - acc[1] if VB == 4 else acc[0]
            else:
                field = acc[1]
            o = field * (CODE_UNIT / (1 << (VB * f))) + zero[None, :]
            tl.store(out[None, :] + (f * DV + r * ROWS + rows)[:, None], o, mask=live[None, :])
    tl.store(ml, m - P_SHIFT, mask=live)
    tl.store(ml + 1, tl.sum(l, 0), mask=live)


# `starts` is a slice at any address. Its alignment must not select another compiled kernel.
@triton.jit(do_not_specialize=["NB", "layer", "cap", "scale"], do_not_specialize_on_alignment=["starts", "sizes"])
def _decode_kernel(
    q_ptr, q_stride_b, q_stride_h, part_o, part_ml, scratch, items, column_ranges, lists,
    pages, table, counts, headers, NB, layer, scale, cap, starts, sizes,
    L: tl.constexpr, H: tl.constexpr, G: tl.constexpr, NQ: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    P: tl.constexpr, page_bytes: tl.constexpr, CLASSES: tl.constexpr, CHUNK: tl.constexpr,
    SCRATCH: tl.constexpr, WORDS: tl.constexpr, CAPPED: tl.constexpr, WARPS: tl.constexpr,
    ASM: tl.constexpr, WINDOWED: tl.constexpr, MULTI: tl.constexpr, PDL: tl.constexpr,
):
    """grid (columns * H,); a column is a persistent CTA's share of the work items. part_o fp32 `[items, H, G, D]`,
    part_ml fp32 `[items, H, G, 2]`.

    MULTI: request b has the queries starts[b] to starts[b + 1] (int32 `[B + 1]`), its last tokens, which lie in its
    last block. Partial results have NQ rows instead of G: row g is query g // G of the request and head g % G of the
    group. `sizes` int32 `[B, C]`: lengths of the lists. Without MULTI neither is read.
    """
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    h = pid % H
    head = (layer * H + h).to(tl.int64)
    words = scratch + pid.to(tl.int64) * SCRATCH
    qz = (words + WORDS).to(tl.pointer_type(tl.float32))
    tile_pages = (words + WORDS + CHUNK * NQ // 2).to(tl.pointer_type(tl.int32))
    g = tl.arange(0, NQ)
    for item in range(tl.load(column_ranges + pid // H), tl.load(column_ranges + pid // H + 1)):
        request = tl.load(items + item * 4)
        cls = tl.load(items + item * 4 + 1)
        start = tl.load(items + item * 4 + 2)
        blocks = tl.load(items + item * 4 + 3)
        entries = lists + (request * len(CLASSES) + cls).to(tl.int64) * NB + start
        if MULTI:
            first = tl.load(starts + request)
            queries = tl.load(starts + request + 1) - first
            q_row = q_ptr + (first + g // G).to(tl.int64) * q_stride_b + (h * G + g % G) * q_stride_h
            part = (item * H + h).to(tl.int64) * NQ + g
            live = g < queries * G
            hidden = queries - 1 - g // G
            last = tl.load(sizes + request * len(CLASSES)) - 1 - start
        else:
            q_row = q_ptr + request.to(tl.int64) * q_stride_b + (h * G + g) * q_stride_h
            part = (item * H + h).to(tl.int64) * G + g
            live = g < G
            hidden = 0
            last = 0
        out = part_o + part * D
        ml = part_ml + part * 2
        for c in tl.static_range(len(CLASSES)):
            if cls == c:
                if CLASSES[c][KEY_BITS] == 16:
                    _plain_program(
                        q_row, live, out, ml, words, tile_pages, entries, blocks, pages, table, head * E, scale, cap,
                        last, hidden, page_bytes, L * H * E, NQ, D, P, CLASSES[c][TOKENS], CLASSES[c][TILE_PAGES],
                        CLASSES[c][VALUE_CODES], CHUNK, CAPPED, CLASSES[c][TILE_TOKENS], CLASSES[c][STAGES], WARPS,
                        ASM, WINDOWED, MULTI,
                    )
                else:
                    _packed_program(
                        q_row, live, out, ml, words, tile_pages, qz, entries, blocks, pages, table, counts, headers,
                        head, scale, cap, page_bytes, L * H, E, NQ, D, P, CLASSES[c][KEY_BITS], CLASSES[c][VALUE_BITS],
                        CLASSES[c][TOKENS], CLASSES[c][TILE_PAGES], CLASSES[c][SIDE],
                        CLASSES[c][VALUE_CODES], CLASSES[c][VALUE_META], CHUNK, CAPPED,
                        CLASSES[c][TILE_TOKENS], CLASSES[c][STAGES], WARPS, ASM, WINDOWED,
                    )


class DecodeAttention:
    """Plan and buffers of the decode attention of one store: `plan` once per step, `run` for each layer."""

    def __init__(
        self,
        store: PageStore,
        *,
        max_batch: int,
        max_blocks: int,
        query_heads: int,
        tuning: Tuning | None = None,
        columns: int | None = None,
        window: int = -1,
        query_rows: int = 0,
    ):
        """`columns`: persistent CTAs per KV head; by default as many as are resident at once, so that all run in one
        wave. `window` >= 0: a query sees its own token and `window` tokens before it, in blocks that keep every
        token. `query_rows` > 0, a power of two and at least 8: requests may have several queries, whose query heads
        make at most `query_rows` rows per KV head (see `plan`); the engine is then "triton".
        """
        layout = store.layout
        self.window, self.query_rows = window, query_rows
        if query_heads % layout.heads:
            raise ValueError(f"{query_heads} query heads are not a multiple of {layout.heads} KV heads")
        self.store, self.tuning = store, tuning or Tuning()
        self.group = query_heads // layout.heads
        self.engine = self._choose_engine()
        self._query_columns = query_rows or max(8, triton.next_power_of_2(self.group))
        self._classes = tuple(self._describe(f, side) for f, side in format_tiers(store))
        # Per program: tile words, q . zero of a chunk's blocks, pages of each tile, plus two tiles of read-ahead.
        tiles = max(CHUNK * layout.block_tokens // c.tile_tokens + 2 for c in self._classes)
        ids = max((CHUNK * layout.block_tokens // c.tile_tokens + 2) * c.tile_pages for c in self._classes)
        self._words = (tiles + 1) // 2 * 2
        self._scratch_words = self._words + CHUNK * self._query_columns // 2 + (ids + 3) // 4 * 2
        columns = columns or self._resident_columns()
        self._plan = DecodePlan(store, max_batch, max_blocks, columns=columns, window=window)
        dev, rows = store.device, self._plan.capacity * layout.heads
        words = self._plan.columns * layout.heads * self._scratch_words
        self._scratch = torch.empty(words, dtype=torch.int64, device=dev)
        self._part_rows = query_rows or self.group
        self._part_o = torch.empty((rows, self._part_rows, layout.head_dim), dtype=torch.float32, device=dev)
        self._part_ml = torch.empty((rows, self._part_rows, 2), dtype=torch.float32, device=dev)
        self._starts = self._owners = self._plan.sizes  # not read with one query per request

    def _choose_engine(self) -> str:
        engine, store = self.tuning.engine, self.store
        if engine == "auto":
            # Gluon is chosen where it is measured to be faster. With 8-bit keys in one tier, Triton is.
            packed = [r for r in store.block_formats if r.high.packed]
            faster = all(r.low is not None or r.high.key_bits <= 4 for r in packed)
            fits = self.group <= 8 and store.layout.head_dim == 128
            able = gluon_kernel is not None and store.device.type == "cuda" and not INTERPRET
            hopper = faster and fits and able and torch.cuda.get_device_capability(store.device)[0] == 9
            return "gluon" if hopper and self.window < 0 and not self.query_rows else "triton"
        if engine == "gluon":
            if gluon_kernel is None:
                raise RuntimeError("this Triton has no Gluon; use the engine 'triton'")
            if self.group > 16:
                raise ValueError("the engine 'gluon' supports at most 16 query heads per KV head; use 'triton'")
            if self.window >= 0 or self.query_rows:
                raise ValueError("the engine 'gluon' has neither windows nor several queries per request; use 'triton'")
        elif engine != "triton":
            raise ValueError(f"{engine!r} is not an engine; use 'auto', 'gluon' or 'triton'")
        return engine

    def _describe(self, fmt: Format, side: int) -> FormatClass:
        """The class of one format and side, with the tile that suits its bytes per token."""
        page, tune = self.store.layout.page(fmt), self.tuning
        t, token_bytes = page.tokens, page.key_row_bytes + page.value_row_bytes
        # With 256 features, tiles of 64 tokens exceed the registers.
        tile = tune.plain_tile if not fmt.packed else tune.tile or (64 if page.head_dim <= 128 else 32)
        if self.engine == "gluon":
            # One tile of keys and one of values are queued in shared memory.
            while fmt.packed and not tune.tile and tile > 16 and tile * token_bytes > GLUON_TILE_BYTES:
                tile //= 2
        tile = min(tile, self.store.layout.block_tokens)
        # Small pages belong to ragged blocks, whose tiles are mostly part-filled.
        stages = tune.stages or (3 if tile * token_bytes <= STAGED_BYTES and t % tile == 0 else 2)
        span = 1 if t % tile == 0 else tile // t if tile % t == 0 else (tile + t - 2) // t + 1
        if self.engine == "gluon":
            span = 4
        return format_class(page, side)._replace(tile_tokens=tile, tile_pages=span, stages=stages)

    def _constants(self, capped: bool) -> dict:
        layout, t = self.store.layout, self.tuning
        out = {
            "L": layout.layers, "H": layout.heads, "G": self.group, "NQ": self._query_columns,
            "D": layout.head_dim, "E": layout.head_pages_bf16, "P": layout.block_tokens,
            "page_bytes": layout.page_bytes, "CLASSES": self._classes, "SCRATCH": self._scratch_words,
            "WORDS": self._words, "CAPPED": capped, "num_warps": self._warps, **launch_options(self.store.device),
        }  # fmt: skip
        if self.engine == "triton":
            out |= {"CHUNK": CHUNK, "WARPS": t.warps, "ASM": not INTERPRET, "WINDOWED": self.window >= 0}
            out["MULTI"] = self.query_rows > 0
        registers = t.max_registers
        if self.engine == "gluon" and self._query_columns == 8 and layout.head_dim <= 128:
            registers = registers or GLUON_REGISTERS  # 16 query columns spill with fewer than 255
        if registers and not INTERPRET:
            out["maxnreg"] = registers
        return out

    @property
    def _warps(self) -> int:
        return 1 if self.engine == "gluon" else self.tuning.warps

    @property
    def _kernel(self):
        return gluon_kernel if self.engine == "gluon" else _decode_kernel

    def _resident_columns(self) -> int:
        """CTAs per KV head that the device holds at once, from the compiled kernel's use of registers and shared
        memory.
        """
        store, heads = self.store, self.store.layout.heads
        if store.device.type != "cuda":
            return 4
        types = torch.float32, torch.int64, torch.int32
        f, i8, i4 = (torch.empty(16, dtype=t, device=store.device) for t in types)
        q = torch.empty((1, heads * self.group, store.layout.head_dim), dtype=store.dtype, device=store.device)
        multi_args = () if self.engine == "gluon" else (i4, i4)
        kernel = self._kernel.warmup(
            q, q.stride(0), q.stride(1), f, f, i8, i4, i4, i8, store.pages, store.table, store.counts, store.headers,
            1, 0, 1.0, 0.0, *multi_args, grid=(1,), **self._constants(False),
        )  # fmt: skip
        kernel._init_handles()
        props = torch.cuda.get_device_properties(store.device)
        shared = props.shared_memory_per_multiprocessor // (kernel.metadata.shared + 1024)
        # Each of an SM's four partitions has a quarter of the registers, allocated to whole warps.
        warps = 4 * (props.regs_per_multiprocessor // 4 // (-(-kernel.n_regs // 8) * 8 * 32))
        return max(1, min(shared, warps // self._warps, 32) * props.multi_processor_count // heads)

    def plan(
        self,
        row_blocks: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor | None = None,
        owners: torch.Tensor | None = None,
    ) -> None:
        """Read the step's blocks: int32 `row_blocks[B, NB]`, `seq_lens[B]`. Allocates nothing, does not sync.

        With `query_rows`: request b has the queries `starts[b]` to `starts[b + 1]` (int32 `[B + 1]`), its last tokens,
        which lie in its last, uncompressed block. Query n belongs to request `owners[n]` (int32 `[N]`).
        """
        if self.query_rows:
            self._starts, self._owners = starts, owners
        self._plan.update(self.store, row_blocks, seq_lens)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        *,
        scale: float,
        logit_cap: float = 0.0,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the planned requests' queries `q[N, Hq, D]` -> `out[N, Hq, D]` in q's dtype. The log-sum-exp to
        base 2 goes to `lse` fp32 `[N, Hq]`, if given.
        """
        store, plan, heads = self.store, self._plan, self.store.layout.heads
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # contiguous, even if q is not
        if q.shape[0] == 0:
            return out
        if q.dtype != store.dtype:
            raise ValueError(f"queries are {q.dtype}, but the pages hold {store.dtype}")
        multi_args = () if self.engine == "gluon" else (self._starts, plan.sizes)
        self._kernel[(plan.columns * heads,)](
            q, q.stride(0), q.stride(1), self._part_o, self._part_ml, self._scratch, plan.items,
            plan.column_ranges, plan.lists, store.pages, store.table, store.counts, store.headers,
            plan.max_blocks, layer, scale, logit_cap, *multi_args, **self._constants(logit_cap > 0),
        )  # fmt: skip
        merge_kernel[(q.shape[0], q.shape[1])](
            self._part_o, self._part_ml, plan.ranges, out, self._part_ml if lse is None else lse, self._owners,
            self._starts, heads, self.group, store.layout.head_dim, 8, lse is not None, self._part_rows,
            self.query_rows > 0, num_warps=1, **launch_options(store.device),
        )  # fmt: skip
        return out


def decode_attention_triton(
    store: PageStore,
    layer: int,
    q: torch.Tensor,
    row_blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """`decode_attention` with one query per request: plan and run in one call. A server keeps a `DecodeAttention`."""
    op = DecodeAttention(store, max_batch=q.shape[0], max_blocks=row_blocks.shape[1], query_heads=q.shape[1])
    op.plan(row_blocks.int(), seq_lens.int())
    return op.run(layer, q, scale=scale, logit_cap=logit_cap)

"""Decode attention over mixed-precision pages: `plan` once per step, then one launch and a merge per layer.

A program (CTA) takes one (work item, KV head). A work item is a KV split: a run of blocks of one request in one format
class, a format and its side of the block table. Every program therefore knows its precision at compile time, and a
layer's bf16 tails, high pages and low pages share one launch. Partial results are merged by log-sum-exp.
"""


from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..common.dependent_launch import launch_options
from ..common.format_class import (
    FormatClass,
    format_class,
    format_tiers,
)
from ..formats import Format
from ..store import PageStore
from .kernel import _decode_kernel
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
            # Gluon is used where it was measured to be faster. With 8-bit keys in a single tier, Triton is faster.
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
        """The class of one format and side, with a tile chosen by its bytes per token."""
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

        With `query_rows`: request b has the queries `starts[b]` to `starts[b + 1]` (int32 `[B + 1]`). They belong to
        its last tokens, which lie in its last, uncompressed block. Query n belongs to request `owners[n]` (int32
        `[N]`).
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

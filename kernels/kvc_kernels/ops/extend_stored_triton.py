"""New tokens that see earlier blocks as they will be stored and their own as it is: the cut into groups, and the join.

A *group* is the new tokens of one block of one request. It attends to three disjoint sets of tokens: those of its own
block (exact; the new ones causally), the blocks before it that are packed already or lie open in front of it (from
pages), and the *staged* ones: full blocks before it that are still uncompressed, be it that this forward fills them or
that they wait to be packed. Staged blocks of a request lie in consecutive slots of `StoredRows`, so that what a group
sees of them is one run of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from ..layout import Format
from ..store import PageStore
from .extend_flashinfer_triton import RaggedPrefill, StagedPrefill
from .stored_triton import StoredRows


@dataclass
class Groups:
    """Lists on the host, an entry a group in the order of the new tokens; `staged` has one a slot."""

    request: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # new tokens
    prefix: list[int] = field(default_factory=list)  # tokens before the chunk that it reads from pages, or staged
    first: list[int] = field(default_factory=list)  # its first staged block's slot
    count: list[int] = field(default_factory=list)  # staged blocks that it sees
    staged: list[tuple[int, int]] = field(default_factory=list)  # (request, place of the block in its row)

    @classmethod
    def cut(
        cls,
        prefix_lens: list[int],
        extend_lens: list[int],
        waiting: list[list[int]] | None,
        p: int,
        exact: list[bool] | None = None,
    ) -> Groups:
        """`waiting[B]`: places of full blocks of each prefix that are uncompressed; p: tokens of a block. An `exact`
        request is one group: its blocks are never packed, so it sees all of them as they are.
        """
        out = cls()
        for r, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
            if not new:
                continue
            if exact and exact[r]:
                out._add(r, new, prefix, len(out.staged), 0)
                continue
            slot, before = len(out.staged), sorted(waiting[r]) if waiting else []
            begin, end = prefix // p, (prefix + new - 1) // p
            out.staged += [(r, j) for j in (*before, *range(begin, end))]
            for j in range(begin, end + 1):
                tokens = min((j + 1) * p, prefix + new) - max(j * p, prefix)
                # The cached tokens of the block that the chunk begins in are exact for that block alone.
                out._add(r, tokens, prefix if j == begin else begin * p, slot, len(before) + j - begin)
        return out

    def _add(self, request: int, tokens: int, prefix: int, first: int, count: int) -> None:
        self.request.append(request)
        self.tokens.append(tokens)
        self.prefix.append(prefix)
        self.first.append(first)
        self.count.append(count)

    def runs(self) -> tuple[list[int], list[int], list[int]]:
        """(request, prefix, new tokens) of neighbouring groups that read the same from pages: at most 2 a request."""
        request, prefix, tokens = [], [], []
        for r, n, t in zip(self.request, self.prefix, self.tokens):
            if request and (request[-1], prefix[-1]) == (r, n):
                tokens[-1] += t
            else:
                request.append(r)
                prefix.append(n)
                tokens.append(t)
        return request, prefix, tokens


@triton.jit(do_not_specialize=["rows"])
def _join_kernel(
    a, a_lse, b, b_lse, out, out_lse, rows, D: tl.constexpr, ROWS: tl.constexpr, LSE: tl.constexpr
):
    """grid (rows / ROWS,). All `[rows, D]`, LSE (base 2) fp32 `[rows]`; b may have seen nothing (LSE -inf)."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    live = i < rows
    la = tl.load(a_lse + i, mask=live, other=0.0)
    lb = tl.load(b_lse + i, mask=live, other=float("-inf"))
    top = tl.maximum(la, lb)
    wa = tl.exp2(la - top)
    wb = tl.exp2(lb - top)
    at = i[:, None] * D + d[None, :]
    x = tl.load(a + at, mask=live[:, None], other=0.0).to(tl.float32)
    y = tl.load(b + at, mask=(live & (wb > 0))[:, None], other=0.0).to(tl.float32)
    total = wa + wb
    mixed = (x * wa[:, None] + y * wb[:, None]) / total[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=live[:, None])
    if LSE:
        tl.store(out_lse + i, top + tl.log2(total), mask=live)


def join(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor, out, out_lse) -> None:
    """Attention over two disjoint sets of tokens -> over both; contiguous `[N, Hq, D]` and base-2 LSE fp32 `[N, Hq]`.

    `out`, `out_lse` may be `a`, `a_lse`; `out_lse` may be None.
    """
    rows, dim = a_lse.numel(), a.shape[-1]
    _join_kernel[(triton.cdiv(rows, 16),)](
        a, a_lse, b, b_lse, out, a_lse if out_lse is None else out_lse, rows, dim, 16, out_lse is not None, num_warps=4
    )


class StagedExtend:
    """The plan and buffers of one forward whose queries see blocks as stored; `plan` once a forward, then by layer
    `fill`, and `own` where FlashInfer takes what is not in pages.
    """

    def __init__(self, store: PageStore, fmt: Format, ragged: RaggedPrefill | None, *, query_heads: int):
        self.store, self.query_heads, self.ragged = store, query_heads, ragged
        self.rows = StoredRows(store, fmt)
        self.prefill = StagedPrefill.create(ragged, store.device, store.layout.block_tokens)
        self.groups: Groups | None = None
        self.skips: list[bool] = []
        self.sees = torch.zeros((0, 2), dtype=torch.int32, device=store.device)
        self._o = torch.empty((2, 0, query_heads, store.layout.head_dim), dtype=store.dtype, device=store.device)
        self._lse = torch.empty((2, 0, query_heads), dtype=torch.float32, device=store.device)

    def plan(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        waiting: list[list[int]] | None,
        exact: list[bool] | None = None,
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """What to read from pages: rows of blocks int32 `[B', NB]`, prefix and new tokens `[B']` of runs of new tokens.

        `skips[B']` then says whose whole uncompressed blocks are staged, hence not to be read from pages.
        `groups` is None, and the arguments come back, where no query sees a staged block. Does not sync. `sees` int32
        `[B', 2]`: first slot and number of the staged blocks of each run, where FlashInfer does not take them.
        """
        groups = Groups.cut(prefix_lens, extend_lens, waiting, self.store.layout.block_tokens, exact)
        self.groups = groups if groups.staged else None
        if self.groups is None:
            return row_blocks, prefix_lens, extend_lens
        request, prefix, tokens = groups.request, groups.prefix, groups.tokens
        if self.prefill is not None:
            self.ragged.plan(groups.tokens)
            self.prefill.plan(groups.tokens, groups.first, groups.count)
            request, prefix, tokens = groups.runs()
        self.skips = [not (exact and exact[r]) for r in request]
        sees = [x for pair in zip(groups.first, groups.count) for x in pair]
        # `sees` comes first: at any other place its alignment would vary, and with it the compiled kernel.
        host = torch.tensor(sees + [x for pair in groups.staged for x in pair] + request, dtype=torch.int32)
        if self.store.device.type == "cuda":
            host = host.pin_memory()
        whole = host.to(self.store.device, non_blocking=True)
        sees, items, index = whole.split((len(sees), 2 * len(groups.staged), len(request)))
        self.sees = sees.view(-1, 2)
        self.rows.plan(row_blocks, items.view(-1, 2))
        n = sum(tokens)
        if self.prefill is not None and self._lse.shape[1] < n:
            self._o = self._o.new_empty((2, n, *self._o.shape[2:]))
            self._lse = self._lse.new_empty((2, n, self.query_heads))
        return row_blocks.index_select(0, index), prefix, tokens

    def fill(self, layer: int) -> None:
        """Stage the blocks of this layer; its new rows were appended before."""
        self.rows.fill(layer)

    def own(self, q, k, v, into: tuple | None, *, scale: float, logit_cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of the new tokens over their own blocks' new tokens and the staged blocks.

        Into `into` (the LSE may be None), or into buffers that the next call writes again.
        """
        n = q.shape[0]
        (exact, staged), (exact_lse, staged_lse) = self._o[:, :n], self._lse[:, :n]
        self.ragged.run(q, k, v, scale=scale, logit_cap=logit_cap, lse=True, into=(exact, exact_lse))
        self.prefill.run(q, self.rows.k, self.rows.v, (staged, staged_lse), scale=scale, logit_cap=logit_cap)
        out, lse = into or (exact, exact_lse)
        join(exact, exact_lse, staged, staged_lse, out, lse)
        return out, lse

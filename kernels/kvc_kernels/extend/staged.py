"""Prefill whose queries see earlier blocks fake-quantized and their own block exact: the cut into groups.

A *group* is the new tokens of one block of one request. It attends to three disjoint sets of tokens: its own block
(exact, causally), the packed blocks before it (from pages), and the *staged* blocks: full blocks before it that are
still uncompressed, because this forward fills them or because they wait to be packed. Staged blocks of a request have
consecutive slots of `FakeQuantRows`. For a prefill library the group's own block has a slot, too, so that one causal
call over a list of slots covers all but the packed pages. Without a library the Triton kernel takes the dense new rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..common.upload import upload
from ..formats import Format
from ..store import PageStore
from .dense_prefill import paged_prefill
from .fake_quant_kernel import FakeQuantRows


@dataclass
class Groups:
    """Lists on the host, one entry per group in the order of the new tokens; `staged` has one entry per slot."""

    p: int  # tokens of a block
    request: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # new tokens
    begin: list[int] = field(default_factory=list)  # tokens before the first of them
    prefix: list[int] = field(default_factory=list)  # tokens before the new ones, in pages or staged
    first: list[int] = field(default_factory=list)  # slot of its first staged block
    count: list[int] = field(default_factory=list)  # number of staged blocks that it sees
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
        """Groups of a forward. `waiting[B]`: places of full blocks of each prefix that are uncompressed; `p`: tokens of
        a block. An `exact` request is one group: it sees all of its uncompressed blocks exact.
        """
        out = cls(p)
        for r, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
            if not new:
                continue
            if exact and exact[r]:
                out._add(r, new, prefix, prefix, len(out.staged), 0)
                continue
            slot, before = len(out.staged), sorted(waiting[r]) if waiting else []
            first, last = prefix // p, (prefix + new - 1) // p
            out.staged += [(r, j) for j in (*before, *range(first, last))]
            for j in range(first, last + 1):
                begin = max(j * p, prefix)
                tokens = min((j + 1) * p, prefix + new) - begin
                # Cached tokens of the block in which the new ones begin are exact for that block alone.
                out._add(r, tokens, begin, prefix if j == first else first * p, slot, len(before) + j - first)
        return out

    def _add(self, request: int, tokens: int, begin: int, prefix: int, first: int, count: int) -> None:
        self.request.append(request)
        self.tokens.append(tokens)
        self.begin.append(begin)
        self.prefix.append(prefix)
        self.first.append(first)
        self.count.append(count)

    def lists(self) -> tuple[list[np.ndarray], list[int], list[tuple[int, ...]]]:
        """Slots of each group's staged and own blocks, tokens in its last one, and the items of `FakeQuantRows`.

        A group's own blocks hold its new tokens and cached ones before them; their slots follow the staged ones.
        The slots of a long prompt grow with its square, so they are int32 arrays.
        """
        slots, last, at = [], [], len(self.staged)
        all_slots = np.arange(at + sum(n // self.p + 2 for n in self.tokens), dtype=np.int32)
        places = {x: [*x, slot, -1, self.p] for slot, x in enumerate(self.staged)}
        for r, tokens, begin, first, count in zip(self.request, self.tokens, self.begin, self.first, self.count):
            end = begin + tokens
            new_blocks = range(begin // self.p, -(-end // self.p))
            for j in new_blocks:
                item = places.setdefault((r, j), [r, j, -1, -1, 0])
                item[3:] = at + j - new_blocks.start, min(self.p, end - j * self.p)
            slots.append(np.concatenate((all_slots[first : first + count], all_slots[at : at + len(new_blocks)])))
            last.append(end - new_blocks[-1] * self.p)
            at += len(new_blocks)
        return slots, last, [tuple(x) for x in places.values()]

    def runs(self) -> tuple[list[int], list[int], list[int]]:
        """(request, tokens before its first own block, new tokens) of each request: the remaining reads from pages if
        own blocks have slots."""
        request, prefix, tokens = [], [], []
        for r, n, begin in zip(self.request, self.tokens, self.begin):
            if request and request[-1] == r:
                tokens[-1] += n
            else:
                request.append(r)
                prefix.append(begin // self.p * self.p)
                tokens.append(n)
        return request, prefix, tokens


class StagedExtend:
    """Plan and buffers of a forward with fake-quantized history: `plan` once a forward, then for each layer `fill`, and
    `run` if a library takes the tokens that are not in pages.
    """

    def __init__(self, store: PageStore, fmt: Format, ragged, *, query_heads: int):
        self.store, self.query_heads = store, query_heads
        self.rows = FakeQuantRows(store, fmt)
        self.prefill = paged_prefill(ragged, store.device, store.layout.block_tokens)
        self.groups: Groups | None = None
        self.skips: list[bool] = []
        self.waits: list[list[int]] = []
        self.sees = torch.zeros((0, 2), dtype=torch.int32, device=store.device)
        self._o = torch.empty((0, query_heads, store.layout.head_dim), dtype=store.dtype, device=store.device)
        self._lse = torch.empty((0, query_heads), dtype=torch.float32, device=store.device)

    def plan(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        waiting: list[list[int]] | None,
        formats: list[Format | None] | None = None,
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """The remaining reads from pages: block table int32 `[B', NB]`, prefix and new tokens `[B']` of runs of new
        tokens. Does not sync.

        Sets `skips[B']`: whether full uncompressed blocks of a run are staged, hence not read from pages; `waits[B']`:
        their places; `sees` int32 `[B', 2]`: first slot and number of the staged blocks of each run, for the Triton
        kernel. If no query sees a staged block, `groups` is None and the arguments are returned. `formats` as in
        `ExtendAttention.plan`.
        """
        exact = formats and [fmt is not self.rows.format for fmt in formats]
        groups = Groups.cut(prefix_lens, extend_lens, waiting, self.store.layout.block_tokens, exact)
        self.groups = groups if groups.staged else None
        if self.groups is None:
            return row_blocks, prefix_lens, extend_lens
        if self.prefill is None:
            request, prefix, tokens = groups.request, groups.prefix, groups.tokens
            items = [(r, j, slot, -1, groups.p) for slot, (r, j) in enumerate(groups.staged)]
            slots = len(items)
        else:
            request, prefix, tokens = groups.runs()
            pages, last, items = groups.lists()
            slots = int(pages[-1][-1]) + 1
            self.prefill.plan(groups.tokens, pages, last)
        self.skips = [not (exact and exact[r]) for r in request]
        self.waits = [waiting[r] if waiting and skips else [] for r, skips in zip(request, self.skips)]
        sees = [x for pair in zip(groups.first, groups.count) for x in pair]
        # Rows of eight come first, so that their alignment, and with it the compiled kernel, does not vary.
        flat = [x for item in items for x in (*item, 0, 0, 0)]
        lists = upload(flat + sees + request, self.store.device)
        flat, sees, index = lists.split((len(flat), len(sees), len(request)))
        self.sees = sees.view(-1, 2)
        self.rows.plan(row_blocks, flat.view(-1, 8), slots)
        n = sum(tokens)
        if self.prefill is not None and len(self._lse) < n:
            self._o, self._lse = (x.new_empty((n, *x.shape[1:])) for x in (self._o, self._lse))
        self._state = self._o[:n], self._lse[:n]
        return row_blocks.index_select(0, index), prefix, tokens

    def fill(self, layer: int) -> None:
        """Stage the blocks of one layer, after its new rows were appended."""
        self.rows.fill(layer)

    def run(self, q: torch.Tensor, into: tuple | None, *, scale: float, logit_cap: float):
        """Output and LSE of the new tokens over their own blocks and the staged ones, by the library.

        Written to `into` (the LSE may be None), or to buffers that the next call overwrites.
        """
        into = into or self._state
        self.prefill.run(q, self.rows.k, self.rows.v, into, scale=scale, logit_cap=logit_cap)
        return into

"""Long prefills over long packed prefixes: blocks are unpacked in passes for a prefill library.

With a thousand queries per cached token attention is bound by arithmetic and unpacking costs little, so the fastest
dense kernel wins. The buffer has a fixed size: a long prefix takes several passes, whose states are merged. Formats
must keep every token of a block; the host does not know the lengths of pruned heads.
"""

from __future__ import annotations

import torch

from ..common.upload import upload
from ..store import PageStore
from .merge_kernel import merge_states
from .unpack_rows_kernel import UnpackedRows

PASS_TOKENS = 16384
MIN_NEW, MIN_PREFIX = 512, 2048  # with fewer tokens, the Triton kernel over packed pages is as fast
MAX_PLANS = 8  # plans of the library per forward: one for each (new tokens, blocks) of a pass


class UnpackedPrefix:
    """Prefixes unpacked to dense rows: `plan` once a forward; if it takes the forward, `run` for each layer."""

    def __init__(self, store: PageStore, ragged):
        g, device = store.layout, store.device
        self.store, self.rows, self.ragged = store, UnpackedRows(store), ragged
        self.slots = max(1, PASS_TOKENS // g.block_tokens)
        self.k, self.v = torch.empty((2, 0, g.block_tokens, g.heads, g.head_dim), dtype=store.dtype, device=device)
        self.lse = torch.empty(0, dtype=torch.float32, device=device)
        self.prefills: list = []

    @classmethod
    def create(cls, store: PageStore, ragged) -> UnpackedPrefix | None:
        """The operation, or None without a library or if a block may keep only part of its tokens in one format."""
        if ragged is None or any(r.low is not None for r in store.block_formats):
            return None
        return cls(store, ragged)

    def plan(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        skip: list[list[int]] | None = None,
    ) -> bool:
        """Plan the forward and return True, or return False unless every prefix is long, of whole blocks and followed
        by many new tokens.

        Lengths on the host, `row_blocks[B, NB]` int32 on the device. `skip[B]`: places of blocks that another engine
        takes. Does not sync.
        """
        p, items, passes, start = self.store.layout.block_tokens, [], [], 0
        for r, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
            if prefix and new:
                if prefix % p or prefix < MIN_PREFIX or new < MIN_NEW:
                    return False
                skipped = set(skip[r]) if skip else ()
                places = [j for j in range(prefix // p) if j not in skipped]
                for at in range(0, len(places), self.slots):
                    in_pass = places[at : at + self.slots]
                    passes.append((start, new, len(items), len(in_pass)))
                    items += [(r, j, slot, p) for slot, j in enumerate(in_pass)]
            start += new
        shapes = sorted({(new, n) for _, new, _, n in passes})
        if not passes or len(shapes) > MAX_PLANS:
            return False
        self._items, self._blocks, self._passes = upload(items, self.store.device), row_blocks, passes
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

    def _prefill(self):
        first = self.prefills[0] if self.prefills else None
        return self.ragged.paged(self.store.device, self.store.layout.block_tokens, causal=False, first=first)

    def run(self, layer: int, q, new_state: tuple, out, out_lse, *, scale: float, logit_cap: float) -> None:
        """Merge the planned prefixes into `new_state` (output and LSE of the new tokens); the result goes to `out`,
        `out_lse`.

        Rows of requests without a prefix are copied. `new_state` is overwritten.
        """
        o, lse = new_state
        part = self.lse[: lse.numel()].view(lse.shape)
        if out_lse is None:
            out_lse = part
        done, passes = 0, self._passes
        for i, (start, new, first, n) in enumerate(passes):
            if start > done:
                self._copy(slice(done, start), new_state, out, out_lse)
            rows, last = slice(start, start + new), i + 1 == len(passes) or passes[i + 1][0] != start
            self.rows.fill(layer, self._blocks, self._items, first, n, self.k, self.v)
            into = out[rows], part[rows]
            self._plans[new, n].run(q[rows], self.k, self.v, into, scale=scale, logit_cap=logit_cap)
            to = (out[rows], out_lse[rows]) if last else (o[rows], lse[rows])
            merge_states(o[rows], lse[rows], *into, *to)
            done = start + new
        if done < len(q):
            self._copy(slice(done, len(q)), new_state, out, out_lse)

    @staticmethod
    def _copy(rows: slice, state: tuple, out, out_lse) -> None:
        out[rows].copy_(state[0][rows])
        out_lse[rows].copy_(state[1][rows])

"""The work list of an extend forward: items from lengths on the host, lists of blocks by class on the device."""

from __future__ import annotations

from heapq import heapreplace
from itertools import pairwise

import torch
import triton

from ..common.format_class import ladder_classes, rung_class_masks
from ..common.upload import upload
from ..decode.planner import _split_kernel
from ..store import PageStore

START_TOKENS = 384  # cost of starting and ending a program, in prefix tokens (docs/kernels/prefill.md)
MORE_ROUNDS = 3  # rounds of programs that cutting may add; bounds the partial results


def last_end(works: list[tuple[int, int]], programs: int) -> int:
    """When all have ended, if `programs` run at a time and the others, longest first, each take the place of the first
    that ends. `works`: (duration, how many last so long).
    """
    ends = [0] * programs
    for duration, n in sorted(works, reverse=True):
        for _ in range(n):
            heapreplace(ends, ends[0] + duration)
    return max(ends)


def cut_prefixes(blocks: list[int], tiles: list[int], programs: int, start: int = 0) -> int:
    """Most blocks of a part, so that all parts of all prefixes are done early; the last part of each has what is left.

    `blocks[B]`: blocks of each request; `tiles[B]`: programs a part (query tiles times KV heads); `programs`: how many
    run at a time; `start`: blocks that take as long as a program needs beside its own. Parts that differ fill a GPU
    where equal ones do not: 16 parts for each of 8 heads leave 4 of 132 multiprocessors idle; with a shorter 17th, two
    of which fit where one of the others does, none is.
    """
    whole, limit = max([1, *blocks]), sum(tiles) + MORE_ROUNDS * programs

    def end(most: int) -> int:
        full = [(most + start, b // most * t) for b, t in zip(blocks, tiles)]
        rest = [(b % most + start, t) for b, t in zip(blocks, tiles) if b % most or not b]
        return last_end(full + rest, programs)

    tries = {-(-whole // k) for k in (2, 3, 4, 5, 6, 8)}
    most = max(1, -(-sum(b * t for b, t in zip(blocks, tiles)) // programs))
    while most < whole:
        tries.add(most)
        most += 1 + most // 100
    best, earliest = whole, end(whole)
    for most in sorted(tries):
        if most + start >= earliest:
            break
        if sum(t * max(1, -(-b // most)) for b, t in zip(blocks, tiles)) <= limit:
            now = end(most)
            if now < 0.99 * earliest:
                best, earliest = most, now
    return best


class ExtendPlan:
    """Tensors of one extend forward of B requests; NB blocks a row, C classes.

    | tensor   | shape, dtype         | meaning                                                                     |
    |----------|----------------------|-----------------------------------------------------------------------------|
    | `lists`  | int64 `[B, C, NB]`   | prefix blocks of a request by class: block << 32 | tokens                   |
    | `sizes`  | int32 `[B, C]`       | lengths of the lists                                                        |
    | `items`  | int32 `[n, 8]`       | request, first query, first row, end row, from, to, of, slot or -1          |
    | `joins`  | int32 `[n, 5]`       | first query, first row, end row, first slot, slots of a query tile          |

    A row is new token * group + query head of the group; an item is one query tile and one part of what it sees: of
    each list that share which lies between `from` and `to` of `of` blocks. The part from 0 begins with the new tokens
    themselves, if they are not done elsewhere; they count as blocks at the front of the last class. An item's result
    goes to a slot where others join it, else straight to the output. Longer items come first.
    """

    def __init__(self, store: PageStore, group: int, *, max_blocks: int | None):
        self.store, self.group = store, group
        self.max_blocks = max_blocks or 0
        self.classes = ladder_classes(store)
        self.rung_classes = torch.tensor(rung_class_masks(store), dtype=torch.int32, device=store.device)
        self.n_items = self.n_joins = self.n_slots = 0

    def update(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        *,
        rows: int,
        programs: int,
        own: bool = True,
        skip_full: list[bool] | None = None,
    ) -> None:
        """Lengths on the host, `row_blocks` int32 `[B, NB]` on the device; `rows` of a query tile, `programs` that
        the device runs at a time; `own`: new tokens among themselves are part of the items. Where `skip_full[B]` whole
        uncompressed blocks of the prefix are left out.
        """
        store, p = self.store, self.store.layout.block_tokens
        tiles = [-(-n * self.group // rows) for n in extend_lens]
        blocks = [-(-n // p) if t else 0 for n, t in zip(prefix_lens, tiles)]
        # Without a prefix there is nothing to cut; else a tile sees about half of the new tokens.
        sees = [b + -(-n // (p * min(t, 2))) if own and b else b for b, n, t in zip(blocks, extend_lens, tiles)]
        most = cut_prefixes(sees, [t * store.layout.heads for t in tiles], programs, -(-START_TOKENS // p))
        items, joins, slots, start = [], [], 0, 0
        for r, (new, n, parts) in enumerate(zip(extend_lens, blocks, [-(-s // most) or 1 for s in sees])):
            end = new * self.group
            for first in range(0, end, rows):
                if parts > 1:
                    joins.append((start, first, end, slots, parts))
                of = n + (-(-min(first + rows, end) // (self.group * p)) if own else 0)
                borders = [min(i * most, of) for i in range(parts)] + [of]
                for i, (lo, hi) in enumerate(pairwise(borders)):
                    items.append((r, start, first, end, lo, hi, max(of, 1), slots + i if parts > 1 else -1))
                slots += parts if parts > 1 else 0
            start += new
        items.sort(key=lambda item: item[4] - item[5])
        self.n_items, self.n_joins, self.n_slots = len(items), len(joins), slots
        flat = [x for row in items for x in row] + [x for row in joins for x in row] + list(prefix_lens)
        flat += [int(x) for x in skip_full or [False] * len(prefix_lens)]
        whole = upload(flat, store.device)
        n = len(prefix_lens)
        self.items, self.joins, lens, skip = whole.split((8 * len(items), 5 * len(joins), n, n))
        self.max_blocks = max(self.max_blocks, triton.next_power_of_2(row_blocks.shape[1]))
        nc = len(self.classes)
        self.lists = torch.empty((len(tiles), nc, self.max_blocks), dtype=torch.int64, device=store.device)
        self.sizes = torch.empty((len(tiles), nc), dtype=torch.int32, device=store.device)
        if tiles:
            _split_kernel[(len(tiles),)](
                row_blocks, row_blocks.stride(0), lens, store.rung, self.rung_classes, skip, self.lists, self.sizes,
                self.max_blocks, nc, p, 128, num_warps=4,
            )  # fmt: skip

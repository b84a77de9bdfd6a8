"""Work list of a prefill with cached prefix: items from lengths on the host, block lists by class on the device."""

from __future__ import annotations

from heapq import heapreplace
from itertools import pairwise

import torch
import triton

from ..common.format_class import format_class_masks, format_tiers
from ..common.upload import upload
from ..decode.planner import _split_kernel
from ..store import PageStore

START_TOKENS = 384  # prefix tokens that take as long as the start and end of a CTA (docs/kernels/prefill.md)
MORE_ROUNDS = 3  # rounds of CTAs that KV splits may add; bounds the partial results


def last_end(works: list[tuple[int, int]], programs: int) -> int:
    """Time at which all work has ended, if `programs` CTAs run at a time and the longest remaining work starts first.
    `works`: (duration, number of CTAs with it).
    """
    ends = [0] * programs
    for duration, n in sorted(works, reverse=True):
        for _ in range(n):
            heapreplace(ends, ends[0] + duration)
    return max(ends)


def cut_prefixes(blocks: list[int], tiles: list[int], programs: int, start: int = 0) -> int:
    """Blocks per KV split with which all splits of all prefixes end earliest; the last split of a prefix has the rest.

    `blocks[B]`: blocks of each request. `tiles[B]`: CTAs per split (query tiles times KV heads). `programs`: CTAs that
    run at a time. `start`: blocks that take as long as the fixed cost of a CTA. A shorter last split can fill a GPU
    that equal splits leave idle: 16 splits of each of 8 heads occupy 128 of 132 multiprocessors; with a 17th of half
    the length, two of which share one place, all are busy.
    """
    longest, limit = max([1, *blocks]), sum(tiles) + MORE_ROUNDS * programs

    def end(size: int) -> int:
        full = [(size + start, b // size * t) for b, t in zip(blocks, tiles)]
        rest = [(b % size + start, t) for b, t in zip(blocks, tiles) if b % size or not b]
        return last_end(full + rest, programs)

    candidates = {-(-longest // k) for k in (2, 3, 4, 5, 6, 8)}
    size = max(1, -(-sum(b * t for b, t in zip(blocks, tiles)) // programs))
    while size < longest:
        candidates.add(size)
        size += 1 + size // 100
    best, earliest = longest, end(longest)
    for size in sorted(candidates):
        if size + start >= earliest:
            break
        if sum(t * max(1, -(-b // size)) for b, t in zip(blocks, tiles)) <= limit:
            now = end(size)
            if now < 0.99 * earliest:
                best, earliest = size, now
    return best


class ExtendPlan:
    """Tensors of one prefill of B requests; NB blocks per row, C classes.

    | tensor   | shape, dtype         | meaning                                                                     |
    |----------|----------------------|-----------------------------------------------------------------------------|
    | `lists`  | int64 `[B, C, NB]`   | prefix blocks of a request by class: block << 32 | tokens                   |
    | `sizes`  | int32 `[B, C]`       | lengths of the lists                                                        |
    | `items`  | int32 `[n, 8]`       | request, first query, first row, end row, from, to, of, slot or -1          |
    | `merges` | int32 `[n, 5]`       | first query, first row, end row, first slot, slots of a query tile          |

    A row is new token * group + query head of the group. An item is one query tile and one KV split: of each list, the
    share between `from` and `to` of `of` blocks. The split from 0 begins with the new tokens, unless another engine
    takes them; they count as blocks at the front of the last class. The state of an item goes to a slot if the tile has
    several splits, else to the output. Longer items come first.
    """

    def __init__(self, store: PageStore, group: int, *, max_blocks: int | None):
        self.store, self.group = store, group
        self.max_blocks = max_blocks or 0
        self.classes = format_tiers(store)
        self.class_masks = torch.tensor(format_class_masks(store), dtype=torch.int32, device=store.device)
        self.n_items = self.n_merges = self.n_slots = self.most_rows = 0

    def update(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        *,
        rows: int,
        programs: int,
        new_tokens: bool = True,
        skip_full: list[bool] | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """Lengths on the host, `row_blocks` int32 `[B, NB]` on the device. `rows` of a query tile; `programs`: CTAs
        that the device runs at a time; `new_tokens`: items include the attention of new tokens to themselves.
        `skip_full[B]`: skip full uncompressed blocks of the prefix. `most_tokens`: limit of a KV split; None: no limit.
        """
        store, p = self.store, self.store.layout.block_tokens
        tiles = [-(-n * self.group // rows) for n in extend_lens]
        blocks = [-(-n // p) if t else 0 for n, t in zip(prefix_lens, tiles)]
        # Without a prefix there is nothing to cut; else a tile sees about half of the new tokens.
        sees = [b + -(-n // (p * min(t, 2))) if new_tokens and b else b for b, n, t in zip(blocks, extend_lens, tiles)]
        size = cut_prefixes(sees, [t * store.layout.heads for t in tiles], programs, -(-START_TOKENS // p))
        if most_tokens is not None:
            size = min(size, most_tokens // p)
        items, merges, slots, start = [], [], 0, 0
        for r, (new, n, parts) in enumerate(zip(extend_lens, blocks, [-(-s // size) or 1 for s in sees])):
            end = new * self.group
            for first in range(0, end, rows):
                if parts > 1:
                    merges.append((start, first, end, slots, parts))
                of = n + (-(-min(first + rows, end) // (self.group * p)) if new_tokens else 0)
                borders = [min(i * size, of) for i in range(parts)] + [of]
                for i, (lo, hi) in enumerate(pairwise(borders)):
                    items.append((r, start, first, end, lo, hi, max(of, 1), slots + i if parts > 1 else -1))
                slots += parts if parts > 1 else 0
            start += new
        items.sort(key=lambda item: item[4] - item[5])
        self.n_items, self.n_merges, self.n_slots = len(items), len(merges), slots
        self.most_rows = max(extend_lens, default=0) * self.group
        flat = [x for row in items for x in row] + [x for row in merges for x in row] + list(prefix_lens)
        flat += [int(x) for x in skip_full or [False] * len(prefix_lens)]
        lists = upload(flat, store.device)
        n = len(prefix_lens)
        self.items, self.merges, lens, skip = lists.split((8 * len(items), 5 * len(merges), n, n))
        self.max_blocks = max(self.max_blocks, triton.next_power_of_2(row_blocks.shape[1]))
        nc = len(self.classes)
        self.lists = torch.empty((len(tiles), nc, self.max_blocks), dtype=torch.int64, device=store.device)
        self.sizes = torch.empty((len(tiles), nc), dtype=torch.int32, device=store.device)
        if tiles:
            _split_kernel[(len(tiles),)](
                row_blocks, row_blocks.stride(0), lens, store.format_id, self.class_masks, skip, self.lists, self.sizes,
                self.max_blocks, nc, p, 128, num_warps=4,
            )  # fmt: skip

"""The work list of an extend forward: items from lengths on the host, lists of blocks by class on the device."""

from __future__ import annotations

import torch
import triton

from ..store import PageStore
from .decode_plan_triton import _split_kernel, ladder_classes


def cut_prefixes(blocks: list[int], tiles: list[int], programs: int) -> list[int]:
    """Parts to cut each request's prefix into, so that about `programs` programs run at a time and end together.

    `blocks[B]`: prefix blocks; `tiles[B]`: programs a part (query tiles times KV heads). The smallest budget of blocks
    a program is taken that keeps all parts within one round of the machine; with more query tiles than that, only a
    prefix far longer than the others is cut, for at most one more round.
    """
    least = sum(tiles)
    limit = programs if least < programs else least + programs
    lo, hi = 1, max([1, *blocks])
    while lo < hi:
        mid = (lo + hi) // 2
        if sum(t * max(1, -(-b // mid)) for b, t in zip(blocks, tiles)) <= limit:
            hi = mid
        else:
            lo = mid + 1
    return [max(1, -(-b // lo)) for b in blocks]


class ExtendPlan:
    """Tensors of one extend forward of B requests; NB blocks a row, C classes.

    | tensor   | shape, dtype         | meaning                                                                     |
    |----------|----------------------|-----------------------------------------------------------------------------|
    | `lists`  | int64 `[B, C, NB]`   | prefix blocks of a request by class: block << 32 | tokens                   |
    | `sizes`  | int32 `[B, C]`       | lengths of the lists                                                        |
    | `items`  | int32 `[n, 8]`       | request, first query, first row, end row, part, parts, slot or -1, own: 1 or 0 |
    | `joins`  | int32 `[n, 5]`       | first query, first row, end row, first slot, slots of a query tile          |

    A row is new token * group + query head of the group; an item is one query tile and one part of the prefix, with
    `own` also the new tokens themselves. Its result goes to a slot where others join it, else straight to the output.
    """

    def __init__(self, store: PageStore, group: int, *, max_blocks: int | None):
        self.store, self.group = store, group
        self.max_blocks = max_blocks or 0
        self.classes = ladder_classes(store)
        masks = []
        for i, rung in enumerate(store.ladder):
            high = self.classes.index((rung.high, 0)) if i else 0
            low = self.classes.index((rung.low, 1)) if i and rung.low is not None else None
            masks.append(1 << high | (0 if low is None else 1 << low))
        self.rung_classes = torch.tensor(masks or [1], dtype=torch.int32, device=store.device)
        self.n_items = self.n_joins = self.n_slots = 0

    def update(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        *,
        rows: int,
        programs: int,
        skip_full: list[bool] | None = None,
    ) -> None:
        """Lengths on the host, `row_blocks` int32 `[B, NB]` on the device; `rows` of a query tile, `programs` that
        the device runs at a time. Where `skip_full[B]` whole uncompressed blocks of the prefix are left out.
        """
        store, p = self.store, self.store.layout.block_tokens
        tiles = [-(-n * self.group // rows) for n in extend_lens]
        blocks = [-(-n // p) if t else 0 for n, t in zip(prefix_lens, tiles)]
        cuts = cut_prefixes(blocks, [t * store.layout.heads for t in tiles], programs)
        items, joins, slots, start = [], [], 0, 0
        for r, (new, parts) in enumerate(zip(extend_lens, cuts)):
            end = new * self.group
            for first in range(0, end, rows):
                if parts > 1:
                    joins.append((start, first, end, slots, parts))
                for part in range(parts):
                    items.append((r, start, first, end, part, parts, slots + part if parts > 1 else -1, int(not part)))
                slots += parts if parts > 1 else 0
            start += new
        self.n_items, self.n_joins, self.n_slots = len(items), len(joins), slots
        flat = [x for row in items for x in row] + [x for row in joins for x in row] + list(prefix_lens)
        flat += [int(x) for x in skip_full or [False] * len(prefix_lens)]
        host = torch.tensor(flat, dtype=torch.int32)
        if store.device.type == "cuda":
            host = host.pin_memory()
        whole = host.to(store.device, non_blocking=True)
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

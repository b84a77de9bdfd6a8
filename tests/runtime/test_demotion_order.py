"""The order of demotion against a scan over all blocks, on a ladder of four steps."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import BlockFormat
from sglang_kvc.adapter.tree_demotion import DemotionQueue
from sglang_kvc.cache.blocks import Blocks, State
from sglang_kvc.cache.demotion import Demotion
from sglang_kvc.cache.reuse import Use

NATS = {1: 0.00028, 2: 0.0012, 3: 0.0053, 4: 0.015, 5: 0.15}  # loss of k8v8, k8v4, k4v4, k4v2 and k2v2
PAGES = {1: 18, 2: 14, 3: 9, 4: 8, 5: 5}
FLOOR = 5


class Node(SimpleNamespace):
    """A node of the tree."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    def __lt__(self, other):
        return self.last_access_time < other.last_access_time


class Tree:
    """Nodes without a tree, and the real queue over them. `clock` counts uses and, with `reuse`, forwards."""

    def __init__(self, draw: random.Random, reuse: bool):
        self.clock, self.reuse, self.pages_freed, self.due = 1000, reuse, 0, 0
        counts = [draw.randint(1, 4) for _ in range(12)]
        self.blocks = Blocks(1 + sum(counts))
        self.blocks.state[:] = State.PACKED
        self.blocks.format_id[:] = 1
        runtime = SimpleNamespace(
            store=SimpleNamespace(block_formats=[BlockFormat(FORMATS["bf16"], pages=32)] + [
                BlockFormat(FORMATS[name], pages=PAGES[i])
                for i, name in enumerate(("k8v8", "k8v4", "k4v4", "k4v2", "k2v2"), start=1)
            ]),
            policy=SimpleNamespace(ladder=(1, 2, 3, 4, 5)), blocks=self.blocks, queue_move=self._move,
            counters=SimpleNamespace(demoted_blocks=0),
            capacity=SimpleNamespace(missing_pages=lambda tokens: self.due - self.pages_freed),
        )  # fmt: skip
        order = SimpleNamespace(now=self.clock) if reuse else None
        component = SimpleNamespace(
            blocks_of=lambda node: node.blocks, cache=SimpleNamespace(reuse=order),
            tree_core=SimpleNamespace(root_node=SimpleNamespace(last_access_time=self.clock)),
        )  # fmt: skip
        self.queue, self.component, self.nodes = DemotionQueue(Demotion(runtime), component), component, []
        ids = np.split(np.arange(1, 1 + sum(counts)), np.cumsum(counts)[:-1])
        for own in ids:
            node = Node(id=int(own[0]), blocks=own, backuped=False, locked=False, last_access_time=0)
            node.kvc_uses = (Use(math.log(draw.randint(1, 300)), busy=False, priority=draw.choice([0, 0, 1])),)
            self.nodes.append(node)
            self.use(node, 0)
            self.queue.add(node)

    def _move(self, due, *, from_format, to_format, lengths):
        assert (self.blocks.format_id[due] == from_format).all()
        self.blocks.format_id[due] = to_format
        self.pages_freed += len(due) * (PAGES[from_format] - PAGES[to_format])

    def use(self, node: Node, later: int) -> None:
        self.clock += 1 + later
        node.last_access_time = self.component.tree_core.root_node.last_access_time = self.clock
        node.kvc_uses[0].ended = self.clock
        if self.reuse:
            self.component.cache.reuse.now = self.clock

    def shrink(self, pages: int) -> None:
        self.due = self.pages_freed + pages
        self.queue.make_room(1)

    def expected(self, pages: int) -> list[int]:
        """Formats after a demotion that moves one block at a time, each the best of all."""
        formats, freed = self.blocks.format_id.copy(), 0
        while freed < pages:
            best = min((
                (*self._loss(node, formats[block]), formats[block], self._coldness(node), -block, block)
                for node in self.nodes if not node.locked and not node.backuped
                for block in node.blocks if formats[block] < FLOOR
            ), default=None)  # fmt: skip
            if best is None:
                break
            block = best[-1]
            freed += PAGES[formats[block]] - PAGES[formats[block] + 1]
            formats[block] += 1
        return formats.tolist()

    def _loss(self, node: Node, at: int) -> tuple[float, ...]:
        cost = (NATS[at + 1] - NATS[at]) / (PAGES[at] - PAGES[at + 1])
        if not self.reuse:
            return (cost / max(1, self.clock - node.last_access_time),)
        (use,) = node.kvc_uses
        if use.place is not None:
            return 1, use.priority, cost
        if use.done:
            return -1, use.priority, cost / max(1, self.clock - use.ended)
        return 0, use.priority, cost / max(1, self.clock - use.ended + use.steps * math.exp(use.log_pause))

    def _coldness(self, node: Node) -> tuple[float, ...]:
        (use,) = node.kvc_uses
        return (*use.rank(), node.last_access_time) if self.reuse else (node.last_access_time,)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_order_is_that_of_a_scan_over_all_blocks(seed, reuse):
    draw, apart = random.Random(seed), 0
    tree = Tree(draw, reuse)
    for _ in range(300):
        node, event = draw.choice(tree.nodes), draw.choice(["use", "use", "lock", "unlock", "host", "rank", "shrink"])
        if event == "use":
            tree.use(node, draw.choice([0, 3, 40, 1000, 30_000]))
        elif event == "lock" and sum(n.locked for n in tree.nodes) < 6:
            node.locked = True
            tree.queue.discard(node)
        elif event == "unlock" and node.locked:
            tree.use(node, 0)
            node.locked = False
            tree.queue.add(node)
        elif event == "host" and not node.locked:
            node.backuped = draw.random() < 0.2
            if not node.backuped:
                tree.queue.add(node)
        elif event == "rank":
            (use,) = node.kvc_uses
            use.place, use.done = draw.choice([None, None, draw.randint(0, 10**7)]), draw.random() < 0.2
            if node in tree.queue:  # as `ReuseOrder` does: the rank may have fallen
                tree.queue.add(node)
        elif event == "shrink":
            pages = draw.randint(1, 12)
            want = tree.expected(pages)
            tree.shrink(pages)
            assert tree.blocks.format_id.tolist() == want
            unlocked = [tree.blocks.format_id[n.blocks] for n in tree.nodes if not n.locked and not n.backuped]
            apart = max(apart, np.ptp(np.concatenate(unlocked)))
    assert apart > 1  # some blocks moved two steps before others moved one

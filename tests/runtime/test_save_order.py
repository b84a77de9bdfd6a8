"""The order in which an eviction saves blocks in host memory, against uses of prompts without a tree.

The block used least recently goes first, and of the blocks last used by one prompt the last one. No block is thus saved
before those that continue it, and host memory keeps the first blocks of a prompt longest.
"""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_kvc.adapter.tree_host import FULL
from sglang_kvc.cache.host_tier import HostTier

from .audit import _ids, _nodes
from .model import ONE_RANK, P, ToyServer

Path = tuple[int, ...]  # of a block: a number for each block up to it
# A prompt is a sequence of these parts. It grows by one part at a time, because SGLang counts the split of a node as a
# use of both halves, and parts are then never split by a prompt.
PARTS = ((1,), (2, 3), (4, 5, 6))
BLOCKS = 14  # that the device holds
UNIT = 8192  # bytes; one packed block


class Uses:
    """A toy server and the uses of its blocks."""

    def __init__(self, host_blocks: int):
        self.server = ToyServer(high="k4v4", window=0, blocks=BLOCKS + 4, host_memory=host_blocks * UNIT)
        self.server.tree.init_hicache(ONE_RANK, None)
        self.tier, self.turns = self.server.runtime.host_tier, 0
        self.used: dict[Path, int] = {}  # turn of the last use
        self.device: set[Path] = set()
        self.path_of: dict[int, Path] = {}  # by block id

    def turn(self, prompt: Path) -> None:
        tokens = [1000 * number + i for number in prompt for i in range(P)]
        req = self.server.admit([*tokens, 1])
        self.turns += 1
        for i, block in enumerate(req.kvc.blocks[: len(prompt)], start=1):
            self.path_of[block] = prompt[:i]
            self.device.add(prompt[:i])
            self.used[prompt[:i]] = self.turns
        self.server.finish(req)
        self.server.runtime.flush()

    def random_turns(self, draw: random.Random, count: int) -> None:
        """Prompts of one to three parts, as long as nothing is evicted for them."""
        for _ in range(count):
            prompt: Path = ()
            for part in draw.choices(PARTS, k=draw.randint(1, 3)):
                prompt += part
                if len(self.device | {prompt[: i + 1] for i in range(len(prompt))}) < BLOCKS:
                    self.turn(prompt)

    def order(self, paths: set[Path]) -> list[Path]:
        return sorted(paths, key=lambda path: (self.used[path], -len(path)))

    def evict(self, blocks: int) -> list[Path]:
        """Evict some blocks; returns those that were saved, each node's last block first."""
        nodes: list[np.ndarray] = []

        def plan(tier, ids):
            nodes.append(ids)
            return save(tier, ids)

        save = HostTier.plan_save
        with mock.patch.object(HostTier, "plan_save", plan):
            self.server.tree.evict(EvictParams(num_tokens=blocks * P))
        self.server.runtime.flush()
        return [self.path_of[block] for ids in nodes for block in ids.tolist()[::-1]]

    def places(self) -> tuple[set[Path], set[Path]]:
        """The blocks that the tree has on the device and in host memory."""
        found: tuple[set[Path], set[Path]] = set(), set()
        for node in _nodes(self.server.tree):
            tokens, at = [], node
            while at is not self.server.tree.root_node:
                tokens, at = [*at.key.token_ids, *tokens], at.parent
            path, data = tuple(t // 1000 for t in tokens[::P]), node.component(FULL)
            for place, value in zip(found, (data.value, data.host_value)):
                n = len(_ids(self.server.tree.component, value))
                place |= {path[: len(path) - i] for i in range(n)}
        return found


SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_eviction_saves_least_recently_used_and_last_blocks_first(seed):
    """Blocks that are computed again are not saved a second time."""
    draw, uses, stored = random.Random(seed), Uses(host_blocks=400), set()
    for _ in range(3):
        uses.random_turns(draw, draw.randint(2, 4))
        blocks, expected = draw.randint(1, 8), uses.order(uses.device)
        saved = uses.evict(blocks)
        left, on_host = uses.places()
        evicted = uses.order(uses.device - left)
        assert len(evicted) >= min(blocks, len(expected)) and evicted == expected[: len(evicted)]
        assert saved == [path for path in evicted if path not in stored]
        stored.update(evicted)
        assert on_host == stored
        uses.device = left
    uses.server.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_small_host_memory_keeps_end_of_the_order(seed):
    draw, saved = random.Random(seed), []
    uses = Uses(host_blocks=draw.randint(2, 8))
    uses.random_turns(draw, 6)
    order = uses.order(uses.device)
    while uses.server.tree.evictable_slots():
        saved += uses.evict(draw.randint(1, 4))
    device, kept = uses.places()
    assert saved == order and not device
    assert kept and uses.order(kept) == order[-uses.tier.stored :]
    uses.server.check()

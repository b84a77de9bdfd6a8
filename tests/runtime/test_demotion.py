"""Cold blocks move to lower formats before any is dropped: their order, floor, named formats, accounting and rows."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_patches.scheduler import around_check_decode_mem
from sglang_kvc.adapter.tree_eviction import EvictionQueue
from sglang_kvc.cache.identity import identity
from sglang_kvc.cache.runtime import install
from sglang_kvc.cache.sizing import HostLayout, make_layout
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.request_quality import LOSSLESS
from sglang_kvc.policies import make_policy
from tests.support.no_sync import NoSync

from .model import P, ToyServer, make_runtime

# A head of a block takes 8 pages of 1280 bytes uncompressed, 4 in k8v4, 2 in k4v4 and k4v2, and 1 in k2v2.
LADDER = {"high": "k8v4", "floor": "k2v2", "page_bytes": 1280, "window": 0, "blocks": 7}
K8V4, K4V4, K4V2, K2V2, NAMED = range(1, 6)


def prompt(i: int, blocks: int) -> list[int]:
    return [*range(1000 * i, 1000 * i + blocks * P)]


def answered(server: ToyServer, i: int, blocks: int = 2, level: str | None = None) -> list[int]:
    """The blocks that the tree keeps of a prompt, in order."""
    req = server.admit([*prompt(i, blocks), 1], level=level)
    kept = req.kvc.blocks[:blocks]
    server.finish(req)
    return kept


def formats(server: ToyServer, ids: list[int]) -> list[int]:
    """Format ids on the device, which equal the CPU's records after a flush."""
    server.runtime.flush()
    format_ids = server.runtime.store.format_id[ids].tolist()
    assert format_ids == server.runtime.blocks.format_id[ids].tolist()
    return format_ids


def take_all(server: ToyServer) -> None:
    """Take whole uncompressed blocks, which are never freed, until none is left."""
    blocks = server.runtime.take([0] * (server.allocator.available_size() // P))
    server.unowned = getattr(server, "unowned", []) + blocks


def press(server: ToyServer) -> None:
    """Make room for one block, and take it."""
    server.tree.evict(EvictParams(num_tokens=P))
    assert server.allocator.available_size() >= P
    take_all(server)


def audit(server: ToyServer) -> None:
    """Run `ToyServer.check` although the blocks of `take_all` have no owner."""
    blocks = server.unowned
    server.runtime.free(blocks)
    server.check()
    server.unowned = server.runtime.take([0] * len(blocks))


def set_ages(server: ToyServer, ages: dict[int, int]) -> None:
    """Let the nodes of the tree's first blocks have last been used that many accesses ago."""
    root, component = server.tree.tree_core.root_node, server.tree.component
    root.last_access_time += max(ages.values())
    for node in root.children.values():
        node.last_access_time = root.last_access_time - ages[component.blocks_of(node)[0]]


# A step from k8v4 to k4v4 adds 0.0041 nats and saves 8 pages, and one from k4v4 to k2v2 adds 0.1447 and saves 4. A page
# of the second costs 70.6 times as much as one of the first.
@pytest.mark.parametrize(
    "age, then", [(71, [K4V4, K2V2, K8V4, K8V4]), (70, [K4V4, K4V4, K8V4, K4V4]), (1, [K4V4, K4V4, K8V4, K4V4])]
)
def test_cold_block_moves_two_steps_before_recent_one_moves_one(age, then):
    server = ToyServer(**LADDER)
    cold, recent = answered(server, 0), answered(server, 1)
    set_ages(server, {cold[0]: 1000, recent[0]: 999})
    server.shrink(2 * 8)
    assert formats(server, [*cold, *recent]) == [K4V4, K4V4, K8V4, K8V4]
    set_ages(server, {cold[0]: age, recent[0]: 1})
    server.shrink(1)
    assert formats(server, [*cold, *recent]) == then
    server.check()


def test_nodes_of_similar_age_move_one_step_before_any_moves_two_or_is_dropped():
    server = ToyServer(**{**LADDER, "blocks": 12})
    kept = [answered(server, i) for i in range(8)]
    server.finish(server.admit([*prompt(0, 2), 5]))  # the first prompt is the warmest now
    order = [block for ids in [*kept[1:], kept[0]] for block in ids[::-1]]  # the last block of a node goes first
    take_all(server)
    assert formats(server, order) == [K8V4] * 16
    seen, slots = [], server.tree.evictable_slots()
    while True:
        press(server)
        audit(server)
        if server.tree.evictable_slots() < slots:
            break
        seen.append(formats(server, order))
    for row in seen:
        steps = [{K8V4: 0, K4V4: 1, K2V2: 2}[f] for f in row]  # k4v2 saves no page over k4v4
        assert steps == sorted(steps, reverse=True) and steps[0] - steps[-1] <= 1
    assert len({tuple(row) for row in seen}) == len(seen) > 4
    assert server.runtime.counters.demoted_blocks == 32 and server.runtime.counters.evicted_blocks
    # The dropped leaves are the coldest, and the remaining blocks are at the floor.
    left = [bool(server.runtime.ledger.idle[ids].all()) for ids in [*kept[1:], kept[0]]]
    assert left == sorted(left) and left[-1] and formats(server, kept[0]) == [K2V2] * 2


def test_demotion_moves_no_more_blocks_than_needed():
    server = ToyServer(**LADDER)
    kept = answered(server, 0, blocks=6)
    take_all(server)
    short = server.runtime.capacity.missing_pages(P)
    press(server)
    moved = -(-short // (2 * 2 * 2))  # two pages per head, two layers, two heads
    assert formats(server, kept) == [K8V4] * (6 - moved) + [K4V4] * moved


def test_both_halves_of_a_split_node_keep_its_age():
    """A node that is split when its last blocks go to host memory. Its first blocks are still the coldest."""
    server = ToyServer(**{**LADDER, "blocks": 12})
    cold, recent = answered(server, 0, blocks=4), answered(server, 1, blocks=4)
    first, last = server.tree._split(leaf_of(server, cold), 2), leaf_of(server, cold)
    assert first.last_access_time == last.last_access_time < leaf_of(server, recent).last_access_time
    server.shrink(4 * 8)
    assert formats(server, [*cold, *recent]) == [K4V4] * 4 + [K8V4] * 4
    server.check()


def leaf_of(server: ToyServer, blocks: list[int]):
    """The leaf that holds the last of `blocks`."""
    leaves, component = server.tree.tree_core.evictable_device_leaves, server.tree.component
    return next(leaf for leaf in leaves if component.blocks_of(leaf)[-1] == blocks[-1])


def test_queue_of_equal_ranks_does_not_depend_on_addresses():
    """Tensor-parallel ranks have the same nodes at other addresses."""

    class Leaf:
        def __init__(self, i: int):
            self.id = i

        def __lt__(self, other: Leaf) -> bool:
            return False

    def order() -> list[int]:
        kept, queue = [], EvictionQueue(lambda leaf: 0)
        leaves = [(Leaf(i), kept.append(bytearray(random.randrange(1, 999))))[0] for i in range(40)]
        for leaf in leaves * 5:  # rebuilds the heap
            queue.add(leaf)
        out = []
        while (leaf := queue.next()) is not None:
            out.append(leaf.id)
            queue.discard(leaf)
        return out

    assert len({tuple(order()) for _ in range(20)}) == 1


def test_demotion_reads_nothing_from_the_device():
    server = ToyServer(**LADDER)
    blocks = [*answered(server, 0), *answered(server, 1)]
    assert formats(server, blocks) == [K8V4] * 4
    with NoSync():
        server.shrink(8)
        server.runtime.flush()
    assert formats(server, blocks).count(K4V4) == 1
    server.check()


@pytest.mark.parametrize("floor, least", [("k4v4", K4V4), (None, K8V4)])
def test_demotion_stops_at_floor(floor, least):
    server = ToyServer(**{**LADDER, "floor": floor})
    kept = answered(server, 0), answered(server, 1)
    take_all(server)
    while server.tree.evictable_slots():
        left = [ids for ids in kept if server.runtime.ledger.idle[ids].all()]
        assert all(f <= least for ids in left for f in formats(server, ids))
        press(server)
        audit(server)
    assert bool(server.runtime.counters.demoted_blocks) == (floor is not None)


def test_blocks_of_named_format_are_not_demoted():
    server = ToyServer(**LADDER)
    plain, named, exact = (answered(server, 0, level=level) for level in (None, "k8v4", LOSSLESS))
    assert not set(named) & set(plain)
    take_all(server)
    press(server)
    assert formats(server, plain) == [K4V4] * 2
    assert formats(server, named) == [NAMED] * 2 and formats(server, exact) == [0] * 2
    while server.runtime.ledger.idle[named].all():
        assert formats(server, named) == [NAMED] * 2
        press(server)
        audit(server)


def test_prompt_continues_demoted_prefix_in_its_own_format():
    server = ToyServer(**LADDER)
    kept = answered(server, 0)
    take_all(server)
    press(server)
    before = formats(server, kept)
    assert K4V4 in before
    server.runtime.free(server.unowned)
    req = server.admit([*prompt(0, 3), 1, 2])
    assert req.kv.cache_protected_len == 3 * P and req.kvc.blocks[:2] == kept
    server.check()
    assert formats(server, req.kvc.blocks[:3]) == [*before, K8V4]
    server.finish(req)
    assert formats(server, kept) == before
    server.check()


def test_host_memory_keeps_format_of_node():
    server = ToyServer(**LADDER)
    stored, other = answered(server, 0), answered(server, 1)
    component = server.tree.component
    nodes = server.tree.tree_core.root_node.children.values()
    node = next(n for n in nodes if component.blocks_of(n).tolist() == stored)
    data = node.component_data[component.component_type]
    data.host_value = data.value
    take_all(server)
    for _ in range(2):
        component.demotions.make_room(4 * P)
    assert formats(server, stored) == [K8V4] * 2 and formats(server, other) == [K2V2] * 2


def test_tree_keeps_demoted_copy_over_recomputed_one():
    """Two requests compute one prefix; the tree keeps its own copy in any format."""
    server = ToyServer(**LADDER)
    kept = answered(server, 0)
    server.runtime.demotion.demote(np.array(kept), 10**6)
    req = server.admit([*prompt(0, 2), 1])
    assert req.kvc.blocks[:2] == kept and formats(server, kept) == [K4V4] * 2
    server.check()


def test_running_requests_are_demoted_before_retraction():
    server = ToyServer(**{**LADDER, "blocks": 9})
    plain, named = server.admit([*prompt(0, 2), 1]), server.admit([*prompt(1, 2), 1], level="k8v4")
    sharing = server.admit([*prompt(0, 2), 2])
    take_all(server)
    server.tree.component.demotions.make_room(P)  # blocks of running requests are locked
    assert formats(server, plain.kvc.blocks[:2]) == [K8V4] * 2
    seqs = [req.kvc for req in (plain, named, sharing)]
    won = 0
    while server.runtime.demotion.demote_running(seqs, P):
        take_all(server)
        won += 1
        audit(server)
    assert won and formats(server, plain.kvc.blocks) == [K2V2, K2V2, 0]
    assert formats(server, named.kvc.blocks) == [NAMED, NAMED, 0]
    assert sharing.kvc.blocks[:2] == plain.kvc.blocks[:2]
    server.runtime.free(server.unowned)
    for req in (plain, named, sharing):
        assert server.decode(req, 7)
    server.check()


@pytest.mark.parametrize("floor", ["k2v2", None])
def test_decode_step_without_memory_demotes_before_retracting(floor):
    server = ToyServer(**{**LADDER, "floor": floor, "blocks": 9})
    reqs = [server.admit([*prompt(i, 3), 1]) for i in range(2)]
    take_all(server)
    fits = []

    def stock(batch, selected):
        server.tree.evict(EvictParams(num_tokens=P))
        fits.append(server.allocator.available_size() >= P)
        return fits[-1]

    # A request that just ended has no blocks any more.
    batch = SimpleNamespace(
        reqs=[*reqs, SimpleNamespace(kvc=None)], tree_cache=server.tree,
        new_tokens_required_next_decode=lambda selected: P,
    )  # fmt: skip
    install(server.runtime)
    try:
        assert around_check_decode_mem(stock, batch) == bool(floor)
    finally:
        install(None)
    assert fits == ([False, True] if floor else [False])
    audit(server)


def test_blocks_in_window_are_not_demoted():
    server = ToyServer(**{**LADDER, "window": 2 * P, "blocks": 9})
    kept = answered(server, 0, blocks=3)
    req = server.admit([*prompt(0, 3), 1])
    take_all(server)
    server.runtime.demotion.demote_running([req.kvc], 8 * P)
    window = req.kvc.window_start
    assert window and formats(server, kept[window:]) == [K8V4] * (3 - window)
    assert set(formats(server, kept[:window])) == {K2V2}


def test_demotion_cost_does_not_grow_with_tree():
    looked = []
    for blocks in (10, 40):
        server = ToyServer(**{**LADDER, "blocks": blocks})
        for i in range(blocks):
            answered(server, i, blocks=1)
        take_all(server)
        calls = []
        tier_of = server.runtime.demotion.tier_of
        server.runtime.demotion.tier_of = lambda ids, f=tier_of, c=calls: c.append(1) or f(ids)
        press(server)
        looked.append(len(calls))
    assert looked[1] <= looked[0] + 4


def test_identity_of_stored_blocks_includes_floor():
    with_floor, without = make_runtime(**LADDER), make_runtime(**{**LADDER, "floor": None})
    assert identity(with_floor) != identity(without)


@pytest.mark.parametrize("options, parts", [({"high": "k8v4", "floor": "k4v4"}, 3), ({"high": "k4v4"}, 1)])
def test_records_of_all_formats_fill_host_memory_units(options, parts):
    config = KvcConfig(**options)
    policy = make_policy(config)
    layout = make_layout(config, policy, layers=8, heads=4, head_dim=128)
    block_formats = policy.block_formats(layout)
    host = HostLayout.of(layout, block_formats, 1 << 30)
    for block_format in block_formats[1:]:
        size = host.record.num_bytes(block_format.pages)
        assert size <= host.units_for(block_format.pages) * host.unit_bytes <= 1.04 * size
    assert min(host.units_for(f.pages) for f in block_formats[1:]) == parts

"""An eviction saves and frees all of its nodes together, and leaves what node by node would have left."""

from __future__ import annotations

import contextlib
import random
from unittest import mock

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel

from kvc_kernels import ops
from sglang_kvc.adapter.eviction_batch import EvictionBatch
from sglang_kvc.adapter.tree_component import written_at
from sglang_kvc.adapter.tree_host import FULL
from sglang_kvc.cache.op_queue import OpLog, Release, Save
from sglang_kvc.options.config import REUSE
from sglang_kvc.options.request_quality import LOSSLESS

from .audit import _ids, _nodes, check_tree, unpacked_records
from .model import ONE_RANK, P, ToyServer, make_runtime
from .overlap import Overlap, configured
from .test_overlap import LADDER, LEANKV
from .test_starved import HOST, Starved

TURNS = 120
NODE_BY_NODE = mock.patch.object(EvictionBatch, "open", lambda self: contextlib.nullcontext())
KINDS = {
    "k4v4": {"high": "k4v4", "window": 0},
    "leankv": {**LEANKV, "window": 0},
    "floor": LADDER,
    "reuse": {"high": "k4v4", "window": 0, "eviction": REUSE},
}


def nodes_of(tree) -> list[tuple]:
    """Everything that the tree holds, in the order of its nodes."""
    nodes = []
    for node in _nodes(tree):
        data = node.component(FULL)
        blocks, stored = _ids(tree.component, data.value), _ids(tree.component, data.host_value)
        locks = data.lock_ref, data.host_lock_ref
        nodes.append((node.key.token_ids.tolist(), node.key.extra_key, blocks, stored, locks, written_at(node)))
    return nodes


def state(runtime, tree) -> dict[str, object]:
    """The tree, the ledger, the block records, host memory and the counters."""
    blocks, ledger, tier = runtime.blocks, runtime.ledger, runtime.host_tier
    found: dict[str, object] = {"tree": nodes_of(tree), "free ids": list(blocks._free)}
    for record in (blocks.state, blocks.format_id, blocks.generation, blocks.ref_count, ledger.charge, ledger.idle):
        found[f"record {len(found)}"] = record.tolist()
    found["ledger"] = ledger.total, ledger.idle_total, ledger.idle_blocks
    found["counters"] = runtime.counters.evicted_blocks, runtime.counters.compactions
    if tier is not None:
        ids = np.flatnonzero(tier.units[:, 0] >= 0)
        for record in (tier.units, tier.generation, *(r[ids] for r in (tier.format_id, tier.pages, tier.start))):
            found[f"stored {len(found)}"] = record.tolist()
        found["host memory"] = list(tier.memory._free), tier.stored, tier.saved_blocks, tier.loaded_blocks
        found["saves"] = tier.save_number[ids].tolist(), tier.transfers.batch
    return found


def stored_bytes(runtime) -> list[bytes]:
    """Content of all stored blocks; nothing is queued."""
    tier = runtime.host_tier
    if tier is None or not tier.stored:
        return []
    store, blocks = unpacked_records(tier, np.flatnonzero(tier.units[:, 0] >= 0).tolist())
    return [ops.block_digest(store, block, scores=False) for block in blocks]


def life(seed: int, options: dict) -> list:
    """States of a server after each turn, and its stored bytes after every eighth."""
    runtime, states = make_runtime(blocks=6, **options), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(get_parallel().override(tp_rank=0, tp_size=1))  # a refusal is logged by the first rank
        stack.enter_context(configured(runtime, P, retract_every=25))
        server = Overlap(runtime, P, disable=False)
        server.check_every = 1000
        client = Starved(server, seed, [])
        for turn in range(TURNS):
            client.act()
            server.turn()
            runtime.flush()
            states.append(state(runtime, server.tree_cache))
            if turn % 8 == 0:
                states.append(stored_bytes(runtime))
        check_tree(server)
    assert runtime.counters.evicted_blocks
    return states


@pytest.mark.slow
@pytest.mark.parametrize("host_memory", [None, *HOST])
@pytest.mark.parametrize("name", KINDS)
def test_batch_leaves_what_node_by_node_leaves(name, host_memory):
    """Host memory holds one record, a few, or all. Records have different sizes, because some requests are lossless."""
    options = {**KINDS[name], **({"host_memory": host_memory} if host_memory else {})}
    seed = random.Random(f"{name} {host_memory}").randrange(1000)
    batched = life(seed, options)
    with NODE_BY_NODE:
        assert batched == life(seed, options)


def filled(leaves: int, host_memory: int | None = 400_000, levels=(None,)) -> ToyServer:
    """A server whose tree has `leaves` leaves of one block, the first one the oldest. Their levels alternate."""
    options = {} if host_memory is None else {"host_memory": host_memory}
    server = ToyServer(high="k4v4", window=0, blocks=leaves + 3, **options)
    if host_memory is not None:
        server.tree.init_hicache(ONE_RANK, None)
    for i in range(leaves):
        server.finish(server.admit([*range(1000 * i, 1000 * i + P), 1], level=levels[i % len(levels)]))
    server.runtime.flush()
    return server


def evict_all(server: ToyServer) -> list:
    """Evict everything; returns the operations that this queued."""
    with mock.patch.object(OpLog, "push", autospec=True, side_effect=OpLog.push) as push:
        server.tree.evict(EvictParams(num_tokens=10**9))
    return [call.args[1] for call in push.call_args_list]


@pytest.mark.parametrize(
    "levels, host_memory, saves", [((None,), 400_000, 1), ((None, LOSSLESS), 400_000, 2), ((None,), None, 0)]
)
def test_eviction_queues_one_save_per_size_and_one_release(levels, host_memory, saves):
    server = filled(8, host_memory, levels)
    queued = evict_all(server)
    assert [type(op) for op in queued] == [Save] * saves + [Release]
    assert sum(len(op.blocks) for op in queued[:-1]) == (8 if saves else 0) and len(queued[-1].blocks) == 8
    server.check()


def test_record_dropped_by_its_own_eviction_is_not_saved():
    """Host memory holds three records of lossless blocks, and the last ones have the units of earlier ones."""
    server = filled(9, 70_000, (LOSSLESS, None))
    queued = evict_all(server)
    tier = server.runtime.host_tier
    saved = [unit for op in queued[:-1] for unit in op.units.ravel().tolist()]
    assert len(saved) == len(set(saved)) and sum(len(op.blocks) for op in queued[:-1]) == tier.stored < 9
    assert tier.saved_blocks == 9
    server.check()
    with NODE_BY_NODE:
        other = filled(9, 70_000, (LOSSLESS, None))
        evict_all(other)
    other.check()
    assert state(server.runtime, server.tree) == state(other.runtime, other.tree)
    assert stored_bytes(server.runtime) == stored_bytes(other.runtime)


def evict_with(server: ToyServer, at: int, act) -> None:
    """Evict everything, and call `act` when node number `at` is about to be saved."""
    backup, calls = server.tree._execute_kv_backup, []

    def execute(*args):
        calls.append(0)
        if len(calls) == at:
            act()
        return backup(*args)

    with mock.patch.object(server.tree, "_execute_kv_backup", execute):
        server.tree.evict(EvictParams(num_tokens=10**9))


def test_failed_eviction_keeps_what_it_evicted_before():
    server, failure = filled(6), mock.Mock(side_effect=RuntimeError("stop"))
    with pytest.raises(RuntimeError, match="stop"):
        evict_with(server, 4, failure)
    tier = server.runtime.host_tier
    assert tier.stored == 3 and server.runtime.blocks.used_count == 3
    server.check()
    assert len(stored_bytes(server.runtime)) == 3
    evict_all(server)
    assert tier.stored == 6 and server.allocator.used_slots() == 0
    server.check()


NEWER = 5000  # first token of the newer leaf


def server_without_room(blocks: int, host_memory: int, free: int) -> tuple[ToyServer, list[bytes]]:
    """A server whose tree has a leaf of this many blocks and a newer one of one block, and the content of the first.
    All but `free` units of host memory are locked."""
    server = ToyServer(high="k4v4", window=0, blocks=blocks + 4, host_memory=host_memory)
    server.tree.init_hicache(ONE_RANK, None)
    for prompt in ([*range(blocks * P), 1], [*range(NEWER, NEWER + P), 1]):
        server.finish(server.admit(prompt))
    server.runtime.settle()
    leaf = next(iter(server.tree.root_node.children.values()))
    content = [ops.block_digest(server.runtime.store, b, scores=False) for b in server.tree.path_blocks(leaf.id)]
    memory = server.runtime.host_tier.memory
    memory.take(memory.free_units - free)
    return server, content


@pytest.mark.parametrize(
    "host_memory, free", [(64_000, 5), (200_000, 3)], ids=["larger than host memory", "locked host memory"]
)
def test_leaf_without_room_in_host_memory_is_evicted_from_its_end(host_memory, free):
    """It is evicted before a newer leaf. Host memory keeps as many of its first blocks as fit."""
    server, content = server_without_room(8, host_memory, free)
    tree, tier, evictions = server.tree, server.runtime.host_tier, 0
    while tree.evictable_slots() > P:
        tree.evict(EvictParams(num_tokens=1))
        server.check()
        evictions += 1
    (newer,) = (node for node in _nodes(tree) if not node.evicted)
    assert newer.key.token_ids[0] == NEWER and evictions > 1
    assert 0 < tier.stored <= free and set(stored_bytes(server.runtime)) == set(content[: tier.stored])

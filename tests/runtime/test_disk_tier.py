"""The threads of the disk tier beside a scheduler that frees, flushes and changes the weights meanwhile."""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_patches import weights
from sglang_kvc.adapter.block_key import BlockKey
from sglang_kvc.adapter.tree_disk import _Fetched
from sglang_kvc.adapter.tree_eviction import EvictionQueue
from sglang_kvc.cache.block_store import Stored
from sglang_kvc.cache.disk_store import DiskStore
from sglang_kvc.cache.disk_tier import DiskTier, Fetch

from .model import P, ToyServer, make_runtime
from .test_disk_store import MODEL, OTHER, key_of
from .test_starved import Threads


@pytest.fixture
def tier(tmp_path):
    runtime = make_runtime(high="k4v4", window=0, host_memory=200_000)
    runtime.attach_host_tier()
    disk = DiskTier(runtime.host_tier, DiskStore(tmp_path, MODEL, 1 << 20))
    disk._readers, disk._writers = Threads(random.Random(0)), Threads(random.Random(1))
    return disk


def stored(tier: DiskTier, n: int) -> np.ndarray:
    """`n` packed blocks in host memory."""
    runtime = tier.tier.runtime
    blocks = np.array(runtime.take([0] * n))
    runtime.queue_due(blocks)
    ids = tier.tier.save(blocks)
    runtime.flush()
    return ids


def written(tier: DiskTier, ids: np.ndarray) -> list[bytes]:
    """Keys under which writes of the stored blocks have begun but not run."""
    keys = [key_of(i) for i in range(len(ids))]
    tier.write_behind(ids, keys)
    tier.poll()
    return keys


def test_a_block_that_leaves_host_memory_first_is_not_written(tier):
    """Host memory has its units back at once: it never waits for a disk."""
    ids = stored(tier, 3)
    keys = written(tier, ids)
    free = tier.tier.memory.free_units
    tier.tier.free(ids[:1])
    assert tier.tier.memory.free_units > free
    tier._writers.turn(1)
    assert [tier.store.record_bytes(key) is not None for key in keys] == [False, True, True]


def test_what_the_old_weights_wrote_stays_theirs(tier):
    keys = written(tier, stored(tier, 2))
    old = tier.store
    tier.store = old.of(OTHER)
    tier._writers.turn(1)
    assert len(old) == 2 and not len(tier.store)
    assert [tier.store.record_bytes(key) for key in keys] == [None, None]


def test_files_that_were_cut_while_no_server_ran(tier, tmp_path):
    """A file shorter than a header, as a power failure leaves it, is removed when its size is looked at."""
    keys = written(tier, stored(tier, 3))
    tier._writers.turn(1)
    for key, size in zip(keys, (0, 10)):
        path = tier.store.path(key)
        path.write_bytes(path.read_bytes()[:size])
    tier.store = DiskStore(tmp_path, MODEL, 1 << 20)
    for key in keys[:2]:
        assert tier.known([key]) == [] and not tier.store.path(key).exists()
    assert tier.store.damaged == 2
    (size,) = tier.known(keys[2:])
    fetch = tier.fetch(keys[2:], [size], [size])
    tier.poll()
    tier._readers.turn(1)
    assert fetch.finished and fetch.found == 1


def test_an_eviction_ends_where_host_memory_is_full(tmp_path):
    """A node behind which files are being read is dropped like any other; what was read is of no use then."""
    server = ToyServer(high="k4v4", window=0, host_memory=30_000, disk=str(tmp_path), disk_size=1 << 20)
    tree = server.tree
    tree.init_hicache(None, None)
    server.finish(server.admit([*range(P), 1]))
    (node,) = tree.root_node.children.values()
    tier = tree.host_tier
    tree.evict_host(10**9)
    tier.memory.take(tier.memory.free_units - 2)
    fetch = Fetch(tier.reserve([100]), [], [], 0)
    fetch.reads = [Future()]
    lock = tree.inc_host_lock_ref(node.id).to_dec_params()
    tree.fetched.append(_Fetched(None, node.id, BlockKey(node.key.token_ids, None), [], fetch, lock))
    tier.memory.take(tier.memory.free_units)

    queue, asked = tree.tree_core.evictable_device_leaves, []
    queue.next = lambda: asked.append(0) or (EvictionQueue.next(queue) if len(asked) < 10 else None)
    tree.evict(EvictParams(num_tokens=10**9))
    assert server.allocator.used_slots() == 0 and len(asked) < 10
    fetch.reads[0].set_result(Stored(1, 1, 0))
    free = tier.memory.free_units
    tree.check_hicache_events()
    assert not tree.fetched and not tree.root_node.children and tier.memory.free_units == free + 1


def test_an_update_of_the_weights_that_keeps_the_cache(tmp_path, monkeypatch):
    """Blocks of two sets of weights are in the cache: nothing goes to files until it is flushed."""
    server = ToyServer(high="k4v4", window=0, host_memory=200_000, disk=str(tmp_path), disk_size=1 << 20)
    tree = server.tree
    tree.init_hicache(None, None)
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", server.runtime)

    def files_of_a_prompt() -> int:
        req = server.admit([*range(P), 1])
        server.finish(req)
        tree.back_up(req.last_node)
        server.runtime.flush()
        tree.check_hicache_events()
        tree.disk.synchronize()
        return len(tree.disk.store)

    weights.before_flush(None, None, True, "")
    assert files_of_a_prompt() == 0
    tree.reset()
    assert files_of_a_prompt() == 1

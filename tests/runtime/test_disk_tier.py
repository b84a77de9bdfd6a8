"""The threads of the disk tier while the scheduler frees blocks, flushes and changes the weights."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_kernels import ops
from kvc_patches import scheduler, weights
from sglang_kvc.adapter.block_key import BlockKey
from sglang_kvc.adapter.tree_disk import READ_SECONDS, _PrefixFetch
from sglang_kvc.adapter.tree_eviction import EvictionQueue
from sglang_kvc.cache.block_store import Stored
from sglang_kvc.cache.disk_store import DiskStore
from sglang_kvc.cache.disk_tier import DiskTier, Fetch
from sglang_kvc.cache.runtime import Runtime

from .model import ONE_RANK, P, ToyServer, make_runtime
from .test_disk_store import MODEL, OTHER, key_of
from .test_prefetch import packed_block
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
    """Keys of the stored blocks whose writes are queued but have not run."""
    keys = [key_of(i) for i in range(len(ids))]
    tier.write_behind(ids, keys)
    tier.poll()
    return keys


def test_block_evicted_before_its_write_is_not_written(tier):
    """Host memory gets its units back at once and never waits for a disk."""
    ids = stored(tier, 3)
    keys = written(tier, ids)
    free = tier.tier.memory.free_units
    tier.tier.free(ids[:1])
    assert tier.tier.memory.free_units > free
    tier._writers.turn(1)
    assert [tier.store.record_bytes(key) is not None for key in keys] == [False, True, True]


@pytest.mark.parametrize("policy", [{"high": "k4v4"}, {"policy": "quota", "keep": 0.5}], ids=["k4v4", "quota"])
def test_pages_have_the_same_hashes_after_a_restart(tmp_path, policy):
    """The next server on the same folder reads every block to its device, byte for byte."""
    keys = [key_of(i) for i in range(5)]

    def server() -> tuple[Runtime, DiskTier]:
        runtime = make_runtime(window=0, host_memory=2_000_000, **policy)
        runtime.attach_host_tier()
        return runtime, DiskTier(runtime.host_tier, DiskStore(tmp_path, MODEL, 1 << 24))

    runtime, disk = server()
    blocks = np.array([packed_block(runtime, i) for i in range(len(keys))])
    before = [ops.block_digest(runtime.store, int(b), scores=False) for b in blocks]
    disk.write_behind(runtime.host_tier.save(blocks), keys)
    runtime.flush()
    while len(disk.store) < len(keys):
        disk.poll()

    runtime, disk = server()
    sizes = disk.record_sizes(keys)
    fetch = disk.fetch(keys, sizes, sizes)
    while not fetch.reads or not fetch.finished:
        disk.poll()
    assert fetch.found == len(keys)
    loading = runtime.host_tier.load(fetch.ids)
    runtime.settle()
    assert [ops.block_digest(runtime.store, int(b), scores=False) for b in loading.blocks] == before
    assert len(set(before)) == len(keys)


def test_writes_begun_under_old_weights_stay_in_old_store(tier):
    keys = written(tier, stored(tier, 2))
    old = tier.store
    tier.store = old.of(OTHER)
    tier._writers.turn(1)
    assert len(old) == 2 and not len(tier.store)
    assert [tier.store.record_bytes(key) for key in keys] == [None, None]


def files_in(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


class SlowDisk(DiskStore):
    """A write takes until `go` is set."""

    def _write_file(self, *args) -> bool:
        self.begun.release()
        self.go.wait()
        return super()._write_file(*args)


def test_cleared_disk_stays_empty(tmp_path):
    """Writes under way end before the files are removed. Those that have not begun never do."""
    runtime = make_runtime(high="k4v4", window=0, host_memory=200_000)
    runtime.attach_host_tier()
    store = SlowDisk(tmp_path, MODEL, 1 << 20)
    store.begun, store.go = threading.Semaphore(0), threading.Event()
    disk = DiskTier(runtime.host_tier, store)
    written(disk, stored(disk, 6))
    for _ in range(store.threads):
        assert store.begun.acquire(timeout=10), "a writer did not begin"
    blocks = np.array(runtime.take([0]))
    runtime.queue_due(blocks)
    disk.write_behind(runtime.host_tier.save(blocks), [key_of(9)])  # waits for its save
    threading.Timer(0.2, store.go.set).start()
    disk.clear()
    assert (len(store), store.num_bytes, files_in(tmp_path)) == (0, 0, 0)
    runtime.flush()
    disk.poll()
    disk._writers.shutdown()
    assert (len(store), store.num_bytes, files_in(tmp_path)) == (0, 0, 0)
    assert not store.begun.acquire(blocking=False), "a write began after the clear"


def test_truncated_files_are_removed_on_lookup(tier, tmp_path):
    """A file shorter than a header, as a power failure leaves it, is removed when its size is read."""
    keys = written(tier, stored(tier, 3))
    tier._writers.turn(1)
    for key, size in zip(keys, (0, 10)):
        path = tier.store.path(key)
        path.write_bytes(path.read_bytes()[:size])
    tier.store = DiskStore(tmp_path, MODEL, 1 << 20)
    for key in keys[:2]:
        assert tier.record_sizes([key]) == [] and not tier.store.path(key).exists()
    assert tier.store.damaged == 2
    (size,) = tier.record_sizes(keys[2:])
    fetch = tier.fetch(keys[2:], [size], [size])
    tier.poll()
    tier._readers.turn(1)
    assert fetch.finished and fetch.found == 1


def test_eviction_succeeds_when_host_memory_is_full(tmp_path):
    """A node whose children are being read from files is dropped like any other, and the data read is discarded."""
    server = ToyServer(high="k4v4", window=0, host_memory=30_000, disk=str(tmp_path), disk_size=1 << 20)
    tree = server.tree
    tree.init_hicache(ONE_RANK, None)
    server.finish(server.admit([*range(P), 1]))
    (node,) = tree.root_node.children.values()
    tier = tree.host_tier
    tree.evict_host(10**9)
    tier.memory.take(tier.memory.free_units - 2)
    fetch = Fetch(tier.reserve([100]), [], [], 0)
    fetch.reads = [Future()]
    lock = tree.inc_host_lock_ref(node.id).to_dec_params()
    req = SimpleNamespace(kvc_found=P)
    tree.fetches.append(_PrefixFetch(req, node.id, 0, BlockKey(node.key.token_ids, None), [], fetch, lock, 0))
    tier.memory.take(tier.memory.free_units)

    queue, calls = tree.tree_core.evictable_device_leaves, []
    queue.next = lambda: calls.append(0) or (EvictionQueue.next(queue) if len(calls) < 10 else None)
    tree.evict(EvictParams(num_tokens=10**9))
    assert server.allocator.used_slots() == 0 and len(calls) < 10
    fetch.reads[0].set_result(Stored(1, 1, 0))
    free = tier.memory.free_units
    tree.check_hicache_events()
    assert not tree.fetches and not tree.root_node.children and tier.memory.free_units == free + 1


def test_turn_saves_only_new_nodes(tmp_path, monkeypatch):
    """Nodes on the disk are not saved again at the end of each turn after host memory has dropped them, also if they
    were split. They are saved again if the disk was cleared, or when the device evicts them."""
    server = ToyServer(high="k4v4", window=0, host_memory=200_000, disk=str(tmp_path), disk_size=1 << 20)
    tree = server.tree
    tree.init_hicache(ONE_RANK, None)
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", server.runtime)

    def saved_by_turn(*blocks: int) -> int:
        """Blocks saved by a turn whose prompt has these blocks, with an empty host memory."""
        tree.evict_host(10**9)
        assert not tree.host_tier.stored
        saved, prompt = tree.host_tier.saved_blocks, [b * P + i for b in blocks for i in range(P)]
        req = server.admit([*prompt, 1])
        server.finish(req)
        tree.back_up(req.last_node)
        server.runtime.flush()
        tree.check_hicache_events()
        tree.disk.synchronize()
        return tree.host_tier.saved_blocks - saved

    assert [saved_by_turn(0, 1), saved_by_turn(0, 1), saved_by_turn(0, 2)] == [2, 0, 1]
    assert len(tree.disk.store) == 3
    tree.clear_storage_backend()
    assert [saved_by_turn(0, 1), saved_by_turn(0, 1)] == [2, 0]
    tree.evict_host(10**9)
    tree.evict(EvictParams(num_tokens=10**9))
    assert tree.host_tier.stored == 3


@pytest.mark.parametrize("lag", [0, 256])
def test_blocks_that_will_be_planned_are_not_saved(tmp_path, lag):
    """Blocks of incomplete prompts, and with a lag those of a running answer, are packed with all their tokens. Another
    request of their prefix may end before they are planned."""
    options = {"policy": "leankv", "high": "k8v4", "low": "k4v2", "alpha_low": 0.3, "window": 0, "lag": lag}
    server = ToyServer(host_memory=400_000, disk=str(tmp_path), disk_size=1 << 20, trust="all", **options)
    tree, runtime = server.tree, server.runtime
    tree.init_hicache(ONE_RANK, None)
    req = server.admit([*range(4 * P), 1])
    server.finish(req)
    tree.back_up(req.last_node)
    assert tree.host_tier.stored == 4
    tree.evict_host(10**9)
    nodes = tree._path(tree.tree_core.node_by_id(req.last_node))
    ids = np.concatenate([tree.component.blocks_of(node) for node in nodes])
    runtime.blocks.format_id[ids] = runtime.policy.unplanned_format
    (runtime.blocks.ref_count if lag else runtime.blocks.window_count)[ids] += 1
    for node in nodes:
        node.kvc_written = None
    tree.back_up(req.last_node)
    assert not tree.host_tier.stored


@pytest.mark.parametrize("idle", [False, True])
def test_pass_without_forward_waits_for_reads(tmp_path, monkeypatch, idle):
    """The threads that read get the interpreter's lock meanwhile."""
    server = ToyServer(high="k4v4", window=0, host_memory=30_000, disk=str(tmp_path), disk_size=1 << 20)
    tree = server.tree
    tree.init_hicache(ONE_RANK, None)
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", server.runtime)
    fetch = Fetch(tree.host_tier.reserve([100]), [], [], 0)
    fetch.reads = [Future()]
    tree.fetches.append(_PrefixFetch(None, tree.root_node.id, 0, BlockKey([*range(P)], None), [], fetch, None, 0))
    waits = []
    monkeypatch.setattr("sglang_kvc.adapter.tree_disk.wait", lambda tasks, seconds: waits.append((tasks, seconds)))
    scheduler.before_on_idle(SimpleNamespace(is_fully_idle=lambda: idle, tree_cache=tree))
    assert waits == ([] if idle else [(fetch.reads, READ_SECONDS)])


def test_weight_update_without_flush_stops_writes(tmp_path, monkeypatch):
    """Blocks of two sets of weights are in the cache: nothing goes to files until it is flushed."""
    server = ToyServer(high="k4v4", window=0, host_memory=200_000, disk=str(tmp_path), disk_size=1 << 20)
    tree = server.tree
    tree.init_hicache(ONE_RANK, None)
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", server.runtime)

    def files_of_a_prompt() -> int:
        req = server.admit([*range(P), 1])
        server.finish(req)
        tree.back_up(req.last_node)
        server.runtime.flush()
        tree.check_hicache_events()
        tree.disk.synchronize()
        return len(tree.disk.store)

    weights.before_update(None, None)
    assert files_of_a_prompt() == 0
    tree.reset()
    assert files_of_a_prompt() == 1

"""Clearing the disk tier, also while its store is slow, hangs or fails."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

from sglang_kvc.cache import disk_tier
from sglang_kvc.cache.disk_store import DiskStore
from sglang_kvc.cache.disk_tier import DiskTier

from .memory_backend import MemoryBackend
from .model import P, make_runtime
from .test_disk_order import ask, found
from .test_disk_store import MODEL, key_of
from .test_disk_tier import SlowDisk, files_in, stored, written
from .test_hanging_reads import serve as serve_kind
from .test_stored_prompts import EVERYTHING, finish_writes, run, serve, tokens, write_files


@pytest.fixture
def slow(tmp_path):
    """A disk tier whose writes begin (`store.begun`) and then wait for `store.go`."""
    runtime = make_runtime(blocks=12, high="k4v4", window=0, host_memory=200_000)
    runtime.attach_host_tier()
    store = SlowDisk(tmp_path, MODEL, 1 << 20)
    store.begun, store.go = threading.Semaphore(0), threading.Event()
    disk = runtime.host_tier.disk = DiskTier(runtime.host_tier, store)
    yield runtime, disk, store
    store.go.set()
    disk.close()


@pytest.mark.parametrize("evicted", [False, True], ids=["next turn", "eviction"])
def test_nodes_in_host_memory_are_written_again_after_a_clear(tmp_path, evicted):
    prompt = tokens(1, 4)
    with serve(tmp_path, disk_size=1 << 20) as server:
        tree = server.tree_cache
        ask(server, prompt)
        assert found(server, prompt) == 4 and tree.clear_storage_backend()
        assert found(server, prompt) == 0
        if evicted:
            tree.evict(EVERYTHING)
            finish_writes(server)
        else:
            ask(server, prompt)
        assert found(server, prompt) == 4
    with serve(tmp_path, disk_size=1 << 20) as server:
        assert ask(server, prompt) == 4


def test_blocks_that_were_read_are_written_again_after_a_clear(tmp_path):
    """Also before the server's first save."""
    prompt = tokens(1, 4)
    write_files(tmp_path, [[*prompt, 1]])
    with serve(tmp_path) as server:
        assert ask(server, prompt) == 4 and not server.tree_cache.host_tier.transfers.batch
        assert server.tree_cache.clear_storage_backend() and found(server, prompt) == 0
        ask(server, prompt)
        assert found(server, prompt) == 4


def test_blocks_of_a_read_are_written_again_if_the_disk_is_cleared_before_they_arrive(tmp_path):
    prompt = tokens(1, 4)
    write_files(tmp_path, [[*prompt, 1]])
    with serve(tmp_path) as server:
        tree = server.tree_cache
        server.submit([*prompt, 1], [5], None, None)
        run(server, until=lambda: tree.fetches and tree.fetches[0].fetch.reads)
        wait(tree.fetches[0].fetch.reads, 30)
        assert tree.clear_storage_backend()
        run(server)
        assert list(server.requests.values())[-1].cached_tokens == 4 * P
        ask(server, prompt)
        assert found(server, prompt) == 4


def test_backend_that_cannot_be_cleared_is_reported(tmp_path, monkeypatch, caplog):
    def fail(self):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(MemoryBackend, "clear", fail)
    with serve_kind("backend", tmp_path) as server:
        cleared = server.runtime.cleared
        assert not server.tree_cache.clear_storage_backend() and "nobody answers" in caplog.text
        assert server.runtime.cleared == cleared + 1  # ranks whose backends answered stay in step


@pytest.mark.parametrize("kind", ["files", "backend"])
def test_clear_does_not_wait_for_a_write_that_hangs(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(disk_tier, "LOOKUP_SECONDS", 0.1)
    go, begun = threading.Event(), threading.Event()

    def hanging(write):
        def hang(self, *args):
            begun.set()
            go.wait(60)
            return write(self, *args)

        return hang

    monkeypatch.setattr(DiskStore, "_write_file", hanging(DiskStore._write_file))
    monkeypatch.setattr(MemoryBackend, "batch_set", hanging(MemoryBackend.batch_set))
    with serve_kind(kind, tmp_path) as server:
        server.submit([*tokens(1, 3), 1], [5], None, None)
        for _ in range(2000):
            server.turn()
            if begun.is_set():
                break
            time.sleep(0.001)
        assert begun.is_set()
        began = time.monotonic()
        server.tree_cache.clear_storage_backend()
        assert time.monotonic() - began < 10
        go.set()


@pytest.mark.parametrize("flushed", [False, True])
def test_slow_write_brings_nothing_back_after_a_clear(slow, monkeypatch, tmp_path, flushed):
    monkeypatch.setattr(disk_tier, "LOOKUP_SECONDS", 0.1)
    runtime, disk, store = slow
    written(disk, stored(disk, 2))
    for _ in range(2):
        assert store.begun.acquire(timeout=10)
    if flushed:
        runtime.reset()
    disk.clear()
    store.go.set()
    disk._writers.shutdown()
    assert (len(store), files_in(tmp_path)) == (0, 0)


def test_waiting_writes_are_bounded_while_the_disk_hangs(slow):
    runtime, disk, _ = slow
    tier = runtime.host_tier
    for n in range(300):
        blocks = runtime.take([0] * 8)
        runtime.queue_due(blocks)
        ids = tier.save(np.array(blocks))
        runtime.free(blocks)
        disk.write_behind(ids, [key_of(8 * n + i) for i in range(8)])
        runtime.flush()
        disk.poll()
        tier.free(ids)  # host memory drops them for others
    most = disk_tier.MAX_WAITING * tier.memory.num_units
    assert len(disk._waiting) <= most and len(disk._writes) <= most + disk_tier.MAX_WRITES

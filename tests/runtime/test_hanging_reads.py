"""Reads of the disk tier or of a storage backend that do not end: prompts are computed, and flushes do not wait."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_kvc.cache.disk_store import DiskStore

from .audit import check_tree
from .memory_backend import MemoryBackend, server_args
from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_disk_tier import stored, tier, written  # noqa: F401
from .test_stored_prompts import finish_writes, run, tokens


class Gate:
    """Where reads wait while it is closed. began: counts the reads that have come to it."""

    def __init__(self):
        self.opened, self.began = threading.Event(), threading.Semaphore(0)
        self.opened.set()

    def before(self, call):
        def gated(*args):
            if not self.opened.is_set():
                self.began.release()
                assert self.opened.wait(100)
            return call(*args)

        return gated


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(DiskStore, "read", gate.before(DiskStore.read))
    monkeypatch.setattr(MemoryBackend, "batch_get", gate.before(MemoryBackend.batch_get))
    yield gate
    gate.opened.set()


@contextlib.contextmanager
def serve(kind: str, folder, host: int = 200_000):
    disk = {"disk": str(folder), "disk_size": 1 << 30} if kind == "files" else {"storage": "dynamic"}
    runtime = make_runtime(blocks=40, high="k4v4", window=0, host_memory=host, **disk)
    with get_parallel().override(tp_rank=0, tp_size=1), configured(runtime, 4 * P, retract_every=10**6):
        server = Overlap(runtime, 4 * P, disable=False, context=2048, server_args=server_args(str(folder)))
        yield server
        server.tree_cache.disk.close()


def ask(server: Overlap, prompt: list[int]) -> int:
    """Answer `prompt`; returns its number of cached blocks."""
    server.submit([*prompt, 1], [5], None, None)
    run(server)
    request = list(server.requests.values())[-1]
    assert list(request.output_ids) == [5]
    return request.cached_tokens // P


def write(kind: str, folder, prompts: list[list[int]]) -> None:
    with serve(kind, folder) as server:
        for prompt in prompts:
            ask(server, prompt)
        finish_writes(server)


def check(server: Overlap) -> None:
    """Check all blocks when nothing is queued."""
    finish_writes(server)
    server.runtime.settle()
    check_tree(server)


def open_gate(server: Overlap, gate: Gate) -> None:
    """Let the reads end that hang."""
    gate.opened.set()
    assert not wait(server.tree_cache.disk._hanging, 60).not_done


@pytest.mark.parametrize("kind", ["files", "backend"])
def test_prompts_are_computed_when_reads_hang(tmp_path, gate, monkeypatch, kind, caplog):
    """While a read hangs, later prompts do not wait for records. Once it has ended, they hit them again."""
    prompts = [tokens(1 + k, 3) for k in range(4)]
    write(kind, tmp_path, prompts)
    with serve(kind, tmp_path) as server:
        tree = server.tree_cache
        gate.opened.clear()
        monkeypatch.setattr("sglang_kvc.cache.disk_tier.STALL_SECONDS", 0.05)
        assert ask(server, prompts[0]) == 0
        assert gate.began.acquire(timeout=60) and not tree.fetches and "hang" in caplog.text
        monkeypatch.setattr("sglang_kvc.cache.disk_tier.STALL_SECONDS", 1000)
        assert [ask(server, prompt) for prompt in prompts[1:3]] == [0, 0]
        open_gate(server, gate)
        check(server)
        assert ask(server, prompts[3]) == 3
        check(server)


@pytest.mark.parametrize("kind", ["files", "backend"])
def test_flush_does_not_wait_for_reads_of_an_aborted_prompt(tmp_path, gate, kind):
    prompts = [tokens(1 + k, 3) for k in range(3)]
    write(kind, tmp_path, prompts)
    with serve(kind, tmp_path, host=40_000) as server:
        tree, tier = server.tree_cache, server.runtime.host_tier
        gate.opened.clear()
        server.submit([*prompts[0], 1], [5], None, None)
        for _ in range(5000):
            server.turn()
            if gate.began.acquire(blocking=False):
                break
        assert tree.fetches and tier.stored == 3
        server.abort("0")
        flushing = threading.Thread(target=lambda: server.flush() and flushed.append(time.monotonic()), daemon=True)
        flushed: list[float] = []
        flushing.start()
        flushing.join(30)
        assert flushed, "the flush waits for a read"
        assert not tree.fetches and not tier.stored and tier.memory.free_units == tier.memory.num_units
        assert ask(server, prompts[1]) == 0
        tree.evict_host(10**9)
        ask(server, tokens(9, 3))  # host memory is used for other blocks
        open_gate(server, gate)
        check(server)
        assert ask(server, prompts[2]) == 3
        check(server)


def test_abandoned_read_writes_nothing(tier, gate):  # noqa: F811
    """The memory of its block belongs to another one when it ends."""
    keys = written(tier, stored(tier, 2))
    tier._writers.turn(1)
    sizes = tier.record_sizes(keys)
    fetch = tier.fetch(keys, sizes, sizes)
    gate.opened.clear()
    tier.poll()
    reading = threading.Thread(target=tier._readers.turn, args=(1,))
    reading.start()
    assert gate.began.acquire(timeout=60)
    tier.abandon(fetch)
    assert fetch.found == 0 and tier.record_sizes(keys) == []
    tier.tier.free(fetch.ids)
    before = tier.tier.memory.data.clone()
    gate.opened.set()
    reading.join(60)
    assert fetch.finished and fetch.found == 0 and (tier.tier.memory.data == before).all()
    assert tier.record_sizes(keys) == sizes


def test_slow_reads_are_waited_for(tier, monkeypatch):  # noqa: F811
    """A read that ends restarts the time, also for prompts whose reads wait behind it."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tier._moved = 0.0
    keys = written(tier, stored(tier, 4))
    tier._writers.turn(1)
    sizes = tier.record_sizes(keys)
    first, second = (tier.fetch(keys[i : i + 2], sizes[i : i + 2], sizes[i : i + 2]) for i in (0, 2))
    now[0] = 1000.0
    assert not tier.ended(first)  # not begun: saves come first
    tier.poll()
    ended = []
    for task in list(tier._readers.tasks)[:3]:
        now[0] += 50
        ended += [(tier.ended(first), tier.ended(second))]
        tier._readers.tasks, rest = [task], [t for t in tier._readers.tasks if t is not task]
        tier._readers.turn(1)
        tier._readers.tasks = rest
    assert ended == [(False, False), (False, False), (True, False)] and first.found == 2
    now[0] += 61
    assert tier.ended(second) and not second.finished
    tier.abandon(second)
    assert second.found == 1 and second.finished and np.all(second.ids != first.ids[0])

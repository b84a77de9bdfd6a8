"""Random workloads on servers with scarce resources: pools of a few blocks, host memory of a few records, a disk that
is full, slow, broken or damaged, with aborts, retractions, priorities, pauses and flushes.

No request waits forever, each is answered in full or refused with a reason, and no tier loses or duplicates a block.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import sys
from collections import Counter
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel

from sglang_kvc.cache.disk_store import DiskStore
from sglang_kvc.options.request_quality import LOSSLESS

from . import record
from .audit import _nodes, check_tree
from .memory_backend import BadBackend, MemoryBackend, server_args
from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_overlap import LEANKV, MORE, Client

SEEDS = int(os.environ.get("KVC_STARVED", "1"))  # runs of each kind, each with its own seed
TURNS = 80
# A record of a packed block takes about 5 KiB, one of an uncompressed block about 20 KiB.
HOST = (8_000, 30_000, 80_000, 200_000)
DISK = (0, 30_000, 1 << 30, 1 << 30)
KINDS = {
    "k4v4": {"high": "k4v4", "window": 0},
    "window": {"high": "k8v4", "window": P},
    "leankv": {**LEANKV, "window": 0},
    "quota": {"policy": "quota", "keep": 0.5},
}


class Threads:
    """An executor that runs its tasks on request, late and in any order."""

    def __init__(self, draw: random.Random):
        self.draw, self.tasks = draw, []

    def submit(self, run, *args) -> Future:
        future: Future = Future()
        self.tasks.append((future, run, args))
        return future

    def shutdown(self, **kwargs) -> None:
        """Drop the remaining tasks."""

    def turn(self, share: float) -> None:
        """Run this share of the tasks."""
        self.draw.shuffle(self.tasks)
        begun = [task for task in self.tasks if self.draw.random() < share]
        self.tasks = [task for task in self.tasks if task not in begun]
        for future, run, args in begun:
            if future.set_running_or_notify_cancel():
                future.set_result(run(*args))


class BadDisk(DiskStore):
    """Some writes fail, and some files change before they are read."""

    draw: random.Random

    def of(self, identity: bytes) -> DiskStore:
        other = super().of(identity)
        other.__class__, other.draw = BadDisk, self.draw
        return other

    def _write_file(self, *args) -> bool:
        if self.draw.random() < 0.3:
            raise OSError(28, "No space left on device")
        return super()._write_file(*args)

    def read(self, key, record):
        path = self.path(key)
        if self.draw.random() < 0.2 and path.exists():
            content = bytearray(path.read_bytes())
            content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(content[: self.draw.choice([len(content), len(content) // 2])])
        return super().read(key, record)


class Starved(Client):
    """A client that asks for more than the server holds, and an operator who flushes and changes the weights."""

    answers = (1, 1, 1, 4, 4, 16, P + 1)

    def __init__(self, server: Overlap, seed: int, threads: list[Threads]):
        super().__init__(server, seed, (None, None, None, LOSSLESS, "nonsense"))
        self.threads, self.aborted, self.ended = threads, set(), set()

    def act(self) -> None:
        draw, server = self.draw, self.server
        for _ in range(draw.randint(1, 3)):
            if len(server.waiting_queue) < 16:
                self.submit()
                req = next(reversed(server.requests.values()))
                req.priority = draw.randint(0, 2) if server.enable_priority_scheduling else None
        live = [r for r in server.requests.values() if not r.finished()]
        if live and draw.random() < 0.05:
            self.abort(draw.choice(live))
        if server.chunked_req is not None and draw.random() < 0.05:
            self.abort(server.chunked_req)
        if draw.random() < 0.02:
            server.pause()
        if draw.random() < 0.3:
            server.tree_cache.evict(EvictParams(num_tokens=draw.randint(1, 3) * P))
        if draw.random() < 0.005 and server.tree_cache.disk is not None:
            server.tree_cache.clear_storage_backend()
        for threads in self.threads:
            threads.turn(draw.choice([0, 0.3, 1]))

    def abort(self, req) -> None:
        self.aborted.add(req.rid)
        self.server.abort(req.rid)

    def flush(self) -> None:
        """`/flush_cache`, at times after an update of the weights."""
        if self.draw.random() < 0.5:
            record.weights += 1
        assert self.server.flush(), "an idle server does not flush"
        self.server.seen["flushed"] += 1

    def check_answers(self) -> None:
        """Each request is counted once: as answered, refused or ended by an abort."""
        for rid, req in self.server.requests.items():
            assert req.finished()
            if isinstance(req.finished_reason, FINISH_ABORT):
                assert rid in self.aborted or req.finished_reason.message, "refused without a reason"
                end = "ended by an abort" if rid in self.aborted else "refused"
            else:
                assert list(req.output_ids) == req.answer
                end = "answered"
            self.server.seen[end] += rid not in self.ended
            self.ended.add(rid)


class Peer:
    """The other of two tensor-parallel ranks, at the end of a pipe. Both must decide alike independently of their
    disks."""

    def __init__(self, pipe):
        self.pipe = pipe

    def both(self, label: str, value):
        """The values of this rank and of the other."""
        self.pipe.send((label, value))
        assert self.pipe.poll(60), f"the other rank does not come to {label}"
        other, peer_value = self.pipe.recv()
        assert other == label, f"a rank is at {label}, the other at {other}"
        return value, peer_value

    def join(self, server: Overlap) -> None:
        tree, runtime, turn = server.tree_cache, server.runtime, server.turn

        def reduce(tensor: torch.Tensor, op) -> None:
            tensor.copy_(torch.tensor(min(self.both("a minimum", tensor.tolist()))))

        def reduce_max(tensor: torch.Tensor) -> torch.Tensor:
            return torch.tensor(self.both("a maximum", tensor.tolist())).amax(0)

        def turn_and_compare() -> None:
            turn()
            local, remote = self.both("the end of a turn", state(server))
            assert local == remote, "the ranks differ"

        tree.tp_world_size, tree._all_reduce, runtime.reduce_max = 2, reduce, reduce_max
        server.turn = turn_and_compare


def state(server: Overlap) -> tuple:
    """The complete state that determines the server's next step."""
    tree, tier = server.tree_cache, server.runtime.host_tier
    nodes = [(n.id, len(n.key), n.evicted, n.backuped) for n in _nodes(tree)]
    queues = [r.rid for r in server.waiting_queue], [r.rid for r in server.running_batch.reqs]
    fetches, loads = (len(tree.lookups), len(tree.fetches)), [load.loading is not None for load in tree.loads]
    return nodes, queues, loads, fetches, server.runtime.ledger.total, tier.memory.free_units


def life(seed: int, options: dict, folder: Path | None, peer: Peer | None = None, backend: bool = False) -> Counter:
    """Run servers one after the other on one folder, or on one storage backend named by it, each from its start until
    its requests have ended. `peer`: the other rank, which has its own disk."""
    draw, seen = random.Random(f"{seed} {options}"), Counter()
    disk_draw = random.Random(f"{seed} {folder}")
    record.weights = 0
    for start in range(1 if folder is None else 2):
        seen += _server(draw, disk_draw, seed + start, options, folder, peer, backend)
    return seen


def _server(
    draw, disk_draw: random.Random, seed: int, options: dict, folder: Path | None, peer: Peer | None, backend: bool
) -> Counter:
    disk = {"disk": str(folder), "disk_size": draw.choice(DISK)} if folder is not None else {}
    disk = {"storage": "dynamic"} if backend else disk
    runtime = make_runtime(blocks=draw.choice([5, 6, 7]), host_memory=draw.choice(HOST), **options, **disk)
    runtime.weights = lambda: bytes([record.weights])
    chunk, mixed = draw.choice([P, 2 * P]), draw.random() < 0.3
    rank = get_parallel().override(tp_rank=0, tp_size=1)  # only the first server logs a refusal
    with contextlib.ExitStack() as stack:
        stack.enter_context(rank)
        stack.enter_context(configured(runtime, chunk, retract_every=draw.choice([10, 25, 1000]), mixed=mixed))
        server, threads = Overlap(runtime, chunk, disable=False, server_args=server_args(str(folder))), []
        server.check_every = 8
        if draw.random() < 0.5:
            server.schedule_by_priority()
        if folder is not None:
            tier = server.tree_cache.disk
            place, good, bad = tier.store, DiskStore, BadDisk
            if backend:
                place, good, bad = tier.store.backend, MemoryBackend, BadBackend
            place.__class__, place.draw = draw.choice([good, bad]), disk_draw
            if draw.random() < 0.8:  # the remaining runs use real threads
                tier._readers, tier._writers, tier._lookup_thread = threads = [Threads(disk_draw) for _ in range(3)]
            stall = 0.0 if disk_draw.random() < 0.3 else 60.0  # 0: reads of the last turns are given up
            stack.enter_context(patch("sglang_kvc.cache.disk_tier.STALL_SECONDS", stall))
        if peer is not None:
            peer.join(server)
        for name in ("cache.disk_tier", "adapter.tree_disk"):
            stack.enter_context(patch(f"sglang_kvc.{name}.wait", partial(_wait, threads)))
        client = Starved(server, seed, threads)
        for half in range(2):
            for _ in range(TURNS // 2):
                client.act()
                server.turn()
            _finish(server, threads)
            client.check_answers()
            check_tree(server)
            if half == 0 and draw.random() < 0.5:
                client.flush()
        check_released(server, files=folder is not None and not backend)
    return server.seen


def check_released(server: Overlap, files: bool) -> None:
    """Empty all tiers of an idle server, and check that nothing is left in any. `files`: it has a disk."""
    runtime, tree, tier = server.runtime, server.tree_cache, server.runtime.host_tier
    tree.evict(EvictParams(num_tokens=10**9))
    assert server.token_to_kv_pool_allocator.used_slots() == 0
    assert runtime.capacity.available_tokens() == runtime.sizing.capacity_tokens
    assert server.req_to_token_pool.available_size() == server.req_to_token_pool.size
    if tier is None:
        return
    tree.evict_host(10**9)
    server.seen["saved"] = tier.saved_blocks
    assert not tier.stored and tier.memory.free_units == tier.memory.num_units
    if tree.disk is not None:
        store = tree.disk.store
        server.seen["written"], server.seen["read"] = store.bytes_written, store.bytes_read
        if files:
            kept = sum(sum(each._sizes.values()) for each in store._account.stores.values())
            assert store.num_bytes == kept <= store.limit
        tree.disk.close()


def _wait(threads: list[Threads], tasks, seconds: float | None = None) -> None:
    if seconds is not None:
        return
    for executor in threads:
        executor.turn(1)
    wait(tasks)


def _finish(server: Overlap, threads: list[Threads], turns: int = 1000) -> None:
    tree = server.tree_cache
    for _ in range(turns):
        idle = not server.busy and not tree.ongoing_prefetch and not getattr(tree, "loads", ())
        if idle:
            break
        for executor in threads:
            executor.turn(0.5)
        server.turn()
    assert idle, "requests wait for ever"
    server.turn()  # settles
    assert not server.runtime.unsettled


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["host", "disk", "backend"])
@pytest.mark.parametrize("name", KINDS)
def test_starved_servers_answer_or_refuse_every_request(name, tiers, tmp_path):
    seen, expected = Counter(), {"answered", "refused", "hits", "saved", *(["written"] if tiers != "host" else [])}
    for seed in range(SEEDS + MORE):
        if seed >= SEEDS and not expected - seen.keys():
            break
        folder = None if tiers == "host" else tmp_path / str(seed)
        seen += life(1000 * seed, KINDS[name], folder, backend=tiers == "backend")
    print(name, tiers, dict(seen))
    assert not expected - seen.keys(), "these lives hold too little"


def run_ranks(target, *args) -> None:
    """Run `target(rank, pipe, *args)` in two processes, which the pipe connects; both must succeed."""
    fork = multiprocessing.get_context("fork")
    ends = fork.Pipe()
    ranks = [fork.Process(target=target, args=(i, end, *args)) for i, end in enumerate(ends)]
    for rank in ranks:
        rank.start()
    for end in ends:
        end.close()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def _rank(rank: int, pipe, seed: int, options: dict, folder: Path, backend: bool) -> None:
    torch.set_num_threads(1)
    life(seed, options, folder / str(rank), Peer(pipe), backend)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["disk", "backend"])
@pytest.mark.parametrize("name", ["k4v4", "leankv"])
def test_two_ranks_with_separate_disks_stay_in_step(name, tiers, tmp_path):
    """Files of one rank are damaged, late or missing while those of the other are intact."""
    for seed in range(-(-SEEDS // 3)):
        run_ranks(_rank, 500 + 1000 * seed, KINDS[name], tmp_path / str(seed), tiers == "backend")


@pytest.mark.slow
def test_disabled_tiers_add_no_calls(monkeypatch):
    """Without `--kvc-host-memory` no decode step calls a function of a tier. The end of a request calls two, which do
    nothing."""
    monkeypatch.setattr("tests.runtime.overlap.check_records", lambda server: None)
    runtime, calls = make_runtime(high="k4v4", window=0), Counter()
    tiers = ("host_tier.py", "tree_host.py", "tree_prefetch.py", "transfers.py", "host_memory.py")
    tiers += ("disk_tier.py", "disk_store.py", "tree_disk.py", "backend_store.py")

    def count(frame, event, arg) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(tiers):
            calls[frame.f_code.co_name] += 1

    with configured(runtime, P, retract_every=1000):
        server, requests = Overlap(runtime, P, disable=False), 4
        for i in range(requests):
            server.submit([100 * i + j for j in range(P + 3)], [5000 + j for j in range(P)], None, None)
        while server.waiting_queue or server.chunked_req is not None:
            server.turn()
        for _ in range(3):  # process the result of the last prefill
            server.turn()
        sys.setprofile(count)
        try:
            for _ in range(20):
                server.turn()
            assert all(not r.finished() for r in server.requests.values()) and not calls
            while server.busy:
                server.turn()
        finally:
            sys.setprofile(None)
    lookups = {"component", "_path"}  # also used without tiers
    assert server.seen["packed"] and calls.keys() <= {"back_up", "_uses_disk", *lookups}
    assert calls["back_up"] == calls["_uses_disk"] == requests

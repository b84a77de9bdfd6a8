"""Prompts whose blocks are in host memory or in files, on SGLang's scheduler: how much they hit, and when."""

from __future__ import annotations

import contextlib
import time
from unittest.mock import MagicMock

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_kernels import ops

from .audit import _nodes, check_tree
from .model import P, make_runtime
from .overlap import Overlap, configured

EVERYTHING = EvictParams(num_tokens=10**9)


@contextlib.contextmanager
def serve(
    folder=None, *, blocks: int = 60, host: int = 2_000_000, chunk: int = 4 * P, disk_size: int = 1 << 30, **options
):
    """A server, with a disk tier in `folder` if it is given."""
    disk = {} if folder is None else {"disk": str(folder), "disk_size": disk_size}
    runtime = make_runtime(blocks=blocks, host_memory=host, window=0, **{"high": "k4v4", **options}, **disk)
    with configured(runtime, chunk, retract_every=10**6):
        server = Overlap(runtime, chunk, disable=False, context=2048)
        server.check_every = 1000
        yield server
        if server.tree_cache.disk is not None:
            server.tree_cache.disk.close()


def tokens(name: int, blocks: int) -> list[int]:
    return [1000 * name + i for i in range(blocks * P)]


def run(server: Overlap, until=lambda: False) -> None:
    """Run until all requests have been answered, or `until` is true."""
    tree = server.tree_cache
    for _ in range(5000):
        if until() or not (server.busy or tree.ongoing_prefetch or tree.loads):
            return
        server.turn()
        time.sleep(0.0003)  # for the threads of the disk tier
    raise AssertionError("some request was never answered")


def finish_writes(server: Overlap) -> None:
    disk = server.tree_cache.disk
    for _ in range(500):
        server.turn()
        if not (disk._waiting or disk._writing):
            return
        time.sleep(0.002)
    raise AssertionError("some write never ended")


def write_files(folder, prompts: list[list[int]]) -> int:
    """Write the blocks of `prompts` to files; returns their bytes."""
    with serve(folder) as server:
        for prompt in prompts:
            server.submit(prompt, [5], None, None)
            run(server)
        finish_writes(server)
        return server.tree_cache.disk.store.num_bytes


@pytest.mark.parametrize(
    ("shared", "own", "host"),
    [
        pytest.param(0, 4, 150_000, id="more than host memory holds"),
        pytest.param(8, 2, 300_000, id="shared prefix, little host memory"),
        pytest.param(8, 2, 2_000_000, id="shared prefix"),
    ],
)
def test_prompts_that_arrive_together_hit_all_their_files(tmp_path, shared, own, host):
    """No prompt is computed for lack of room in host memory, and each record is read once."""
    prompts = [tokens(1, shared) + tokens(10 + k, own) + [1] for k in range(8)]
    size = write_files(tmp_path, prompts)
    with serve(tmp_path, host=host) as server:
        for prompt in prompts:
            server.submit(prompt, [6], None, None)
        run(server)
        cached = [request.cached_tokens // P for request in server.requests.values()]
        assert cached == [shared + own] * len(prompts)
        assert server.tree_cache.disk.store.bytes_read == size


def digests(server: Overlap) -> list[bytes]:
    """Content of the blocks of the tree's only path, all of which are on the device."""
    (deepest,) = (node for node in _nodes(server.tree_cache) if not node.children)
    server.runtime.settle()
    blocks = server.tree_cache.path_blocks(deepest.id).tolist()
    return [ops.block_digest(server.runtime.store, block, scores=False) for block in blocks]


@pytest.mark.parametrize("chunk", [4 * P, 16 * P])
@pytest.mark.parametrize("turns", [False, True], ids=["evicted", "written in turns"])
def test_prefix_larger_than_host_memory_reaches_the_disk_and_comes_back(tmp_path, chunk, turns):
    """Host memory holds 5 of its 16 blocks. The prompt is one node of the tree, or four."""
    prompt = [*tokens(1, 16), 1]
    with serve(tmp_path, host=64_000, chunk=chunk) as server:
        tree, store = server.tree_cache, server.tree_cache.disk.store
        assert tree.host_tier.memory.num_units == 5
        for on_disk in (5, 10, 15, 16) if turns else (5,):
            server.submit(prompt, [5], None, None)
            run(server)
            finish_writes(server)
            assert len(store) == on_disk
        before = digests(server)
        while tree.evictable_slots():
            tree.evict(EvictParams(num_tokens=1))
            finish_writes(server)
            check_tree(server)
        assert len(store) == 16
        tree.evict_host(10**9)
        server.submit(prompt, [6], None, None)
        run(server)
        assert list(server.requests.values())[-1].cached_tokens == 16 * P
        assert digests(server) == before


def test_prompts_find_their_files_again_after_host_memory_dropped_them(tmp_path):
    """With little memory, blocks that were read leave host memory before their prompt is admitted."""
    prompts = [[*tokens(10 + k, 2 + k % 4), 1] for k in range(16)]
    write_files(tmp_path, prompts)
    with serve(tmp_path, blocks=8, host=300_000) as server:
        for again in range(2):
            for k, prompt in enumerate(prompts):
                server.submit(prompt, [6 + again + i for i in range(1 + k * 7 % (2 * P))], None, None)
        run(server)
        for request in server.requests.values():
            assert request.cached_tokens == len(request.origin_input_ids) // P * P


def test_blocks_read_from_files_are_not_saved_again(tmp_path):
    prompts = [[*tokens(10 + k, 3), 1] for k in range(2)]
    write_files(tmp_path, prompts)
    with serve(tmp_path) as server:
        tree = server.tree_cache
        for prompt in prompts:
            server.submit(prompt, [6], None, None)
            run(server)
        tree.evict_host(10**9)  # the duplicates of blocks on the device
        assert not tree.host_tier.stored
        server.submit(prompts[0], [7], None, None)
        run(server)
        assert tree.host_tier.saved_blocks == 0


@pytest.mark.parametrize("on_disk", [False, True])
def test_stored_prompt_is_admitted_when_it_has_arrived(tmp_path, on_disk):
    """Behind it waits a prompt that does not fit, and the running request frees no memory for long."""
    with serve(tmp_path if on_disk else None, blocks=12) as server:
        tree = server.tree_cache
        server.submit([*tokens(1, 3), 1], [5], None, None)
        run(server)
        if on_disk:
            finish_writes(server)
        tree.evict(EVERYTHING)
        if on_disk:
            tree.evict_host(10**9)
        server.new_token_ratio_tracker = MagicMock(current=0.1)  # it has its minimum and falls no more
        server.submit([*tokens(2, 1), 1, 2, 3], [7] * 700, None, None)
        for _ in range(4):
            server.turn()
        server.submit([*tokens(1, 3), 1], [6, 6], None, None)
        server.submit([*tokens(3, 15), 1], [8] * 900, None, None)
        long, stored, large = (server.requests[name] for name in ("1", "2", "3"))
        begun = server.forward_ct
        run(server, stored.finished)
        assert stored.cached_tokens == 3 * P and server.forward_ct - begun < 100
        assert not long.finished() and not large.output_ids
        server.abort(long.rid)
        server.abort(large.rid)
        run(server)


@pytest.mark.parametrize("options", [{"high": "k8v8", "floor": "k2v2"}, {"high": "k8v4", "floor": "k4v4"}, {}], ids=str)
def test_full_host_memory_drops_no_more_than_a_save_needs(options):
    """A stored block has several units of host memory if blocks can become smaller than it."""
    with serve(blocks=40, host=1_300_000, chunk=8 * P, **options) as server:
        tree, tier = server.tree_cache, server.runtime.host_tier
        name = 10
        while tier.memory.free_units >= 12:
            server.submit([*tokens(name, 1), 1], [5], None, None)
            run(server)
            tree.evict(EVERYTHING)
            name += 1
        server.submit([*tokens(900, 8), 1], [5], None, None)
        run(server)
        before, free = tier.stored, tier.memory.free_units
        tree.evict(EVERYTHING)
        units_each = (tier.memory.num_units - free) / before
        dropped = before + 8 - tier.stored
        assert dropped * units_each <= max(0, 8 * units_each - free) + units_each


@contextlib.contextmanager
def loading(monkeypatch, paused: bool = False):
    """A server with a load whose prompt was aborted, or waits while the engine is paused, which checks no load."""
    with serve() as server:
        tree, prompt = server.tree_cache, tokens(1, 4)
        server.submit([*prompt, 1], [5], None, None)
        run(server)
        tree.evict(EVERYTHING)
        server.submit([*prompt, 1], [5], None, None)
        run(server, until=lambda: tree.loads)
        monkeypatch.setattr(tree, "check_hicache_events", lambda: None)
        monkeypatch.delattr(server.runtime.host_tier, "arrived")  # reports no load late
        server._engine_paused = paused
        if not paused:
            server.abort("1")
        assert tree.loads
        yield server
        check_tree(server)


@pytest.mark.parametrize("paused", [False, True], ids=["aborted", "paused"])
def test_flush_does_not_fail_because_of_a_load(monkeypatch, paused):
    with loading(monkeypatch, paused) as server:
        assert server.flush() and not server.tree_cache.loads

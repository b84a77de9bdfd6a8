"""Stored blocks of waiting prompts come back before the scheduler reaches the prompts, a few buffers in each flush."""

from __future__ import annotations

import contextlib
import math
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_kernels import ops
from sglang_kvc.adapter import admission, decode_memory, waiting_queue
from sglang_kvc.adapter.admission import wait_for_blocks
from sglang_kvc.adapter.tree_host import Hit
from sglang_kvc.adapter.tree_prefetch import prefetch
from sglang_kvc.cache import transfers
from sglang_kvc.cache.host_tier import HostTier

from . import record
from .model import P, make_runtime
from .overlap import ROWS, Overlap, configured

STORED = [*range(3 * P), 1]  # a prompt whose three full blocks are in host memory


def server_with_stored_prompt(runtime, chunk: int) -> Overlap:
    server = Overlap(runtime, chunk, disable=False)
    server.check_every = 1000
    server.submit(STORED, [5000], None, None)
    while server.busy:
        server.turn()
    server.tree_cache.evict(EvictParams(num_tokens=10**9))
    assert runtime.host_tier.stored == 3
    return server


def turns_until(server: Overlap, condition) -> int:
    for turn in range(200):
        if condition():
            return turn
        server.turn()
    raise AssertionError("200 turns")


@pytest.mark.parametrize(
    ("level", "stored", "blocks", "written"), [("lossless", 31, 6, 5), ("one-shot:8x", 25, 8, 4)]
)
@pytest.mark.parametrize("claimed", [True, False])
def test_load_leaves_lone_chunked_prompt_its_memory(monkeypatch, level, stored, blocks, written, claimed):
    """A prompt that stays uncompressed until it is complete runs alone, and another one asks for a load of six turns
    that would take its memory. Even if the load takes it (not `claimed`), the next chunk waits instead of failing."""
    if not claimed:
        monkeypatch.setattr(waiting_queue, "_unclaimed_tokens", lambda scheduler, runtime, plan: math.inf)
        monkeypatch.setattr(admission, "_rest_of_chunked", lambda adder, runtime: 0.0)
    runtime = make_runtime(blocks=10, high="k4v4", window=0, host_memory=2_000_000)
    with configured(runtime, P, retract_every=10**6):
        server = Overlap(runtime, P, disable=False, context=4096)
        server.check_every = 1000
        prefix = [*range(stored * P), 1]
        server.submit(prefix, [5000], None, None)
        turns_until(server, lambda: not server.busy)
        server.tree_cache.evict(EvictParams(num_tokens=10**9))
        tier, asked = runtime.host_tier, []
        arrived = tier.arrived
        monkeypatch.setattr(tier, "arrived", lambda: arrived() if len(asked) >= 6 or asked.append(0) else 0)
        server.submit([100_000 + i for i in range(blocks * P + 1)], [6000], level, None)
        alone = server.requests["1"]
        turns_until(server, lambda: getattr(alone, "kvc", None) is not None and alone.kvc.length >= written * P)
        server.submit(prefix, [5001], None, None)
        waits = server.requests["2"]
        server.turn()
        assert bool(tier.loading) is not claimed
        turns_until(server, lambda: not server.busy)
        assert alone.finished() and waits.finished() and waits.cached_tokens == stored * P


def test_load_begins_while_chunks_of_another_prompt_run():
    runtime = make_runtime(blocks=24, high="k4v4", window=0, host_memory=2_000_000)
    with configured(runtime, P, retract_every=10**6):
        server = server_with_stored_prompt(runtime, chunk=P)
        server.submit([100_000 + i for i in range(12 * P)], [6000], None, None)
        server.turn()
        server.submit(STORED, [5001], None, None)
        long, hit = list(server.requests.values())[1:]
        server.turn()
        assert runtime.host_tier.loaded_blocks == 3 and not long.output_ids
        turns_until(server, hit.finished)
        assert hit.cached_tokens == 3 * P


@contextlib.contextmanager
def stored_prompt_beside(requests: int, *, blocks: int, prompt: int = 5, answer: int = 40):
    """A server in which `requests` decode, and the stored prompt, which waits."""
    runtime = make_runtime(blocks=blocks, high="k4v4", window=0, host_memory=2_000_000)
    with configured(runtime, 4 * P, retract_every=10**6):
        server = server_with_stored_prompt(runtime, chunk=4 * P)
        for i in range(requests):
            tokens = [10_000 * (i + 1) + j for j in range(prompt)]
            server.submit(tokens, [7000 + j for j in range(answer + i)], None, None)
        for _ in range(4):
            server.turn()
        assert len(server.running_batch.reqs) == requests
        server.submit(STORED, [5001], None, None)
        yield server, list(server.requests.values())[-1]


def test_load_begins_while_all_rows_are_taken():
    with stored_prompt_beside(ROWS, blocks=40) as (server, hit):
        for loaded in (0, 3):  # before a decode step, a load begins in the turn after the pass
            server.turn()
            assert len(server.running_batch.reqs) == ROWS and server.runtime.host_tier.loaded_blocks == loaded
        turns_until(server, hit.finished)
        assert hit.cached_tokens == 3 * P


def test_nothing_is_loaded_into_memory_that_running_requests_need():
    with stored_prompt_beside(2, blocks=8, prompt=3 * P, answer=P) as (server, hit):
        turns_until(server, hit.finished)
        assert server.seen["retracted"] == 0


@pytest.mark.parametrize("begun", [False, True])
def test_pause_ends_loads(begun):
    """A paused server checks no load. Its cache can be flushed once all requests are retracted."""
    with stored_prompt_beside(1, blocks=40) as (server, hit):
        tree, tier = server.tree_cache, server.runtime.host_tier
        turns_until(server, lambda: any((load.loading is not None) is begun for load in tree.loads))
        tier.arrived = partial(HostTier.arrived, tier)  # not late
        server.pause_generation(PauseGenerationReqInput(mode="retract"))
        assert not tree.loads and server.is_fully_idle(ignore_waiting=True)
        server._engine_paused = False
        turns_until(server, lambda: not server.busy)
        assert hit.cached_tokens == 3 * P


@pytest.mark.parametrize("memory", ["taken", "short"])
def test_load_without_memory_is_canceled_and_asked_for_again(monkeypatch, memory):
    with stored_prompt_beside(1, blocks=8) as (server, hit):
        runtime, tree = server.runtime, server.tree_cache
        server.turn()
        assert len(tree.loads) == 1 and tree.queued_load_tokens > 0 and not runtime.host_tier.loading
        if memory == "taken":
            monkeypatch.setattr(tree, "_make_room", lambda ids: False)
            tree.check_hicache_events()
            monkeypatch.undo()
        else:
            assert not decode_memory.settle(runtime, server.running_batch) and tree.loads
            assert decode_memory.cancel_loads(runtime, server.running_batch)
        assert not tree.loads and tree.queued_load_tokens == 0 and not runtime.host_tier.loading
        turns_until(server, hit.finished)
        assert hit.cached_tokens == 3 * P


def test_canceled_load_is_prefetched_again_while_all_rows_are_taken():
    with stored_prompt_beside(ROWS, blocks=40, answer=90) as (server, _):
        server.turn()
        assert server.tree_cache.cancel_queued_loads()
        turns_until(server, lambda: server.runtime.host_tier.loaded_blocks == 3)
        assert len(server.running_batch.reqs) == ROWS


@pytest.mark.parametrize("seed", range(3))
def test_random_cancellations_lose_nothing(seed):
    """Stored prompts with shared prefixes arrive beside decoding, and many of their loads are canceled. Every turn
    checks the owners of all blocks, and every eighth forward the rows that it reads."""
    draw, canceled = random.Random(seed), 0
    with stored_prompt_beside(2, blocks=12, answer=190) as (server, _):
        tree, tier, prompts, server.check_every = server.tree_cache, server.runtime.host_tier, [STORED], 8
        prompts += [[*STORED[: n * P], *range(1000 * n, 1000 * n + 2 * P), 1] for n in range(3)]
        while len(server.running_batch.reqs) > 1 or server.waiting_queue:  # until one of the two has ended
            if draw.random() < 0.2 and len(server.waiting_queue) < 3:
                server.submit(draw.choice(prompts), [5001], None, None)
            if draw.random() < 0.1:
                tree.evict(EvictParams(num_tokens=10**9))
            server.turn()
            if draw.random() < 0.5:
                canceled += tree.cancel_queued_loads()
        turns_until(server, lambda: not server.busy and not tree.loads)
        assert canceled >= 5 and tier.loaded_blocks >= 20 and not tree.queued_load_tokens
        assert all(request.finished() for request in server.requests.values())


def test_later_prompts_leave_memory_to_a_load_that_has_not_begun():
    with stored_prompt_beside(1, blocks=24) as (server, hit):
        tree, capacity = server.tree_cache, server.runtime.capacity
        room = capacity.reachable_tokens()
        hit.init_next_round_input(tree)
        adder = PrefillAdder(P, tree, server.token_to_kv_pool_allocator, server.running_batch, 0.1, 10**9, 4 * P, 0)
        left = adder.rem_total_tokens
        assert wait_for_blocks(adder, hit) is AddReqResult.CONTINUE
        claimed = left - adder.rem_total_tokens
        assert claimed == tree.queued_load_tokens > 0
        tree.begin_loads()  # its memory is taken now
        assert room - capacity.reachable_tokens() >= claimed and not tree.queued_load_tokens


class Prompts:
    """A tree with `memory` tokens of reachable memory, and waiting prompts that need some of it each."""

    def __init__(self, *needs: int):
        self.memory, self.tries, self.matched = 0, [], []
        self.loads_canceled = self.queued_load_tokens = 0
        self.runtime = SimpleNamespace(capacity=SimpleNamespace(reachable_tokens=lambda: self.memory))
        self.waiting = [SimpleNamespace(kvc_private=False, host_hit_length=need) for need in needs]
        for req in self.waiting:
            req.init_next_round_input = lambda tree, need=req.host_hit_length: self.matched.append(need)

    def fetch(self, req) -> bool:
        return False

    def bring_back(self, req, **options) -> Hit:
        self.tries.append(req.host_hit_length)
        if req.host_hit_length > self.memory:
            return Hit.NO_ROOM
        self.memory -= req.host_hit_length
        return Hit.LOADING

    def prefetch(self, memory: int) -> list[int]:
        """Prompts that are tried with this much memory."""
        self.memory, self.tries, self.matched = memory, [], []
        prefetch(self, self.waiting, lambda: 0.0)
        return self.tries


def test_refused_prompt_is_tried_again_when_memory_is_freed():
    prompts = Prompts(90)
    tried = [prompts.prefetch(memory) for memory in (50, 50, 30, 30, 40, 40, 90, 95)]
    assert tried == [[90], [], [], [], [90], [], [90], []]


def test_room_of_refused_prompt_is_what_others_leave():
    prompts = Prompts(60, 50)
    assert prompts.prefetch(100) == [60, 50]  # the first one leaves 40
    assert prompts.prefetch(40) == []
    assert prompts.prefetch(45) == [50]


def test_path_of_refused_prompt_counts_as_used():
    prompts = Prompts(90)
    assert prompts.prefetch(50) == [90]
    assert prompts.prefetch(50) == [] and prompts.matched == [90]


@pytest.mark.parametrize("settles", [False, True])
def test_long_load_takes_several_flushes(monkeypatch, settles):
    monkeypatch.setattr(transfers, "BUFFERS_PER_FLUSH", 1)
    runtime = make_runtime(blocks=24, high="k4v4", window=0, host_memory=2_000_000)
    runtime.attach_host_tier()
    tier = runtime.host_tier
    each = len(tier.transfers._rows(tier.transfers.load_buffers[0][0], 1))  # blocks of one unit that a buffer holds
    n = 2 * each + 1
    blocks = np.array([packed_block(runtime, i) for i in range(n)])
    before = [ops.block_digest(runtime.store, int(b), scores=False) for b in blocks]
    ids = tier.save(blocks)
    runtime.free(blocks)
    runtime.settle()
    loading = tier.load(ids)
    runtime.flush()
    assert not loading.finished and runtime.unsettled
    if settles:
        runtime.settle()
    else:
        runtime.flush()
        assert not loading.finished
        runtime.flush()
    assert loading.finished and not runtime.page_ops.loads_left
    assert [ops.block_digest(runtime.store, int(b), scores=False) for b in loading.blocks] == before


def packed_block(runtime, number: int) -> int:
    """A packed block of tokens that no other block has."""
    (block,) = runtime.take([0])
    runtime.flush()
    tokens = record.history([*range(number * P, (number + 1) * P)], None)
    record.write_rows(runtime.store, torch.arange(block * P, (block + 1) * P), tokens)
    runtime.queue_due(np.array([block]))
    runtime.settle()
    return block


@pytest.mark.parametrize("stored", range(7, 12))
def test_full_pool_makes_room_for_stored_blocks_of_any_number(stored):
    """Evicting a packed block frees a third of an uncompressed one, SGLang's unit."""
    runtime = make_runtime(blocks=10, high="k4v4", window=0, host_memory=20_000_000)
    with configured(runtime, 4 * P, retract_every=10**6):
        server = Overlap(runtime, 4 * P, disable=False)
        server.check_every = 1000
        prompt = [*range(stored * P), 1]
        server.submit(prompt, [5000], None, None)
        turns_until(server, lambda: not server.busy)
        server.tree_cache.evict(EvictParams(num_tokens=10**9))
        for i in range(1, 100):  # leaves of one block
            server.submit([1000 * i + j for j in range(P + 1)], [7000], None, None)
            turns_until(server, lambda: not server.busy)
            if runtime.counters.evicted_blocks > stored:
                break
        else:
            pytest.fail("the pool never became full")
        server.submit(prompt, [5001], None, None)
        hit = list(server.requests.values())[-1]
        turns_until(server, hit.finished)
        assert hit.cached_tokens == stored * P

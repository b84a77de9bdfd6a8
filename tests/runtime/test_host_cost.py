"""The scheduler thread's work grows with the number of changed blocks, not with the number of existing ones."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from unittest import mock

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.evict_policy import TLRUStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_eviction_strategy
from triton.runtime.jit import JITFunction

from bench.kernels import host_time
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import PageLayout, PoolLayout
from kvc_kernels.ops import ScoreSampling
from kvc_kernels.pages import tiers
from kvc_kernels.store import PageStore
from kvc_kernels.tiering import thresholds_kernel
from sglang_kvc.cache import op_queue
from sglang_kvc.cache.blocks import State
from sglang_kvc.cache.op_queue import Compact, OpLog, Release

from .model import P, ToyServer, make_runtime
from .test_answers import ANSWER, ANSWERS, WHOLE
from .test_replan import LEANKV, Batch


def prompt(i: int) -> list[int]:
    """One whole block that no other prompt shares, and one more token."""
    return [1000 * i + j for j in range(P)] + [1]


def cached(server: ToyServer, i: int) -> bool:
    """Whether the tree still has the block of `prompt(i)`; counts as a use of it."""
    key = RadixKey(array("q", prompt(i)), None)
    return server.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == P


def filled(leaves: int, policy: str = "lru", **options) -> ToyServer:
    """A server whose tree has `leaves` leaves of one block, prompt(0) the oldest."""
    server = ToyServer(**{"high": "bf16", "blocks": leaves + 3, **options})
    server.tree.tree_core.eviction_strategy = get_eviction_strategy(policy)
    for i in range(leaves):
        server.finish(server.admit(prompt(i)))
    assert len(server.tree.tree_core.evictable_device_leaves) == leaves
    return server


def evict(server: ToyServer, blocks: int) -> int:
    """Make room for `blocks` blocks more than are free; returns the number of evicted tokens."""
    num_tokens = server.allocator.available_size() + blocks * P
    with server.runtime.capacity.exact_need(num_tokens):
        return server.tree.evict(EvictParams(num_tokens=256 * P)).num_tokens_evicted


@pytest.fixture
def priority_calls(monkeypatch):
    """`priority_calls(server)` records calls of `get_priority` of the server's eviction policy."""

    def count(server):
        strategy = server.tree.tree_core.eviction_strategy
        calls = mock.Mock(side_effect=strategy.get_priority)
        monkeypatch.setattr(strategy, "get_priority", calls)
        return calls

    return count


def test_eviction_with_goal_met_visits_no_leaf(priority_calls):
    server = filled(6)
    calls = priority_calls(server)
    assert evict(server, 0) == 0
    assert calls.call_count == 0


def test_eviction_visits_only_leaves_it_evicts(priority_calls):
    server = filled(20)
    calls = priority_calls(server)
    assert evict(server, 2) == 2 * P
    assert calls.call_count <= 6  # far fewer than the 20 leaves


def test_evicted_blocks_are_counted():
    server = filled(8)
    assert evict(server, 5) == 5 * P
    assert server.runtime.counters.evicted_blocks == 5
    server.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority"])
def test_least_recently_used_leaf_is_evicted_first(policy):
    server = filled(5, policy)
    for i in (0, 2):
        if policy == "lru":  # hit by a prompt that is not admitted, so its leaf is never locked
            assert cached(server, i)
        else:
            server.finish(server.admit(prompt(i)))
    for evicted in range(1, 5):
        assert evict(server, 1) == P
        assert [leaf(server, i) is not None for i in (1, 3, 4, 0, 2)] == [False] * evicted + [True] * (5 - evicted)


def leaf(server: ToyServer, i: int):
    """The node of `prompt(i)`'s block, None if it was evicted; does not count as a use."""
    tokens = array("q", prompt(i)[:P])
    return next((n for n in server.tree.root_node.children.values() if n.key.token_ids == tokens), None)


def test_parent_is_evicted_in_order_and_after_its_children():
    server = filled(3)
    child = server.admit([*prompt(0)[:P], *range(P), 1])  # a leaf below the block of prompt(0)
    server.finish(child)
    assert evict(server, 2) == 2 * P  # prompts 1 and 2 are older than the leaf used last
    assert [leaf(server, i) is not None for i in range(3)] == [True, False, False]
    assert evict(server, 1) == P and not leaf(server, 0).children
    assert evict(server, 1) == P and leaf(server, 0) is None


def test_tail_optimized_lru_trims_long_conversation_first():
    """Each conversation may lose its last block: that of the long one is a separate leaf, the short one has a single
    leaf."""
    server = ToyServer(high="bf16", blocks=8, tree={"eviction_policy": "tlru"})
    server.tree.tree_core.eviction_strategy = TLRUStrategy(threshold=P)
    short, long = range(2 * P), range(5000, 5000 + 3 * P)
    for tokens in (short, long[: 2 * P], long):
        server.finish(server.admit([*tokens, 1]))

    def cached_blocks(tokens):
        key = RadixKey(array("q", [*tokens, 1]), None)
        return server.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len // P

    assert evict(server, 1) == P and (cached_blocks(short), cached_blocks(long)) == (2, 2)
    assert evict(server, 1) == 2 * P and (cached_blocks(short), cached_blocks(long)) == (0, 2)
    server.check()


def test_heap_of_evictable_leaves_stays_bounded():
    """Each use of a prompt locks and unlocks its leaf, which must not add an entry each time."""
    server = filled(4)
    for _ in range(300):
        server.tree.unlock(server.tree.lock(leaf(server, 2).id))
    assert len(server.tree.tree_core.evictable_device_leaves.heap) < 150
    assert evict(server, 1) == P and leaf(server, 0) is None


def test_queue_copies_each_entry_once():
    """Each finished request packs one block and frees one; each entry is copied once, when the queue is drained."""
    log, copied = OpLog(), []
    concatenate_real = np.concatenate

    def concatenate(parts, *args, **options):
        out = concatenate_real(parts, *args, **options)
        copied.append(len(out))
        return out

    n = 200
    with mock.patch.object(op_queue.np, "concatenate", concatenate):
        for i in range(n):
            one = np.array([i])
            log.push(Compact(one, 0, 1, one, one, one, one))
            log.push(Release(n + one))
        ops = log.drain()
    assert [type(op) for op in ops] == [Compact, Release]
    assert ops[0].blocks.tolist() == list(range(n)) and ops[1].blocks.tolist() == list(range(n, 2 * n))
    assert sum(copied) <= 6 * n  # four records and the ids of one operation, the ids of the other


def test_layout_computes_page_layouts_once():
    layout = PoolLayout(2, 2, 64, P, 2176)
    for fmt in FORMATS.values():
        assert layout.page(fmt) is layout.page(fmt)
    assert layout.block_pages_bf16 == 4 * layout.head_pages_bf16
    with mock.patch.object(PoolLayout, "pages_for", side_effect=AssertionError):
        assert layout.block_pages_bf16 == 4 * layout.head_pages_bf16


@pytest.mark.parametrize("options", [dict(high="k4v4"), dict(policy="leankv", high="k8v4", low="k4v2")])
@pytest.mark.parametrize("new", [host_time.NEW, 0], ids=["warm", "decode"])
def test_forward_reuses_constants_of_server(options, new, monkeypatch):
    """Page sizes, policy settings and launch constants are taken from the previous forward."""
    monkeypatch.setattr(host_time, "REPEATS", 1)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)
    backend = host_time.make_backend(**options)
    fb = host_time.batch(2, 300, new)
    host_time.measure(backend, fb)
    with (
        mock.patch.object(PageLayout, "_segments", side_effect=AssertionError),
        mock.patch.object(PageLayout, "__init__", side_effect=AssertionError),
        mock.patch.object(ScoreSampling, "__init__", side_effect=AssertionError),
    ):
        host_time.measure(backend, fb)


def test_compactions_reuse_constants_of_server(monkeypatch):
    """Blocks are packed whole, planned, and planned again."""
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)
    monkeypatch.setattr(PageStore, "use_kernels", True)
    runtime, one = make_runtime(**LEANKV, window=0, lag=2 * P), np.array([1])
    thresholds_kernel._source.cache_clear()
    for _ in range(2):
        for formats in ((0, 2), (2, 1), (1, 1)):
            runtime.page_ops.run(Compact(one, *formats, one, one, one, one), step=0)
        monkeypatch.setattr(PageLayout, "_segments", mock.Mock(side_effect=AssertionError))
    plans = thresholds_kernel._source.cache_info()
    assert plans.misses == plans.hits == 2
    assert set(runtime.store.launch_constants) == {("pack", 2, True), ("swap", 2), ("swap", 1)}


@pytest.mark.parametrize("wave, plans", [(12, 1), (11, 2), (8, 2), (4, 3), (2, 3)])
def test_answers_of_same_length_are_planned_by_same_launches(wave, plans):
    """As many answers as fit a wave are planned together. Scores and tiers are read from the same places."""
    runtime = make_runtime(**ANSWERS)
    op = Compact(
        np.array(runtime.take([P * i for i in range(12)])), WHOLE, ANSWER, *np.zeros((4, 12), dtype=np.int64),
        groups=np.array([[4, 4]] * 3),
    )  # fmt: skip
    with mock.patch.object(tiers, "token_slots", mock.Mock(wraps=tiers.token_slots)) as lookups:
        waves = [(part, blocks.tolist()) for part, blocks, _ in runtime.page_ops._plans(op, wave)]
    assert [block for part, blocks in waves for block in blocks] == op.blocks.tolist()
    assert all(op.blocks[part].tolist() == blocks and len(blocks) <= wave for part, blocks in waves)
    assert lookups.call_count == plans


def lines_of_a_step(requests: int, options: dict) -> int:
    """The number of Python lines run to prepare a decode step in which no request changes its blocks."""
    batch = Batch([P + 20] * requests, **options)
    batch.step()
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        assert not batch.step()
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("options", [dict(high="k4v4", policy="quantize", low=None, alpha_low=None), {}])
def test_decode_step_does_not_loop_over_requests(options):
    """The previous step had the same requests, so the step takes a few array operations."""
    few, many = lines_of_a_step(8, options), lines_of_a_step(40, options)
    assert many - few <= 40 - 8  # the test's own loop over lengths


def test_step_without_turn_looks_at_no_block(monkeypatch):
    batch = Batch([P + 20] * 3, window=0, lag=2 * P)
    monkeypatch.setattr(batch.runtime.replanning, "_queue", mock.Mock(side_effect=AssertionError))
    assert not batch.step()


def test_request_gets_new_sequence_after_retraction():
    """The request is alone in its batch, as before its retraction."""
    server = ToyServer(high="bf16", blocks=8)
    req = server.admit(prompt(0))
    table, first = server.runtime.blocks.sequences, req.kvc
    assert table.of([req]) == table.of([req]) == [first]
    server.finish(req, insert=False)
    req.kvc = server.runtime.new_sequence()
    assert table.of([req]) == [req.kvc] != [first]


class Writes:
    """A record of blocks that counts what is written to it."""

    def __init__(self, record: np.ndarray):
        self.record, self.written = record, 0

    def __setitem__(self, at, value):
        self.written += np.size(at)
        self.record[at] = value

    def __getitem__(self, at):
        return self.record[at]


def test_decode_step_writes_only_length_of_last_block():
    """The other blocks of the window were full before."""
    server = ToyServer(high="k4v4", window=9 * P, blocks=12)
    req = server.admit([*prompt(0)[:P], *range(6 * P), 1])
    filled = server.runtime.blocks.num_tokens
    server.runtime.blocks.num_tokens = writes = Writes(filled)
    for step in range(P + 2):
        before = writes.written
        assert server.decode(req, step)
        assert writes.written - before <= 2
    assert filled[req.kvc.blocks].tolist() == 8 * [P] + [3]


def test_block_lengths_follow_prompt_chunks():
    server = ToyServer(high="bf16", blocks=8)
    first = server.admit([*range(2 * P + 9)], chunk=40)
    assert server.runtime.blocks.num_tokens[first.kvc.blocks].tolist() == [P, P, 9]
    second = server.admit([*range(2 * P), *range(90)])
    assert second.kvc.shared == 3 and server.runtime.blocks.num_tokens[second.kvc.blocks].tolist() == [P, P, P, 26]


@pytest.mark.parametrize("policy", [dict(high="k4v4"), dict(policy="leankv", high="k8v4", low="k4v2")])
def test_uncompressed_tokens_match_blocks_of_request(policy):
    """The request has a packed prefix, shares its prompt with another, arrives in chunks, and moves its window."""

    def check(*reqs):
        for seq in (r.kvc for r in reqs):
            states = server.runtime.blocks.state[seq.blocks[seq.window_start :]]
            assert seq.open_tokens() == P * int((states == State.OPEN).sum())

    server = ToyServer(window=3 * P, blocks=24, **policy)
    server.finish(server.admit([*range(3 * P), 1]))
    first = server.admit([*range(5 * P), 1], chunk=P)
    second = server.admit([*range(5 * P), 2], chunk=100)
    check(first, second)
    assert first.kvc.open_tokens() < (len(first.kvc.blocks) - first.kvc.window_start) * P
    for step in range(2 * P):
        assert server.decode(first, step)
        check(first, second)
    server.finish(first)
    for step in range(4 * P):
        assert server.decode(second, step)
        check(second)
    server.check()


def test_uncompressed_tokens_are_not_recounted():
    server = ToyServer(high="k4v4", window=6 * P, blocks=12)
    req = server.admit([*range(6 * P), 1])
    server.runtime.blocks.state = None
    assert req.kvc.open_tokens() == 7 * P


def test_one_block_leaf_takes_three_words_per_token():
    """They are its tokens, the same tokens as key in its parent's table, and its slots."""
    server = ToyServer(high="bf16", blocks=4)
    keys = [RadixKey(array("q", range(1000 * i, 1000 * i + P)), salt) for salt in (None, "a") for i in range(1, 51)]
    tracemalloc.start()
    for key in keys:
        slots = server.tree.component.slots_of([1])
        assert server.tree.insert(InsertParams(key=key, value=slots)).prefix_len == 0
    per_leaf = tracemalloc.get_traced_memory()[0] / len(keys)
    tracemalloc.stop()
    assert per_leaf < 3 * 8 * P + 2000
    for key in keys:
        longer = RadixKey(key.token_ids + array("q", [7]), key.extra_key, limit=P + 1)
        assert server.tree.match_prefix(MatchPrefixParams(key=longer)).device_prefix_len == P
    other = RadixKey(keys[0].token_ids, "b")
    assert server.tree.match_prefix(MatchPrefixParams(key=other)).device_prefix_len == 0

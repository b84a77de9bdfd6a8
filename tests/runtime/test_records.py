"""Ledger, block records and sizing against plain Python models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout
from kvc_patches.allocation import around_alloc_for_extend
from sglang_kvc.cache.blocks import Blocks, State
from sglang_kvc.cache.ledger import Ledger
from sglang_kvc.cache.op_queue import Compact
from sglang_kvc.cache.packing import Phase, tokens_decoded, tokens_written
from sglang_kvc.cache.sizing import size_pool

from .model import ToyServer, make_runtime

BLOCKS = 10
IDS = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5, unique=True).map(np.array)
STEP = st.one_of(
    st.tuples(st.just("set"), IDS, st.integers(0, 50)),
    st.tuples(st.just("idle"), IDS, st.booleans()),
    st.tuples(st.just("drop"), IDS, st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=30))
def test_ledger_totals_match_reference_model(steps):
    ledger, charge, idle = Ledger(BLOCKS, 1000), dict.fromkeys(range(BLOCKS), 0), set()
    for kind, ids, arg in steps:
        if kind == "set":
            ledger.set(ids, arg)
            charge.update(dict.fromkeys(ids.tolist(), arg))
        elif kind == "idle":
            ledger.set_idle(ids, arg)
            idle = idle | set(ids.tolist()) if arg else idle - set(ids.tolist())
        else:
            ledger.drop(ids)
            charge.update(dict.fromkeys(ids.tolist(), 0))
            idle -= set(ids.tolist())
        assert ledger.total == sum(charge.values())
        assert ledger.idle_total == sum(charge[b] for b in idle)
        assert ledger.idle_blocks == len(idle)
        assert ledger.free == 1000 - ledger.total
        assert ledger.reachable == ledger.free + ledger.idle_total


def test_blocks_are_allocated_once_and_freed_once():
    blocks = Blocks(6)
    ids = blocks.take(5, [0, 64, 128, 192, 256])
    assert sorted(ids) == [1, 2, 3, 4, 5] and blocks.free_count == 0
    assert blocks.start[ids].tolist() == [0, 64, 128, 192, 256]
    generation = blocks.generation[ids[0]]
    blocks.give_back(np.array(ids[:2]))
    assert blocks.generation[ids[0]] == generation + 1
    assert blocks.state[ids[0]] == State.FREE and blocks.used_count == 3
    with pytest.raises(AssertionError, match="twice"):
        blocks.give_back(np.array(ids[:1]))


def layout(**kw):
    return PoolLayout(**{"layers": 30, "heads": 3, "head_dim": 64, "block_tokens": 256, "page_bytes": 2176, **kw})


@pytest.mark.parametrize("name", ["k8v8", "k4v4", "k2v2"])
def test_pool_size_stays_within_memory_budget(name):
    lay, fmt = layout(), FORMATS[name]
    block_formats = (BlockFormat(BF16, pages=lay.block_pages_bf16), BlockFormat(fmt, pages=lay.block_pages(fmt)))
    for mib in (256, 1000, 5000):
        sizing = size_pool(mib << 20, lay, block_formats)
        spent = sizing.num_pages * (lay.page_bytes + 4) + sizing.num_blocks * lay.block_meta_bytes
        assert 0.97 * (mib << 20) < spent <= (mib << 20) + 4 * lay.block_meta_bytes
        assert sizing.reserve_pages >= lay.block_pages(fmt)
        assert sizing.capacity_tokens // 256 * lay.block_pages_bf16 <= sizing.chargeable_pages
        # Block ids must not run out before the pages do.
        assert (sizing.num_blocks - 1) * lay.block_pages(fmt) >= sizing.chargeable_pages - lay.block_pages_bf16


def test_open_blocks_counts_uncompressed_full_blocks_of_prefix():
    runtime = make_runtime()
    seq = runtime.new_sequence()
    assert seq.open_blocks(0) == []
    seq.extend(runtime.take([0, 64, 128]))
    assert seq.open_blocks(150) == [0, 1]
    runtime.queue_due(seq.slide(96 + 32))
    assert seq.open_blocks(150) == [1]
    assert seq.open_blocks(127) == []


def test_forward_finds_its_sequences_when_requests_share_id():
    """The tokenizer processes of `--tokenizer-worker-num` do not know each other's ids."""
    server = ToyServer(high="k4v4", levels=("k8v4",), window=0)
    first, second = (server.admit([7] * 200, level=level) for level in (None, "k8v4"))
    first.rid = second.rid = "same"

    def forward(reqs, rids):
        batch = SimpleNamespace(
            reqs=reqs, tree_cache=server.tree, token_to_kv_pool_allocator=server.allocator,
            seq_lens_cpu=torch.tensor([200] * len(reqs)),
        )  # fmt: skip
        around_alloc_for_extend(lambda batch: None, batch)
        return server.runtime.sequences_of(rids)

    # The second request arrives later; then comes the first one's next chunk, and then both in one batch.
    assert forward([second], ["same"]) == [second.kvc] and forward([first], ["same"]) == [first.kvc]
    assert [id(s) for s in forward([first, second], ["same"] * 2)] == [id(first.kvc), id(second.kvc)]
    assert server.runtime.sequences_of(["of a warm-up"]) == [None] and server.runtime.sequences_of([]) == []


def test_queries_of_mixed_decode_step_see_stored_blocks():
    runtime = make_runtime(high="k4v4", window=0)
    prefills, decodes = runtime.new_sequence(), runtime.new_sequence()
    for seq in (prefills, decodes):
        seq.prompt = 200
        runtime.grow([seq], [200])
    runtime.grow([decodes], [201])
    default = runtime.policy.fake_quant_format(runtime.policy.format_id_of(None))
    assert runtime.fake_quant_format([prefills, decodes, None]) == [default, None, default]


def test_late_count_is_not_applied_to_reused_block():
    """A block is packed, freed and reused within one queue, so its count arrives when the block has another owner."""
    from .model import make_runtime

    runtime = make_runtime(blocks=4, policy="leankv", high="k8v4", low="k4v2", alpha_high=0.9, alpha_low=0.5, window=0)
    (block,) = runtime.take([0])
    runtime.blocks._free.clear()  # ids are scarce: the next id is the one just freed
    runtime.step += 1
    runtime.flush()
    runtime.queue_due([block])
    runtime.free([block])
    assert runtime.take([0]) == [block]
    runtime.step += 1
    runtime.flush()
    assert len(runtime.pending) == 1
    runtime.harvest(runtime.step)
    assert runtime.ledger.charge[block] == runtime.layout.block_pages_bf16


@pytest.mark.parametrize("two_tiers", [False, True])
def test_each_event_queues_expected_compactions(two_tiers):
    """Starts, N and formats of the compactions that each event queues, for five written blocks and a window of one
    block."""
    policy = dict(policy="leankv", high="k8v4", low="k4v2") if two_tiers else dict(high="k4v4")
    runtime = make_runtime(window=64, **policy)
    seq = runtime.new_sequence()
    assert runtime.grow([seq], [5 * 64])
    seq.prompt = 3 * 64

    def queued(length, phase, kept=()):
        runtime.log.clear()
        if phase is None:
            tokens_decoded(runtime, [seq], np.array([length]))
        else:
            tokens_written(runtime, seq, length, phase, kept)
        ops = [op for op in runtime.log.drain() if isinstance(op, Compact) and op.from_format != op.to_format]
        return [(op.starts.tolist(), op.lengths.tolist(), op.from_format, op.to_format) for op in ops]

    held = [([0], [0], 2, 1)] if two_tiers else []
    assert queued(2 * 64, Phase.CHUNK) == [([0], [0], 0, 2 if two_tiers else 1)]
    assert queued(3 * 64, Phase.PREFILL) == [([64], [0], 0, 1), *held]
    assert queued(3 * 64, None) == [] and queued(4 * 64, None) == [([128], [4 * 64], 0, 1)]
    seq.release()
    assert queued(4 * 64 + 1, Phase.END, seq.blocks[:4]) == [([192], [4 * 64 + 1], 0, 1)]


def test_first_decode_step_before_prefill_result_plans_as_prompt():
    runtime = make_runtime(window=64, policy="leankv", high="k8v4", low="k4v2")
    seq = runtime.new_sequence()
    assert runtime.grow([seq], [2 * 64 + 1])
    seq.prompt = 2 * 64
    tokens_decoded(runtime, [seq], np.array([2 * 64]))
    tokens_written(runtime, seq, 2 * 64, Phase.PREFILL)
    (op,) = (op for op in runtime.log.drain() if isinstance(op, Compact))
    assert (op.starts.tolist(), op.lengths.tolist()) == ([0], [0])


@pytest.mark.parametrize("options", [dict(window=0), dict(window=32), dict(window=64, policy="leankv", low="k4v2")])
def test_batched_decode_step_equals_separate_steps(options):
    """Compares blocks taken, tokens recorded and operations queued over three blocks of steps, at every position within
    a block."""

    def steps(decode):
        runtime = make_runtime(blocks=40, **{"high": "k8v4", **options})
        prompts = [64 - 1, 64, 64 + 1, 100]
        seqs = [runtime.new_sequence() for _ in prompts]
        runtime.grow(seqs, prompts)
        for seq, n in zip(seqs, prompts):
            seq.prompt = n
        runtime.log.clear()
        for step in range(3 * 64):
            decode(runtime, seqs, [n + step for n in prompts])
        queued = [(type(op).__name__, op.blocks.tolist()) for op in runtime.log.drain()]
        records = (runtime.blocks.num_tokens, runtime.blocks.state, runtime.blocks.window_count, runtime.ledger.charge)
        return [seq.blocks for seq in seqs], [seq.length for seq in seqs], queued, [r.tolist() for r in records]

    def one_by_one(runtime, seqs, written):
        for seq, n in zip(seqs, written):
            tokens_decoded(runtime, [seq], np.array([n]))
        assert runtime.grow(seqs, [n + 1 for n in written])

    def together(runtime, seqs, written):
        tokens_decoded(runtime, seqs, np.array(written))
        ends = np.array(written) + 1
        assert runtime.grow_by_one(seqs, ends).tolist() == [
            s.blocks[(n - 1) // 64] * 64 + (n - 1) % 64 for s, n in zip(seqs, ends)
        ]

    assert steps(together) == steps(one_by_one)

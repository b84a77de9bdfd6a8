"""Replanning of blocks: its times, frequency and batch sizes, and that its bytes depend on the sequence alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common.bits import segment
from kvc_kernels.formats import BF16
from kvc_patches.allocation import around_alloc_for_decode
from sglang_kvc.adapter.allocator import KvcAllocator
from sglang_kvc.cache import capacity
from sglang_kvc.cache.op_queue import Compact

from .model import H, L, P, Request, ToyServer, make_runtime

LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2", "alpha_low": 0.3}


class Batch:
    """Requests that decode together, without pages: nothing is flushed, and the operations queued by a step are
    counted."""

    def __init__(self, prompts: list[int], **options):
        self.runtime = make_runtime(**{"blocks": 60 * len(prompts), **LEANKV, **options})
        self.allocator = KvcAllocator(self.runtime, SimpleNamespace(runtime=self.runtime), "cpu")
        self.lengths, self.reqs = list(prompts), []
        for n in prompts:
            seq = self.runtime.new_sequence()
            seq.extend(self.runtime.take(list(range(0, n, P))))
            self.runtime.queue_due(seq.slide(n), seq.format_id)
            seq.prompt = n
            self.reqs.append(SimpleNamespace(kvc=seq))
        self.runtime.log.clear()

    def step(self) -> list[Compact]:
        batch = SimpleNamespace(
            reqs=self.reqs, token_to_kv_pool_allocator=self.allocator, seq_lens_cpu=torch.tensor(self.lengths)
        )
        slots = around_alloc_for_decode(lambda b, k: self.allocator.alloc(len(b.reqs)), batch, 1)
        assert slots is not None
        self.lengths = [n + 1 for n in self.lengths]
        return [op for op in self.runtime.log.drain() if isinstance(op, Compact)]


@pytest.mark.parametrize("prompt", [1, 3 * P + 5, 8 * P])
@pytest.mark.parametrize("window", [0, 32, P])
def test_block_is_replanned_whenever_sequence_length_doubles(prompt, window):
    batch = Batch([prompt], window=window)
    blocks, packed, turns = batch.reqs[0].kvc.blocks, 0, set()
    for length in range(prompt, prompt + 40 * P):
        for op in batch.step():
            assert len(op.blocks) == 1 and op.lengths.tolist() == [length]
            if op.from_format:
                turns.add((blocks.index(int(op.blocks[0])), length))
            else:
                packed += 1
    expected = {(b, window + ((b + 1) << k) * P + k * P // 16) for b in range(len(blocks)) for k in range(1, 8)}
    assert turns == {(b, at) for b, at in expected if prompt <= at <= length}
    assert len({at for _, at in turns}) == len(turns)  # one block per step
    assert len(turns) <= packed + len(blocks).bit_length()


def test_step_packs_many_requests_in_one_operation_per_kind():
    """Equal lengths are the worst case: one step packs, or repacks, a block of every request in one operation."""
    n, prompt, new = 16, 8 * P, 3 * P
    batch = Batch([prompt] * n)
    steps = [batch.step() for _ in range(new)]
    assert max(len(ops_) for ops_ in steps) == 1
    assert max(sum(len(op.blocks) for op in ops_) for ops_ in steps) == n
    first = sum(len(op.blocks) for ops_ in steps for op in ops_ if op.from_format == 0)
    again = sum(len(op.blocks) for ops_ in steps for op in ops_ if op.from_format)
    assert first == 3 * n and again <= first + n
    # At different lengths both kinds may occur in one step, as one operation each.
    batch = Batch([prompt + 4 * i for i in range(n)])
    assert max(len(batch.step()) for _ in range(new)) == 2


def test_policies_without_replanning_pack_once():
    batch = Batch([4 * P, 2 * P], policy="prune", high="k4v4", low=None, scorer="h2o")
    assert all(op.from_format == 0 for _ in range(6 * P) for op in batch.step())


class WithScores(ToyServer):
    """Attention is fixed: a token's scores are a function of its history, and each later step dilutes them."""

    def _forward(self, req: Request, done: int, slots: torch.Tensor) -> None:
        super()._forward(req, done, slots)
        store, page = self.runtime.store, self.runtime.layout.page(BF16)
        scores = segment(page, store.pages, "scores", torch.float32)
        tokens = list(req.origin_input_ids + req.output_ids)
        for i, slot in enumerate(slots.tolist()):
            history = np.random.default_rng(abs(hash(tuple(tokens[: done + i + 1]))) % 2**32)
            attention_scores = torch.from_numpy(history.exponential(0.4, (L, H)).astype(np.float32))
            place = store.table[slot // P, :, :, slot % P // page.tokens].long()
            scores[place, slot % P % page.tokens] = attention_scores
        store.query_counts[torch.tensor(req.kvc.blocks[: done // P], dtype=torch.long)] += len(slots)


def answers(lengths: list[int], new: int) -> tuple[list[list[str]], ToyServer]:
    """Digests of all blocks of requests with these prompts that decode `new` tokens concurrently."""
    server = WithScores(blocks=80, **LEANKV)
    reqs = [server.admit([100 * n + j for j in range(n)]) for n in lengths]
    for step in range(new):
        for req in reqs:
            assert server.decode(req, 7000 + step)
    server.check()
    full = [r.kvc.blocks[: (len(r.origin_input_ids) + new) // P] for r in reqs]
    return [[ops.block_digest(server.runtime.store, b) for b in blocks] for blocks in full], server


def test_concurrent_sequences_do_not_change_packed_bytes():
    together, server = answers([2 * P + 3, P // 2, 3 * P], 5 * P)
    alone, _ = answers([2 * P + 3], 5 * P)
    assert together[0] == alone[0]
    # The case is not trivial: later plans drop tokens that the first plans kept.
    once = WithScores(blocks=80, **LEANKV)
    once.runtime.replanning.replan = lambda ids, length: 0
    req = once.admit([100 * (2 * P + 3) + j for j in range(2 * P + 3)])
    for step in range(5 * P):
        once.decode(req, 7000 + step)
    pairs = ((once, req.kvc.blocks[0]), (server, server.running[0].kvc.blocks[0]))
    first, last = (int(s.runtime.store.counts[block, ..., 0].sum()) for s, block in pairs)
    assert last < first


def test_shared_blocks_are_not_replanned():
    """A block of two running sequences is not planned for the length of either."""
    server = WithScores(blocks=80, **LEANKV)
    prompt = list(range(2 * P))
    one, two = server.admit([*prompt, 1]), server.admit([*prompt, 2])
    shared = one.kvc.blocks[:1]
    assert two.kvc.blocks[:1] == shared
    before = ops.block_digest(server.runtime.store, shared[0], scores=False)
    for step in range(4 * P):
        server.decode(one, step)
    assert ops.block_digest(server.runtime.store, shared[0], scores=False) == before
    server.finish(two)
    assert server.runtime.replanning.replan(shared, 6 * P) == 1


def queued_for_a_prompt(tokens: int, overlap: bool) -> list[tuple[list[int], list[int]]]:
    """(starts, lengths) of the compactions when a prompt has been prefilled and its first decode step is prepared."""
    server = ToyServer(**LEANKV, window=P, blocks=20)
    look, server.tree.checkpoint = server.tree.checkpoint, lambda req, up_to: None
    req = server.admit(list(range(1, tokens + 1)))
    batch = SimpleNamespace(
        reqs=[req], tree_cache=server.tree, token_to_kv_pool_allocator=server.allocator,
        seq_lens_cpu=torch.tensor([tokens]),
    )  # fmt: skip

    def end():
        look(req, up_to=tokens)

    def prepare():
        around_alloc_for_decode(lambda b, k: server.allocator.alloc(len(b.reqs)), batch, 1)

    for step in (prepare, end) if overlap else (end, prepare):
        step()
    ops = [op for op in server.runtime.log.drain() if isinstance(op, Compact)]
    return [(op.starts.tolist(), op.lengths.tolist()) for op in ops]


@pytest.mark.parametrize("tokens", [6 * P + 10, 6 * P])
def test_prompt_is_planned_alike_by_decode_step_and_result(tokens):
    """With overlap scheduling the first decode step is prepared before the result of the prefill is processed."""
    n = (tokens - P) // P
    assert queued_for_a_prompt(tokens, False) == [([P * i for i in range(n)], [0] * n)]
    assert queued_for_a_prompt(tokens, True) == queued_for_a_prompt(tokens, False)


@pytest.mark.parametrize("new", [0, 5])
def test_window_of_finished_request_is_planned_by_its_length(new):
    """The blocks of its window are packed when it ends: by the rule for prompts before the first token, then by
    Algorithm 1."""
    server = ToyServer(**LEANKV, window=P, blocks=20)
    req = server.admit(list(range(2 * P)))
    for step in range(new):
        assert server.decode(req, step)
    server.runtime.log.clear()
    server.finish(req)
    (op,) = (op for op in server.runtime.log.drain() if isinstance(op, Compact))
    assert op.starts.tolist() == [P] and op.lengths.tolist() == [2 * P + new if new else 0]


def test_growth_of_answers_is_charged_what_earlier_blocks_took(monkeypatch):
    """A server that has packed blocks expects their size, with every count that the device has reported."""
    monkeypatch.setattr(capacity, "MEAN_BLOCKS", 1)
    server = ToyServer(**LEANKV, blocks=40)
    runtime, upper_bound = server.runtime, server.runtime.store.block_formats[1].pages
    first = runtime.capacity.expected_tokens(P, 1)
    assert first < runtime.capacity.packed_tokens(P, 1)
    req = server.admit(list(range(1, 12 * P)))
    runtime.settle()
    packed = np.array(req.kvc.blocks[:11])
    pages = runtime.ledger.charge[packed]
    assert (runtime.blocks.format_id[packed] == 1).all()
    expected = runtime.capacity.expected_tokens(P, 1) * runtime.layout.block_pages_bf16 / P
    assert pages.min() <= expected <= pages.max() < upper_bound
    assert runtime.capacity.expected_tokens(P, 1) != first

"""Random sequences of take, append, compact and release against a plain Python model of the store."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvc_kernels import ops
from kvc_kernels.common.bits import segment
from kvc_kernels.formats import BF16
from tests.support.pages import RefStore, block_formats_of, make_store, random_tiers

BLOCK_FORMATS = block_formats_of("k8v4", "k8v4+k4v2", "k4v4", "k2v2")
CONFIGS = {
    # Pages of 1184 bytes make two k8v4 pages of a full head, so that tiers have whole and part-filled pages.
    "has_scores": {"has_scores": True, "page_bytes": 1184},
    "unscored": {"has_scores": False, "page_bytes": 1184},
    "chosen page": {"has_scores": False},
}


class StoreMachine(RuleBasedStateMachine):
    config: dict

    @initialize()
    def start(self):
        self.store = make_store(BLOCK_FORMATS, blocks=5, spare=3, **self.config)
        self.model = RefStore(self.store)
        self.filled = {}  # block -> tokens appended
        self.p = self.store.layout.block_tokens
        self.spare = list(range(1, self.store.table.shape[0]))

    def _some(self, seed, pool):
        """One to three members of `pool` in random order."""
        gen = np.random.default_rng(seed)
        return [int(b) for b in gen.permutation(sorted(pool))[: gen.integers(1, 4)]]

    def _at(self, format_filter):
        return {b for b in self.model.table if format_filter(int(self.store.format_id[b]))}

    @rule(seed=st.integers(0, 2**20), fill=st.booleans())
    def take(self, seed, fill):
        fits = len(self.model.free) // self.store.layout.block_pages_bf16
        blocks = self._some(seed, self.spare)[:fits] if self.spare else []
        if not blocks:
            return
        ops.take_bf16(self.store, torch.tensor(blocks))
        self.model.take(blocks)
        for b in blocks:
            self.spare.remove(b)
            self.filled[b] = 0
        if fill:
            self._append([(b, i) for b in blocks for i in range(self.p)], seed)
            self.filled.update((b, self.p) for b in blocks)

    @precondition(lambda self: any(n < self.p for b, n in self.filled.items()))
    @rule(seed=st.integers(0, 2**20), to_end=st.booleans())
    def append(self, seed, to_end):
        """The next tokens of one or more open blocks in one call."""
        gen = np.random.default_rng(seed)
        at = []
        for b in self._some(seed, [b for b, n in self.filled.items() if n < self.p]):
            n = self.p - self.filled[b] if to_end else int(gen.integers(1, 5))
            n = min(n, self.p - self.filled[b])
            at += [(b, self.filled[b] + i) for i in range(n)]
            self.filled[b] += n
        self._append(at, seed)

    def _append(self, at, seed):
        """Random rows at (block, offset) pairs, in every layer."""
        g, gen = self.store.layout, np.random.default_rng(seed)
        blocks, offsets = torch.tensor(at).T
        for layer in range(g.layers):
            k, v = (torch.from_numpy(gen.normal(size=(len(at), g.heads, g.head_dim)) * s).bfloat16() for s in (3, 1))
            ops.append(self.store, layer, blocks, offsets, k, v)
            for i, (b, position) in enumerate(at):
                self.model.append(b, layer, position, k[i].float().numpy(), v[i].float().numpy())

    @precondition(lambda self: self.store.layout.has_scores and any(n == self.p for n in self.filled.values()))
    @rule(seed=st.integers(0, 2**20))
    def score(self, seed):
        """Attention adds to the scores of a full block that is still open."""
        gen = np.random.default_rng(seed)
        block = self._some(seed, [b for b, n in self.filled.items() if n == self.p])[0]
        page = self.store.layout.page(BF16)
        words = segment(page, self.store.pages, "scores", torch.float32)
        for (l, h), (ids, _) in self.model.table[block].items():
            for t in self.model.rows[block][l, h].tiers[2]:
                t.score += float(np.float32(gen.integers(0, 64) / 64))
                words[ids[t.position // page.tokens], t.position % page.tokens] = t.score

    @precondition(lambda self: any(self.filled.get(b, self.p) == self.p for b in self.model.table))
    @rule(seed=st.integers(0, 2**20), times=st.integers(1, 3))
    def compact(self, seed, times):
        for i in range(times):
            self._compact(seed + i)

    def _compact(self, seed):
        """Move full blocks of one block format to the same or a lower one."""
        gen = np.random.default_rng(seed)
        full = [b for b in self.model.table if self.filled.get(b, self.p) == self.p]
        format_id = int(self.store.format_id[int(gen.choice(full))])
        blocks = self._some(seed, [b for b in full if int(self.store.format_id[b]) == format_id])
        g = self.store.layout
        fits = len(self.model.free) // (g.layers * g.heads * g.head_pages_bf16)
        blocks = blocks[:fits]
        if not blocks:
            return
        target = min(max(1, format_id) + int(gen.choice([0, 1, 1, 2])), len(BLOCK_FORMATS) - 1)
        ids = torch.tensor(blocks)
        tiers = random_tiers(self.store, len(blocks), BLOCK_FORMATS[target], gen)
        counts = ops.compact(self.store, ids, target, tiers, from_format=format_id)
        self.model.compact(blocks, BLOCK_FORMATS[target], tiers)
        assert torch.equal(ops.block_head_pages(self.store, ids).sum((1, 2)).int(), counts)
        for b in blocks:
            self.model.check_bytes(b)
            self.filled.pop(b, None)

    @precondition(lambda self: self.model.table)
    @rule(seed=st.integers(0, 2**20))
    def release(self, seed):
        blocks = self._some(seed, self.model.table)
        ops.release(self.store, torch.tensor(blocks))
        self.model.release(blocks)
        for b in blocks:
            self.filled.pop(b, None)
            self.spare.append(b)

    @invariant()
    def same_as_model(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        if not hasattr(self, "model"):
            return
        for b in self.model.table:
            if int(self.store.format_id[b]):
                self.model.check_bytes(b)
                continue
            k, v, _ = ops.load_dense(self.store, 0, torch.tensor([b]))
            for h in range(self.store.layout.heads):
                for t in self.model.rows[b][0, h].tiers[2]:
                    assert np.array_equal(k[0, h, t.position].numpy(), t.k)
                    assert np.array_equal(v[0, h, t.position].numpy(), t.v)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_sequences(name):
    machine = type("Machine", (StoreMachine,), {"config": CONFIGS[name]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_invariant_check_finds_damage():
    """The checker itself finds a duplicated page, a lost page, and page 0 in use."""
    for damage in ("double", "lose", "zero"):
        store = make_store()
        ops.take_bf16(store, torch.tensor([1, 2]))
        ops.check_invariants(store)
        if damage == "double":
            store.table[1, 0, 0, 0] = store.table[2, 0, 0, 0]
        elif damage == "lose":
            store.cursor[0] += 1
        else:
            store.table[1, 0, 0, 0] = 0
        with pytest.raises(AssertionError):
            ops.check_invariants(store)


def test_double_release_and_late_append_are_harmless():
    store = make_store(has_scores=True)
    block = torch.tensor([3])
    ops.take_bf16(store, block)
    ops.release(store, block)
    ops.release(store, block)
    ops.check_invariants(store)
    before = store.pages[1:].clone()
    row = torch.ones(1, 2, 32)
    ops.append(store, 0, block, torch.tensor([9]), row, row)
    assert torch.equal(store.pages[1:], before)


def test_ring_hands_out_every_page_and_wraps():
    store = make_store(blocks=3)
    for i in range(7):
        blocks = torch.tensor([1, 2, 3])
        ops.take_bf16(store, blocks)
        assert int(store.cursor[1] - store.cursor[0]) == 0
        ops.check_invariants(store)
        ops.release(store, blocks[torch.randperm(3)] if i % 2 else blocks)
        ops.check_invariants(store)


def test_append_zeroes_the_slot_score():
    store = make_store(has_scores=True)
    ops.take_bf16(store, torch.tensor([1]))
    k = torch.ones(32, 2, 32)
    ops.append(store, 0, torch.ones(32, dtype=torch.long), torch.arange(32, dtype=torch.int32), k, k)
    assert not ops.block_scores(store, torch.tensor([1])).any()

"""Random request sequences against the real tree, allocator, ledger and pages; a plain model gives the expected
state."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvc_kernels.formats import FORMATS
from sglang_kvc.options.request_quality import LOSSLESS
from tests.runtime.model import P, ToyServer

PIECES = [[10 * i + j for j in range(P)] for i in range(4)]  # whole blocks from which prompts are built


def machine(**options):
    class Lives(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.server = ToyServer(**options)
            self.salt = 0

        @rule(
            pieces=st.lists(st.integers(0, 3), max_size=3),
            tail=st.integers(1, P - 1),
            chunk=st.booleans(),
            level=st.sampled_from([None, None, LOSSLESS, *options.get("levels", ())]),
        )
        def admit(self, pieces, tail, chunk, level):
            prompt = [t for p in pieces for t in PIECES[p]] + [7] * tail
            self.server.admit(prompt, chunk=P if chunk else None, level=level)

        @rule(index=st.integers(0, 7), steps=st.integers(1, P + 8), fresh=st.booleans())
        def decode(self, index, steps, fresh):
            if not self.server.running:
                return
            req = self.server.running[index % len(self.server.running)]
            for _ in range(steps):
                self.salt += fresh
                if not self.server.decode(req, 1000 + self.salt):
                    return

        @rule(index=st.integers(0, 7), insert=st.booleans())
        def finish(self, index, insert):
            if self.server.running:
                self.server.finish(self.server.running[index % len(self.server.running)], insert)

        @rule(tokens=st.integers(1, 6 * P))
        def evict(self, tokens):
            self.server.tree.evict(EvictParams(num_tokens=tokens))

        @invariant()
        def holds(self):
            self.server.check()

        def teardown(self):
            server = self.server
            for req in list(server.running):
                server.finish(req)
            server.check()
            server.tree.evict(EvictParams(num_tokens=10**9))
            assert server.allocator.used_slots() == 0
            assert server.allocator.available_size() == server.runtime.sizing.capacity_tokens

    return Lives


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"high": "bf16"}, id="bf16"),
        pytest.param({"high": "k4v4"}, id="k4v4"),
        pytest.param({"high": "k8v8", "window": 0}, id="k8v8-window0"),
        pytest.param({"high": "k4v4", "levels": ("k8v4", "k2v2"), "window": 0}, id="levels"),
        pytest.param({"policy": "quota", "keep": 0.5}, id="quota"),
        pytest.param({"policy": "prune", "share": "ada", "low": "k2v2", "sinks": 4}, id="two-tiers"),
        pytest.param({"policy": "leankv", "high": "k8v4", "low": "k4v2"}, id="leankv"),
        pytest.param({"high": "k4v4", "disable": True}, id="no-radix"),
    ],
)
def test_random_requests_match_model(options):
    run_state_machine_as_test(
        machine(**options),
        settings=settings(
            max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_shared_prefix_uses_one_set_of_blocks():
    server = ToyServer(high="k4v4")
    prompt = PIECES[0] + PIECES[1]
    first = server.admit([*prompt, 1, 2])
    used = server.runtime.blocks.used_count
    second = server.admit([*prompt, 3])
    assert second.kvc.blocks[:2] == first.kvc.blocks[:2]
    assert server.runtime.blocks.used_count == used + 1


def test_block_stays_uncompressed_while_in_any_window():
    """A block in the window of one of two sharing requests stays uncompressed until both have moved on or ended."""
    server = ToyServer(high="k4v4", window=P)
    first = server.admit([*PIECES[0], 1])
    second = server.admit([*PIECES[0], 2])
    block = first.kvc.blocks[0]
    server.finish(first)
    server.runtime.flush()
    assert server.runtime.store.format_id[block] == 0
    for step in range(P):
        server.decode(second, step)
    server.runtime.flush()
    assert server.runtime.store.format_id[block] == 1


def test_finished_answers_are_packed():
    server = ToyServer(high="k4v4", window=P)
    req = server.admit([*PIECES[0], *PIECES[1], 1])
    block = req.kvc.blocks[1]
    server.runtime.flush()
    assert server.runtime.store.format_id[block] == 0
    server.finish(req)
    server.runtime.flush()
    assert server.runtime.store.format_id[block] == 1


def test_retraction_packs_blocks_that_tree_keeps():
    server = ToyServer(high="k4v4", window=P)
    req = server.admit([*PIECES[0], 1])
    block = req.kvc.blocks[0]
    server.finish(req, insert=False)
    server.runtime.flush()
    assert server.runtime.store.format_id[block] == 1


def test_decode_needs_no_spare_block():
    """SGLang asks for a block per request before every step; this must not evict a full cache."""
    server = ToyServer(high="bf16", blocks=6)
    req = server.admit([*PIECES[0], *PIECES[1], 1])
    for i in range(2):
        other = server.admit([*PIECES[2 + i], 5])
        server.finish(other)
    before = server.tree.evictable_slots()
    with server.allocator.for_sequences([req.kvc], [req.kvc.length]):
        server.allocator.evict_to_free_tokens(server.tree, 100 * P)
    assert server.tree.evictable_slots() == before


def test_lossless_requests_share_blocks_only_with_lossless_requests():
    server = ToyServer(high="k4v4")
    prompt = [*PIECES[0], *PIECES[1]]
    packed = server.admit([*prompt, 1])
    exact = server.admit([*prompt, 1], level=LOSSLESS)
    assert not set(packed.kvc.blocks) & set(exact.kvc.blocks)
    for _ in range(2 * P):
        assert server.decode(packed, 9) and server.decode(exact, 9)
    blocks = [list(r.kvc.blocks) for r in (packed, exact)]
    server.finish(packed)
    server.finish(exact)
    server.runtime.flush()
    format_ids = [server.runtime.store.format_id[b].tolist() for b in blocks]
    assert format_ids == [[1, 1, 1, 1, -1], [0, 0, 0, 0, -1]]
    again = server.admit([*prompt, 2], level=LOSSLESS)
    assert again.kvc.blocks[:2] == blocks[1][:2]
    assert server.runtime.fake_quant_format([None, again.kvc]) == [FORMATS["k4v4"], None]


def test_each_level_uses_its_own_format():
    server = ToyServer(high="k4v4", levels=("k8v4", "k2v2"), window=0)
    format_ids = {None: 1, "k8v4": 2, "k2v2": 3, LOSSLESS: 0}
    reqs = {level: server.admit([*PIECES[0], *PIECES[1], 1], level=level) for level in format_ids}
    seen = server.runtime.fake_quant_format([r.kvc for r in reqs.values()])
    assert [f and f.name for f in seen] == ["k4v4", "k8v4", "k2v2", None]
    server.runtime.flush()
    for level, format_id in format_ids.items():
        assert server.runtime.store.format_id[reqs[level].kvc.blocks[:2]].tolist() == [format_id] * 2
    server.check()
    for req in reqs.values():
        server.finish(req)
    again = server.admit([*PIECES[0], *PIECES[1], 2], level="k2v2")
    assert again.kv.cache_protected_len == 2 * P
    assert server.runtime.store.format_id[again.kvc.blocks[:2]].tolist() == [3, 3]


def test_bf16_server_compresses_on_request():
    server = ToyServer(high="bf16", levels=("k4v4",), window=0)
    plain, small = (server.admit([*PIECES[0], 1], level=level) for level in (None, "k4v4"))
    server.runtime.flush()
    assert [server.runtime.store.format_id[r.kvc.blocks[0]].item() for r in (plain, small)] == [0, 1]
    # A forward without an allocation by the scheduler requests nothing.
    assert server.runtime.fake_quant_format([plain.kvc, small.kvc, None]) == [None, FORMATS["k4v4"], None]

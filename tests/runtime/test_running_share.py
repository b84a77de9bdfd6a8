"""When running requests may hold less than the whole memory, unless the operator says so."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_kvc.cache.running_share import GhostList, RunningShare

from .model import P, ToyServer

MEMORY = 1000.0  # tokens


def serve(share: RunningShare, prompts: int, again: int) -> list[float]:
    """Admit prompts of 100 tokens, `again` of which are computed again, and return the shares that followed."""
    shares = []
    for _ in range(prompts):
        share.admit(100, again, MEMORY)
        shares.append(share.now)
    return shares


def test_ghost_grows_with_leaves_dropped_before_its_own():
    """A chain 1 -> 2 -> 3 is dropped from its end, as leaves are."""
    ghosts = GhostList(limit=100)
    ghosts.add(3, parent=2, block=b"c", tokens=30)
    ghosts.add(4, parent=2, block=b"d", tokens=10)
    assert ghosts.take(2, b"x") == 0 and ghosts.take(1, b"c") == 0
    ghosts.add(2, parent=1, block=b"b", tokens=20)
    assert ghosts.tokens == 50 and ghosts.take(2, b"c") == 0
    assert ghosts.take(1, b"b") == 50 and ghosts.take(1, b"b") == 0 and ghosts.tokens == 0


def test_ghost_that_is_dropped_again_counts_once():
    ghosts = GhostList(limit=100)
    for tokens in (30, 40):
        ghosts.add(tokens, parent=1, block=b"a", tokens=tokens)
    assert ghosts.tokens == 40 and ghosts.take(1, b"a") == 40


def test_earliest_ghosts_are_forgotten():
    ghosts = GhostList(limit=100)
    for i in range(20):
        ghosts.add(100 + i, parent=i, block=b"a", tokens=30)
    assert ghosts.tokens == 90 and not ghosts.take(16, b"a")
    assert [ghosts.take(i, b"a") for i in (17, 18, 19)] == [30, 30, 30] and not ghosts._below


def test_limit_holds_while_prompts_are_computed_again():
    share = RunningShare(None)
    assert set(serve(share, 100, 10)) == {1.0}
    shares = serve(share, 30, 50)
    assert shares[0] == 1.0 and shares[-1] == 0.5
    assert set(serve(share, 500, 10)) == {0.5}  # the limit helps: fewer prompts are computed again
    assert serve(share, 100, 0)[-1] == 1.0


def test_limit_that_does_not_help_ends_and_is_tried_again_later():
    """The limit holds for 8 times the memory's tokens, then it pauses for 32 times as many."""
    shares = serve(RunningShare(None), 900, 90)
    begins = [i for i in range(1, 900) if (shares[i - 1], shares[i]) == (1.0, 0.5)]
    ends = [i for i in range(1, 900) if (shares[i - 1], shares[i]) == (0.5, 1.0)]
    assert len(begins) == 3 and 78 < ends[0] - begins[0] < 84 and 318 < begins[1] - ends[0] < 324


@pytest.mark.parametrize("given", [1.0, 0.3])
def test_share_that_the_operator_gives_stays(given):
    assert set(serve(RunningShare(given), 100, 90)) == {given}


def test_tree_counts_what_was_computed_before():
    """Sessions that grow in turns, against a set of all blocks that were ever cached."""
    draw, server = random.Random(0), ToyServer(high="k4v4", window=0, blocks=24)
    sessions, known, expected = [[] for _ in range(24)], set(), 0
    for turn in range(250):
        tokens = sessions[draw.randrange(24)]
        if len(tokens) > 12 * P:
            tokens.clear()
        tokens += [turn, *draw.choices(range(1000), k=draw.randint(1, 2 * P))]
        blocks = [tuple(tokens[:end]) for end in range(P, len(tokens) + 1, P)]
        match = server.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), None)))
        expected += P * sum(block in known for block in blocks[match.device_prefix_len // P :])
        req = server.admit(tokens)
        assert req is not None
        server.finish(req)
        known.update(blocks)
    assert server.runtime.counters.evicted_blocks > 50 and expected > 50 * P
    assert server.runtime.counters.recomputed_tokens == expected


def test_preempted_request_does_not_count():
    server = ToyServer(high="k4v4", window=0)
    share = server.runtime.running_share
    resumed = SimpleNamespace(output_ids=[1], full_untruncated_fill_ids=[0] * P)
    server.tree.note_admitted(resumed)
    assert share.since == 0

"""When running requests may hold less than the whole memory, unless the operator says so."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_kvc.cache.running_share import RENEWAL, SETTLE, STEP, TRIAL, GhostList, RunningShare, Work

from .model import P, ToyServer

MEMORY = 1000.0  # tokens


def serve(share: RunningShare, prompts: int, again: int, steps: float, running: int = 10) -> list[float]:
    """Admit prompts of 100 tokens, all computed and `again` of them dropped before, with `steps` decode steps of
    `running` requests after each. Returns the shares that followed."""
    shares = []
    for i in range(prompts):
        share.admit(100, 100, again, MEMORY)
        for _ in range(int(steps * (i + 1)) - int(steps * i)):
            share.decode(running)
        shares.append(share.now)
    return shares


def ghosts(limit: int, *blocks: int) -> GhostList:
    known = GhostList()
    known.limit = limit
    known.add(blocks)
    return known


def test_ghosts_count_up_to_the_first_missing_block():
    known = ghosts(100, 1, 2, 3, 5)
    assert known.take([7, 1]) == 0
    assert known.take([1, 2, 4, 5]) == 2 and len(known) == 2
    assert known.take([1, 2, 3]) == 0 and known.take([3, 5]) == 2


def test_ends_of_earliest_ghosts_are_forgotten_first():
    known = ghosts(5, 1, 2, 3)
    known.add([4, 5])
    known.add([2])  # dropped again
    known.add([6])
    assert len(known) == 5 and known.take([3]) == 0
    known.add([7])
    assert known.take([1]) == 0 and known.take([4, 5]) == 2 and known.take([2]) == 1


def test_limit_holds_while_dropped_tokens_take_longer_than_decode_steps():
    share = RunningShare(None)
    few = 100 / STEP  # decode steps that take as long as 100 tokens
    assert set(serve(share, 100, 60, steps=few)) == {1.0}
    shares = serve(share, 30, 90, steps=few / 2)
    assert shares[0] == 1.0 and shares[-1] == 0.5
    share.before *= 2  # the limit helps
    assert set(serve(share, 300, 30, steps=few / 2)) == {0.5}
    assert serve(share, 100, 0, steps=few / 2)[-1] == 1.0


def test_limit_that_does_not_help_pauses_longer_each_time():
    """The limit begins after three times as many prompt tokens as the memory holds, and lasts for 8 times as many. It
    then pauses for 8, 16, 32 and 64 times as many."""
    shares = serve(RunningShare(None), 2200, 90, steps=0.3)
    changes = [i for i in range(1, 2200) if shares[i - 1] != shares[i]]
    assert shares[0] == 1.0
    assert [round((end - begin) / 10) for begin, end in pairwise([0, *changes])] == [3, 8, 8, 8, 16, 8, 32, 8, 64, 8]


def test_limit_is_tried_anew_after_a_long_time():
    """Work that was measured long ago says little."""
    share = RunningShare(None)
    serve(share, 30, 90, steps=0.3)
    share.before *= 2
    shares = serve(share, 1450, 90, steps=0.3)
    changes = [i for i in range(1, 1400) if shares[i - 1] != shares[i]]
    assert [(i + 1) // 10 for i in changes] == [RENEWAL, RENEWAL + SETTLE, RENEWAL + SETTLE + TRIAL]


def test_limit_ends_while_every_prompt_waits():
    share = RunningShare(None)
    serve(share, 35, 90, steps=0.3)
    ended = [share.decode(1) for _ in range(5000)]
    assert share.now == 1 and sum(ended) == 1
    shares = serve(share, 25, 90, steps=0.3)  # one span suffices now: the end of this one, and the next
    assert shares.index(0.5) == 14
    for _ in range(5000):
        share.decode(1)
    serve(share, 100, 0, steps=0.3)
    assert serve(share, 35, 90, steps=0.3).index(0.5) >= 10 * SETTLE - 1  # after a long time without a limit


@pytest.mark.parametrize("huge", [0, 500, 950, 1300])
@pytest.mark.parametrize("burst", [1, 8, 16])
def test_moments_without_decode_steps_begin_no_limit(huge, burst):
    """Dropped tokens take half as long as decode steps, but a prompt as long as the memory and those that queued up
    behind it are admitted without a step between them."""
    share, steps = RunningShare(None), 0
    for i in range(400):
        if i % 100 == 50:
            share.admit(huge, huge, 0, MEMORY)
            steps = -burst
        share.admit(50, 50, 32, MEMORY)
        steps += 1
        if steps > 0 and i % 4 == 0:
            share.decode(10)
        assert share.now == 1


@pytest.mark.parametrize("given", [1.0, 0.3])
def test_share_that_the_operator_gives_stays(given):
    assert set(serve(RunningShare(given), 100, 90, steps=0)) == {given}


def prompts(draw: random.Random) -> list[list[int]]:
    """Sessions that grow, are cut back, or branch off another one."""
    sessions, out = [[] for _ in range(24)], []
    for turn in range(300):
        i = draw.randrange(24)
        match draw.randrange(20):
            case 0:
                sessions[i] = sessions[i][: draw.randrange(2 * P)]
            case 1:
                other = draw.choice(sessions)
                sessions[i] = other[: draw.randint(0, len(other))]
            case _ if len(sessions[i]) > 12 * P:
                sessions[i] = []
        sessions[i] = [*sessions[i], turn, *draw.choices(range(1000), k=draw.randint(1, 2 * P))]
        out.append(sessions[i])
    return out


def test_tree_counts_what_was_computed_before():
    """The tokens that are computed although they follow each other in a set of all blocks that were ever cached."""
    server, known, expected = ToyServer(high="k4v4", window=0, blocks=20), set(), 0
    for tokens in prompts(random.Random(0)):
        blocks = [tuple(tokens[:end]) for end in range(P, len(tokens) + 1, P)]
        match = server.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), None)))
        missed = blocks[match.device_prefix_len // P :]
        expected += P * next((i for i, block in enumerate(missed) if block not in known), len(missed))
        req = server.admit(tokens)
        assert req is not None
        server.finish(req)
        known.update(blocks)
    assert server.runtime.counters.evicted_blocks > 50 and expected > 20 * P
    assert server.runtime.counters.recomputed_tokens == expected


def test_prompt_counts_once_and_an_empty_one_not_at_all():
    server = ToyServer(high="k4v4", window=0)
    share, root = server.runtime.running_share, server.tree.root_node.id
    prompt = {"prefix_len": 0, "extra_key": None, "cache_salt": None, "last_node": root}
    server.tree.note_admitted(SimpleNamespace(full_untruncated_fill_ids=array("q"), **prompt))
    assert share.admitted == 0
    req = SimpleNamespace(full_untruncated_fill_ids=array("q", range(P)), **prompt)
    for _ in range(2):  # the second time after a retraction
        server.tree.note_admitted(req)
    assert share.work.computed == P


def test_private_blocks_leave_no_ghosts():
    """Blocks of a private request are dropped when it ends, and no prompt continues them."""
    server = ToyServer(high="k4v4", window=0)
    tokens = [*range(4 * P), 1]
    queued = SimpleNamespace(kvc_private=True, cache_salt="own", extra_key=None)
    server.finish(server.admit(tokens, queued=queued))
    assert not len(server.runtime.running_share.ghosts)
    server.finish(server.admit(tokens))
    server.tree.evict(EvictParams(num_tokens=4 * P))
    assert len(server.runtime.running_share.ghosts) == 4


def test_flush_forgets_all():
    server = ToyServer(high="k4v4", window=0)
    serve(server.runtime.running_share, 35, 90, steps=0)
    assert server.runtime.running_share.now == 0.5
    server.tree.reset()
    share = server.runtime.running_share
    assert share.now == 1 and share.work == Work() and not share.past and not len(share.ghosts)

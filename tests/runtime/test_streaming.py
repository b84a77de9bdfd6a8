"""Streaming sessions under SGLang's scheduler: each turn hits the full blocks of earlier turns."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session, SessionController

from kvc_patches import sessions
from sglang_kvc.adapter.tree_host import HostCache

from .audit import check_tree
from .model import P, make_runtime
from .overlap import Overlap, configured

SESSION_PARAMS = {"replace": False, "drop_previous_output": False, "offset": 0}


class Received(SimpleNamespace):
    """SGLang's request message; unset fields are None."""

    def __getattr__(self, name):
        return None


class Chat:
    """A client with one streaming session; every row that a turn reads is checked."""

    def __init__(self, server: Overlap, name: str):
        self.server, self.session = server, Session(0, name, streaming=True)
        server.tree_cache.open_radix_session(name)

    def ask(self, new: list[int], answer: list[int], salt: str | None = None, **session_params) -> Req:
        params = SamplingParams(max_new_tokens=len(answer))
        params.normalize(None)
        received = Received(
            rid=str(len(self.server.requests)), input_ids=array("q", new), sampling_params=params,
            return_hidden_states=False, extra_key=salt,
            session_params=SimpleNamespace(**{**SESSION_PARAMS, **session_params}),
        )  # fmt: skip
        req = self.session.create_req(received, None, 1 << 20)
        req = sessions.after_create_req(req, self.session)
        req.session_generation = self.server.tree_cache.ensure_session_generation(self.session.session_id)
        self.server.queue(req, answer)
        return req

    def turn(self, new: list[int], answer: list[int], salt: str | None = None) -> Req:
        req = self.ask(new, answer, salt)
        finish(self.server)
        assert list(req.output_ids) == answer
        return req


def finish(server: Overlap) -> None:
    while server.busy:
        server.turn()
    server.turn()  # idle: settles
    check_tree(server)


@contextlib.contextmanager
def serving(retract_every: int = 1000, **options):
    runtime = make_runtime(**{"high": "k4v4", "window": 0, **options})
    with configured(runtime, 2 * P, retract_every=retract_every), get_parallel().override(tp_rank=0):
        yield Overlap(runtime, 2 * P, disable=False, enable_session_radix_cache=True)


def border(tokens: int) -> int:
    """Tokens in the full blocks of a sequence."""
    return tokens // P * P


@pytest.mark.parametrize("retract_every", [1000, 7])
def test_turn_recomputes_no_full_block(retract_every):
    with serving(retract_every) as server:
        chat, history, retracted = Chat(server, "chat"), [], 0
        for i, (n, answer) in enumerate([(2 * P + 9, P), (5, 1), (P, 2 * P + 3), (1, 7)]):
            new = [1000 * (i + 1) + j for j in range(n)]
            server.submit([7, i], [8] * 2 * P, None, None)  # one of two running requests may be retracted
            req = chat.turn(new, [1000 * (i + 1) + 500 + j for j in range(answer)])
            assert list(req.origin_input_ids) == history + new
            # The last token of an answer is written with the next turn.
            assert req.cached_tokens == border(len(history) - 1 if history else 0)
            history = [*req.origin_input_ids, *req.output_ids]
            retracted += req.retraction_count
        assert bool(retracted) == (retract_every == 7)


def test_aborted_turn_is_forgotten():
    with serving() as server:
        chat = Chat(server, "chat")
        first = chat.turn([1] * (P + 3), [2] * 4)
        history = [*first.origin_input_ids, *first.output_ids]
        second = chat.ask([3] * P, [4] * P)
        for _ in range(8):
            server.turn()
        assert second.output_ids
        server.abort(second.rid)
        finish(server)
        assert isinstance(second.finished_reason, FINISH_ABORT)
        third = chat.turn([5] * 3, [6] * 4)
        assert list(third.origin_input_ids) == history + [5] * 3
        assert third.cached_tokens == border(len(history) - 1)


def test_session_runs_one_turn_at_a_time():
    with serving() as server:
        chat = Chat(server, "chat")
        first = chat.ask([1] * P, [2] * (P + 20))
        for _ in range(4):
            server.turn()
        for session_params in ({}, {}, {"offset": 3}):
            refused = chat.ask([3] * 5, [4], **session_params)
            assert refused.to_finish is not None and refused.session is None
            for _ in range(4):
                server.turn()
        finish(server)
        assert list(first.output_ids) == [2] * (P + 20)
        assert list(chat.turn([5], [6]).origin_input_ids) == [1] * P + [2] * (P + 20) + [5]


def test_blocks_of_open_session_are_evicted_last():
    with serving(blocks=8, high="bf16") as server:
        chat, tree = Chat(server, "chat"), server.tree_cache
        chat.turn([1] * P, [2] * P)
        server.submit([3] * P, [4] * P, None, None)
        finish(server)

        def left() -> set[int]:
            return {n.key.token_ids[0] for n in tree.root_node.children.values()}

        with server.runtime.capacity.exact_need(server.token_to_kv_pool_allocator.available_size() + P):
            tree.evict(EvictParams(num_tokens=P))
        assert left() == {1}
        server.submit([3] * P, [4] * P, None, None)
        finish(server)
        tree.release_radix_session("chat")
        with server.runtime.capacity.exact_need(server.token_to_kv_pool_allocator.available_size() + P):
            tree.evict(EvictParams(num_tokens=P))
        assert left() == {3}


def test_ranks_close_sessions_in_same_pass(monkeypatch):
    """Rank 1 sees the timeout first. Both see the end of a turn in the same pass, and look at different times."""
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", object())
    barrier, votes = threading.Barrier(2, timeout=10), [None, None]

    def closings(rank: int) -> dict[str, int]:
        """The pass in which each session was closed."""

        def reduce(values: torch.Tensor, op) -> None:
            votes[rank] = values.clone()
            barrier.wait()
            values.copy_(torch.minimum(*votes))
            barrier.wait()

        tree = MagicMock(tp_world_size=2, _all_reduce=reduce)
        tree.agreed = functools.partial(HostCache.agreed, tree)
        controller, passes = SessionController(tree), {}
        controller._last_reap_time = time.monotonic() - 10 * rank
        for name, timeout in (("ended", None), ("timed out", 1000.0), ("open", 1e9)):
            controller.sessions[name] = Session(0, name, streaming=True, timeout=timeout)
        ended = controller.sessions["ended"]
        ended._inflight = ended.close_on_finish = True
        for i in range(200):
            ended._inflight &= i < 50
            if i == 10 + 90 * (1 - rank):
                controller.sessions["timed out"].last_active_time -= 2000
            before = set(controller.sessions)
            sessions.around_maybe_reap(SessionController.maybe_reap, controller, time.monotonic())
            passes |= dict.fromkeys(before - set(controller.sessions), i)
        return passes

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(closings, range(2))
    assert first == second and set(first) == {"ended", "timed out"}
    assert first["ended"] >= 50 and first["timed out"] >= 100


def test_session_that_timed_out_during_turn_is_closed_once(monkeypatch):
    """SGLang logs each attempt, and the ranks look for ended sessions many times per second."""
    monkeypatch.setattr("sglang_kvc.cache.runtime._current", object())
    controller, attempts = SessionController(MagicMock(tp_world_size=2, agreed=lambda values: values)), []
    close = controller._close
    controller._close = lambda name: (attempts.append(name), close(name))
    busy = controller.sessions["busy"] = Session(0, "busy", streaming=True, timeout=1.0)
    busy._inflight, busy.last_active_time = True, time.monotonic() - 10
    for i in range(200):
        busy._inflight &= i < 100
        sessions.around_maybe_reap(SessionController.maybe_reap, controller, time.monotonic())
        assert ("busy" in controller) or i >= 100
    assert attempts == ["busy", "busy"] and "busy" not in controller  # during the turn and after it


@pytest.fixture
def hooked(monkeypatch):
    """SGLang's sessions tell the eviction order when they are closed."""
    close = SessionController._close
    monkeypatch.setattr(SessionController, "_close", lambda self, name: sessions.around_close(close, self, name))


@pytest.mark.parametrize("during_turn", [False, True])
@pytest.mark.parametrize(
    ("trust", "timeout", "first"), [("salt", None, "chat"), ("all", None, "other"), ("salt", 60.0, "chat")]
)
def test_blocks_that_closed_session_alone_finds_are_evicted_first(hooked, during_turn, trust, timeout, first):
    """With `--kvc-eviction reuse`. A session is closed by its client or by its timeout."""
    with serving(blocks=8, policy="leankv", high="k8v4", low="k4v2", eviction="reuse", trust=trust) as server:
        tree, chat = server.tree_cache, Chat(server, "chat")
        controller = SessionController(tree)
        controller.sessions["chat"], chat.session.timeout = chat.session, timeout
        server.submit([3] * P, [4], None, "salt")
        finish(server)
        chat.turn([1] * P, [2] * 3)
        last = chat.ask([5] * P, [6] * 9)
        while during_turn and not last.output_ids:
            server.turn()
        if not during_turn:
            finish(server)
        assert next_evicted(tree) == "other"
        if timeout is None:
            controller.close(SimpleNamespace(session_id="chat"))
        else:
            chat.session.last_active_time -= timeout
            controller.maybe_reap(time.monotonic() + 10)
            assert during_turn or "chat" not in controller
        finish(server)
        controller.maybe_reap(time.monotonic() + 20)
        assert last.finished() and "chat" not in controller
        assert next_evicted(tree) == first


@pytest.mark.parametrize("salts", [(None, "salt"), ("salt", None)])
@pytest.mark.parametrize("during_turn", [False, True])
def test_closed_session_finishes_only_turns_without_salt(hooked, during_turn, salts):
    """Other prompts find the blocks of a salted turn."""
    with serving(blocks=12, policy="leankv", high="k8v4", low="k4v2", eviction="reuse") as server:
        tree, chat = server.tree_cache, Chat(server, "chat")
        controller = SessionController(tree)
        controller.sessions["chat"] = chat.session
        server.submit([3] * P, [4], None, "salt")
        finish(server)
        first = chat.turn([1] * P, [2] * 3, salts[0])
        last = chat.ask([5] * P, [6] * 9, salts[1])
        while during_turn and not last.output_ids:
            server.turn()
        if not during_turn:
            finish(server)
        controller.close(SimpleNamespace(session_id="chat"))
        finish(server)
        controller.maybe_reap(time.monotonic() + 10)
        leaf = tree.tree_core.evictable_device_leaves.next()
        assert [req.kvc_use.done for req in (first, last)] == [salt is None for salt in salts]
        assert 3 not in leaf.key.token_ids


def next_evicted(tree) -> str:
    """Whose leaf is the next to be evicted."""
    leaf = tree.tree_core.evictable_device_leaves.next()
    return "other" if 3 in leaf.key.token_ids else "chat"

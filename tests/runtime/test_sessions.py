"""Sessions (`--enable-session-radix-cache`): the cached blocks of an open session are evicted last."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from .model import P, ToyServer


def prompt(i: int) -> list[int]:
    return [*range(1000 * i, 1000 * i + P), 1]


def turn(server: ToyServer, tokens: list[int], session: str | None = None) -> None:
    """A request from its prefill to its end."""
    req = server.admit(tokens)
    req.session_id = session
    req.session_generation = session and server.tree.ensure_session_generation(session)
    server.finish(req)


def cached(server: ToyServer) -> list[int]:
    """The prompts whose block the tree still has."""
    return sorted(n.key.token_ids[0] // 1000 for n in server.tree.root_node.children.values())


def evict_one(server: ToyServer) -> None:
    with server.runtime.capacity.exact_need(server.allocator.available_size() + P):
        server.tree.evict(EvictParams(num_tokens=P))


@pytest.fixture
def server() -> ToyServer:
    toy_server = ToyServer(high="bf16", blocks=8, tree={"enable_session_radix_cache": True})
    for i in range(4):
        turn(toy_server, prompt(i), "chat" if i in (0, 1) else None)
    return toy_server


def test_blocks_of_open_session_are_evicted_last(server):
    order = []
    for _ in range(4):
        before = cached(server)
        evict_one(server)
        order += set(before) - set(cached(server))
    assert order[:2] == [2, 3] and set(order[2:]) == {0, 1}
    server.check()


def test_closed_session_is_evicted_in_usual_order(server):
    server.tree.release_radix_session("chat")
    evict_one(server)
    assert cached(server) == [1, 2, 3]
    server.check()


def test_later_turn_extends_session_to_its_end(server):
    turn(server, [*prompt(0)[:P], *range(7000, 7000 + P), 1], "chat")
    (node,) = (n for n in server.tree.root_node.children.values() if n.key.token_ids[0] == 0)
    (leaf,) = node.children.values()
    refs = [server.tree.component.session_ref(n) for n in (node, leaf)]
    assert refs[1] == 1 and refs[0] >= 1
    server.tree.release_radix_session("chat")
    assert [server.tree.component.session_ref(n) for n in (node, leaf)] == [0, 0]
    server.check()

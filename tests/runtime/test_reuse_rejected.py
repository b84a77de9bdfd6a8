"""`--kvc-eviction reuse`: requests that SGLang rejects or aborts before a pass has seen them in the queue."""

from __future__ import annotations

import pytest
from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.runtime_context import get_parallel

from sglang_kvc.cache.reuse import uses_of
from sglang_kvc.options.config import REUSE
from sglang_kvc.options.request_hints import DONE

from .model import P, make_runtime
from .overlap import Overlap, configured

FIRST = [*range(3 * P), 1]
ANSWER = 5000


@pytest.fixture
def server():
    runtime = make_runtime(blocks=12, high="k4v4", window=0, eviction=REUSE)
    with configured(runtime, 4 * P, retract_every=10**6):
        server = Overlap(runtime, 4 * P, disable=False)
        server.check_every, server.send_abort_output = 1000, lambda *args: None
        yield server


def submit(server: Overlap, prompt: list[int], answer: int = 1, hints: dict | None = None):
    server.submit(prompt, [ANSWER + i for i in range(answer)], None, None, hints)
    return next(reversed(server.requests.values()))


def run(server: Overlap, turns: int) -> None:
    for _ in range(turns):
        server.turn()


def test_rejected_turn_leaves_its_session_as_it_was(server):
    """The queue is full when a session's next prompt comes. Another try continues the session."""
    use = submit(server, FIRST).kvc_use
    run(server, 6)
    assert not use.busy
    server.max_queued_requests = 0
    rejected = submit(server, [*FIRST, ANSWER, 2])
    server.max_queued_requests = None
    assert rejected.kvc_use is use and not server.waiting_queue
    run(server, 2)
    assert not use.busy
    again = submit(server, [*FIRST, ANSWER, 2], 1, {DONE: True})
    run(server, 6)
    node = server.tree_cache.tree_core.node_by_id(again.last_node)
    assert again.kvc_use is use and use.done and uses_of(node) == (use,)


def test_refused_turn_leaves_its_session_as_it_was(server):
    """It is too long. The client then cuts its history, and its hint holds for all blocks of the session."""
    use = submit(server, FIRST).kvc_use
    run(server, 6)
    with get_parallel().override(tp_rank=0):  # SGLang's rank 0 logs the refusal
        refused = submit(server, [*FIRST, ANSWER, *range(9000, 9000 + 400 * P)])
    assert "does not fit" in refused.to_finish.message
    run(server, 6)
    again = submit(server, [*FIRST, ANSWER, 2], 1, {DONE: True})
    run(server, 6)
    node = server.tree_cache.tree_core.node_by_id(again.last_node)
    assert again.kvc_use is use and use.done and uses_of(node) == (use,)


@pytest.mark.parametrize("how", ["rejected", "aborted"])
def test_blocks_of_retracted_request_that_never_returns_are_evicted(server, how):
    """A pause retracts the request. SGLang rejects it because the queue is full, or its client aborts it."""
    req = submit(server, [*range(6 * P), 1], 100)
    run(server, 8)
    assert req.output_ids and not req.finished()
    server.max_queued_requests = 0 if how == "rejected" else None
    server.pause_generation(PauseGenerationReqInput(mode="retract"))
    server.max_queued_requests = None
    if how == "aborted":
        server.waiting_queue.remove(req)
        server._release_aborted_request(req)
    server._engine_paused = False
    leaf, use = req.kvc_use.leaf, req.kvc_use
    assert not server.waiting_queue and use.place is not None
    run(server, 2)
    assert use.place is None and not use.busy
    for i in range(1, 20):
        other = submit(server, [*range(1000 * i, 1000 * i + 4 * P), 1])
        while not other.finished():
            server.turn()
    assert server.tree_cache.tree_core._node_arena.get(leaf.id) is None, "other sessions cannot evict them"

"""Sessions of tensor-parallel ranks that time out, or whose client closed them during a turn.

The eviction order depends on open sessions, so all ranks must close one in the same pass. In SGLang each rank looks for
such sessions about once a second by its own clock.
"""

from __future__ import annotations

from typing import Any

PASSES = 16  # of the scheduler, which the ranks make together


def close_ended(controller: Any) -> None:
    """`SessionController.maybe_reap` on one of several ranks. A session counts as timed out once it
    has on every rank."""
    controller.kvc_passes = getattr(controller, "kvc_passes", 0) + 1
    if controller.kvc_passes % PASSES:
        return
    sessions = [*controller.sessions.values()]
    limited = [session for session in sessions if session.timeout is not None]
    for session in sessions:
        turn_runs = session.streaming and session._inflight
        if session.close_on_finish and not turn_runs and controller._all_requests_finished(session):
            session.close_on_finish = False
            controller._close(session.session_id)
    for session, timed_out in zip(limited, controller.tree_cache.agreed([s.is_timed_out() for s in limited])):
        if timed_out and session.session_id in controller and not session.close_on_finish:
            controller._close(session.session_id)

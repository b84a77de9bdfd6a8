"""`session_controller`: detaches a request that a streaming session rejects, closes ended sessions in the same pass on
all ranks, and tells the eviction order of closed sessions.

In SGLang the rejected request ends like a turn, which tells the session that no turn is under way. A second turn would
then be accepted while the first still runs, and both would share token arrays that the prefix tree uses as keys.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook

CONTROLLER = "sglang.srt.session.session_controller.SessionController"
PARAMETERS = "self req tokenizer vocab_size eos_token_ids disagg_mode req_factory"


def after_create_req(result, self, *args, **kwargs):
    if current() is not None and self.streaming and result.to_finish is not None:
        result.session = None
    return result


def around_close(orig, self, session_id):
    session = self.sessions[session_id]
    orig(self, session_id)
    if current() is not None and self.tree_cache.reuse is not None:
        self.tree_cache.reuse.close(session)


def around_maybe_reap(orig, self, now, interval=1.0):
    if current() is None or self.tree_cache.tp_world_size == 1:
        return orig(self, now, interval)
    from sglang_kvc.adapter.session_timeout import close_ended

    return close_ended(self)


def register() -> None:
    hook("sglang.srt.session.session_controller.Session.create_req", "after", PARAMETERS, after_create_req)
    hook(f"{CONTROLLER}._close", "around", "self session_id", around_close)
    hook(f"{CONTROLLER}.maybe_reap", "around", "self now interval", around_maybe_reap)

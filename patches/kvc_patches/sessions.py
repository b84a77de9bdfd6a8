"""`session_controller`: detaches a request that a streaming session rejects, and tells the eviction order of closed
sessions.

In SGLang the rejected request ends like a turn, which tells the session that no turn is under way. A second turn would
then be accepted while the first still runs, and both would share token arrays that the prefix tree uses as keys.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook

PARAMETERS = "self req tokenizer vocab_size eos_token_ids disagg_mode req_factory"


def after_create_req(result, self, *args, **kwargs):
    if current() is not None and self.streaming and result.to_finish is not None:
        result.session = None
    return result


def around_close(orig, self, recv_req):
    session = self.get(recv_req.session_id)
    orig(self, recv_req)
    if current() is not None and session is not None and self.tree_cache.reuse is not None:
        self.tree_cache.reuse.close(session)


def register() -> None:
    hook("sglang.srt.session.session_controller.Session.create_req", "after", PARAMETERS, after_create_req)
    hook("sglang.srt.session.session_controller.SessionController.close", "around", "self recv_req", around_close)

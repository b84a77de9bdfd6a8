"""`session_controller`: detaches a request that a streaming session rejects, and frees private blocks when it closes.

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


def around_close(orig, self, session_id):
    """Free the blocks of unsalted turns, which only the session's own turns could hit."""
    turns = [node.req for node in self.sessions[session_id].req_nodes.values()]
    orig(self, session_id)
    if current() is not None and session_id not in self.sessions:  # otherwise SGLang closes it when its turn has ended
        for req in turns:
            self.tree_cache.drop_private(req)


def register() -> None:
    module = "sglang.srt.session.session_controller"
    hook(f"{module}.Session.create_req", "after", PARAMETERS, after_create_req)
    hook(f"{module}.SessionController._close", "around", "self session_id", around_close)

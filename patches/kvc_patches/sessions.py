"""`session_controller.Session.create_req`: detaches a request that a streaming session rejects.

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


def register() -> None:
    hook("sglang.srt.session.session_controller.Session.create_req", "after", PARAMETERS, after_create_req)

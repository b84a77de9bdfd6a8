"""`session_controller.Session.create_req`: a request that a streaming session rejects is none of its turns.

SGLang lets it end as a turn, which tells the session that none is under way. A second one would then be accepted beside
the first, and both share arrays of tokens, by which the prefix tree names blocks.
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

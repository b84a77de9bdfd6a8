"""Streaming sessions over the prefix tree: a turn that ends leaves its full blocks there, and the next turn hits them.

SGLang's own sessions keep a turn's row for the next turn, so they would own blocks between turns, and a turn would
start inside a block. Here a turn is a request like any other. The last block, which is not full, is computed again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def streams(req: Req) -> bool:
    """Whether the request is a turn of a streaming session."""
    return req.session is not None and req.session.streaming


class StreamingCache(UnifiedRadixCache):
    """The part of `KvcRadixCache` that serves `--enable-streaming-session`."""

    def maybe_hand_to_session(self, req: Req) -> None:
        """Do nothing: a session never takes over the row of a request."""

    def claim_kv_row(self, req: Req) -> bool:
        return False

    def register_session(self, req: Req) -> None:
        """Register the session of a finished request: its blocks are evicted after all others until it is closed.

        SGLang skips streaming sessions here, because they own their KV."""
        turn = req
        if streams(req):
            turn = SimpleNamespace(
                session=None, session_id=req.session.session_id, session_generation=req.session_generation
            )
        self.session_refs.register_session_ref(turn, leaf=req.last_node)

    @staticmethod
    def end_turn(req: Req) -> None:
        """Tell the session that its turn has ended. An aborted turn is forgotten, and the next turn continues after the
        last answered one. A retracted turn has not ended."""
        if not streams(req) or not req.finished():
            return
        if isinstance(req.finished_reason, FINISH_ABORT):
            req.release_mm_inputs_on_abort()
            req.session.abort_req()
        else:
            req.output_ids = req.output_ids[: req.finished_len]
            req.session.finish_req(req)

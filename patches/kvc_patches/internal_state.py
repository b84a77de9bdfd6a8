"""`Scheduler.get_internal_state`: statistics under the key "kvc" of `/server_info`'s `internal_states`."""

from __future__ import annotations

import logging
import time
from typing import Any

from .limits import longest_prompts
from .lookup import current
from .registry import hook

logger = logging.getLogger("sglang_kvc")
REUSE_FACTOR = 10  # statistics are reused for this multiple of the time it took to collect them
_last: tuple[Any, int, float, dict] | None = None  # runtime, `runtime.cleared`, time of expiry, statistics


def snapshot(runtime) -> dict:
    """Statistics, head map and settings of this rank.

    Any client can ask for them, and the scheduler's thread collects them. To limit this to a tenth of its time, the
    last statistics are returned again for `REUSE_FACTOR` times as long as it took to collect them, or until a tier is
    emptied."""
    global _last
    began = time.monotonic()
    if _last is None or _last[0] is not runtime or _last[1] != runtime.cleared or began > _last[2]:
        state = _figures(runtime)
        ended = time.monotonic()
        _last = runtime, runtime.cleared, ended + REUSE_FACTOR * (ended - began), state
    return _last[3]


def _figures(runtime) -> dict:
    """The statistics in builtins. A failure must not end the server."""
    from sglang_kvc.stats.collect import figures

    state: dict = {"config": runtime.config.to_dict()}
    try:
        state["longest_prompt"] = longest_prompts(runtime)
        stats, head_map = figures(runtime)
        state |= {"stats": stats.to_dict(), "head_map": head_map.to_dict()}
    except Exception as e:
        logger.exception("kvc: no statistics for /server_info")
        state["error"] = f"{type(e).__name__}: {e}"
    return state


def after_get_internal_state(result, self, recv_req):
    if (runtime := current()) is not None:
        result.internal_state["kvc"] = snapshot(runtime)
    return result


def register() -> None:
    hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "after",
        "self recv_req",
        after_get_internal_state,
    )

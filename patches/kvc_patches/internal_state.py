"""`Scheduler.get_internal_state`: our figures under the key "kvc" of `/server_info`'s `internal_states`."""

from __future__ import annotations

import logging

from .registry import hook

logger = logging.getLogger("sglang_kvc")


def snapshot(runtime) -> dict:
    """Figures, map and settings of this rank, in builtins; a figure that cannot be had must not end the server."""
    state: dict = {"config": runtime.config.to_dict()}
    try:
        state["stats"] = runtime.stats(detail=True).to_dict()
        state["head_map"] = runtime.head_map().to_dict()
    except Exception as e:
        logger.exception("kvc: no statistics for /server_info")
        state["error"] = f"{type(e).__name__}: {e}"
    return state


def after_get_internal_state(result, self, recv_req):
    from sglang_kvc.runtime import current

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

"""`SchedulerWeightUpdaterManager`: keeps files apart by the weights that wrote them.

A weight update may keep the cache, or fail after it changed some weights. The cache then mixes blocks of two sets of
weights, and the disk tier neither writes nor reads until the cache is flushed. A session whose weights arrive without
a call (RDMA) changes them until it ends.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def before_update(self, recv_req):
    if (runtime := current()) is not None:
        runtime.weights_changed = True


def before_begin(self, recv_req):
    """SGLang refuses a second session, and changes no weight."""
    if self._session is None:
        before_update(self, recv_req)


def before_update_in_session(self, recv_req):
    """SGLang refuses these updates outside a session, and changes no weight."""
    if self._session is not None:
        before_update(self, recv_req)


def before_end(self, recv_req):
    if (runtime := current()) is not None and self._session is not None and not self._session.loaded_weights:
        runtime.weights_changed = True


def before_check(self, recv_req):
    """The action `reset_tensors` overwrites the weights with random numbers."""
    if recv_req.action == "reset_tensors":
        before_update(self, recv_req)


UPDATES = {
    "check_weights": before_check,
    "begin_weight_update": before_begin,
    "update_weights_from_disk": before_update,
    "update_weights_from_distributed": before_update_in_session,
    "update_weights_from_ipc": before_update,
    "update_weights_from_tensor": before_update_in_session,
}


def register() -> None:
    for name, before in UPDATES.items():
        hook(f"{UPDATER}.{name}", "before", "self recv_req", before)
    hook(f"{UPDATER}.end_weight_update", "before", "self recv_req", before_end)

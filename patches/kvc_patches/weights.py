"""`SchedulerWeightUpdaterManager`: keeps files apart by the weights that wrote them.

A weight update may keep the cache, or fail after it changed some weights. The cache then mixes blocks of two sets of
weights, and the disk tier neither writes nor reads until the cache is flushed. A session whose weights arrive without
a call (RDMA) changes them until it ends.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)


def before_update(self, recv_req):
    if (runtime := current()) is not None:
        runtime.weights_changed = True


def before_end(self, recv_req):
    if (runtime := current()) is not None and self._session is not None and not self._session.loaded_weights:
        runtime.weights_changed = True


def register() -> None:
    for name in UPDATES:
        hook(f"{UPDATER}.{name}", "before", "self recv_req", before_update)
    hook(f"{UPDATER}.end_weight_update", "before", "self recv_req", before_end)

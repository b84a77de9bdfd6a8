"""`SchedulerWeightUpdaterManager.flush_cache_after_weight_update`: keeps files apart by the weights that wrote them.

A weight update may keep the cache. The cache then mixes blocks of two sets of weights, and the disk tier neither writes
nor reads until the cache is flushed.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook


def before_flush(self, recv_req, success, message):
    if (runtime := current()) is not None:
        runtime.weights_changed = True


def register() -> None:
    hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "flush_cache_after_weight_update",
        "before",
        "self recv_req success message",
        before_flush,
    )

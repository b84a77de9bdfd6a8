"""`SchedulerWeightUpdaterManager.flush_cache_after_weight_update`: files belong to the weights that wrote their blocks.

An update of the weights may keep the cache. Its blocks are then of two sets of weights, and the disk tier neither
writes nor reads until the cache is flushed.
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

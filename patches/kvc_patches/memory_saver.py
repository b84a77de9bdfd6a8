"""`SchedulerWeightUpdaterManager`: protects memory that `--enable-memory-saver` has released.

SGLang releases the memory before it flushes the cache, so the flush must not touch the page store. It must not read
released weights either, to name the folder of the disk tier.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook
from .scheduler import end_loads

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
KV_CACHE, WEIGHTS = "GPU_MEMORY_TYPE_KV_CACHE", "GPU_MEMORY_TYPE_WEIGHTS"


def _runtime(recv_req, name: str):
    """The runtime, if the request covers the memory with the tag of this name. A request without tags covers all
    memory."""
    from sglang.srt import constants

    tag = getattr(constants, name)
    return current() if tag in (recv_req.tags or [tag]) else None


def around_release(original, self, recv_req):
    """SGLang releases memory only if it is idle, and weights after everything else, so a flush in the same request may
    still read them."""
    if self.scheduler is not None:
        end_loads(self.scheduler)
    if (runtime := _runtime(recv_req, KV_CACHE)) is not None and self.memory_saver_adapter.enabled:
        runtime.release()
    result = original(self, recv_req)
    if (runtime := _runtime(recv_req, WEIGHTS)) is not None:
        runtime.weights_released = self.memory_saver_adapter.enabled
    return result


def after_resume(result, self, recv_req):
    if (runtime := _runtime(recv_req, WEIGHTS)) is not None:
        runtime.weights_released = False
    if (runtime := _runtime(recv_req, KV_CACHE)) is not None and runtime.released:
        runtime.resume()
    return result


def register() -> None:
    hook(f"{MANAGER}.release_memory_occupation", "around", "self recv_req", around_release)
    hook(f"{MANAGER}.resume_memory_occupation", "after", "self recv_req", after_resume)

"""`SchedulerWeightUpdaterManager`: protects the page store while `--enable-memory-saver` has released its memory.

SGLang releases the memory before it flushes the cache, so the flush must not touch the page store.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def _runtime(recv_req):
    """The runtime, if the request covers its memory. A request without tags covers all memory."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    return current() if GPU_MEMORY_TYPE_KV_CACHE in (recv_req.tags or [GPU_MEMORY_TYPE_KV_CACHE]) else None


def before_release(self, recv_req):
    if (runtime := _runtime(recv_req)) is not None and self.memory_saver_adapter.enabled:
        runtime.release()


def after_resume(result, self, recv_req):
    if (runtime := _runtime(recv_req)) is not None and runtime.released:
        runtime.resume()
    return result


def register() -> None:
    hook(f"{MANAGER}.release_memory_occupation", "before", "self recv_req", before_release)
    hook(f"{MANAGER}.resume_memory_occupation", "after", "self recv_req", after_resume)

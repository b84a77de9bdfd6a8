"""`SchedulerInvariantChecker`: makes the leak check compare slots, which add up.

Scheduling reads physical sizes, which change as blocks are compressed and do not add up to SGLang's token total. Every
slot in use belongs to the tree, to a running request or to a load from the host.
"""

from __future__ import annotations

import dataclasses

from .lookup import runtime_of
from .registry import hook


def around_check_full_pool(orig, self, ps, uncached=0):
    allocator = self.token_to_kv_pool_allocator
    if runtime_of(allocator) is None:
        return orig(self, ps, uncached)
    exact = dataclasses.replace(
        ps,
        full_available_size=self.max_total_num_tokens - allocator.used_slots() + self.tree_cache.loading_slots,
        full_evictable_size=self.tree_cache.evictable_slots(),
    )
    return orig(self, exact, uncached)


def register() -> None:
    hook(
        "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_full_pool",
        "around",
        "self ps uncached",
        around_check_full_pool,
    )

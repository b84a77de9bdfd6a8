"""`schedule_policy.SchedulePolicy`: `hrrn` keeps its order when many prompts wait.

SGLang matches every waiting prompt with the radix tree in every pass. To bound that work, it turns to first come, first
served when more than 128 prompts wait, although cached prompts should then be preferred most. Here the order stays, and
a pass matches no more than 32 prompts. `lpm` still falls back, because its order alone lets uncached prompts starve.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook

POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"


def around_determine_active_policy(orig, self, waiting_queue):
    from sglang_kvc.adapter.waiting_order import HRRN

    if current() is not None and self.policy == HRRN:
        return self.policy
    return orig(self, waiting_queue)


def around_compute_prefix_matches(orig, self, waiting_queue, policy):
    if current() is None:
        return orig(self, waiting_queue, policy)
    from sglang_kvc.adapter.waiting_order import match_prompts

    return match_prompts(self, waiting_queue, lambda some: orig(self, some, policy))


def register() -> None:
    hook(f"{POLICY}._determine_active_policy", "around", "self waiting_queue", around_determine_active_policy)
    hook(f"{POLICY}._compute_prefix_matches", "around", "self waiting_queue policy", around_compute_prefix_matches)

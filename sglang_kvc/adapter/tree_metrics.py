"""SGLang's metrics of the hierarchical cache (`--enable-metrics`), fed by the host tier.

The scheduler's thread reports a transfer when it sees its end, and never waits for one. On a GPU a duration is the time
between two events on the stream of the copies, both of which have passed: of a load from its first copy to its last
page, of a save for each buffer that it fills. On a CPU it is that of the clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName

if TYPE_CHECKING:
    from ..cache.host_tier import HostTier
    from ..cache.transfers import Loading

KV = PoolName.KV.value
NO_ROOM = "host_pressure"  # SGLang's reason for blocks that leave the device without a copy


class TierMetrics:
    """Reports the transfers of `tier` to `collector`, a `RadixCacheMetricsCollector` of SGLang."""

    def __init__(self, collector: Any, tier: HostTier, block_tokens: int):
        self.collector, self.tier, self.block_tokens = collector, tier, block_tokens
        tier.transfers.timed = True
        collector.increment_dropped_tokens(num_tokens=0, reason=NO_ROOM, pool=KV)  # the series exists from the start

    def report_load(self, loading: Loading, began: float) -> None:
        """Report a finished load, which was queued when `time.perf_counter` was `began`."""
        self.collector.increment_load_back_num_tokens(num_tokens=len(loading.blocks) * self.block_tokens, pool=KV)
        self.collector.increment_load_back_num_bytes(loading.num_bytes)
        on_device = loading.milliseconds / 1e3
        self.collector.observe_load_back_duration(on_device if loading.events else time.perf_counter() - began)

    def report_saves(self) -> None:
        """Report saves that have ended since the last call, and blocks that were evicted without a copy."""
        for save in self.tier.transfers.take_saved():
            self.collector.increment_backup_num_tokens(num_tokens=save.blocks * self.block_tokens, pool=KV)
            self.collector.increment_backup_num_bytes(save.num_bytes)
            self.collector.observe_backup_duration(save.seconds)
        if dropped := self.tier.take_unsaved():
            self.collector.increment_dropped_tokens(num_tokens=dropped * self.block_tokens, reason=NO_ROOM, pool=KV)

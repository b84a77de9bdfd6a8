"""SGLang's metrics of the hierarchical cache (`--enable-metrics`), fed by the host and disk tiers.

The scheduler's thread reports a transfer when it sees its end, and never waits for one. On a GPU a duration is the time
between two events on the stream of the copies, both of which have passed: of a load from its first copy to its last
page, of a save for each buffer that it fills. On a CPU it is that of the clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_STORAGE,
    StorageMetricsCollector,
    resolve_collector_class,
)

if TYPE_CHECKING:
    from ..cache.host_tier import HostTier
    from ..cache.transfers import Loading

KV = PoolName.KV.value
NO_ROOM = "host_pressure"  # SGLang's reason for blocks that leave the device without a copy


class TierMetrics:
    """Reports the transfers of `tier` to `collector`, a `RadixCacheMetricsCollector` of SGLang."""

    def __init__(self, collector: Any, tier: HostTier, block_tokens: int):
        self.collector, self.tier, self.block_tokens = collector, tier, block_tokens
        self.storage: Any = None  # a `StorageMetricsCollector` of SGLang
        self._written = 0  # blocks reported to it
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

    def attach_storage(self, name: str) -> None:
        """Also report the traffic of the disk tier or of the storage backend `name`."""
        storage = resolve_collector_class(STAT_LOGGER_ROLE_STORAGE, StorageMetricsCollector)
        self.storage = storage(labels=storage_labels(self.collector.labels, name))

    def report_reads(self, blocks: int) -> None:
        """Report blocks that were read into host memory."""
        self.storage.log_prefetched_tokens(blocks * self.block_tokens)

    def report_writes(self, total: int) -> None:
        """Report written blocks, of which there are `total` since start."""
        self.storage.log_backuped_tokens((total - self._written) * self.block_tokens)
        self._written = total


def storage_labels(labels: dict[str, Any], name: str) -> dict[str, Any]:
    """SGLang's labels for a storage backend. The ranks are those in `labels` of the radix cache."""
    ranks = {label: value for label, value in labels.items() if label != "cache_type"}
    return {"storage_backend": name, **ranks, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}

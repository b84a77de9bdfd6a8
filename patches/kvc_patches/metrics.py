"""`PoolStats` and `SchedulerMetricsCollector`: statistics in the periodic log line and in Prometheus.

SGLang calls `get_prefill_usage_msg_parts` and `get_decode_usage_msg_parts` only when it is about to log, and
`log_stats` only with `--enable-metrics`. prometheus_client must not be imported before SGLang has set up its
multi-process folder, so the gauges are created at first use.
"""

from __future__ import annotations

import functools
import logging

from .lookup import current
from .registry import hook

logger = logging.getLogger("sglang_kvc")
POOL_STATS = "sglang.srt.managers.scheduler_components.pool_stats_observer.PoolStats"
COLLECTOR = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector"
PREFIX = "sglang_kvc:"

# name -> (description, value of KvcStats)
GAUGES = {
    "compression_ratio": ("Uncompressed over real bytes, everything resident.", lambda s: s.ratio),
    "compression_ratio_body": ("Uncompressed over real bytes, packed blocks only.", lambda s: s.ratio_body),
    "bytes_per_token": ("Bytes of a resident token, all metadata included.", lambda s: s.bytes_per_token),
    "pages_total": ("Pages of the pool.", lambda s: s.pages_total),
    "pages_free": ("Pages not in use.", lambda s: s.pages_free),
    "block_ids_total": ("Block ids of the pool.", lambda s: s.block_ids_total),
    "block_ids_free": ("Block ids not in use.", lambda s: s.block_ids_free),
    "tokens": ("Tokens resident, pruned ones included.", lambda s: s.tokens),
    "occupancy": ("Share of packed pages' token slots that hold a token.", lambda s: s.occupancy),
    "compacted_blocks": ("Blocks compacted since start.", lambda s: s.compactions),
    "compaction_seconds": ("Host time of compactions since start.", lambda s: s.compaction_ms / 1e3),
    "evicted_blocks": ("Blocks evicted since start.", lambda s: s.evicted_blocks),
    "demoted_blocks": ("Moves of blocks to a lower format since start.", lambda s: s.demoted_blocks),
    "recomputed_tokens": ("Prompt tokens computed again after they were dropped.", lambda s: s.recomputed_tokens),
    "running_share": ("Share of memory for running requests; 1: no limit.", lambda s: s.running_share),
    "host_bytes": ("Bytes of host memory in use.", lambda s: s.host_bytes),
    "host_bytes_total": ("Bytes of host memory; 0 without a host tier.", lambda s: s.host_bytes_total),
    "host_blocks": ("Blocks in host memory.", lambda s: s.host_blocks),
    "host_saved_bytes": ("Bytes copied to the host since start.", lambda s: s.host_saved_bytes),
    "host_loaded_bytes": ("Bytes copied back from the host since start.", lambda s: s.host_loaded_bytes),
    "host_loading": ("Loads from host memory under way.", lambda s: s.host_loading),
    "canceled_loads": ("Loads canceled before they began since start; they are retried.", lambda s: s.canceled_loads),
    "transfer_seconds": ("Host time of copies to and from the host since start.", lambda s: s.transfer_ms / 1e3),
    "disk_bytes": ("Bytes of files of the disk tier.", lambda s: s.disk_bytes),
    "disk_bytes_total": ("Bytes that files may take; 0 with a storage backend.", lambda s: s.disk_bytes_total),
    "disk_blocks": ("Blocks in files; with a storage backend, those written since start.", lambda s: s.disk_blocks),
    "disk_written_bytes": ("Bytes written to files since start.", lambda s: s.disk_written_bytes),
    "disk_read_bytes": ("Bytes read from files since start.", lambda s: s.disk_read_bytes),
    "disk_damaged": ("Damaged files since start.", lambda s: s.disk_damaged),
}
# name -> (description, extra label, values of KvcStats by label)
LABELED_GAUGES = {
    "blocks": ("Blocks in use, by block format.", "format", lambda s: s.blocks_by_format),
    "tier_share": ("Share of (layer, head, token) triples in each tier.", "tier", lambda s: s.tier_shares),
}


class Gauges:
    """All `sglang_kvc:*` gauges, with SGLang's label names."""

    def __init__(self, gauge_cls, labelnames: tuple[str, ...]):
        self.plain = {
            name: gauge_cls(PREFIX + name, doc, labelnames=labelnames, multiprocess_mode="mostrecent")
            for name, (doc, _) in GAUGES.items()
        }
        self.labeled = {
            name: gauge_cls(PREFIX + name, doc, labelnames=(*labelnames, extra), multiprocess_mode="mostrecent")
            for name, (doc, extra, _) in LABELED_GAUGES.items()
        }

    def set(self, stats, labels: dict[str, str]) -> None:
        for name, (_, read) in GAUGES.items():
            value = read(stats)
            if value is not None:
                self.plain[name].labels(**labels).set(value)
        for name, (_, extra, read) in LABELED_GAUGES.items():
            for label, value in read(stats).items():
                self.labeled[name].labels(**labels, **{extra: label}).set(value)


# prometheus_client accepts a name once per process, for any number of collectors.
gauges = functools.cache(Gauges)


def _stats(read):
    """`read` applied to the runtime's statistics, without waiting for the device. None if there is no runtime, or if
    reading fails."""
    from sglang_kvc.stats.collect import measure

    runtime = current()
    if runtime is None:
        return None
    try:
        return read(measure(runtime, detail=False))
    except Exception:  # must not end the scheduler
        logger.exception("kvc: no statistics for the log")
        return None


def after_usage_msg_parts(result, self):
    line = _stats(lambda stats: stats.log_line())
    return result if line is None else [*result, line]


def after_log_stats(result, self, stats):
    kvc_stats = _stats(lambda stats: stats)
    if kvc_stats is None or hasattr(self, "kvc_gauges_failed"):
        return
    try:
        from prometheus_client import Gauge

        gauges(self._gauge_cls or Gauge, tuple(self.labels)).set(kvc_stats, self.labels)
    except Exception:
        self.kvc_gauges_failed = True
        logger.exception("kvc: the Prometheus gauges cannot be set, and are not updated until the server restarts")


def register() -> None:
    hook(f"{POOL_STATS}.get_prefill_usage_msg_parts", "after", "self", after_usage_msg_parts)
    hook(f"{POOL_STATS}.get_decode_usage_msg_parts", "after", "self", after_usage_msg_parts)
    hook(f"{COLLECTOR}.log_stats", "after", "self stats", after_log_stats)

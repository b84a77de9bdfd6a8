"""SGLang's metrics of the hierarchical cache, fed by the host and disk tiers."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.mem_cache.unified_cache import storage_attachment
from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment
from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector, StorageMetricsCollector

from sglang_kvc.adapter import tree_metrics
from sglang_kvc.adapter.radix_cache import KvcRadixCache
from sglang_kvc.adapter.tree_metrics import storage_labels
from sglang_kvc.cache.transfers import Loading, _Saving
from sglang_kvc.stats import collect

from .model import P
from .test_hit_sources import answered
from .test_stored_prompts import EVERYTHING, finish_writes, run, serve, tokens

PROMPT = [*tokens(1, 4), 1]


class FakeCollector:
    """Stands in for SGLang's `RadixCacheMetricsCollector` and `StorageMetricsCollector`."""

    def __init__(self):
        self.labels = {"cache_type": "KvcRadixCache", "tp_rank": 0}
        self.counts: Counter = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def increment_load_back_num_tokens(self, num_tokens: int, pool: str) -> None:
        self.counts["loaded tokens", pool] += num_tokens

    def increment_load_back_num_bytes(self, num_bytes: int) -> None:
        self.counts["loaded bytes"] += num_bytes

    def observe_load_back_duration(self, duration_seconds: float) -> None:
        self.seconds["loaded"].append(duration_seconds)

    def increment_backup_num_tokens(self, num_tokens: int, pool: str) -> None:
        self.counts["saved tokens", pool] += num_tokens

    def increment_backup_num_bytes(self, num_bytes: int) -> None:
        self.counts["saved bytes"] += num_bytes

    def observe_backup_duration(self, duration_seconds: float) -> None:
        self.seconds["saved"].append(duration_seconds)

    def increment_dropped_tokens(self, num_tokens: int, reason: str, pool: str) -> None:
        self.counts["dropped", reason, pool] += num_tokens

    def increment_eviction_num_tokens(self, num_tokens: int) -> None:
        self.counts["evicted"] += num_tokens

    def observe_eviction_duration(self, duration_seconds: float) -> None:
        self.seconds["evicted"].append(duration_seconds)

    def log_prefetched_tokens(self, prefetched_tokens: int) -> None:
        self.counts["prefetched"] += prefetched_tokens

    def log_backuped_tokens(self, backuped_tokens: int) -> None:
        self.counts["backuped"] += backuped_tokens


def test_fake_collector_has_the_methods_of_sglang():
    for name, method in vars(FakeCollector).items():
        if name.startswith(("increment", "observe", "log")):
            owner = StorageMetricsCollector if name.startswith("log") else RadixCacheMetricsCollector
            assert [*inspect.signature(method).parameters] == [*inspect.signature(getattr(owner, name)).parameters]


@pytest.fixture
def collector(monkeypatch):
    """The collector of servers that start in this test."""
    fake = FakeCollector()
    monkeypatch.setattr(KvcRadixCache, "metrics_collector", fake)
    return fake


@pytest.fixture
def storage(monkeypatch):
    """The collector of the disk tier of servers that start in this test."""
    fake = FakeCollector()
    monkeypatch.setattr(tree_metrics, "resolve_collector_class", lambda role, default: lambda labels: fake)
    return fake


def evict(server) -> None:
    server.tree_cache.evict(EVERYTHING)
    server.runtime.flush()
    server.turn()


def test_saves_and_loads_are_counted_with_their_packed_bytes(collector):
    with serve() as server:
        answered(server, PROMPT)
        assert collector.counts == {("dropped", "host_pressure", "kv"): 0}
        evict(server)
        saved = server.runtime.host_tier.transfers.bytes_saved
        assert collector.counts["saved tokens", "kv"] == collector.counts["evicted"] == 4 * P
        assert collector.counts["saved bytes"] == saved > 0
        assert not collector.seconds["loaded"] and all(s > 0 for s in collector.seconds["saved"])
        answered(server, PROMPT)
        assert collector.counts["loaded tokens", "kv"] == 4 * P
        assert collector.counts["loaded bytes"] == saved
        assert len(collector.seconds["loaded"]) == 1 and collector.seconds["loaded"][0] > 0
        for _ in range(3):  # nothing is counted twice
            evict(server)
        assert collector.counts["saved tokens", "kv"] == 4 * P


def test_tokens_for_which_host_memory_has_no_room_are_dropped(collector):
    """Host memory holds 5 blocks. What it displaces before the copy counts as dropped, too."""
    with serve(host=64_000, chunk=16 * P) as server:
        for name in range(1, 7):
            answered(server, [*tokens(name, 2), 1])
        evict(server)
        counts = collector.counts
        assert counts["saved tokens", "kv"] == server.runtime.host_tier.stored * P > 0
        dropped = counts["dropped", "host_pressure", "kv"]
        assert dropped > 0 and counts["saved tokens", "kv"] + dropped == counts["evicted"] == 12 * P


def test_a_leaf_that_never_fits_is_dropped(collector):
    with serve(host=20_000, blocks=20) as server:
        server.submit(PROMPT, [6], "lossless", None)
        while any(not r.finished() for r in server.requests.values()):
            server.turn()
        units = server.runtime.host_tier.units_of
        server.runtime.host_tier.units_of = lambda blocks: 1000 * units(blocks)
        evict(server)
        assert collector.counts["dropped", "host_pressure", "kv"] == collector.counts["evicted"] > 0


def test_saves_of_a_flushed_cache_are_counted_once(collector):
    with serve() as server:
        answered(server, PROMPT)
        evict(server)
        assert server.flush()
        server.turn()
        assert collector.counts["saved tokens", "kv"] == 4 * P


def test_loads_under_way_and_canceled_loads_are_counted():
    with serve() as server:
        tree, stats = server.tree_cache, lambda: collect.measure(server.runtime, detail=False)
        answered(server, PROMPT)
        evict(server)
        server.submit(PROMPT, [6], None, None)
        run(server, lambda: tree.loads)
        assert stats().host_loading == 1 and stats().canceled_loads == 0
        run(server)
        assert stats().host_loading == 0
        evict(server)
        req = server.requests["0"]
        req.init_next_round_input(tree)
        tree.bring_back(req, room=lambda: 10**9, others_run=False)
        assert tree.cancel_queued_loads() and stats().canceled_loads == tree.loads_canceled == 1


def test_without_metrics_nothing_is_timed():
    with serve() as server:
        answered(server, PROMPT)
        evict(server)
        answered(server, PROMPT)
        tree, transfers = server.tree_cache, server.runtime.host_tier.transfers
        assert tree.tier_metrics is None and not transfers.timed and not transfers.saved
        assert transfers.bytes_saved > 0 and transfers.bytes_loaded > 0


class FakeEvent:
    """Stands in for a CUDA event with timing, at `ms` on the stream. It cannot be waited for."""

    def __init__(self, ms: float, passed: bool = True):
        self.ms, self.passed = ms, passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later.passed, "CUDA raises an error for an event that has not passed"
        return later.ms - self.ms


def test_device_times_are_read_from_events_that_have_passed(collector):
    with serve() as server:
        tree, transfers, unit = server.tree_cache, server.runtime.host_tier.transfers, np.zeros((2, 3), dtype=int)
        first, second = (_Saving(unit, 0, FakeEvent(10 * i), FakeEvent(10 * i + 4, passed=False)) for i in range(2))
        transfers.saving.extend((first, second))
        tree.check_hicache_events()
        assert not collector.seconds["saved"]
        first.ended.passed = True
        tree.check_hicache_events()
        assert collector.seconds["saved"] == [0.004] and collector.counts["saved tokens", "kv"] == 2 * P
        assert collector.counts["saved bytes"] == 6 * transfers.memory.unit_bytes
        second.ended.passed = True
        tree.check_hicache_events()
        assert collector.seconds["saved"] == [0.004] * 2
        loading = Loading(np.zeros(3, dtype=int), num_bytes=7, began=FakeEvent(1), events=[FakeEvent(3), FakeEvent(9)])
        tree.tier_metrics.report_load(loading, 0.0)
        assert collector.seconds["loaded"] == [0.008]


def test_reads_and_writes_of_files_are_counted(collector, storage, tmp_path):
    with serve(tmp_path) as server:
        answered(server, PROMPT)
        finish_writes(server)
        assert storage.counts == {"backuped": 4 * P}
        evict(server)
        finish_writes(server)
        assert storage.counts == {"backuped": 4 * P}  # they are in files already
    with serve(tmp_path) as server:
        answered(server, PROMPT)
        assert storage.counts == {"backuped": 4 * P, "prefetched": 4 * P}


def test_failed_writes_and_damaged_files_are_not_counted(collector, storage, tmp_path, monkeypatch):
    with serve(tmp_path) as server:
        answered(server, PROMPT)
        finish_writes(server)
    storage.counts.clear()
    for i, path in enumerate(sorted(path for path in tmp_path.rglob("*") if path.is_file())):
        path.write_bytes(path.read_bytes()[:-1] + b"?" * (i % 2 == 0))
    with serve(tmp_path) as server:
        monkeypatch.setattr(server.tree_cache.disk.store, "write", lambda *args: False)
        req = answered(server, PROMPT)
        finish_writes(server)
        assert storage.counts["prefetched"] == req.cached_tokens < 4 * P and not storage.counts["backuped"]


def test_storage_metrics_have_the_labels_of_sglang(collector, monkeypatch):
    collector.labels |= {"pp_rank": 0, "dp_rank": 0, "team": "a"}
    monkeypatch.setattr(storage_attachment, "resolve_collector_class", lambda role, default: SimpleNamespace)
    ranks = SimpleNamespace(tp_rank=0, dp_rank=0, pp_rank=0, pp_size=1)
    controller = SimpleNamespace(storage_config=ranks, get_attn_cp_rank_and_size=lambda: (0, 1))
    cache = SimpleNamespace(cache_controller=controller, storage_metrics_collector=None)
    stock = StorageAttachment(cache)._resolve_metrics_collector("file", {"team": "a"})
    assert storage_labels(collector.labels, "file") == stock.labels

"""Statistics of a running server: their meaning, and their form in the log, in Prometheus and in /server_info."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from kvc_patches import internal_state, metrics
from sglang_kvc.cache import runtime
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.stats import collect, inspect
from sglang_kvc.stats.records import HeadMap, KvcStats, times
from tests.runtime.model import P, ToyServer

STATS = KvcStats(
    config="leankv k8v4+k4v2, block 256",
    scope="sequence",
    bf16_token_bytes=23040,
    page_bytes=2112,
    pages_total=40000,
    pages_free=31000,
    tokens=5000,
    bytes=30_000_000,
    packed_tokens=4096,
    packed_bytes=20_000_000,
    block_ids_total=400,
    block_ids_free=380,
    blocks_by_format={"bf16": 4, "k8v4+k4v2": 16},
    tokens_by_tier={"bf16": 1000, "high": 3000, "low": 500, "pruned": 500},
    occupancy=0.93,
    compactions=16,
    compaction_ms=120.5,
    evicted_blocks=3,
)
EMPTY = KvcStats("quantize k4v4", "block", 23040, 2112, 40000, 40000, 0, 0, 0, 0)
MAP = HeadMap(kept=[[1.0, 0.5], [0.25, 0.0]], high=[[0.5, 0.5], [0.25, 0.0]], blocks=16)


def test_ratios_match_counts():
    assert STATS.ratio == pytest.approx(23040 * 5000 / 30e6)
    assert STATS.ratio_body == pytest.approx(23040 * 4096 / 20e6)
    assert STATS.bytes_per_token == 6000
    assert STATS.tier_shares == {"bf16": 0.2, "high": 0.6, "low": 0.1, "pruned": 0.1}


def test_demoted_blocks_are_shown_only_if_present():
    demoted = replace(STATS, demoted_blocks=7)
    assert ", compacted 16 blocks, demoted 7 blocks" in demoted.log_line()
    assert ("demoted", "7 blocks moved to a lower format") in inspect.rows(demoted)
    assert "demoted" not in dict(inspect.rows(STATS))
    assert metrics.GAUGES["demoted_blocks"][1](demoted) == 7 and KvcStats.from_dict(demoted.to_dict()) == demoted


def test_recomputed_tokens_are_shown_with_the_limit():
    again = replace(STATS, recomputed_tokens=7)
    assert ("recomputed", "7 prompt tokens that had been dropped") in inspect.rows(again)
    assert "recomputed" not in dict(inspect.rows(STATS)) and "running share" not in again.log_line()
    limited = replace(again, running_share=0.5)
    assert dict(inspect.rows(limited))["recomputed"].endswith("; running requests may hold 50% of the memory")
    assert ", running share 0.50" in limited.log_line()
    names = ("recomputed_tokens", "running_share")
    assert [metrics.GAUGES[name][1](limited) for name in names] == [7, 0.5]


def test_host_traffic_is_shown_with_rate_and_host_time():
    hosted = replace(STATS, host_bytes=10**9, host_bytes_total=2 * 10**9, host_saved_bytes=3 * 10**9, transfer_ms=12.3)
    assert hosted.log_line().endswith(", host 1.0 of 2.0 GB, 3.0 GB out, 0.0 GB back")
    assert dict(inspect.rows(hosted))["host traffic"].endswith(" back in 12 ms of host time")
    assert "rate of loads" not in dict(inspect.rows(hosted))
    loaded = replace(hosted, host_loaded_bytes=9 * 10**9, host_arrived_bytes=5 * 10**9, host_load_ms=100.0)
    assert dict(inspect.rows(loaded))["rate of loads"] == "50.0 GB/s"
    assert loaded.log_line().endswith(", 3.0 GB out, 9.0 GB back at 50.0 GB/s")
    assert metrics.GAUGES["transfer_seconds"][1](hosted) == pytest.approx(0.0123)


def test_gauges_tell_capacity_and_content_of_tiers():
    stats = replace(
        STATS, host_bytes_total=9, host_blocks=3, host_loading=2, canceled_loads=5, disk_bytes_total=8, disk_blocks=4
    )
    names = ("host_bytes_total", "host_blocks", "host_loading", "canceled_loads", "disk_bytes_total", "disk_blocks")
    assert [metrics.GAUGES[name][1](stats) for name in names] == [9, 3, 2, 5, 8, 4]


def test_block_ids_are_counted():
    server = ToyServer(high="k4v4", window=0)
    stats = [collect.measure(server.runtime, detail=False)]
    server.admit([*range(3 * P), 1])
    stats.append(collect.measure(server.runtime, detail=False))
    before, after = stats
    assert before.block_ids_total == after.block_ids_total == before.block_ids_free
    assert before.block_ids_free - after.block_ids_free == 4
    assert dict(inspect.rows(STATS))["block ids"] == "380 of 400 free"
    assert "block ids" not in dict(inspect.rows(replace(STATS, block_ids_total=0)))  # of a server that counts none


def test_formats_of_same_name_are_counted_together():
    server = ToyServer(high="k8v4", floor="k4v4", window=0)
    for level in (None, "k8v4"):
        server.finish(server.admit([*range(2 * P), 1], level=level))
    server.runtime.flush()
    assert collect.measure(server.runtime, detail=False).blocks_by_format == {"bf16": 0, "k8v4": 4, "k4v4": 0}
    server.runtime.demotion.demote(np.array([1, 2, 3, 4]), 10**9)
    stats = collect.measure(server.runtime, detail=True)
    assert stats.blocks_by_format == {"bf16": 0, "k8v4": 2, "k4v4": 2} and stats.demoted_blocks == 2


def test_empty_cache_has_no_ratio():
    assert EMPTY.ratio is EMPTY.ratio_body is EMPTY.bytes_per_token is None
    assert EMPTY.tier_shares == {} and times(None) == "-"
    assert EMPTY.log_line().startswith("kvc: - (body -), pages free 40000/40000")
    begun = replace(EMPTY, tokens=1, bytes=500_000)
    assert begun.log_line().startswith("kvc: nothing packed yet, pages free")


def test_log_line_contains_all_statistics():
    assert STATS.log_line() == (
        "kvc: 3.84x (body 4.72x), 6000 B/token, pages free 31000/40000, "
        "tiers bf16 20% high 60% low 10% pruned 10%, occupancy 0.93, compacted 16 blocks"
    )


@pytest.mark.parametrize("stats", [STATS, EMPTY], ids=["full", "empty"])
def test_json_round_trip(stats):
    sent = json.loads(json.dumps(stats.to_dict()))
    assert KvcStats.from_dict({**sent, "of a newer server": 1}) == stats
    assert sent["ratio_body"] == stats.ratio_body
    assert HeadMap.from_dict(json.loads(json.dumps(MAP.to_dict()))) == MAP and MAP.shape == (2, 2)


@pytest.fixture
def fake_runtime(monkeypatch):
    monkeypatch.setattr(internal_state, "longest_prompts", lambda runtime: {"default": 5})
    """A runtime in place of this process' own, whose figures are `STATS` and `MAP`."""
    before = runtime.current()
    monkeypatch.setattr(collect, "measure", lambda runtime, detail: STATS)
    monkeypatch.setattr(collect, "figures", lambda runtime: (STATS, MAP))
    fake = SimpleNamespace(config=KvcConfig(), cleared=0)
    runtime.install(fake)
    yield fake
    runtime.install(before)


def broken(*args, **kwargs):
    raise RuntimeError("no figures")


def test_log_hook_adds_one_part(fake_runtime):
    assert metrics.after_usage_msg_parts(["token usage: 0.5"], None) == ["token usage: 0.5", STATS.log_line()]


def test_server_info_hook_adds_builtins(fake_runtime):
    result = SimpleNamespace(internal_state={"stock": 1})
    assert internal_state.after_get_internal_state(result, None, None) is result
    sent = json.loads(json.dumps(result.internal_state))["kvc"]
    assert sent["config"] == KvcConfig().to_dict() and sent["longest_prompt"] == {"default": 5}
    assert KvcStats.from_dict(sent["stats"]) == STATS and HeadMap.from_dict(sent["head_map"]) == MAP


def test_failing_statistics_do_not_stop_server(fake_runtime, monkeypatch):
    monkeypatch.setattr(collect, "measure", broken)
    monkeypatch.setattr(collect, "figures", broken)
    assert metrics.after_usage_msg_parts(["a"], None) == ["a"]
    assert metrics.after_log_stats(None, SimpleNamespace(), None) is None
    result = SimpleNamespace(internal_state={})
    internal_state.after_get_internal_state(result, None, None)
    assert result.internal_state["kvc"]["error"] == "RuntimeError: no figures"


def test_hooks_leave_stock_servers_unchanged():
    assert runtime.current() is None
    assert metrics.after_usage_msg_parts(["a"], None) == ["a"]
    result = SimpleNamespace(internal_state={})
    internal_state.after_get_internal_state(result, None, None)
    assert result.internal_state == {}
    metrics.after_log_stats(None, SimpleNamespace(labels={"model_name": "m"}, _gauge_cls=FakeGauge), None)
    assert not FakeGauge.values


class FakeGauge:
    """Stands in for prometheus_client.Gauge; remembers the values set."""

    values: ClassVar[dict] = {}

    def __init__(self, name, documentation, labelnames, multiprocess_mode):
        assert documentation and multiprocess_mode == "mostrecent"
        self.name, self.names = name, tuple(labelnames)

    def labels(self, **labels):
        assert tuple(labels) == self.names
        key = (self.name, *sorted(labels.items()))
        return SimpleNamespace(set=lambda value: self.values.__setitem__(key, value))


@pytest.fixture(autouse=True)
def no_gauges():
    metrics.gauges.cache_clear()
    FakeGauge.values = {}


def test_prometheus_gauges(fake_runtime):
    collector = SimpleNamespace(labels={"model_name": "m"}, _gauge_cls=FakeGauge)
    metrics.after_log_stats(None, collector, None)
    metrics.after_log_stats(None, collector, None)
    plain = {key[0]: value for key, value in FakeGauge.values.items() if len(key) == 2}
    assert plain["sglang_kvc:compression_ratio_body"] == STATS.ratio_body
    assert plain["sglang_kvc:pages_free"] == 31000
    assert plain["sglang_kvc:block_ids_free"] == 380
    assert plain["sglang_kvc:compaction_seconds"] == pytest.approx(0.1205)
    assert FakeGauge.values["sglang_kvc:blocks", ("format", "bf16"), ("model_name", "m")] == 4
    assert FakeGauge.values["sglang_kvc:tier_share", ("model_name", "m"), ("tier", "high")] == 0.6
    fake_runtime.stats = lambda detail=False: EMPTY
    metrics.after_log_stats(None, collector, None)
    assert plain["sglang_kvc:occupancy"] == 0.93


@pytest.fixture
def real_gauge():
    """A gauge of prometheus_client in a separate registry, which accepts each name only once."""
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    return registry, lambda *args, **options: Gauge(*args, **options, registry=registry)


def test_gauges_work_with_real_client(fake_runtime, real_gauge):
    from prometheus_client import generate_latest

    registry, gauge = real_gauge
    for model in ("m", "n"):  # two collectors in one process
        collector = SimpleNamespace(labels={"model_name": model}, _gauge_cls=gauge)
        metrics.after_log_stats(None, collector, None)
        metrics.after_log_stats(None, collector, None)
    text = generate_latest(registry).decode()
    for model in ("m", "n"):
        assert f'sglang_kvc:compression_ratio{{model_name="{model}"}} 3.84' in text
        assert f'sglang_kvc:tier_share{{model_name="{model}",tier="pruned"}} 0.1' in text


@pytest.mark.parametrize("later", [{"model_name": "m", "rank": "0"}, {}], ids=["more labels", "fewer labels"])
def test_failing_gauges_do_not_stop_server(fake_runtime, real_gauge, monkeypatch, later):
    logged = []
    monkeypatch.setattr(metrics.logger, "exception", logged.append)
    collector = SimpleNamespace(labels={"model_name": "m"}, _gauge_cls=real_gauge[1])
    metrics.after_log_stats(None, collector, None)
    collector.labels = later
    for _ in range(3):
        metrics.after_log_stats(None, collector, None)
    assert len(logged) == 1


def test_failing_log_line_does_not_stop_server(fake_runtime, monkeypatch):
    monkeypatch.setattr(collect, "measure", lambda runtime, detail: SimpleNamespace(log_line=broken))
    assert metrics.after_usage_msg_parts(["a"], None) == ["a"]


def test_page_for_operators_has_all_metrics():
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    gauges = {**metrics.GAUGES, **{f"{n}{{{row[1]}=...}}": row for n, row in metrics.LABELED_GAUGES.items()}}
    for name, (text, *_) in gauges.items():
        assert f"| `{name}` | {text[0].lower()}{text[1:].rstrip('.')} |" in page

"""Servers of `agent_replay`, and the bytes that they move between tiers."""

from __future__ import annotations

import argparse
import contextlib

import requests
from prometheus_client.parser import text_string_to_metric_families

from bench import common
from bench.agents.options import Options

HICACHE = "sglang:hicache_host_total_tokens"  # reported from the start if the hierarchical cache is on
HICACHE_BYTES = {  # SGLang's metrics -> this plug-in's counters
    "sglang:hicache_backup_bytes_total": "host_saved_bytes",
    "sglang:load_back_bytes_total": "host_loaded_bytes",
}


def arms(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> options of a server. All servers have the KV memory of `--tokens` bf16 tokens and the same order of
    admission. The fp8 servers use pages of 128 tokens, from which FlashAttention 3 reads fp8 faster."""
    memory, host = ["--max-total-tokens"], str(args.host_gb)
    attention = ["--attention-backend", common.default_attention()] if common.has_gpu() else []
    fp8 = ["--kv-cache-dtype", "fp8_e4m3", "--page-size", "128"]
    stock = common.stock(*memory, str(args.tokens), *attention, *args.server_args.split())
    stock_fp8 = common.stock(*memory, str(2 * args.tokens), *attention, *fp8, *args.server_args.split())
    ours = common.kvc("k4v4", *memory, str(args.tokens), *args.server_args.split(), memory=None)
    tiers = ["--kvc-host-memory", f"{host}GB", "--kvc-eviction", "reuse"]
    servers = {
        "stock_bf16": stock,
        "stock_fp8": stock_fp8,
        "stock_fp8_hicache": [*stock_fp8, "--enable-hierarchical-cache", "--hicache-size", host],
        "kvc": ours,
        "kvc_tiers": [*ours, *tiers],
    }
    if args.disk:
        servers["kvc_disk"] = [*ours, *tiers, "--kvc-disk", args.disk]
    common_options = ["--schedule-policy", "hrrn", "--enable-cache-report", "--enable-metrics"]
    return {name: [*options, *common_options] for name, options in servers.items()}


def arm(args: argparse.Namespace, name: str) -> tuple[list[str], Options]:
    """Options of the server `name`, which is one of `arms` or one with more options: `kvc+share-0.5+interval-4`.

    Raises:
        ValueError: there is no such server or option.
    """
    base, plus, added = name.partition("+")
    servers = arms(args)
    if base not in servers:
        raise ValueError(f"no such arm: {name}; choose from {', '.join(servers)}")
    try:
        options = Options.parse(added) if plus else Options()
    except (TypeError, ValueError):
        raise ValueError(f"no such options of an arm: {added}; see bench.agents.options") from None
    return [*servers[base], *options.flags()], options


def tier_counters(url: str) -> dict[str, float]:
    """Counters of the host and disk tiers; empty for servers that report none."""
    with contextlib.suppress(requests.RequestException, ValueError, KeyError, IndexError):
        stats = requests.get(f"{url}/server_info", timeout=60).json()["internal_states"][0]["kvc"]["stats"]
        return {k: v for k, v in stats.items() if k.startswith(("host_", "disk_")) and isinstance(v, (int, float))}
    with contextlib.suppress(requests.RequestException, ValueError):
        return hicache_counters(requests.get(f"{url}/metrics", timeout=60).text)
    return {}


def hicache_counters(metrics: str) -> dict[str, float]:
    """Bytes that SGLang's hierarchical cache has copied, of all ranks, from `metrics` in Prometheus' text format."""
    # A counter has no sample before its first copy.
    totals = dict.fromkeys(HICACHE_BYTES.values(), 0.0) if HICACHE in metrics else {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if name := HICACHE_BYTES.get(sample.name):
                totals[name] = totals.get(name, 0) + sample.value
    return totals

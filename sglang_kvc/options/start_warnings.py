"""Warnings at a server's start: arguments and environment variables without effect, a policy that lets one request
decide what others read, prompts without a prefix cache, and an order of admission that suits no sessions."""

from __future__ import annotations

import os
from typing import Any

from sglang_kvc.options.config import ALL, KvcConfig
from sglang_kvc.options.request_quality import PARAMETER
from sglang_kvc.policies import SEQUENCE, make_policy

TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"

# Options of SGLang's hierarchical cache that are ignored, with its defaults.
HICACHE_IGNORED = {
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "kernel",
    "hicache_mem_layout": "page_first",
}


def trust_warning(config: KvcConfig) -> str | None:
    """A sentence if the content of blocks depends on one request's attention scores: which requests share them. Else
    None."""
    if make_policy(config).scope != SEQUENCE:
        return None
    if config.trust == ALL:
        return (
            f"--kvc-policy {config.policy} with --kvc-trust {ALL}: the first request with a prefix decides how "
            f"precisely all other requests read it; if tenants do not trust each other, omit --kvc-trust {ALL} and "
            f"give the requests of each tenant a cache_salt."
        )
    return (
        f"--kvc-policy {config.policy} packs blocks by the attention of one request, so only requests with the same "
        f"cache_salt share them, and a request without one computes its whole prompt; if all clients trust each other, "
        f"set --kvc-trust {ALL}."
    )


def one_shot_warning(config: KvcConfig) -> str | None:
    """A sentence if prompts have a budget by default, which keeps them out of the prefix cache. Else None."""
    if config.one_shot is None:
        return None
    return (
        f"--kvc-one-shot: a prompt that {config.one_shot} makes smaller hits no cached prefix and leaves none; if "
        f'prompts have a common prefix, name the server\'s format in their custom_params: {{"{PARAMETER}": '
        f'"{config.high}"}}.'
    )


def order_warning(config: KvcConfig, schedule_policy: str) -> str | None:
    """A sentence if sessions in host memory are admitted in order of arrival. Else None."""
    if not config.host_memory or schedule_policy != "fcfs":
        return None
    return (
        "--kvc-host-memory with --schedule-policy fcfs: once the histories of all sessions exceed host memory, each "
        "prompt finds its blocks evicted; use --schedule-policy hrrn, which keeps some sessions in the cache."
    )


def ignored_warnings(args: Any, *, cpu: bool) -> list[str]:
    """A sentence for each argument that has no effect."""
    warnings = []
    if args.quantization_param_path is not None:
        warnings.append("--quantization-param-path is ignored: scales are computed from the data of each block.")
    for name, default in HICACHE_IGNORED.items():
        if getattr(args, name) != default:
            option = name.replace("_", "-")
            warnings.append(f"--{option} is ignored: blocks go to the host when they are evicted, in packed form.")
    if args.hicache_storage_prefetch_policy != "timeout":
        warnings.append(
            "--hicache-storage-prefetch-policy is ignored: a prompt waits while its blocks are read."
        )
    if args.enable_torch_compile and cpu:
        warnings.append("--enable-torch-compile is ignored on a CPU: SGLang would compile for its own CPU kernels.")
    if args.enable_return_indexer_topk:
        warnings.append("--enable-return-indexer-topk is ignored: models with an indexer are not served.")
    return warnings


def environment_warnings() -> list[str]:
    """A sentence for each environment variable that has no effect."""
    if TREE_CORE not in os.environ:
        return []
    return [f"{TREE_CORE} is ignored: --kv-backend kvc keeps blocks in SGLang's Python tree."]

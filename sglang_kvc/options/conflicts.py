"""Combinations of server arguments and settings that cannot be served together, one check each.

Each raises `ConfigError` with one sentence: what, why, and what to do instead. `unsupported_args` has the arguments
that are always refused.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sglang_kvc.calibration.tensors import BY_HEAD
from sglang_kvc.errors import ConfigError
from sglang_kvc.options.config import REUSE, KvcConfig
from sglang_kvc.policies import make_policy


def check_conflicts(args: Any, config: KvcConfig) -> None:
    """Raise at the first conflict that shows in the arguments and settings alone."""
    if args.page_size not in (None, config.block_size):
        raise ConfigError(
            f"--page-size {args.page_size} contradicts the block size {config.block_size}, because SGLang's page is "
            f"one block; drop it and set --kvc-block-size."
        )
    if args.max_total_tokens is not None and config.memory is not None:
        raise ConfigError(
            f"--max-total-tokens {args.max_total_tokens} contradicts --kvc-memory, because both set the size of the "
            f"cache; drop one of them."
        )
    check_eviction(config, args)
    check_running_share(config, args)
    check_hierarchical(config, args)
    check_host_memory(config, args.disable_radix_cache)
    check_disk(config)
    check_storage(config)
    check_streaming(args)
    check_experts(config, args.enable_return_routed_experts)
    check_paged_experts(config, args.enable_paged_experts)
    check_chunk(args.chunked_prefill_size, config)
    if config.calibration is not None and (args.tp_size or 1) > 1 and set(BY_HEAD) & set(make_policy(config).needs):
        raise ConfigError(
            f"--tp-size {args.tp_size} cannot be served with the head statistics of --kvc-calibration, because the "
            f"file holds all heads and a rank cannot tell which are local; use --tp-size 1 or another --kvc-scorer."
        )


def check_memory(config: KvcConfig, device_bytes: float | None) -> None:
    """Refuse a pool that is larger than the device's memory (`device_bytes` None: unknown)."""
    if config.memory and device_bytes and config.memory > device_bytes:
        raise ConfigError(
            f"--kvc-memory of {config.memory / 1e9:.1f} GB is more than the device has ({device_bytes / 1e9:.1f} GB); "
            f"choose a smaller size, or drop the option to have it chosen."
        )


def check_running_share(config: KvcConfig, args: Any) -> None:
    """Refuse a limit for the sake of cached sessions on a server that caches none."""
    if config.running_share not in (None, 1) and args.disable_radix_cache:
        raise ConfigError(
            "--kvc-running-share has no effect with --disable-radix-cache, because no session stays cached; drop one "
            "of them."
        )


def check_eviction(config: KvcConfig, args: Any) -> None:
    """Refuse an eviction order without effect, and two contradicting orders."""
    if config.eviction != REUSE:
        return
    if args.disable_radix_cache:
        raise ConfigError(
            "--kvc-eviction reuse has no effect with --disable-radix-cache, because nothing is cached; drop one of "
            "them."
        )
    if args.radix_eviction_policy != "lru":
        raise ConfigError(
            f"--radix-eviction-policy {args.radix_eviction_policy} contradicts --kvc-eviction reuse, because both "
            f"order evictions; drop one of them."
        )


def host_memory_of(args: Any) -> str:
    """The value of `--kvc-host-memory` that follows from `--enable-hierarchical-cache`."""
    if args.hicache_size > 0:
        return f"{args.hicache_size}GB"
    raise ConfigError(
        "--enable-hierarchical-cache needs a size with --kv-backend kvc, because SGLang's --hicache-ratio counts "
        "uncompressed tokens; give --kvc-host-memory, like 64GB, or --hicache-size."
    )


def check_hierarchical(config: KvcConfig, args: Any) -> None:
    """Refuse options of SGLang's hierarchical cache that contradict `--kvc-host-memory`."""
    if args.hicache_host_memory_mode != "cache":
        raise ConfigError(
            f"--hicache-host-memory-mode {args.hicache_host_memory_mode} cannot be served with --kv-backend kvc, "
            "because host memory keeps blocks and is no buffer for a store; drop it."
        )
    if args.enable_hierarchical_cache and not config.host_memory:
        raise ConfigError(
            "--enable-hierarchical-cache contradicts --kvc-host-memory 0, because blocks that leave the GPU need host "
            "memory; drop one of them."
        )
    gigabytes = config.host_memory / 1e9  # `start.prepare` sets the rounded size
    if gigabytes and args.hicache_size > 0 and args.hicache_size not in (gigabytes, max(1, round(gigabytes))):
        raise ConfigError(
            f"--hicache-size {args.hicache_size} contradicts --kvc-host-memory of {gigabytes:g} GB, "
            "because both set the size of the host tier; drop one of them."
        )


def check_host_size(config: KvcConfig, ranks: int, host_bytes: float) -> None:
    """Refuse host memory of the `ranks` ranks of this host beyond the `host_bytes` that are free for them."""
    if config.host_memory * ranks > host_bytes:
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"--kvc-host-memory of {config.host_memory / 1e9:g} GB{each} is more than the free memory of this "
            f"host or container ({host_bytes / 1e9:.1f} GB); give less."
        )


def ranks_per_host(args: Any) -> int:
    """Ranks of this server on one host, each with its own host memory and its own limit of files."""
    replicas = 1 if args.enable_dp_attention else args.dp_size or 1  # ranks of DP attention are among those of tp_size
    return max(1, (args.tp_size or 1) * replicas // (args.nnodes or 1))


def check_host_memory(config: KvcConfig, disable_radix_cache: bool) -> None:
    """Refuse host memory that no block would ever use."""
    if config.host_memory and disable_radix_cache:
        raise ConfigError(
            "--kvc-host-memory has no effect with --disable-radix-cache, because it keeps blocks of the prefix cache; "
            "drop one of them."
        )


def check_disk(config: KvcConfig) -> None:
    """Refuse a disk tier that would write or read nothing."""
    if config.disk is None:
        if config.disk_size is not None:
            raise ConfigError("--kvc-disk-size has no effect without --kvc-disk; add --kvc-disk FOLDER, or drop it.")
        return
    if not config.host_memory:
        raise ConfigError(
            "--kvc-disk needs --kvc-host-memory, because blocks go to files and come back through host memory; give "
            "--kvc-host-memory, like 64GB."
        )
    try:
        Path(config.disk).mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.disk):
            pass
    except OSError as e:
        raise ConfigError(
            f"--kvc-disk {config.disk} cannot be written ({e.strerror}); give a folder on a local disk that the server "
            "may write to."
        ) from None


def check_storage(config: KvcConfig) -> None:
    """Refuse a storage backend that would get no blocks, or together with files."""
    if config.storage is None:
        return
    if config.disk is not None:
        raise ConfigError(
            f"--hicache-storage-backend {config.storage} contradicts --kvc-disk, because only one of them can store "
            "the blocks; drop one of them."
        )
    if not config.host_memory:
        raise ConfigError(
            f"--hicache-storage-backend {config.storage} needs --kvc-host-memory, because blocks go to the backend and "
            "come back through host memory; give --kvc-host-memory, like 64GB."
        )


def check_dp_attention(args: Any, config: KvcConfig) -> None:
    """Refuse DP attention with records that ranks would share, and policies whose outcome depends on other ranks."""
    if not (args.enable_dp_attention or (args.attn_dp_size or 1) > 1):
        return
    if config.store_option:
        raise ConfigError(
            f"--enable-dp-attention cannot be served with {config.store_option}, because its ranks hold the same "
            "layers and heads and would write the same records; drop one of them."
        )
    if make_policy(config).collects_scores:
        raise ConfigError(
            f"--enable-dp-attention cannot be served with --kvc-policy {config.policy}, because a decode step runs "
            f"as a prefill where another rank prefills, and both count attention scores differently; use --kvc-policy "
            f"quantize, or --tp-size without it."
        )


def check_streaming(args: Any) -> None:
    """Refuse streaming sessions whose turns would not find their history."""
    for name in ("disable_radix_cache", "strip_thinking_cache"):
        if args.enable_streaming_session and getattr(args, name):
            raise ConfigError(
                f"--enable-streaming-session cannot be served with --{name.replace('_', '-')}, because a turn finds "
                f"the answers before it in the prefix cache; drop one of them."
            )


def check_memory_saver(config: KvcConfig, on: bool, cpu: bool) -> None:
    """Refuse the memory saver if memory cannot be released, or if names of records depend on it."""
    if on and cpu:
        raise ConfigError(
            "--enable-memory-saver cannot be served on the CPU, because torch_memory_saver releases only GPU "
            "memory; drop it, or use --device cuda."
        )
    if on and config.store_option:
        raise ConfigError(
            f"--enable-memory-saver cannot be served with {config.store_option}, because records are named by a digest "
            "of the weights, which may be released when a flush reads them; drop one of them."
        )


def check_experts(config: KvcConfig, returned: bool) -> None:
    """Refuse host memory if SGLang stores the experts of a token by its slot."""
    if returned and config.host_memory:
        raise ConfigError(
            "--enable-return-routed-experts cannot be served with --kvc-host-memory, because experts are kept by slot, "
            "and blocks that come back from the host have other slots; drop one of them."
        )


def check_paged_experts(config: KvcConfig, paged: bool) -> None:
    """Refuse records that are named by the few experts that happen to be on the device."""
    if paged and config.store_option:
        raise ConfigError(
            f"--enable-paged-experts cannot be served with {config.store_option}, because records are named by a "
            "digest of the weights on the device, which has only some experts; drop one of them."
        )


def check_chunk(chunk: int | None, config: KvcConfig, ranks: int = 1) -> None:
    """Refuse a chunk that ends inside a block. SGLang chooses powers of two, which not every block size divides, and
    gives each of the `ranks` ranks of attention data parallelism an equal part, `chunk`, of --chunked-prefill-size."""
    if chunk is not None and chunk > 0 and chunk % config.block_size:
        fitting = -(-chunk // config.block_size) * config.block_size * ranks
        part = f"{chunk}" if ranks == 1 else f"{chunk * ranks} gives each of {ranks} ranks {chunk} tokens, which"
        raise ConfigError(
            f"--chunked-prefill-size {part} is not a multiple of the block size {config.block_size}, and a chunk "
            f"must end at the end of a block; choose {fitting}."
        )

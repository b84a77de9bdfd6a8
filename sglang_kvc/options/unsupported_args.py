"""Server arguments that cannot be served with the compressed cache, as a table. `unsupported_models` has the models.

A refusal is one sentence: what, why, and what to do instead. It is raised before anything starts if the arguments or
the model's config file show it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvc.calibration.tensors import BY_HEAD
from sglang_kvc.errors import ConfigError, listed
from sglang_kvc.options.config import ALL, REUSE, SALT, KvcConfig
from sglang_kvc.policies import SEQUENCE, make_policy

PLAIN = "drop the option, or use --kv-backend default"
AFTER_CAPTURE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
MIN_CAPABILITY = (8, 0)  # packing takes min and max of pairs of fp16 values


# Options of SGLang's hierarchical cache that are ignored, with its defaults.
HICACHE_IGNORED = {
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "kernel",
    "hicache_mem_layout": "page_first",
}


@dataclass(frozen=True)
class Refusal:
    """`when` tests one value: a ServerArgs field or, in the model table, all `ModelFacts`."""

    name: str
    when: Callable[[Any], bool]
    what: str
    why: str
    instead: str = PLAIN

    def error(self, value: Any = None) -> ConfigError:
        return ConfigError(
            f"{self.what.format(value)} cannot be served with --kv-backend kvc, because {self.why}; {self.instead}."
        )


def _on(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return (value or 1) > 1


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


_BUFFERS = "it reads K/V buffers that exist only in the stock cache"
_WHOLE = "a rank must hold all blocks of a sequence"
_ATTENTION = "only its own attention backend can read packed pages"
_BETWEEN = "attention over the pages runs between the captured parts of a prefill, not in them"
PREFILL_GRAPHS = ("breakable", "disabled")  # SGLang's prefill CUDA graph backends that can be served

# `name` is the ServerArgs field that `when` tests.
ARG_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "speculative_algorithm",
        _on,
        "--speculative-algorithm {}",
        "drafts are written and rolled back token by token, which packed pages do not allow",
    ),
    Refusal(
        "hicache_storage_backend",
        _other_than(None),
        "--hicache-storage-backend {}",
        "blocks go to files as records of their own",
        "give --kvc-disk with a folder",
    ),
    Refusal("enable_lmcache", _on, "--enable-lmcache", _BUFFERS),
    Refusal("enable_flexkv", _on, "--enable-flexkv", _BUFFERS),
    Refusal("enable_hisparse", _on, "--enable-hisparse", _BUFFERS),
    Refusal("enable_unified_cache_external_linker", _on, "--enable-unified-cache-external-linker", _BUFFERS),
    Refusal("enable_unified_memory", _on, "--enable-unified-memory", "it replaces the memory pool that holds pages"),
    Refusal("disaggregation_mode", _other_than("null", None), "--disaggregation-mode {}", _BUFFERS),
    Refusal(
        "pp_size",
        _above_one,
        "--pp-size {}",
        "a stage runs several batches in turn, and admission counts the memory that the requests of one batch need",
        "use --tp-size or --dp-size instead",
    ),
    Refusal("dcp_size", _above_one, "--dcp-size {}", _WHOLE, "use --tp-size or --dp-size instead"),
    Refusal("attn_cp_size", _above_one, "--attn-cp-size {}", _WHOLE, "use --tp-size or --dp-size instead"),
    Refusal(
        "enable_two_batch_overlap",
        _on,
        "--enable-two-batch-overlap",
        "each half of a batch would attend with a backend of its own, and a forward has one snapshot of its blocks",
    ),
    Refusal("enable_pdmux", _on, "--enable-pdmux", "pages may be written by one stream only"),
    Refusal("dllm_algorithm", _on, "--dllm-algorithm {}", "a diffusion model rewrites tokens that are already packed"),
    Refusal(
        "enable_deterministic_inference",
        _on,
        "--enable-deterministic-inference",
        "decode attention splits the KV of a batch by its total length, so the batch changes an answer's last bits",
    ),
    Refusal(
        "rl_on_policy_target",
        _on,
        "--rl-on-policy-target {}",
        "it needs the log-probabilities of the trainer bit for bit, and packed blocks change them",
    ),
    Refusal(
        "kv_cache_dtype",
        _other_than("auto", "bf16", "bfloat16", None),
        "--kv-cache-dtype {}",
        "precision is set per token by the cache's own formats",
        "drop it and choose --kvc-high, like k8v8",
    ),
    Refusal("attention_backend", _other_than("kvc", None), "--attention-backend {}", _ATTENTION, "drop the option"),
    Refusal(
        "prefill_attention_backend",
        _other_than("kvc", None),
        "--prefill-attention-backend {}",
        _ATTENTION,
        "drop the option",
    ),
    Refusal(
        "decode_attention_backend",
        _other_than("kvc", None),
        "--decode-attention-backend {}",
        _ATTENTION,
        "drop the option",
    ),
    Refusal(
        "radix_cache_backend",
        _other_than("kvc", None),
        "--radix-cache-backend {}",
        "blocks are owned by its own nodes of the radix tree",
        "drop the option",
    ),
    Refusal("enable_nvidia_megakernel", _on, "--enable-nvidia-megakernel", _BUFFERS),
    Refusal("enable_amd_monokernel", _on, "--enable-amd-monokernel", _BUFFERS),
    Refusal(
        "cuda_graph_backend_prefill",
        _other_than(*PREFILL_GRAPHS, None),
        "--cuda-graph-backend-prefill {}",
        _BETWEEN,
        "drop the option, which gives breakable graphs",
    ),
    Refusal(
        "dwdp_size",
        _above_one,
        "--dwdp-size {}",
        "it shares the weights of experts between ranks, which was never tried with the cache",
        "use --tp-size or --dp-size",
    ),
    Refusal("kv_canary", _other_than("none", None), "--kv-canary {}", _BUFFERS),
    Refusal(
        "prefill_only_disable_kv_cache",
        _on,
        "--prefill-only-disable-kv-cache",
        "it serves embeddings without a cache, which leaves nothing to compress",
    ),
    Refusal("enable_mis", _on, "--enable-mis", "its attention mask is not causal"),
    Refusal(
        "dtype",
        _other_than("auto", "half", "float16", "bfloat16", None),
        "--dtype {}",
        "pages hold 16-bit values",
        "use --dtype bfloat16 or float16",
    ),
    Refusal(
        "device",
        lambda d: d is not None and str(d).split(":")[0] not in ("cuda", "cpu"),
        "--device {}",
        "its kernels run on CUDA devices and, as plain torch, on the CPU",
        "use --device cuda or --device cpu",
    ),
)


DP_ATTENTION = ("enable_dp_attention", "attn_dp_size")  # refused on a GPU by `check_dp_attention`


def check_args(args: Any, config: KvcConfig) -> None:
    """Raise at the first argument that cannot be served. `args` is a ServerArgs that SGLang has not resolved yet."""
    for refusal in ARG_REFUSALS:
        value = getattr(args, refusal.name, None)
        if refusal.when(value):
            raise refusal.error(value)
    if args.page_size not in (None, config.block_size):
        raise ConfigError(
            f"--page-size {args.page_size} contradicts the block size {config.block_size}, because SGLang's page is "
            f"one block; drop it and set --kvc-block-size."
        )
    if args.max_total_tokens is not None and config.memory is not None:
        raise ConfigError(
            f"--max-total-tokens {args.max_total_tokens} contradicts --kvc-memory, because both say how large the "
            f"cache is; drop one of them."
        )
    check_eviction(config, args)
    check_host_memory(config, args.disable_radix_cache)
    check_disk(config)
    check_streaming(args)
    check_experts(config, args.enable_return_routed_experts)
    check_chunk(args.chunked_prefill_size, config)
    if config.calibration is not None and _above_one(args.tp_size) and set(BY_HEAD) & set(make_policy(config).needs):
        raise ConfigError(
            f"--tp-size {args.tp_size} cannot be served with the head statistics of --kvc-calibration, because the "
            f"file holds all heads and a rank does not know which are its own; use --tp-size 1 or another --kvc-scorer."
        )
    graph = _prefill_graph(args.cuda_graph_config)
    if graph not in (*PREFILL_GRAPHS, None):
        raise ConfigError(
            f"--cuda-graph-config with prefill backend {graph!r} cannot be served with --kv-backend kvc, because "
            f"{_BETWEEN}; use {listed(PREFILL_GRAPHS)} there, or leave it out."
        )


def check_eviction(config: KvcConfig, args: Any) -> None:
    """Refuse an order of eviction that nothing would follow, or a second one."""
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
    """`--kvc-host-memory` as `--enable-hierarchical-cache` gives it."""
    if args.hicache_size > 0 and args.hicache_host_memory_mode == "cache":
        return f"{args.hicache_size}GB"
    raise ConfigError(
        "--enable-hierarchical-cache needs a size with --kv-backend kvc, because SGLang's --hicache-ratio counts "
        "uncompressed tokens; give --kvc-host-memory, like 64GB, or --hicache-size."
    )


def check_host_memory(config: KvcConfig, disable_radix_cache: bool) -> None:
    """Refuse host memory where no block would ever go there."""
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
        Path(config.disk).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.disk):
            pass
    except OSError as e:
        raise ConfigError(
            f"--kvc-disk {config.disk} cannot be written ({e.strerror}); give a folder on a local disk that the server "
            "may write to."
        ) from None


def check_dp_attention(args: Any, config: KvcConfig, cpu: bool) -> None:
    """Refuse DP attention on a GPU, and policies whose outcome would depend on what other ranks do."""
    if not (args.enable_dp_attention or _above_one(args.attn_dp_size)):
        return
    if not cpu:
        raise ConfigError(
            "--enable-dp-attention cannot be served on a GPU, because the one server that was tried there did not "
            "start; use --tp-size or --dp-size without it and without --attn-dp-size."
        )
    if config.disk is not None:
        raise ConfigError(
            "--enable-dp-attention cannot be served with --kvc-disk, because its ranks hold the same layers and heads "
            "and would write the same files; drop one of them."
        )
    if make_policy(config).collects_scores:
        raise ConfigError(
            f"--enable-dp-attention cannot be served with --kvc-policy {config.policy}, because a decode step runs "
            f"as a prefill where another rank prefills, and both count attention scores differently; use --kvc-policy "
            f"quantise, or --tp-size without it."
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
    """Refuse to release memory that cannot be released, or that files depend on."""
    if on and cpu:
        raise ConfigError(
            "--enable-memory-saver cannot be served on the CPU, because torch_memory_saver releases memory of a GPU "
            "alone; drop it, or use --device cuda."
        )
    if on and config.disk is not None:
        raise ConfigError(
            "--enable-memory-saver cannot be served with --kvc-disk, because files are named by a sample of the "
            "weights, which may be released when a flush reads it; drop one of them."
        )


def check_experts(config: KvcConfig, returned: bool) -> None:
    """Refuse host memory where SGLang keeps the experts of a token by its slot."""
    if returned and config.host_memory:
        raise ConfigError(
            "--enable-return-routed-experts cannot be served with --kvc-host-memory, because experts are kept by slot, "
            "and blocks that come back from the host have other slots; drop one of them."
        )


def check_chunk(chunk: int | None, config: KvcConfig) -> None:
    """Refuse a chunk that ends inside a block. SGLang chooses powers of two, which not every block size divides."""
    if chunk is not None and chunk > 0 and chunk % config.block_size:
        raise ConfigError(
            f"--chunked-prefill-size {chunk} is not a multiple of the block size {config.block_size}, and a chunk "
            f"must end at the end of a block; choose {-(-chunk // config.block_size) * config.block_size}."
        )


def _prefill_graph(graph_config: Any) -> str | None:
    """Backend that a `--cuda-graph-config` (dict or SGLang's dataclass) asks for in the prefill phase."""
    part = graph_config.get("prefill") if isinstance(graph_config, dict) else getattr(graph_config, "prefill", None)
    return part.get("backend") if isinstance(part, dict) else getattr(part, "backend", None)


def check_memory(config: KvcConfig, device_bytes: float | None) -> None:
    """Refuse a pool that is larger than the whole device (`device_bytes` None: unknown)."""
    if config.memory and device_bytes and config.memory > device_bytes:
        raise ConfigError(
            f"--kvc-memory of {config.memory / 1e9:.1f} GB is more than the device has ({device_bytes / 1e9:.1f} GB); "
            f"choose a smaller size, or drop the option to have it chosen."
        )


def check_capability(capability: tuple[int, int]) -> None:
    """Refuse GPUs that lack the instructions of packing. Called in a scheduler process, which has its GPU."""
    if capability < MIN_CAPABILITY:
        at_least = ".".join(map(str, MIN_CAPABILITY))
        raise ConfigError(
            f"A GPU of compute capability {capability[0]}.{capability[1]} cannot be served with --kv-backend kvc, "
            f"because packing needs instructions of {at_least}; use a GPU of {at_least} or newer, or --kv-backend "
            f"default."
        )


def trust_warning(config: KvcConfig) -> str | None:
    """A sentence if requests read blocks whose content another request's attention scores decided, else None."""
    if config.trust != ALL or make_policy(config).scope != SEQUENCE:
        return None
    return (
        f"--kvc-policy {config.policy} keeps what later tokens attend to, so the first request with a prefix decides "
        f"how precisely all other requests read it; if tenants do not trust each other, set --kvc-trust {SALT} and "
        f"give the requests of each tenant a cache_salt."
    )


def ignored_warnings(args: Any, *, cpu: bool) -> list[str]:
    """A sentence for each argument that has no effect."""
    warnings = []
    if args.quantization_param_path is not None:
        warnings.append("--quantization-param-path is ignored: scales are computed from the data of each block.")
    for name, default in HICACHE_IGNORED.items():
        if getattr(args, name) != default:
            option = name.replace("_", "-")
            warnings.append(f"--{option} is ignored: blocks go to the host when they are evicted, in their own bytes.")
    if args.enable_torch_compile and cpu:
        warnings.append("--enable-torch-compile is ignored on a CPU: SGLang compiles for kernels of its own CPU build.")
    if args.enable_return_indexer_topk:
        warnings.append("--enable-return-indexer-topk is ignored: models with an indexer are not served.")
    return warnings


def check_pool_sizing(after_capture: bool) -> None:
    """Refuse SGLang's plan to size the pool after it has captured CUDA graphs. It may be the default of a model."""
    if after_capture:
        raise ConfigError(
            f"{AFTER_CAPTURE}=1 cannot be served with --kv-backend kvc, because the page pool is sized before CUDA "
            f"graphs are captured; set {AFTER_CAPTURE}=0."
        )


def environment_warnings() -> list[str]:
    """A sentence for each environment variable that has no effect."""
    if TREE_CORE not in os.environ:
        return []
    return [f"{TREE_CORE} is ignored: --kv-backend kvc keeps blocks in SGLang's Python tree."]

"""Server arguments that cannot be served with the compressed cache, as a table. `conflicts` has the combinations of
arguments, `unsupported_models` the models.

A refusal is one sentence: what, why, and what to do instead. If the arguments or the model's config file show the
problem, it is raised before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_kvc.errors import ConfigError, listed
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.conflicts import check_conflicts

PLAIN = "drop the option, or use --kv-backend default"
AFTER_CAPTURE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
MIN_CAPABILITY = (8, 0)  # packing takes min and max of pairs of fp16 values


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
# Backends that store arbitrary bytes and need no more of a host pool than `adapter/staging_pool.py` has.
STORAGE_BACKENDS = ("file", "mooncake", "hf3fs", "nixl", "seaweedfs", "dynamic")
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
        _other_than(*STORAGE_BACKENDS, None),
        "--hicache-storage-backend {}",
        "it keeps no bytes, expects K/V buffers of the stock cache, or is untested with blocks",
        f"give {listed(STORAGE_BACKENDS)}, or --kvc-disk with a folder",
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
        "each half of a batch would have its own attention backend, but a forward has one snapshot of its blocks",
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
        "nodes of kvc's own radix tree own the blocks",
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
        "it shares expert weights between ranks, which is untested with the cache",
        "use --tp-size or --dp-size",
    ),
    Refusal("kv_canary", _other_than("none", None), "--kv-canary {}", _BUFFERS),
    Refusal(
        "prefill_only_disable_kv_cache",
        _on,
        "--prefill-only-disable-kv-cache",
        "it serves embeddings without a cache, so there is nothing to compress",
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


def check_args(args: Any, config: KvcConfig) -> None:
    """Raise at the first argument that cannot be served. `args` is a ServerArgs that SGLang has not resolved yet."""
    for refusal in ARG_REFUSALS:
        value = getattr(args, refusal.name, None)
        if refusal.when(value):
            raise refusal.error(value)
    check_conflicts(args, config)
    graph = _prefill_graph(args.cuda_graph_config)
    if graph not in (*PREFILL_GRAPHS, None):
        raise ConfigError(
            f"--cuda-graph-config with prefill backend {graph!r} cannot be served with --kv-backend kvc, because "
            f"{_BETWEEN}; use {listed(PREFILL_GRAPHS)} there, or omit it."
        )


def _prefill_graph(graph_config: Any) -> str | None:
    """Backend that a `--cuda-graph-config` (dict or SGLang's dataclass) asks for in the prefill phase."""
    part = graph_config.get("prefill") if isinstance(graph_config, dict) else getattr(graph_config, "prefill", None)
    return part.get("backend") if isinstance(part, dict) else getattr(part, "backend", None)


def check_capability(capability: tuple[int, int]) -> None:
    """Refuse GPUs that lack the instructions for packing. Called in a scheduler process, which has a GPU."""
    if capability < MIN_CAPABILITY:
        at_least = ".".join(map(str, MIN_CAPABILITY))
        raise ConfigError(
            f"A GPU of compute capability {capability[0]}.{capability[1]} cannot be served with --kv-backend kvc, "
            f"because packing needs instructions of {at_least}; use a GPU of {at_least} or newer, or --kv-backend "
            f"default."
        )


def check_pool_sizing(after_capture: bool) -> None:
    """Refuse SGLang's option to size the pool after capturing CUDA graphs, which may be a model's default."""
    if after_capture:
        raise ConfigError(
            f"{AFTER_CAPTURE}=1 cannot be served with --kv-backend kvc, because the page pool is sized before CUDA "
            f"graphs are captured; set {AFTER_CAPTURE}=0."
        )

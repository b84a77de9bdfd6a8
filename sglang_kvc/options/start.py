"""Checks of a server's arguments when it starts: before SGLang resolves them, and after it, when the model is known.

Written against SGLang 0.5.23: `resolving_view`, `declare_resolution` and `post_capture_kv_sizing_planned` of
`arg_groups.overrides`, and `mem_cache.host_memory`. The arguments hold the user's values; `resolving_view` reads
SGLang's resolved ones.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, post_capture_kv_sizing_planned, resolving_view
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
from sglang.srt.utils.common import get_device_memory_capacity

from sglang_kvc.errors import ConfigError
from sglang_kvc.options.command_line import CPU_PLATFORM
from sglang_kvc.options.conflicts import (
    check_chunk,
    check_dp_attention,
    check_host_size,
    check_memory,
    check_memory_saver,
    host_memory_of,
    ranks_per_host,
)
from sglang_kvc.options.model_facts import from_model_config
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.options.start_warnings import (
    environment_warnings,
    ignored_warnings,
    one_shot_warning,
    order_warning,
    trust_warning,
)
from sglang_kvc.options.unsupported_args import PREFILL_GRAPHS, check_args, check_pool_sizing
from sglang_kvc.options.unsupported_models import check_facts
from sglang_kvc.options.validate import check_pool, wasted_levels

logger = logging.getLogger(__name__)

MAX_RUNNING_REQUESTS = 256  # SGLang's default of 2048 or more would size tables for requests that never run
MAX_RUNNING_REQUESTS_CPU = 32
# New tokens of the largest prefill CUDA graph. A graph saves host time, which larger prefills hide anyway, but pads to
# the next captured size: SGLang, which captures up to a whole chunk, computes 4101 tokens as 4608.
MAX_PREFILL_GRAPH = 2048
MEMORY_CPU = "1GB"  # SGLang's default would take most of the machine's memory
FRACTION_CPU = 0.5  # without chunked prefill, where SGLang's default leaves 25 GB for a prefill


def prepare(args: Any) -> None:
    """Refuse arguments that cannot be served, then set the fields of SGLang that select our classes."""
    if args.enable_hierarchical_cache and args.kvc_host_memory is None and args.hicache_host_memory_mode == "cache":
        args.kvc_host_memory = host_memory_of(args)
    config = resolve_config(args)
    check_args(args, config)
    if config.storage is not None:
        _check_storage(args)
    sharing = [trust_warning(config), one_shot_warning(config), order_warning(config, args.schedule_policy)]
    sharing = [] if args.disable_radix_cache else sharing
    cpu = _on_cpu(args)
    for warning in [*environment_warnings(), *ignored_warnings(args, cpu=cpu), *filter(None, sharing)]:
        logger.warning(warning)
    whole = args.chunked_prefill_size is not None and args.chunked_prefill_size <= 0
    if whole:
        logger.warning("Without chunked prefill, every prompt must fit into the KV cache uncompressed.")

    check_memory_saver(config, args.enable_memory_saver, cpu)
    check_dp_attention(args, config)
    if cpu:
        _check_platform()
    if config.memory is not None:
        check_memory(config, _device_bytes("cpu" if cpu else "cuda"))
    if config.host_memory:
        check_host_size(config, ranks_per_host(args), available_host_memory_bytes(allow_cgroup_fallback=True))
    args.attention_backend = "kvc"
    args.prefill_attention_backend = None
    args.decode_attention_backend = None
    args.radix_cache_backend = "kvc"
    args.page_size = config.block_size
    args.enable_session_radix_cache |= args.enable_streaming_session  # their blocks are evicted last
    args.enable_hierarchical_cache = config.host_memory > 0
    if config.host_memory:
        # A given size for SGLang's own pool, which is never built, keeps SGLang from sizing one by free memory.
        args.hicache_size = max(1, round(config.host_memory / 1e9))
    if args.max_running_requests is None:
        args.max_running_requests = MAX_RUNNING_REQUESTS_CPU if cpu else MAX_RUNNING_REQUESTS
    if args.cuda_graph_max_bs_prefill is None and args.cuda_graph_bs_prefill is None:
        limits = (MAX_PREFILL_GRAPH, args.max_total_tokens, args.chunked_prefill_size)
        args.cuda_graph_max_bs_prefill = min(n for n in limits if n is not None and n > 0)
    if cpu:
        args.device = "cpu"
        args.disable_overlap_schedule = True
        args.enable_torch_compile = False  # SGLang would compile for CPU kernels that are not installed
        args.sleep_on_idle = True  # a waiting scheduler would otherwise spin on a core that also computes
        args.cuda_graph_backend_decode = args.cuda_graph_backend_prefill = "disabled"
        if args.kvc_memory is None and args.mem_fraction_static is None and args.max_total_tokens is None:
            args.kvc_memory = MEMORY_CPU
        if args.mem_fraction_static is None and whole:
            args.mem_fraction_static = FRACTION_CPU


def verify(args: Any) -> None:
    """Checks after SGLang's resolution: the model's config is known, and SGLang may have changed our fields for it."""
    resolved: Any = resolving_view(args)
    if resolved.model_path.lower() in ("none", "dummy"):
        return  # SGLang resolves nothing
    config = resolve_config(args)
    model = model_config_of(args)
    facts = from_model_config(model)
    check_facts(facts, config)
    heads = model.get_num_kv_heads(max(1, resolved.tp_size // resolved.attn_dp_size))
    for sentence in wasted_levels(config, head_dim=facts.head_dim):
        logger.warning(sentence)
    check_pool(config, layers=model.num_attention_layers, heads=heads, head_dim=facts.head_dim)
    for name, expected in (
        ("attention_backend", "kvc"),
        ("radix_cache_backend", "kvc"),
        ("page_size", config.block_size),
    ):
        value = getattr(resolved, name)
        if value != expected:
            raise ConfigError(
                f"The model {facts.name} cannot be served with --kv-backend kvc, because SGLang sets "
                f"{name}={value} for it; serve it with --kv-backend default."
            )
    check_chunk(resolved.chunked_prefill_size, config, resolved.attn_dp_size)
    check_pool_sizing(post_capture_kv_sizing_planned(args))
    graphs = resolved.cuda_graph_config
    if graphs.prefill.backend not in PREFILL_GRAPHS or _on_cpu(args):  # SGLang's choice: `check_args` refuses a user's
        graphs = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(args, __name__, cuda_graph_config=graphs)


def _check_storage(args: Any) -> None:
    """Refuse storage-backend settings that cannot be read, and a user's class that cannot be loaded."""
    # Late: few servers have a storage backend.
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    option = "--hicache-storage-backend-extra-config"
    try:
        extra = HybridCacheController.parse_storage_backend_extra_config(args.hicache_storage_backend_extra_config)[0]
    except Exception as e:
        raise ConfigError(
            f"{option} cannot be read ({e}); give a JSON object, or @ and a JSON, YAML or TOML file."
        ) from None
    if args.hicache_storage_backend != "dynamic":
        return
    names = [extra.get(name) for name in ("module_path", "class_name", "backend_name")]
    if not all(names):
        raise ConfigError(
            f"--hicache-storage-backend dynamic needs backend_name, module_path and class_name in {option}, because "
            "they name the class; give all three."
        )
    try:
        StorageBackendFactory._load_backend_class(*names)
    except Exception as e:
        raise ConfigError(
            f"The class of --hicache-storage-backend dynamic cannot be loaded ({e}); correct {option}."
        ) from None


def _on_cpu(args: Any) -> bool:
    if args.device is not None:
        return args.device.split(":")[0] == "cpu"
    return not torch.cuda.is_available()


def _check_platform() -> None:
    """Refuse a machine without an accelerator if SGLang, when it was imported, did not choose the CPU platform."""
    # Late import: importing the name would choose the platform.
    from sglang.srt.platforms import current_platform
    from sglang.srt.platforms.interface import SRTPlatform

    if type(current_platform) is SRTPlatform:
        raise ConfigError(
            "kv_backend kvc cannot be served here, because SGLang found no platform for a machine without an "
            f"accelerator; set the environment variable SGLANG_PLATFORM={CPU_PLATFORM} before sglang is imported."
        )


def _device_bytes(device: str) -> float | None:
    """Total memory of the device. SGLang asks the driver's tools, so no CUDA context is made here."""
    megabytes = get_device_memory_capacity(device)
    return None if megabytes is None else megabytes * (1 << 20)

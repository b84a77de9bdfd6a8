"""Registers hooks with the signature that each relies on, and refuses to serve if a hook did not apply."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

SGLANG_VERSION = "0.5.23"
SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


@dataclass(frozen=True)
class Hook:
    """target: dotted path of SGLang's function.
    kind: before, after, around or replace.
    parameters: names of the function's parameters in the SGLang version above.
    file: our file that registers the hook.
    """

    target: str
    kind: str
    parameters: tuple[str, ...]
    file: str


HOOKS: dict[str, Hook] = {}
loaded = False  # set at the end of `kvc_patches.load`

_SRT, _SCHEDULER = "sglang.srt", "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_POOL_STATS = "sglang.srt.managers.scheduler_components.pool_stats_observer.PoolStats"

# Everything that must be patched before a pool is built. It is separate from `HOOKS`, so that `verify` notices a hook
# that was never registered.
TARGETS = frozenset(
    (
        f"{_ADDER}.__init__",
        f"{_ADDER}._get_running_request_total_token_offset",
        f"{_ADDER}.add_chunked_req",
        f"{_ADDER}.add_one_req",
        f"{_ADDER}.preempt_to_schedule",
        f"{_CONFIGURATOR}._build_token_to_kv_pool",
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        f"{_CONFIGURATOR}._resolve_memory_pool_config",
        f"{_CONFIGURATOR}.configure",
        f"{_POLICY}._compute_prefix_matches",
        f"{_POLICY}._determine_active_policy",
        f"{_POOL_STATS}.get_decode_usage_msg_parts",
        f"{_POOL_STATS}.get_prefill_usage_msg_parts",
        f"{_SCHEDULER}._add_request_to_queue",
        f"{_SCHEDULER}.flush_cache",
        f"{_SCHEDULER}.get_internal_state",
        f"{_SCHEDULER}.get_new_batch_prefill",
        f"{_SCHEDULER}.on_idle",
        f"{_SCHEDULER}.pause_generation",
        f"{_SCHEDULER}.process_batch_result",
        f"{_SCHEDULER}.run_batch",
        f"{_SRT}.managers.schedule_batch.Req.get_fill_ids",
        f"{_SRT}.managers.schedule_batch.Req.materialized_host_hit_len",
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.mix_with_running",
        f"{_SRT}.managers.schedule_batch.release_req",
        f"{_SRT}.managers.scheduler.validate_input_length",
        f"{_SRT}.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_full_pool",
        f"{_WEIGHT_UPDATER}.begin_weight_update",
        f"{_WEIGHT_UPDATER}.check_weights",
        f"{_WEIGHT_UPDATER}.end_weight_update",
        f"{_WEIGHT_UPDATER}.release_memory_occupation",
        f"{_WEIGHT_UPDATER}.resume_memory_occupation",
        f"{_WEIGHT_UPDATER}.update_weights_from_disk",
        f"{_WEIGHT_UPDATER}.update_weights_from_distributed",
        f"{_WEIGHT_UPDATER}.update_weights_from_ipc",
        f"{_WEIGHT_UPDATER}.update_weights_from_tensor",
        f"{_SRT}.managers.tp_worker.TpModelWorker.get_worker_info",
        f"{_SRT}.mem_cache.allocation._alloc_page_size",
        f"{_SRT}.mem_cache.allocation.alloc_for_decode",
        f"{_SRT}.mem_cache.allocation.alloc_for_extend",
        f"{_SRT}.mem_cache.kv_index_translator.KVIndexTranslator.capture_token_capacity",
        f"{_SRT}.mem_cache.pool_host.common._cuda_host_register",
        f"{_SRT}.models.utils.enable_fused_set_kv_buffer",
        f"{_SRT}.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        f"{_SRT}.sampling.sampling_params.SamplingParams.verify",
        f"{_SRT}.session.session_controller.Session.create_req",
        f"{_SRT}.session.session_controller.SessionController._close",
        f"{_SRT}.session.session_controller.SessionController.maybe_reap",
        SERVER_ARGS,
    )
)


def hook(target: str, kind: str, parameters: str, fn: Callable) -> None:
    """Register `fn` on the dotted path `target`. `kind` is before, after, around or replace."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in HOOKS:
        return
    HOOKS[target] = Hook(target, kind, tuple(parameters.split()), f"{fn.__module__.rpartition('.')[2]}.py")
    HookRegistry.register(target, fn, HookType[kind.upper()])


def resolve(target: str):
    """The object at a dotted path, which may lead into a class."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            obj = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            obj = getattr(obj, name)
        return obj
    raise ImportError(target)


def parameters_of(fn: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(fn)).parameters)


def changed_parameters() -> dict[str, str]:
    """One line for each hook whose function is missing or has parameters other than those recorded."""
    lines = {}
    for target, h in HOOKS.items():
        try:
            parameters = parameters_of(resolve(target))
        except (ImportError, AttributeError):
            lines[target] = "not found"
            continue
        if parameters != h.parameters:
            lines[target] = f"recorded ({' '.join(h.parameters)}), installed ({' '.join(parameters)})"
    return lines


def table() -> list[str]:
    """Markdown rows of all registered hooks, by file, without the prefix `sglang.srt.`."""
    hooks = sorted(HOOKS.values(), key=lambda h: (h.file, h.target))
    return [f"| `{h.file}` | {h.kind} | `{h.target.removeprefix('sglang.srt.')}` |" for h in hooks]


def verify() -> None:
    """Raise unless every hook of `TARGETS` is in force on a function with the recorded parameters, because a
    half-patched server must not serve."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(TARGETS - set(HookRegistry._patched))
    changed = sorted(set(changed_parameters()) - set(missing))
    if missing:
        problem = f"{len(missing)} of its hooks into SGLang did not apply ({', '.join(missing)})"
    elif changed:
        problem = f"functions that it hooks have different parameters ({', '.join(changed)})"
    elif not loaded:
        problem = "it did not load completely (the log has the error)"
    else:
        return
    raise RuntimeError(
        f"--kv-backend kvc cannot serve: {problem}; install the supported SGLang version ({SGLANG_VERSION}), or start "
        "with --kv-backend default"
    )

"""`KVCacheConfigurator`: the compressed pool and its allocator in place of the stock ones, sized in bytes.

SGLang computes how many tokens of its own cache fit. The same bytes become pages, tables and reserve. A checkpoint may
declare FP8 for SGLang's cache; tokens are counted in the dtype of the model here.
"""

from __future__ import annotations

from .lookup import current
from .registry import hook, verify

CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def _active(configurator) -> bool:
    return getattr(configurator.server_args, "kv_backend", "default") == "kvc"


def before_configure(self, *, pre_model_load_memory):
    """Check hooks and model. This hook is the first to run in a scheduler process."""
    if not _active(self):
        return
    from sglang_kvc.options.unsupported_models import check_model

    verify()
    check_model(self)
    self.kv_cache_dtype, self.kv_cache_dtype_str = self.model_dtype, "auto"


def around_resolve_memory_pool_config(orig, self, pre_model_load_memory):
    config = orig(self, pre_model_load_memory)
    if not _active(self):
        return config
    from sglang_kvc.adapter.build_pool import install_runtime

    sizing = install_runtime(self, pre_model_load_memory, config.max_total_num_tokens).sizing
    config.max_total_num_tokens = sizing.capacity_tokens
    config.max_running_requests = self.resolve_max_num_reqs(sizing.capacity_tokens)
    return config


def around_build_pool(orig, self, **arguments):
    if not _active(self):
        return orig(self, **arguments)
    from sglang_kvc.adapter.pool import KvcPool

    return KvcPool(current(), start_layer=self.layer_info.start_layer, end_layer=self.layer_info.end_layer)


def around_build_allocator(orig, self, *, token_to_kv_pool, **arguments):
    if not _active(self):
        return orig(self, token_to_kv_pool=token_to_kv_pool, **arguments)
    from sglang_kvc.adapter.allocator import KvcAllocator

    return KvcAllocator(token_to_kv_pool.runtime, token_to_kv_pool, self.device)


def register_backends() -> None:
    """Register the attention backend and the radix cache with SGLang, both named "kvc"."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

    if "kvc" not in ATTENTION_BACKENDS:

        @register_attention_backend("kvc")
        def create(runner):
            from sglang_kvc.adapter.attention_backend import KvcAttnBackend

            verify()  # again, because the hook on `configure`, which verifies earlier, may be missing
            return KvcAttnBackend(runner)

    if "kvc" not in registered_radix_cache_backends():
        register_radix_cache_backend("kvc", create_radix_cache)


def create_radix_cache(ctx):
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from sglang_kvc.adapter.radix_cache import KvcRadixCache

    return create_unified_radix_cache(ctx, cache_class=KvcRadixCache)


def register() -> None:
    register_backends()
    hook(f"{CONFIGURATOR}.configure", "before", "self pre_model_load_memory", before_configure)
    hook(
        f"{CONFIGURATOR}._resolve_memory_pool_config",
        "around",
        "self pre_model_load_memory",
        around_resolve_memory_pool_config,
    )
    hook(
        f"{CONFIGURATOR}._build_token_to_kv_pool",
        "around",
        "self sizes is_dsa_model is_dsv4_model req_to_token_pool",
        around_build_pool,
    )
    hook(
        f"{CONFIGURATOR}._build_token_to_kv_pool_allocator",
        "around",
        "self sizes token_to_kv_pool is_dsv4_model req_to_token_pool token_to_kv_pool_allocator",
        around_build_allocator,
    )

"""Construction of the runtime of a server, from SGLang's configurator and the memory that it leaves for the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.configs.model_config import ModelImpl
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.model_loader.utils import get_resolved_model_impl
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from ..cache.build import build_runtime
from ..cache.runtime import Runtime, install
from ..options.resolve import resolve_config

logger = logging.getLogger("sglang_kvc")


def install_runtime(configurator: Any, pre_model_load_memory: Any, stock_tokens: int) -> Runtime:
    """Build the runtime of this process and make it current. `configurator`: SGLang's `KVCacheConfigurator`;
    `stock_tokens`: tokens of SGLang's own cache that would fit."""
    kvc, model = resolve_config(configurator.server_args), configurator.model_config
    heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    layers = configurator.layer_info.num_effective_layers
    dtype = configurator.model_dtype
    stock_bytes = stock_tokens * 2 * heads * model.head_dim * layers * dtype.itemsize
    if kvc.memory is not None:
        _check_memory(kvc.memory, configurator._profile_available_bytes(pre_model_load_memory))
    saver = TorchMemorySaverAdapter.create(enable=get_exec().features.enable_memory_saver)
    with saver.region(GPU_MEMORY_TYPE_KV_CACHE):
        runtime = build_runtime(
            kvc,
            num_bytes=stock_bytes if kvc.memory is None else kvc.memory,
            layers=layers,
            heads=heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=configurator.device,
        )
    runtime.decodes_as_extend = get_parallel().attn_dp_size > 1
    # The condition of `Scheduler.init_chunked_prefill`.
    runtime.chunks_prompts = not (model.is_multimodal and get_resolved_model_impl(model) == ModelImpl.TRANSFORMERS)
    if get_parallel().attn_tp_size > 1:
        runtime.reduce_max = _tensor_parallel_max()
    install(runtime)
    logger.info(
        "kvc: %s; %.2f GiB as %d pages of %d bytes, room for %d blocks; %d tokens fit uncompressed",
        kvc.summary(),
        runtime.store.nbytes / 2**30,
        runtime.sizing.num_pages,
        runtime.layout.page_bytes,
        runtime.sizing.num_blocks,
        runtime.sizing.capacity_tokens,
    )
    return runtime


def _check_memory(requested: int, available: int) -> None:
    if requested > available:
        raise ValueError(
            f"--kvc-memory asks for {requested / 2**30:.2f} GiB but {available / 2**30:.2f} GiB are free for the "
            "KV cache after loading the model; ask for less, or raise --mem-fraction-static"
        )


def _tensor_parallel_max() -> Callable[[torch.Tensor], torch.Tensor]:
    """The maximum of a vector over the tensor-parallel ranks of attention, in place."""
    group = get_parallel().attn_tp_group.cpu_group  # each DP rank has its own requests

    def reduce_max(counts: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
        return counts

    return reduce_max

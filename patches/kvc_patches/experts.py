"""Routed experts (`--enable-return-routed-experts`): SGLang keeps a row for each slot, on the host.

The compressed cache has more slots than it holds uncompressed tokens, so the rows are counted by its blocks. A slot
keeps its row while its block has an owner, packed or not.

SGLang registers the rows with CUDA if torch was built for it, which fails without a GPU.
"""

from __future__ import annotations

import torch

from .lookup import current
from .registry import hook

CAPACITY = "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.capture_token_capacity"
REGISTER = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def around_capture_token_capacity(orig, self, max_token_pool_size):
    if (runtime := current()) is None:
        return orig(self, max_token_pool_size)
    return runtime.sizing.num_blocks * runtime.layout.block_tokens


def around_cuda_host_register(orig, buffer, registration_granularity_bytes=None):
    if current() is None or torch.cuda.is_available():
        orig(buffer, registration_granularity_bytes)


def register() -> None:
    hook(CAPACITY, "around", "self max_token_pool_size", around_capture_token_capacity)
    hook(REGISTER, "around", "buffer registration_granularity_bytes", around_cuda_host_register)

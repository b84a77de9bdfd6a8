"""Token-to-KV pool: a facade over the runtime's page store, which holds the K/V rows by block."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from ..cache.runtime import Runtime

GB = 1 << 30


class KvcPool(KVCache):
    """SGLang's `token_to_kv_pool`. Only the attention backend reads and writes KV, through `runtime`.

    `dtype` is uint8 because SGLang's fused RoPE-and-store path writes into the buffers of every bf16 pool.
    """

    def __init__(self, runtime: Runtime, *, start_layer: int = 0, end_layer: int | None = None):
        sizing, layout, device = runtime.sizing, runtime.layout, str(runtime.store.device)
        super().__init__(
            size=sizing.capacity_tokens,
            page_size=layout.block_tokens,
            dtype=torch.uint8,
            layer_num=layout.layers,
            device=device,
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=end_layer,
        )
        self.runtime = runtime
        self.mem_usage = runtime.store.nbytes / GB

    def get_kv_size_bytes(self) -> tuple[int, int]:
        half = self.runtime.store.nbytes // 2
        return half, self.runtime.store.nbytes - half

    def _no_rows(self):
        raise RuntimeError(
            "--kv-backend kvc keeps no contiguous K/V rows; a feature that reads the pool's buffers cannot run with it"
        )

    def get_key_buffer(self, layer_id: int):
        self._no_rows()

    def get_value_buffer(self, layer_id: int):
        self._no_rows()

    def get_kv_buffer(self, layer_id: int):
        self._no_rows()

    def set_kv_buffer(self, *args, **kwargs):
        self._no_rows()

"""The attention backend: one snapshot a step, then append and attend over pages, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from kvc_kernels import ops

from .pool import KvcPool


@dataclass
class Snapshot:
    """What all layers of one forward use; taken once, so that no kernel reads `req_to_token` while the scheduler may
    already be rewriting a finished request's row for another.

    `row_blocks` int32 `[B, NB]` block ids of each request, `seq_lens` `[B]` with the new tokens counted; `write_blocks`
    and `write_offsets` `[N]` where each new token goes. The `_cpu` lists are for the CPU reference.
    """

    row_blocks: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: list[int]
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    prefix_lens: torch.Tensor | None = None
    extend_lens_cpu: list[int] | None = None
    prefix_lens_cpu: list[int] | None = None


class KvcAttnBackend(AttentionBackend):
    """Plugs into SGLang under the name "kvc". Decode and extend read packed pages directly."""

    def __init__(self, runner):
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, KvcPool):
            raise RuntimeError(
                f"--attention-backend kvc needs the pool of --kv-backend kvc but found {type(pool).__name__}: "
                "a hook did not apply; use --kv-backend kvc, which sets the attention backend itself"
            )
        self.token_to_kv_pool = pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.runtime = pool.runtime
        self.block_tokens = self.runtime.layout.block_tokens
        self.snapshot: Snapshot | None = None

    # ---- once per forward

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        if not in_capture:
            self.runtime.flush()
        fb = forward_batch
        if fb.forward_mode.is_idle():
            return
        lens_cpu = [int(n) for n in fb.seq_lens_cpu.tolist()]
        p = self.block_tokens
        columns = -(-max(lens_cpu) // p)
        # Only the first slot of every block is read; the rest of a row follows from it.
        starts = self.req_to_token_pool.req_to_token[:, ::p]
        row_blocks = starts[fb.req_pool_indices, :columns] // p
        snap = Snapshot(row_blocks, fb.seq_lens, lens_cpu, *self._targets(fb, row_blocks))
        if not fb.forward_mode.is_decode():
            snap.prefix_lens = fb.extend_prefix_lens
            snap.extend_lens_cpu = [int(n) for n in fb.extend_seq_lens_cpu]
            snap.prefix_lens_cpu = [n - e for n, e in zip(lens_cpu, snap.extend_lens_cpu)]
        self.snapshot = snap
        if self.runtime.observe is not None and not in_capture:
            extend = snap.extend_lens_cpu or [1] * len(lens_cpu)
            prefix = [n - e for n, e in zip(lens_cpu, extend)]
            ops.note_observers(self.runtime.store, row_blocks, prefix, extend, self.runtime.observe.window)

    def _targets(self, fb, row_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.block_tokens
        if fb.forward_mode.is_decode():
            last = fb.seq_lens.to(torch.int64) - 1
            return row_blocks.gather(1, (last // p)[:, None])[:, 0], last % p
        return fb.out_cache_loc // p, fb.out_cache_loc % p

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # ---- once per layer

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        snap, index = self.snapshot, self._append(k, v, layer, save_kv_cache)
        out = ops.decode_attention(
            self.runtime.store,
            index,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            snap.row_blocks,
            snap.seq_lens,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            observe=self.runtime.observe,
            seq_lens_cpu=snap.seq_lens_cpu,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        snap, index = self.snapshot, self._append(k, v, layer, save_kv_cache)
        out = ops.extend_attention(
            self.runtime.store,
            index,
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            snap.row_blocks,
            snap.prefix_lens_cpu,
            snap.extend_lens_cpu,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            observe=self.runtime.observe,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _append(self, k, v, layer, save_kv_cache: bool) -> int:
        """Write the new rows into their pages; returns the layer's index in the pool."""
        if k is None or not save_kv_cache:
            raise RuntimeError(
                "this model shares KV between layers or stores it outside the attention backend, which --kv-backend "
                "kvc does not support; serve it with --kv-backend default"
            )
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        shape = (-1, layer.tp_k_head_num, layer.qk_head_dim)
        snap = self.snapshot
        ops.append(
            self.runtime.store, index, snap.write_blocks, snap.write_offsets, k.view(shape), v.view(shape)
        )
        return index

    def support_triton(self) -> bool:
        return self.runtime.store.device.type == "cuda"

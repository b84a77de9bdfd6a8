"""Attention backend: flush the queue and take a snapshot once per step, then append and attend layer by layer."""

from __future__ import annotations

import functools

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel

from kvc_kernels import ops

from ..cache.one_shot import WINDOW
from ..engine.attention import Attention, Snapshot
from ..engine.warm_up import compile_ahead
from ..options.model_facts import attention_layers
from .model_identity import model_text, weights_of_ranks
from .pool import KvcPool


def check_heads(layers, heads: int) -> None:
    """RuntimeError, in one sentence, if a layer's number of KV heads is not the pool's `heads`."""
    if other := {layer.tp_k_head_num for layer in layers} - {heads}:
        raise RuntimeError(
            f"this model's attention has {min(other)} KV heads on a rank that stores {heads}, because SGLang does not "
            "shard it with DP attention; drop --enable-dp-attention and --attn-dp-size"
        )


class KvcAttnBackend(AttentionBackend):
    """SGLang's attention backend "kvc". Decode and extend read packed pages."""

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
        rows, columns = runner.req_to_token_pool.req_to_token.shape
        policy = self.runtime.policy
        layers = attention_layers(runner.model)
        check_heads(layers, self.runtime.layout.heads)
        self.runtime.weights = lambda: weights_of_ranks(runner.model)
        self.runtime.model = functools.cache(lambda: model_text(runner, pool.start_layer))
        sizes = {
            "query_heads": runner.model_config.num_attention_heads // get_parallel().attn_tp_size,
            "max_batch": rows,
            "max_blocks": -(-columns // self.block_tokens),
            "windows": sorted({m.sliding_window_size for m in layers} - {-1}),
        }
        self.attention = Attention(
            self.runtime.store, policy.score_sampling, policy.fake_quant_format(policy.format_id_of(None)), **sizes
        )
        self.query_heads = sizes["query_heads"]
        self.tokens = 0  # rows of the planned forward that are tokens; padding rows may follow
        self.runtime.windowed = bool(sizes["windows"])
        self.runtime.page_ops.gaps = ops.RowGaps(rows, self.runtime.store.device)
        if self.runtime.store.on_gpu and not runner.server_args.skip_server_warmup:
            kinds = {(m.sliding_window_size, m.logit_cap) for m in layers}
            compile_ahead(self.runtime, kinds=kinds, **sizes)
        # Launches are not traced; compiled code calls them.
        self._layer = torch.compiler.disable(self._run) if runner.server_args.enable_torch_compile else self._run

    # ---- once per forward

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Apply the queue, then plan. Graph capture and dummy runs name row 0, whose slots lie in the scratch block."""
        if not in_capture:
            self.runtime.flush()
        fb = forward_batch
        if fb.forward_mode.is_idle():
            return
        if fb.forward_mode.is_decode():
            snap = self.attention.plan_decode(
                self.req_to_token_pool.req_to_token, fb.req_pool_indices, fb.seq_lens, fb.seq_lens_cpu.tolist(),
                self.runtime.page_ops.gaps,
            )  # fmt: skip
            self.tokens = len(fb.seq_lens)
        else:
            snap = self._extend_snapshot(fb)
            self.tokens = len(snap.write_blocks)
            self.attention.plan_extend(snap)
        if self.runtime.layout.has_scores and not in_capture:
            # SGLang already has these lengths on the device.
            self.attention.note(snap, None if snap.extend_lens_cpu is None else fb.extend_seq_lens)

    def _extend_snapshot(self, fb) -> Snapshot:
        p, lens = self.block_tokens, fb.seq_lens_cpu.tolist()
        # Only the first slot of every block is read; it determines the others.
        starts = self.req_to_token_pool.req_to_token[:, ::p]
        row_blocks = starts[fb.req_pool_indices, : -(-max(lens) // p)] // p
        extend = [int(n) for n in fb.extend_seq_lens_cpu]
        slots = fb.out_cache_loc[: sum(extend)]  # DP attention pads the tokens of a rank
        write = slots // p, slots % p
        seqs = self.runtime.sequences_of(fb.rids or [])
        seqs += [None] * (len(lens) - len(seqs))  # an idle rank prefills a dummy prompt
        gaps = [0 if seq is None else seq.gap for seq in seqs]
        seq_lens = fb.seq_lens
        if any(gaps):
            seq_lens = seq_lens - self.runtime.page_ops.gaps.close_up(row_blocks, fb.req_pool_indices) * p
            lens = [n - gap * p for n, gap in zip(lens, gaps)]
        prefix = [n - e for n, e in zip(lens, extend)]
        prompts = [n if seq is None else seq.whole_prompt - seq.gap * p for seq, n in zip(seqs, lens)]
        fake_quant_format = self.runtime.fake_quant_format(seqs)
        waiting = []
        if any(fake_quant_format):
            waiting = [
                [] if seq is None or seq.decoding else seq.open_blocks(length) for seq, length in zip(seqs, prefix)
            ]
        return Snapshot(
            row_blocks, seq_lens, *write, lens, prefix, extend,
            fake_quant_format or None, waiting if any(waiting) else None, not any(gaps),
            self._last_queries(seqs, extend), prompts,
        )  # fmt: skip

    def _last_queries(self, seqs, extend: list[int]) -> list[tuple[slice, ops.LastQueries]]:
        """Rows of this forward's queries that one-shot prompts store, and their destinations."""
        rows, end = [], 0
        for seq, new in zip(seqs, extend):
            end += new
            if seq is None or (prompt := seq.one_shot) is None or seq.decoding:
                continue
            if prompt.queries is None:
                prompt.queries = ops.LastQueries(self.runtime.store, self.query_heads, WINDOW, prompt.tail)
            first, tail = seq.length - new, prompt.tail
            if not seq.probe_tokens(first, seq.length, prompt.tokens):  # a probe ends with the prompt's tail
                tail = max(0, seq.length - (prompt.tokens - tail))
            if (asking := new - tail) > 0:
                rows.append((slice(end - tail - min(asking, WINDOW), end - tail), prompt.queries))
        return rows

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: the attention buffers are static and have room for every row."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # ---- once per layer

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        return self._layer(self.attention.decode, q, k, v, layer, save_kv_cache, kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        return self._layer(self.attention.extend, q, k, v, layer, save_kv_cache, kwargs)

    def _run(self, attend, q, k, v, layer, save_kv_cache: bool, kwargs: dict):
        if unknown := [name for name, value in kwargs.items() if value is not None]:
            raise RuntimeError(
                f"this model's attention takes {', '.join(unknown)}, which --kv-backend kvc does not support; serve it "
                "with --kv-backend default"
            )
        if k is None or not save_kv_cache:
            raise RuntimeError(
                "this model shares KV between layers or stores it outside the attention backend, which --kv-backend "
                "kvc does not support; serve it with --kv-backend default"
            )
        heads, dim = layer.tp_k_head_num, layer.qk_head_dim
        q, k, v = q.view(-1, layer.tp_q_head_num, dim), k.view(-1, heads, dim), v.view(-1, heads, dim)
        # If SGLang pads a prefill for its CUDA graph, it cuts queries to the tokens along their first dim. In a model
        # whose queries are [1, N, Hq, D] (Gemma 3) that is not the token dim, and all rows must be returned. DP
        # attention also pads keys and values.
        tokens = min(k.shape[0], self.tokens)
        padding = q.shape[0] - tokens
        if k.shape[0] > tokens:
            k, v = k[:tokens], v[:tokens]
        out = attend(
            layer.layer_id - self.token_to_kv_pool.start_layer,
            q[:tokens] if padding else q,
            k,
            v,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            window=layer.sliding_window_size,
        )
        out = out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)
        return torch.nn.functional.pad(out, (0, 0, 0, padding)) if padding else out

    def support_triton(self) -> bool:
        return self.runtime.store.on_gpu

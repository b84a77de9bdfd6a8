"""Batches that DP attention makes: padded batches, decode steps run as prefills, and the prompt of an idle rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvc_kernels import ops
from kvc_patches.allocation import around_alloc_for_decode
from sglang_kvc.adapter.attention_backend import KvcAttnBackend, check_heads
from sglang_kvc.engine.attention import Attention

from .model import CONTEXT, ROWS, D, H, P, ToyServer

HQ = 2 * H
LAYER = SimpleNamespace(
    layer_id=1, tp_q_head_num=HQ, tp_k_head_num=H, qk_head_dim=D, v_head_dim=D, scaling=0.1, logit_cap=0.0,
    sliding_window_size=-1,
)  # fmt: skip
PADDING = 3  # rows or tokens


class Rank:
    """A rank with two running requests, before a decode step. `store` is complete after each forward."""

    def __init__(self, **options):
        self.server = server = ToyServer(blocks=16, **options)
        self.runtime = runtime = server.runtime
        runtime.decodes_as_extend = True
        runtime.page_ops.gaps = ops.RowGaps(ROWS + 1, torch.device("cpu"))
        policy = runtime.policy
        backend = self.backend = object.__new__(KvcAttnBackend)
        backend.token_to_kv_pool = SimpleNamespace(start_layer=0)
        backend.req_to_token_pool, backend.runtime = server.rows, runtime
        backend.block_tokens, backend.query_heads, backend.tokens = P, HQ, 0
        backend._layer = backend._run
        backend.attention = Attention(
            runtime.store, None, policy.fake_quant_format(policy.format_id_of(None)), query_heads=HQ,
            max_batch=ROWS + 1, max_blocks=CONTEXT // P,
        )  # fmt: skip
        self.reqs = [server.admit(list(range(1000 * i, 1000 * i + n))) for i, n in enumerate((3 * P + 5, P + 20), 1)]
        lengths = torch.tensor([len(r.origin_input_ids) for r in self.reqs])
        batch = SimpleNamespace(
            reqs=self.reqs, tree_cache=server.tree, token_to_kv_pool_allocator=server.allocator, seq_lens_cpu=lengths
        )
        self.slots = around_alloc_for_decode(lambda b, k: server.allocator.alloc(len(b.reqs)), batch, 1)
        self.rows = torch.tensor([r.kv.req_pool_idx for r in self.reqs])
        server.rows.req_to_token[self.rows, lengths] = self.slots.int()
        self.lengths = lengths + 1
        draw = torch.Generator().manual_seed(3)
        self.q = torch.randn((2 + PADDING, HQ, D), generator=draw).bfloat16()
        self.k, self.v = torch.randn((2, 2 + PADDING, H, D), generator=draw).bfloat16()

    def forward(self, mode: ForwardMode, rows: int, tokens: int, **more) -> torch.Tensor:
        """Attention of one layer over a batch padded to `rows` requests and `tokens` tokens, `[tokens, HQ * D]`."""

        def padded(values: torch.Tensor, n: int, fill: int = 0) -> torch.Tensor:
            return torch.cat((values, values.new_full((n - len(values),), fill)))

        lengths = padded(self.lengths, rows, 1)
        fb = SimpleNamespace(
            **{
                "forward_mode": mode, "req_pool_indices": padded(self.rows, rows), "seq_lens": lengths,
                "seq_lens_cpu": lengths, "out_cache_loc": padded(self.slots, tokens),
                "rids": [r.rid for r in self.reqs], **more,
            }
        )  # fmt: skip
        self.backend.init_forward_metadata_out_graph(fb)
        q, k, v = self.q[:tokens], self.k[:tokens], self.v[:tokens]
        forward = self.backend.forward_decode if mode.is_decode() else self.backend.forward_extend
        return forward(q, k, v, LAYER, fb)


def test_model_with_heads_split_over_all_ranks_is_rejected():
    check_heads([LAYER, LAYER], H)
    with pytest.raises(RuntimeError, match="--enable-dp-attention"):
        check_heads([LAYER, SimpleNamespace(tp_k_head_num=H // 2)], H)


KINDS = {
    "k4v4": {"high": "k4v4", "window": 0},
    "window": {"high": "k8v4", "window": P},
    "quota": {"policy": "quota", "keep": 0.5},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def rank(request) -> Rank:
    return Rank(**request.param)


def test_padding_rows_of_decode_step_change_nothing(rank):
    want = rank.forward(ForwardMode.DECODE, 2, 2)
    out = rank.forward(ForwardMode.DECODE, 2 + PADDING, 2 + PADDING)
    assert torch.equal(out[:2], want) and out.isfinite().all()
    rank.server.check()


def test_decode_step_run_as_prefill_sees_same_blocks(rank):
    """In SGLang's prefill graphs all ranks run the same number of tokens."""
    want = rank.forward(ForwardMode.DECODE, 2, 2)
    for tokens in (2, 2 + PADDING):
        out = rank.forward(ForwardMode.EXTEND, 2, tokens, extend_seq_lens_cpu=[1, 1], extend_seq_lens=None)
        assert (out[:2].float() - want.float()).abs().max() < 0.05 and want.float().abs().max() > 0.2
        assert len(out) == tokens and not out[2:].any()


def test_prompt_of_idle_rank_touches_no_block(rank):
    rank.forward(ForwardMode.DECODE, 2, 2)  # also runs queued operations
    before = rank.runtime.store.pages[1:].clone()
    nobody = torch.zeros(1, dtype=torch.int64)
    out = rank.forward(
        ForwardMode.EXTEND, 2, 5, rids=[], extend_seq_lens_cpu=[5], extend_seq_lens=None, req_pool_indices=nobody,
        seq_lens=nobody + 5, seq_lens_cpu=nobody + 5, out_cache_loc=torch.zeros(5, dtype=torch.int64),
    )  # fmt: skip
    assert len(out) == 5 and torch.equal(rank.runtime.store.pages[1:], before)
    rank.server.check()

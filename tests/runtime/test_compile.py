"""Attention in a model that `--enable-torch-compile` compiles: the answers are the same, and none of our kernel
launches is traced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_kvc.adapter import attention_backend
from sglang_kvc.adapter.attention_backend import KvcAttnBackend
from sglang_kvc.adapter.pool import KvcPool

from .model import CONTEXT, ROWS, D, H, P, make_runtime

HEADS, LENGTHS = 4, (2 * P - 2, 40)  # query heads; two requests, of which one begins a block while it decodes


@pytest.fixture
def make_backend(monkeypatch):
    layer = SimpleNamespace(sliding_window_size=-1, logit_cap=0.0, tp_k_head_num=H)
    monkeypatch.setattr(attention_backend, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, attn_tp_rank=0))
    monkeypatch.setattr(attention_backend, "attention_layers", lambda model: [layer])

    def make(enable_torch_compile: bool) -> KvcAttnBackend:
        runtime = make_runtime(window=0)
        table = torch.zeros((ROWS, CONTEXT), dtype=torch.int32)
        for row, length in enumerate(LENGTHS):
            seq = runtime.new_sequence()
            assert runtime.grow([seq], [length + 4])
            places = torch.arange(length + 4)
            table[row, : length + 4] = torch.tensor(seq.blocks)[places // P] * P + places % P
        runtime.flush()
        gen = torch.Generator().manual_seed(3)
        pages = runtime.store.pages  # finite rows before the new ones
        pages.view(torch.bfloat16).copy_(torch.randn(pages.view(torch.bfloat16).shape, generator=gen))
        return KvcAttnBackend(
            SimpleNamespace(
                token_to_kv_pool=KvcPool(runtime), req_to_token_pool=SimpleNamespace(req_to_token=table), model=None,
                model_config=SimpleNamespace(num_attention_heads=HEADS),
                server_args=SimpleNamespace(enable_torch_compile=enable_torch_compile, skip_server_warmup=True),
            )
        )  # fmt: skip

    return make


def steps(backend: KvcAttnBackend, graphs: list | None) -> list[torch.Tensor]:
    """Three decode steps of a model of two layers; `graphs` collects the traced graphs; with None nothing is
    compiled."""
    gen = torch.Generator().manual_seed(0)
    width = HEADS * D
    weights = torch.randn(width, width + 2 * H * D, generator=gen).bfloat16() / width**0.5

    layers = [
        SimpleNamespace(
            layer_id=i, tp_q_head_num=HEADS, tp_k_head_num=H, qk_head_dim=D, v_head_dim=D, scaling=D**-0.5,
            logit_cap=0.0, sliding_window_size=-1,
        )
        for i in range(2)
    ]  # fmt: skip

    def block(x, layer, batch):
        q, k, v = torch.matmul(x, weights).split((width, H * D, H * D), -1)
        return x + backend.forward(q, k, v, layer, batch)

    def forward(x, batch):
        for layer in layers:
            x = block(x, layer, batch)
        return x

    def collect(module, inputs):
        graphs.append(module)
        return module.forward

    run = forward if graphs is None else torch.compile(forward, backend=collect, dynamic=False)
    out = []
    for step in range(3):
        lens = torch.tensor(LENGTHS) + step + 1
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, req_pool_indices=torch.arange(2), seq_lens=lens, seq_lens_cpu=lens
        )
        backend.init_forward_metadata_out_graph(batch)
        out.append(run(torch.randn(2, width, generator=gen).bfloat16(), batch))
    return out


@pytest.mark.slow
def test_compiled_code_calls_attention_untraced(make_backend):
    torch._dynamo.reset()
    plain, compiled, graphs = make_backend(False), make_backend(True), []
    want, got = steps(plain, None), steps(compiled, graphs)
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert torch.equal(plain.runtime.store.pages, compiled.runtime.store.pages), "other rows were written"
    traced = {str(n.target) for g in graphs for n in g.graph.nodes if n.op in ("call_function", "call_method")}
    assert any("matmul" in name for name in traced)
    assert not any(word in name for name in traced for word in ("index", "scaled_dot", "softmax", "exp"))


@pytest.mark.slow
def test_attention_is_traced_without_option(make_backend):
    """Shows what the test above would see if nothing broke the graph."""
    torch._dynamo.reset()
    graphs = []
    steps(make_backend(False), graphs)
    traced = {str(n.target) for g in graphs for n in g.graph.nodes if n.op in ("call_function", "call_method")}
    assert any(word in name for name in traced for word in ("index", "scaled_dot", "softmax", "exp"))

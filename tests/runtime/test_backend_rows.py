"""Rows that SGLang passes to the attention backend: it returns as many rows, with zeros for padding."""

from types import SimpleNamespace

import pytest
import torch

from sglang_kvc.adapter.attention_backend import KvcAttnBackend

LAYER = SimpleNamespace(
    layer_id=3, tp_q_head_num=4, tp_k_head_num=2, qk_head_dim=8, v_head_dim=8, scaling=0.5, logit_cap=2.0,
    sliding_window_size=7,
)  # fmt: skip


def run(q, tokens):
    """The backend's output for `q` and `tokens` new rows, and the arguments of its attention call."""
    given = []

    def attend(layer, q, k, v, **options):
        given.append((layer, q, k, v, options))
        return q + 1

    backend = SimpleNamespace(token_to_kv_pool=SimpleNamespace(start_layer=1), tokens=tokens)
    k = torch.randn((tokens, 2, 8))
    return KvcAttnBackend._run(backend, attend, q, k, k, LAYER, True, {}), given[0]


@pytest.mark.parametrize("shape", [(5, 32), (5, 4, 8), (1, 5, 4, 8)])
def test_unpadded_rows_are_returned(shape):
    q = torch.randn(shape)
    out, (layer, got, k, _, options) = run(q, 5)
    assert layer == 2 and options == {"scale": 0.5, "logit_cap": 2.0, "window": 7}
    assert torch.equal(got, q.view(5, 4, 8)) and k.shape == (5, 2, 8)
    assert torch.equal(out, (q + 1).view(5, 32))


def test_padding_queries_get_zero_rows():
    """FlashInfer takes exactly as many queries as it was planned for."""
    q = torch.randn((1, 8, 4, 8))
    out, (_, got, *_) = run(q, 5)
    assert torch.equal(got, q[0, :5])
    assert torch.equal(out[:5], (q[0, :5] + 1).view(5, 32)) and not out[5:].any() and len(out) == 8

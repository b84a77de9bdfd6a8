"""What is captured is what the model computes, and what is measured is what numpy says of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.calibration.measure import formats
from sglang_kvc.calibration.measure.attention import by_block
from sglang_kvc.calibration.measure.attention_scores import attention_scores, layer_shares, retention
from sglang_kvc.calibration.measure.capture import CalibrateError, run
from sglang_kvc.calibration.measure.passes import calibrate
from sglang_kvc.calibration.measure.queries import rotary_frequencies, same_before_rotation, unrotate

from .conftest import BLOCK, DIM, HEADS, KV_HEADS, LAYERS, TOKENS, make_ids, make_model

LAYOUT, _ = formats.layout_for("k4v4", (LAYERS, KV_HEADS, DIM), BLOCK)


def captured(model, ids):
    """Rotated q, k, v of every layer, and logits, of a pass through our attention."""
    rows = {}

    def attend(layer, q, k, v, scale):
        rows[layer] = (q, k, v)
        return by_block(q, k, v, scale, LAYOUT.block_tokens, None)

    logits = run(model, ids, attend, torch.arange(len(ids)))
    return rows, logits


def hooked(model, ids):
    """The same by hooks on the projections and the model's own rotation."""
    projected, handles = {}, []
    for i, layer in enumerate(model.model.layers):
        for name in "qkv":
            module = getattr(layer.self_attn, f"{name}_proj")

            def keep(module, args, out, key=(i, name)):
                projected[key] = out[0].unflatten(-1, (-1, DIM)).transpose(0, 1)

            handles.append(module.register_forward_hook(keep))
    with torch.inference_mode():
        logits = model(ids.unsqueeze(0), use_cache=False).logits[0]
        cos, sin = model.model.rotary_emb(logits, torch.arange(len(ids)).unsqueeze(0))
    for handle in handles:
        handle.remove()

    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * cos[0] + torch.cat((-b, a), -1) * sin[0]

    rows = {}
    for i in range(LAYERS):
        q, k, v = (projected[i, name] for name in "qkv")
        rows[i] = (rotate(q), rotate(k), v)
    return rows, logits


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_rows_are_those_of_the_model(kind, ids):
    model = make_model(kind)
    before = model.config._attn_implementation
    ours, logits = captured(model, ids)
    theirs, expected = hooked(model, ids)
    for layer in range(LAYERS):
        for a, b, heads in zip(ours[layer], theirs[layer], (HEADS, KV_HEADS, KV_HEADS)):
            assert a.shape == (heads, TOKENS, DIM)
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert model.config._attn_implementation == before


def test_query_statistics(model, ids, found):
    rows, _ = captured(model, ids)
    frequencies = found.tensors["rotary_frequencies"].double().numpy()
    angle = np.arange(TOKENS)[:, None] * frequencies
    for layer in range(LAYERS):
        q = rows[layer][0].double().numpy()
        a, b = q[..., : DIM // 2], q[..., DIM // 2 :]
        # A pair (a, b) was turned by the angle: turned back as a complex number.
        z = (a + 1j * b) * np.exp(-1j * angle)
        q = np.concatenate((z.real, z.imag), -1)
        for head in range(HEADS):
            mean, covariance = q[head].mean(0), np.cov(q[head].T, bias=True)
            np.testing.assert_allclose(found.tensors["query_mean"][layer, head], mean, atol=1e-4)
            np.testing.assert_allclose(found.tensors["query_covariance"][layer, head], covariance, atol=1e-3)


def test_rotation_is_undone_or_left_alone(model, ids):
    frequencies = rotary_frequencies(model)
    keys = captured(model, ids)[0][0][1]
    assert same_before_rotation(keys, ids, frequencies)
    assert not same_before_rotation(keys, ids, frequencies * 1.5)
    assert not same_before_rotation(keys, torch.arange(len(ids)), frequencies)
    x = torch.randn(1, 4, DIM)
    torch.testing.assert_close(unrotate(x, torch.zeros(DIM // 4)), x)


def test_attention_scores_and_retention(model, ids):
    q, k, _ = captured(model, ids)[0][1]
    scale, early = DIM**-0.5, 192
    got = attention_scores(q, k, scale, (early, TOKENS))
    logits = np.einsum("hgnd,hmd->hgnm", q.double().unflatten(0, (KV_HEADS, -1)).numpy(), k.double().numpy()) * scale
    logits = np.where(np.tril(np.ones((TOKENS, TOKENS), dtype=bool)), logits, -np.inf)
    w = np.exp(logits - logits.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    w[..., np.arange(TOKENS), np.arange(TOKENS)] = 0
    np.testing.assert_allclose(got[0], w[:, :, :early].sum(2), atol=1e-4)
    np.testing.assert_allclose(got[1], w.sum(2), atol=1e-4)

    importance = got[1].sum(1)
    blocks = importance[:, : TOKENS // BLOCK * BLOCK - BLOCK].double().numpy().reshape(-1, BLOCK)
    best = -np.sort(-blocks, axis=-1)
    expected = (best.cumsum(-1) / best.sum(-1, keepdims=True)).mean(0)
    np.testing.assert_allclose(retention(importance, BLOCK), expected, atol=1e-9)


def test_layer_shares(found):
    shares, curves = found.tensors["layer_shares"], found.tensors["retention_curves"]
    assert shares.shape == (LAYERS,) and float(shares.sum()) == pytest.approx(1)
    assert curves.shape == (LAYERS, BLOCK)
    torch.testing.assert_close(curves[:, -1], torch.ones(LAYERS))
    total = round(0.25 * LAYERS * BLOCK)
    assert ops.greedy_allocation(curves.double(), total, 1) == [round(float(x) * total) for x in shares]
    # A layer whose attention is spread out needs more tokens than one that looks at a few.
    steep = torch.ones(BLOCK, dtype=torch.float64)
    even = torch.arange(1, BLOCK + 1, dtype=torch.float64) / BLOCK
    assert layer_shares(torch.stack((steep, even))).tolist() == [1 / 32, 31 / 32]


def test_a_text_that_is_too_short(model):
    with pytest.raises(CalibrateError, match="longer text"):
        calibrate(model, make_ids(3 * BLOCK), block=BLOCK)


def test_a_model_with_a_window_is_refused(ids):
    model = make_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(CalibrateError, match="cannot be served"):
        calibrate(model, ids, block=BLOCK)

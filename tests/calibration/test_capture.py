"""Captured rows equal the model's, and measured statistics equal numpy references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.calibration.measure import formats
from sglang_kvc.calibration.measure import layer_statistics as layers
from sglang_kvc.calibration.measure.attention import by_block
from sglang_kvc.calibration.measure.attention_scores import attention_scores
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
    """The same values by hooks on the projections and the model's own rotation."""
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
def test_captured_rows_equal_model(kind, ids):
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


def test_query_statistics(model, ids, measured):
    rows, _ = captured(model, ids)
    frequencies = measured.tensors["rotary_frequencies"].double().numpy()
    angle = np.arange(TOKENS)[:, None] * frequencies
    for layer in range(LAYERS):
        q = rows[layer][0].double().numpy()
        a, b = q[..., : DIM // 2], q[..., DIM // 2 :]
        # The rotary embedding turns each pair (a, b) by the angle; a complex product turns it back.
        z = (a + 1j * b) * np.exp(-1j * angle)
        q = np.concatenate((z.real, z.imag), -1)
        for head in range(HEADS):
            mean, covariance = q[head].mean(0), np.cov(q[head].T, bias=True)
            np.testing.assert_allclose(measured.tensors["query_mean"][layer, head], mean, atol=1e-4)
            np.testing.assert_allclose(measured.tensors["query_covariance"][layer, head], covariance, atol=1e-3)


def test_rotation_is_verified_and_undone(model, ids):
    frequencies = rotary_frequencies(model)
    keys = captured(model, ids)[0][0][1]
    assert same_before_rotation(keys, ids, frequencies)
    assert not same_before_rotation(keys, ids, frequencies * 1.5)
    assert not same_before_rotation(keys, torch.arange(len(ids)), frequencies)
    x = torch.randn(1, 4, DIM)
    torch.testing.assert_close(unrotate(x, torch.zeros(DIM // 4)), x)


def probabilities(q, k) -> np.ndarray:
    """A[h, i, j] in fp64: the attention of query i of query head h to token j."""
    logits = np.einsum("hgnd,hmd->hgnm", q.double().unflatten(0, (KV_HEADS, -1)).numpy(), k.double().numpy())
    n = k.shape[1]
    logits = np.where(np.tril(np.ones((n, n), dtype=bool)), logits.reshape(HEADS, n, n) * DIM**-0.5, -np.inf)
    w = np.exp(logits - logits.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def test_attention_scores(model, ids):
    q, k, _ = captured(model, ids)[0][1]
    early = 192
    got = attention_scores(q, k, DIM**-0.5, (early, TOKENS))
    w = probabilities(q, k)
    w[..., np.arange(TOKENS), np.arange(TOKENS)] = 0
    w = w.reshape(KV_HEADS, -1, TOKENS, TOKENS)
    np.testing.assert_allclose(got[0], w[:, :, :early].sum(2)[..., :TOKENS], atol=1e-4)
    np.testing.assert_allclose(got[1], w.sum(2), atol=1e-4)


def test_layer_statistics(model, ids, measured):
    """XKV's curves, CAKE's entropy and shift, and MiniKV's variance, token by token in numpy."""
    rows, _ = captured(model, ids)
    for layer in range(LAYERS):
        w = probabilities(*rows[layer][:2])
        curves, entropy, shift = [], [], []
        for end in (TOKENS // 4, TOKENS // 2, 3 * TOKENS // 4, TOKENS):
            seen = w[:, end - 8 : end, :end].mean((0, 1))
            pooled = [seen[max(0, j - 3) : j + 4].mean() for j in range(end)]
            best = np.concatenate(([0], np.cumsum(sorted(pooled, reverse=True)) / sum(pooled)))
            curves.append(np.interp(np.arange(1, 257) * end / 256, np.arange(end + 1), best))
            a = w[:, end - 32 : end, : end - 32]
            entropy.append(np.mean(-np.sum(a * np.log(a), -1)))
            shift.append(np.mean(np.sum(np.var(a, 1, ddof=1), -1)))
        np.testing.assert_allclose(measured.tensors["importance_retention"][layer], np.mean(curves, 0), atol=2e-5)
        np.testing.assert_allclose(measured.tensors["attention_entropy"][layer], np.mean(entropy), rtol=1e-3)
        np.testing.assert_allclose(measured.tensors["attention_shift"][layer], np.mean(shift), rtol=1e-3)
        w[:, np.arange(TOKENS), np.arange(TOKENS)] = 0
        cumulative = w.sum(1).reshape(KV_HEADS, -1, TOKENS).sum(1)
        variance = np.var(cumulative, -1, ddof=1).mean()
        np.testing.assert_allclose(measured.tensors["attention_variance"][layer], variance, rtol=1e-3)
    # Every file gives an allocation for every kept share of the tokens.
    for kept in (1, LAYERS * 10, LAYERS * 256):
        assert sum(ops.greedy_allocation(measured.tensors["importance_retention"], kept)) == kept


def test_retrieval_heads_are_detected(model, ids, measured):
    m = TOKENS // 2
    rows, _ = captured(model, torch.cat((ids[:m], ids[:m])))
    for layer in range(LAYERS):
        w = probabilities(*rows[layer][:2]).reshape(KV_HEADS, -1, 2 * m, 2 * m).mean(1)
        for head in range(KV_HEADS):
            attention = [w[head, m + i, max(0, i - 3) : min(m, i + 6)].sum() for i in range(m - 1)]
            assert float(measured.tensors["head_retrieval"][layer, head]) == pytest.approx(np.mean(attention), rel=1e-3)
    # A head whose queries look for the key after their own token's first copy.
    keys = torch.nn.functional.one_hot(torch.arange(2 * m) % m, m).float()
    queries = 50 * torch.nn.functional.one_hot((torch.arange(2 * m) + 1) % m, m).float()
    assert float(layers.head_retrieval(queries[None], keys[None], 1.0)) > 0.4


def test_query_samples_are_captured_queries(model, ids, measured):
    rows, _ = captured(model, ids)
    samples, frequencies = measured.tensors["query_samples"], measured.tensors["rotary_frequencies"]
    for i in range(samples.shape[2]):
        at = (2 * i + 1) * TOKENS // (2 * samples.shape[2])
        want = unrotate(rows[1][0][:, at : at + 1], frequencies, first=at)[:, 0]
        torch.testing.assert_close(samples[1, :, i], want, rtol=1e-4, atol=1e-4)


def test_too_short_text_is_rejected(model):
    with pytest.raises(CalibrateError, match="longer text"):
        calibrate(model, make_ids(3 * BLOCK), block=BLOCK)


def test_model_with_window_is_rejected(ids):
    model = make_model("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(CalibrateError, match="cannot be served"):
        calibrate(model, ids, block=BLOCK)

"""The attention of a prompt's last queries against float64, and the query rows kept across its chunks."""

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.scores import prompt_end
from tests.support.pages import block_formats_of, fill, make_store, random_kv

P, WINDOW, GROUP = 32, 8, 3


def slow_scores(q, k, scale, cap):
    """Sums of squared probabilities `[H, S]` for `q[w, Hq, D]`, the last queries of `k[S, H, D]`, token by token."""
    tokens, heads = k.shape[:2]
    out = np.zeros((heads, tokens))
    for i, row in enumerate(q):
        seen = tokens - len(q) + i + 1
        for j, query in enumerate(row):
            logits = k[:seen, j // (len(row) // heads)] @ query * scale
            logits = cap * np.tanh(logits / cap) if cap else logits
            e = np.exp(logits - logits.max())
            out[j // (len(row) // heads), :seen] += (e / e.sum()) ** 2
    return out


@pytest.mark.parametrize("elements", [1 << 23, 1])  # all heads at once, one at a time
@pytest.mark.parametrize(("cap", "tail"), [(0.0, 0), (3.0, 0), (0.0, 5)])
def test_scores_are_squared_attention(monkeypatch, cap, tail, elements):
    monkeypatch.setitem(prompt_end.STEP_ELEMENTS, "cpu", elements)
    store, tokens = make_store(block_tokens=P, layers=2, heads=2), 3 * P + 5
    blocks = torch.tensor([4, 1, 6, 2])
    k, v = random_kv(store, tokens)
    fill(store, blocks, k, v)
    queries = ops.LastQueries(store, 2 * GROUP, WINDOW, tail)
    q = torch.randn(2, WINDOW, 2 * GROUP, 32, generator=torch.Generator().manual_seed(3)).to(store.dtype)
    for layer in range(2):
        queries.add(layer, q[layer], scale=0.1 + layer, logit_cap=cap)
        (scores,) = ops.prompt_scores(store, slice(layer, layer + 1), blocks, tokens, queries)
        keys = k[layer, : tokens - tail].double().numpy()
        want = slow_scores(q[layer].double().numpy(), keys, 0.1 + layer, cap)
        assert scores.shape == (2, tokens) and torch.isfinite(scores).all()
        np.testing.assert_allclose(scores[:, : tokens - tail].numpy(), want, rtol=2e-4, atol=1e-6)
        assert not scores[:, tokens - tail :].any()


@pytest.mark.parametrize("packed", [1, 3])
def test_scores_of_packed_blocks_match_unpacked_rows(packed):
    spec = "k4v4"
    store = make_store(block_formats_of(spec), block_tokens=P, layers=2, heads=2, head_dim=32)
    tokens, blocks = 3 * P + 9, torch.tensor([4, 1, 6, 2])
    fill(store, blocks, *random_kv(store, tokens))
    ops.compact(store, blocks[:packed], 1, None, from_format=0)
    queries = ops.LastQueries(store, 2 * GROUP, WINDOW)
    q = torch.randn(2, WINDOW, 2 * GROUP, 32, generator=torch.Generator().manual_seed(3)).to(store.dtype)
    for layer in range(2):
        queries.add(layer, q[layer], scale=0.3, logit_cap=0.0)
    both = ops.prompt_scores(store, slice(0, 2), blocks, tokens, queries, packed=packed, format_id=1)
    for layer, scores in enumerate(both):
        keys = ops.load_dense(store, layer, blocks)[0].transpose(0, 1).flatten(1, 2)[:, :tokens]
        want = slow_scores(q[layer].double().numpy(), keys.transpose(0, 1).double().numpy(), 0.3, 0.0)
        np.testing.assert_allclose(scores.numpy(), want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("chunks", [[40], [8], [3, 5], [20, 1], [9, 2, 3, 1], [7, 8, 7]])
def test_last_query_rows_are_kept_across_chunks(chunks):
    store = make_store(block_tokens=P)
    queries = ops.LastQueries(store, 2, WINDOW)
    rows = torch.arange(sum(chunks)).view(-1, 1, 1).expand(-1, 2, 32).to(store.dtype)
    for part in rows.split(chunks):
        queries.add(0, part[-WINDOW:], scale=1.0, logit_cap=0.0)
    assert torch.equal(queries.rows[0], rows[-WINDOW:])


def test_layers_of_equal_scale_and_cap_are_grouped():
    queries = ops.LastQueries(make_store(block_tokens=P, layers=7), 2, WINDOW)
    queries.scaling = [(1.0, 0.0)] * 3 + [(0.5, 0.0)] * 2 + [(0.5, 30.0)] * 2
    assert [*queries.groups(2)] == [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 7)]
    assert [*queries.groups(9)] == [slice(0, 3), slice(3, 5), slice(5, 7)]

"""Scores collected while queries are available: windows, powers, reductions, and skipped near tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvc_kernels import ops
from tests.kernels.common.test_attention_reference import dense, reference, request


@pytest.mark.parametrize("skip", [0, 1, 10])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("reduce", ["max", "sum", "squares", "worst"])
@pytest.mark.parametrize("window", [None, 7])
def test_scores_match_attention_matrix(window, reduce, power, skip):
    """Covers a prefill in three chunks and two decode steps, with the first block packed in between. The window of 7
    queries begins in the second chunk."""
    check(ops.ScoreSampling(window, reduce, power, skip, decode_stride=1))


@pytest.mark.parametrize("window, stride, decode_stride", [(None, 4, 2), (8, 2, 1), (None, 1, 2), (None, 64, 16)])
@pytest.mark.parametrize("reduce", ["sum", "worst"])
def test_strided_queries_match_attention_matrix(window, stride, decode_stride, reduce):
    check(ops.ScoreSampling(window, reduce, 2, 3, stride, decode_stride))


def check(sampling):
    store, row, _ = request("k4v4", has_scores=True, length=170, packed=0)
    window, prompt = sampling.window, 168
    num_queries = np.zeros((3, 64))
    want = np.zeros((2, 170))
    for step, (prefix, new) in enumerate(((0, 100), (100, 64), (164, 4), (168, 1), (169, 1))):
        if step == 3:
            ops.compact(store, row[:1], 1, ops.keep_all(1, store.layout), from_format=0)
        end = prefix + new
        k, v, stored = dense(store, row, 170)
        q = torch.randn(new, 6, 64, generator=torch.Generator().manual_seed(step))
        _, p = reference(q, k[:, :end], v[:, :end], stored[:, :end], 0.125, 0.0)
        kw = {"scale": 0.125, "sampling": sampling}
        if new == 1:
            ops.decode_attention(store, 0, q, row[None], torch.tensor([end]), **kw)
        else:
            ops.extend_attention(store, 0, q, row[None], [prefix], [new], prompt_lens=[prompt], **kw)
        worst = sampling.reduce == "worst"
        scores = np.zeros((6, 170))
        step = sampling.decode_stride if new == 1 else sampling.stride
        counted = range(prefix if window is None else min(end, max(prefix, prompt - window)), end)
        for i in counted:
            if (i + 1) % step:
                continue
            for j in range(i - max(1, sampling.skip) + 1):
                weights = p[:, i - prefix, j].double().numpy() ** sampling.power
                scores[:, j] = np.maximum(scores[:, j], weights) if worst else scores[:, j] + weights
            for j in range(i):
                num_queries.flat[j] += step if i // 64 > j // 64 or j <= i - max(1, sampling.skip) else 0
        for h in range(2):
            group = scores[3 * h : 3 * h + 3]
            rule = {"max": group.max(0), "sum": group.sum(0), "squares": (group**2).sum(0), "worst": group.max(0)}
            want[h] = np.maximum(want[h], group.max(0)) if worst else want[h] + step * rule[sampling.reduce]
        counts = torch.tensor([len(counted)]) if new > 1 else None
        ops.count_queries(store, row[None], torch.tensor([end]), counts, sampling)
    got = ops.block_scores(store, row).transpose(0, 2)[:, 0].reshape(2, -1)[:, :170]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-3, atol=1e-6)
    if worst:
        return  # a largest value has no mean
    starts, prompts = torch.tensor([0, 64]), torch.tensor([prompt, prompt])
    mean = ops.mean_attention_scores(store, row[:2], starts, prompts, sampling).transpose(0, 2)[:, 0].reshape(2, -1)
    np.testing.assert_allclose(mean, want[:, :128] / num_queries.flat[:128].clip(1), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("prompt", [1, 40, 64, 100, 150, 170])
@pytest.mark.parametrize(
    "sampling",
    [
        ops.ScoreSampling(), ops.ScoreSampling(16, decode_stride=8), ops.ScoreSampling(stride=16, decode_stride=2),
        ops.ScoreSampling(skip=10),
    ],
    ids=str,
)  # fmt: skip
def test_mean_of_uniform_attention(sampling, prompt):
    """If every query pays the same to each earlier token, a mean is that of these payments, wherever the prompt ends.
    Blocks may lie in the prompt, in the answer or in both."""
    store, row, _ = request("k4v4", has_scores=True, length=170, packed=0)
    paid, met = np.zeros(170), np.zeros(170)
    forwards = [(0, prompt), *((i, 1) for i in range(prompt, 170))]
    for prefix, new in forwards:
        end, decoding, q = prefix + new, prefix > 0, torch.zeros(new, 6, 64)
        kw = {"scale": 0.125, "sampling": sampling}
        if decoding:
            ops.decode_attention(store, 0, q, row[None], torch.tensor([end]), **kw)
        else:
            ops.extend_attention(store, 0, q, row[None], [0], [new], prompt_lens=[prompt], **kw)
        counted = None if decoding else torch.tensor([sampling.counted(end, new, prompt)])
        ops.count_queries(store, row[None], torch.tensor([end]), counted, sampling)
        step = sampling.decode_stride if decoding else sampling.stride
        for i in range(prefix, end):
            if (i + 1) % step == 0 and (decoding or i >= prompt - (sampling.window or prompt)):
                paid[: max(0, i - sampling.nearest + 1)] += step / (i + 1)
                met += step * ((np.arange(170) // 64 < i // 64) | (np.arange(170) <= i - sampling.nearest))
    starts, prompts = torch.tensor([0, 64]), torch.tensor([prompt, prompt])
    mean = ops.mean_attention_scores(store, row[:2], starts, prompts, sampling)
    np.testing.assert_allclose(mean[:, 0, 0].flatten(), (paid / met.clip(1))[:128], rtol=1e-5)


def test_packed_tokens_are_never_skipped():
    """Packed tokens have no order, so near ones also count and no far one is skipped."""
    store, row, _ = request("k4v4", has_scores=True, length=64 + 3, packed=1)
    q = torch.randn(3, 6, 64)
    ops.extend_attention(store, 0, q, row[None], [64], [3], scale=0.125, sampling=ops.ScoreSampling(None, "sum", 1, 20))
    scores, stored = ops.block_scores(store, row)[:, 0], ops.block_tiers(store, row)[:, 0] > 0
    assert torch.equal(scores[0] > 0, stored[0]) and (scores[1, :, :3] == 0).all()


@pytest.mark.parametrize("wrong", [{"reduce": "mean"}, {"power": 3}, {"skip": -1}, {"window": 0}, {"stride": 3},
                                   {"stride": 128}, {"decode_stride": 0}, {"window": 8, "stride": 16}])
def test_invalid_sampling_is_rejected(wrong):
    with pytest.raises(ValueError, match="attention is collected"):
        ops.ScoreSampling(**wrong)


@given(st.integers(0, 100), st.integers(0, 70), st.integers(1, 8), st.sampled_from([1, 4, 16, 64]))
def test_query_counts_do_not_depend_on_chunking(prefix, new, cuts, stride):
    """However a prompt is cut, a query's position alone decides whether it is counted."""
    store, row, _ = request("k4v4", has_scores=True, length=170, packed=0)
    at = sorted({prefix, prefix + new, *(prefix + new * i // cuts for i in range(cuts))})
    for a, b in itertools.pairwise(at):
        ops.count_queries(store, row[None], torch.tensor([b]), torch.tensor([b - a]), ops.ScoreSampling(stride=stride))
    sampled = [i for i in range(prefix, prefix + new) if ops.ScoreSampling(decode_stride=stride).decoding(i)]
    assert store.query_counts[row].tolist() == [stride * sum(i >= 64 * (j + 1) for i in sampled) for j in range(3)]

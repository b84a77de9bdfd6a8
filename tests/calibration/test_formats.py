"""Formats and thresholds are judged by their effect on predictions."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import pytest
import torch

from kvc_kernels.common import quant
from kvc_kernels.extend.fake_quant import fake_quantize
from kvc_kernels.formats import FORMATS
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration.measure import formats, thresholds
from sglang_kvc.calibration.measure.attention import by_block, causal
from sglang_kvc.calibration.measure.formats import Difference, compare, verdict
from sglang_kvc.calibration.measure.passes import calibrate
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies.published.leankv import LeanKV

from .conftest import BLOCK, DIM, HEADS, KV_HEADS, LAYERS, TOKENS, make_model

SHAPE = (LAYERS, KV_HEADS, DIM)


def rows(seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(h, TOKENS, DIM, generator=gen) for h in (HEADS, KV_HEADS, KV_HEADS))


def test_exact_predictions_have_zero_difference():
    logits = torch.randn(300, 50)
    assert compare(logits, logits.clone(), torch.arange(300) % 50) == Difference(0.0, 0.0, 0.0, 1.0)


def test_difference_of_predictions_matches_reference():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    got = compare(p.log(), q.log(), torch.tensor([1, 0]))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert got.kl_mean == pytest.approx(kl / 2, abs=1e-6)
    assert got.kl_p99 == pytest.approx(0.99 * kl, abs=1e-6)
    assert got.nll_delta == pytest.approx(math.log(0.5 / 0.75) / 2, abs=1e-6)
    assert got.top1_equal == 0.5


@pytest.mark.parametrize(
    "mean, p99, expected",
    [(0.0, 0.0, "ok"), (0.02, 0.2, "ok"), (0.021, 0.1, "loses"), (0.01, 0.3, "loses"), (0.21, 0.3, "breaks")],
)
def test_verdicts_follow_thresholds(mean, p99, expected):
    assert verdict(Difference(mean, p99, 0.0, 1.0)) == expected
    assert verdict(Difference(math.nan, p99, 0.0, 1.0)) == "breaks"


def test_query_sees_its_block_exact_and_earlier_ones_packed():
    layout, _ = formats.layout_for("k2v2", SHAPE, BLOCK)
    q, k, v = rows()
    got = by_block(
        q, k, v, DIM**-0.5, layout.block_tokens, functools.partial(fake_quantize, layout, FORMATS["k2v2"])
    )
    exact = by_block(q, k, v, DIM**-0.5, layout.block_tokens, None)
    torch.testing.assert_close(got[:, :BLOCK], exact[:, :BLOCK], rtol=0, atol=0)
    for at in (BLOCK, 3 * BLOCK + 5, TOKENS - 1):
        begin = at // BLOCK * BLOCK
        packed = fake_quantize(layout, FORMATS["k2v2"], *(x[:, :begin].unflatten(1, (-1, BLOCK)) for x in (k, v)))
        keys, values = (torch.cat((a.flatten(1, 2), b[:, begin : at + 1]), 1) for a, b in zip(packed, (k, v)))
        expected = causal(q[:, at : at + 1], keys, values, DIM**-0.5)
        torch.testing.assert_close(got[:, at : at + 1], expected, rtol=1e-5, atol=1e-5)
    assert (got - exact)[:, BLOCK:].abs().max() > 0.01


def test_every_format_is_measured(measured):
    seen = {r.format: r for r in measured.formats}
    assert set(seen) == set(FORMATS) - {"bf16", "k2v2"}  # the kernels have no 2-bit keys of 32 features
    by_bits = [seen[f] for f in ("k8v8", "k4v4", "k4v2")]
    assert by_bits[0].difference.kl_mean < by_bits[1].difference.kl_mean < by_bits[2].difference.kl_mean
    assert by_bits[0].token_bytes > by_bits[1].token_bytes > by_bits[2].token_bytes
    fine = [r for r in measured.formats if r.verdict == "ok"]
    assert measured.findings().recommended == (min(fine, key=lambda r: r.token_bytes).format if fine else "bf16")
    assert formats.recommended([]) == "bf16"


def test_large_key_bias_breaks_no_keys(ids):
    model = make_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            # The pair that rotates slowest, so that the bias stays in its channel.
            layer.self_attn.k_proj.bias.view(KV_HEADS, DIM)[:, DIM // 2 - 1] += 200
    by_format = {r.format: r for r in calibrate(model, ids, block=BLOCK).formats}
    assert by_format["k4v8"].verdict != "breaks"


def test_thresholds(measured):
    t, tried = measured.chosen, measured.tried
    first = [r for r in tried if r.alpha_low == 0 < r.alpha_high]
    assert [r.alpha_high for r in first] == list(thresholds.ALPHA_HIGH)
    assert all(r.pruned == 0 and r.high + r.low == pytest.approx(1) for r in first)
    assert all(a.high >= b.high for a, b in pairwise(first))
    fine = [r.alpha_high for r in first if r.difference.kl_mean <= thresholds.LOSS]
    assert t.alpha_high == max(fine, default=0)
    assert (t.high, t.low) == ("k8v4", "k4v2")
    second = [r for r in tried if r.alpha_low > 0]
    assert [r.alpha_low for r in second] == list(thresholds.ALPHA_LOW)
    assert {r.alpha_high for r in second} == {t.alpha_high}
    assert t.alpha_low in (0.0, *thresholds.ALPHA_LOW)


def test_tokens_are_pruned_without_low_tier_if_no_alpha_high_qualifies(model, ids, monkeypatch):
    monkeypatch.setattr(thresholds, "LOSS", -1.0)
    monkeypatch.setattr(thresholds, "PRUNING_LOSS", 1e9)
    monkeypatch.setattr(thresholds, "ALPHA_HIGH", (1.0,))
    result = calibrate(model, ids, block=BLOCK)
    assert (result.chosen.alpha_high, result.chosen.alpha_low) == (0.0, max(thresholds.ALPHA_LOW))
    assert [(r.alpha_high, r.alpha_low) for r in result.tried] == [
        (1.0, 0.0), (0.0, 0.0), *((0.0, a) for a in thresholds.ALPHA_LOW)
    ]  # fmt: skip
    assert all(r.low == 0 for r in result.tried[1:]) and result.tried[1].pruned == 0


def test_header_of_two_tier_block_covers_only_kept_tokens():
    policy = LeanKV()
    config = KvcConfig(policy="leankv", block_size=BLOCK, high=policy.high, low=policy.low)
    layout = make_layout(config, policy, layers=1, heads=KV_HEADS, head_dim=DIM)
    _, k, v = (x[:, : TOKENS // BLOCK * BLOCK] for x in rows(3))
    k[:, 7] += 30  # an outlier that is dropped must not widen the others' range
    tiers = torch.randint(0, 3, k.shape[:2], generator=torch.Generator().manual_seed(0)).to(torch.int8)
    tiers[:, 7] = 0
    keys, values = thresholds.fake_quant_rows(k, v, tiers, layout, policy)
    blocks, kept = k.unflatten(1, (-1, BLOCK)), (tiers != 0).unflatten(1, (-1, BLOCK))
    header = quant.key_header(blocks, kept)
    for name, tier in ((policy.high, 2), (policy.low, 1)):
        fmt, in_tier = FORMATS[name], tiers == tier
        expected = quant.dequantize_keys(quant.quantize_keys(blocks, header, fmt.key_bits), header, fmt.key_bits)
        torch.testing.assert_close(keys[in_tier], expected.flatten(1, 2)[in_tier], rtol=0, atol=0)
        codes = quant.quantize_tokens(v, fmt.value_bits, layout.page(fmt).value_groups)
        torch.testing.assert_close(values[in_tier], quant.dequantize_tokens(*codes)[in_tier], rtol=0, atol=0)

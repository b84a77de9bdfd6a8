"""Formats: codes, bytes, round trips."""

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common import quant
from kvc_kernels.common.bits import PageRows, pack_features, read_page, unpack_features, write_page
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import PageLayout
from tests.support.pages import RefStore, block_formats_of, encode, fill, lower, make_store, random_kv, random_tiers

PACKED = [f for f in FORMATS.values() if f.packed]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", [-1, -2])
def test_fields_lie_in_equal_parts(bits, axis):
    codes = torch.randint(0, 2**bits, (3, 32, 64), dtype=torch.uint8)
    packed = pack_features(codes, bits, axis)
    n = codes.shape[axis]
    width = n * bits // 8
    assert packed.shape[axis] == width
    for f in (0, 1, width - 1, n // 2, n - 1):
        field = (packed.select(axis, f % width) >> (f // width * bits)) & (2**bits - 1)
        assert torch.equal(field, codes.select(axis, f))
    assert torch.equal(unpack_features(packed, bits, axis), codes)


@pytest.mark.parametrize("fmt", PACKED, ids=lambda f: f.name)
@pytest.mark.parametrize("has_scores", [False, True])
def test_page_round_trip_and_zero_padding(fmt, has_scores):
    page = PageLayout(fmt, 64, 4096 + 16, has_scores)
    t, lead = page.tokens, (2, 3)
    gen = torch.Generator().manual_seed(0)

    def codes(bits):
        return torch.randint(0, 2**bits, (*lead, t, 64), generator=gen).to(torch.uint8)

    def halves(*shape):
        return torch.randn(*lead, *shape, t, generator=gen).half()

    rows = PageRows(
        codes(fmt.key_bits),
        codes(fmt.value_bits),
        halves(page.value_groups, 2),
        torch.randn(*lead, t, generator=gen) if has_scores else None,
        torch.randint(0, 999, (*lead, t), generator=gen).to(torch.int16) if has_scores else None,
    )
    read = read_page(page, write_page(page, rows))
    for a, b in zip(rows, read):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    # The content of slots without a token has no effect.
    valid = torch.arange(t) < 5
    masks = [valid[:, None]] * 2 + [valid] * 3  # keys and values are token-major, the rest ends in tokens
    other = PageRows(*(x if x is None else torch.where(m, x, 7) for x, m in zip(rows, masks)))
    bytes_a = write_page(page, rows, valid.expand(*lead, t))
    assert torch.equal(bytes_a, write_page(page, other, valid.expand(*lead, t)))
    assert not bytes_a[..., page.used_bytes :].any()


def test_bf16_page_round_trip():
    page = PageLayout(BF16, 64, 4096, True)
    k, v = torch.randn(2, 4, page.tokens, 64).bfloat16().unbind(0)
    scores = torch.randn(4, page.tokens)
    read = read_page(page, write_page(page, PageRows(k, v, scores=scores)))
    assert torch.equal(read.keys, k) and torch.equal(read.values, v) and torch.equal(read.scores, scores)


@pytest.mark.parametrize("spec", [f.name for f in PACKED])
@pytest.mark.parametrize("has_scores", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_packed_bytes_equal_reference(spec, has_scores, head_dim):
    """Quantize and pack from bf16, bit for bit against the token-by-token reference."""
    store = make_store(block_formats_of(spec), has_scores=has_scores, head_dim=head_dim, dtype=torch.float16)
    blocks = torch.tensor([4, 2])
    k, v = random_kv(store, 64)
    k[0, :, 0, 3] = 2.5  # a channel without range
    v[0, 5] = 0  # a token without range
    fill(store, blocks, k, v)
    model = RefStore(store)
    model.take([4, 2])
    for i in range(64):
        model.append([4, 2][i // 32], 0, i % 32, k[0, i].float().numpy(), v[0, i].float().numpy())
    tiers = random_tiers(store, 2, store.block_formats[1], np.random.default_rng(0))
    ops.compact(store, blocks, 1, tiers, from_format=0)
    model.compact([4, 2], store.block_formats[1], tiers)
    model.check()
    model.check_bytes(4)
    model.check_bytes(2)
    dense_k, _, tier = ops.load_dense(store, 0, blocks)
    for i, b in enumerate((4, 2)):
        for h in range(2):
            head = model.rows[b][0, h]
            for t in head.tiers[2]:
                at = t.position if has_scores else head.tiers[2].index(t)
                assert np.array_equal(dense_k[i, h, at].numpy(), head.key_of(t, 2))
                assert tier[i, h, at] == 2


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_round_trip_error_is_at_most_half_a_step(bits):
    gen = torch.Generator().manual_seed(3)
    k = torch.randn(5, 64, 32, generator=gen) + 6 * torch.randn(32, generator=gen)
    header = quant.key_header(k, torch.ones(5, 64, dtype=torch.bool))
    dequantized = quant.dequantize_keys(quant.quantize_keys(k, header, bits), header, bits)
    step = (k.amax(1, keepdim=True) - k.amin(1, keepdim=True)) / (2**bits - 1)
    # The fp16 rounding of scale (2^-11 of the range) and zero (2^-11 of the bias) adds to this.
    slack = 2.0**-11 * (k.abs().amax(1, keepdim=True) + step * 2**bits)
    assert ((dequantized - k).abs() <= step / 2 + slack).all()
    for groups in (1, 2) if bits == 2 else (1,):
        v = torch.randn(5, 64, 64, generator=gen)
        codes, meta = quant.quantize_tokens(v, bits, groups)
        assert meta.shape == (5, groups, 2, 64)
        parts = v.unflatten(-1, (groups, -1))
        step = (parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)) / (2**bits - 1)
        error = (quant.dequantize_tokens(codes, meta) - v).unflatten(-1, (groups, -1)).abs()
        assert (error <= step / 2 + 2.0**-10 * parts.abs().amax(-1, keepdim=True)).all()


def test_rounding_is_half_to_even():
    header = torch.tensor([[1.0], [0.0]]).half().expand(2, 4)
    k = torch.tensor([[0.5, 1.5, 2.5, 300.0], [-3.0, 0.25, 254.5, 3.5]])
    assert quant.quantize_keys(k, header, 8).tolist() == [[0, 2, 2, 255], [0, 0, 254, 4]]


def test_constant_and_empty_inputs():
    k = torch.full((1, 16, 8), 3.25)
    header = quant.key_header(k, torch.ones(1, 16, dtype=torch.bool))
    assert torch.equal(quant.dequantize_keys(quant.quantize_keys(k, header, 4), header, 4), k)
    nothing = quant.key_header(k, torch.zeros(1, 16, dtype=torch.bool))
    assert not nothing.any()
    codes, meta = quant.quantize_tokens(torch.full((1, 2, 8), -1e-9), 4, 1)
    assert not codes.any() and torch.isfinite(meta).all()
    header = quant.key_header(torch.tensor([[[1e6], [-1e6]]]), torch.ones(1, 2, dtype=torch.bool))
    assert torch.isfinite(header).all()


def test_header_ignores_pruned_tokens():
    k = torch.randn(1, 16, 8)
    k[0, 3] = 100.0
    kept = torch.ones(1, 16, dtype=torch.bool)
    kept[0, 3] = False
    header = quant.key_header(k, kept)
    assert header[0, 0].float().max() < 10 / 255


def test_code_conversion_table():
    codes = torch.arange(256, dtype=torch.uint8)
    for source, target in ((8, 4), (8, 2), (4, 2), (2, 4), (4, 8), (2, 8), (4, 4)):
        valid = codes[: 2**source]
        got = quant.convert_codes(valid, source, target)
        assert got.tolist() == lower(valid.numpy(), source, target).tolist()
        assert int(got.max()) == 2**target - 1
    # The path does not matter, and codes of fewer bits survive a conversion up and back down.
    direct = quant.convert_codes(codes, 8, 2)
    assert torch.equal(direct, quant.convert_codes(quant.convert_codes(codes, 8, 4), 4, 2))
    assert torch.equal(quant.convert_codes(quant.convert_codes(codes[:16], 4, 8), 8, 4), codes[:16])


def test_encode_matches_reference_on_fp32():
    gen = np.random.default_rng(0)
    x = gen.normal(size=(4, 16, 8)).astype(np.float32) * 3
    header = quant.key_header(torch.from_numpy(x), torch.ones(4, 16, dtype=torch.bool))
    for bits, factor in ((8, 1), (4, 17), (2, 85)):
        want = encode(x, header[:, 0:1].float().numpy() * factor, header[:, 1:2].float().numpy(), bits)
        assert np.array_equal(quant.quantize_keys(torch.from_numpy(x), header, bits).numpy(), want)

"""Quantization of keys (per channel) and values (per token) to 8, 4 or 2 bits, and of codes to fewer bits.

All arithmetic is fp32 with IEEE division. Codes are computed from the fp16-rounded scale and zero that are stored, by
round-half-to-even, and clamped. `x ~ scale * code + zero` with zero = min and scale = (max - min) / (2^b - 1).
"""

from __future__ import annotations

import torch

HALF_MAX = 65504.0


def levels(bits: int) -> int:
    """Largest code of `bits` bits."""
    return (1 << bits) - 1


def grid_factor(bits: int) -> int:
    """Steps of the 8-bit grid per step of the `bits`-bit grid: 1, 17 or 85."""
    return 255 // levels(bits)


def _half_range(lo: torch.Tensor, hi: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 (scale, zero) of fp32 ranges [lo, hi] cut into `steps` steps."""
    lo = lo.clamp(-HALF_MAX, HALF_MAX)
    hi = hi.clamp(-HALF_MAX, HALF_MAX)
    # The divisor is a tensor: CUDA multiplies by the reciprocal of a plain number, which rounds the other way when the
    # quotient lies between two fp16 numbers (17 scales of a grid of quantized values).
    return ((hi - lo) / torch.full((), steps, dtype=hi.dtype, device=hi.device)).half(), lo.half()


def _encode(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes of fp32 `x`. A scale of 0 (constant input, or a range below fp16) gives code 0."""
    inverse_safe = torch.where(scale > 0, scale, torch.inf)
    return x.sub(zero).div_(inverse_safe).round_().clamp_(0, levels(bits)).to(torch.uint8)


def key_header(k: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Per-channel header of blocks of keys, fp16 `[..., 2, D]`: scale on the 8-bit grid, (max - min) / 255, and zero =
    min.

    `k` any float `[..., P, D]`, `kept` bool `[..., P]`. The range covers the kept tokens only, so a pruned outlier
    costs nothing. Both are 0 if no token is kept.
    """
    keep = kept.unsqueeze(-1)
    lo = k.masked_fill(~keep, torch.inf).amin(-2).float()
    hi = k.masked_fill(~keep, -torch.inf).amax(-2).float()
    any_kept = kept.any(-1, keepdim=True)
    zero = torch.zeros((), dtype=torch.float32, device=k.device)
    scale, low = _half_range(torch.where(any_kept, lo, zero), torch.where(any_kept, hi, zero), 255)
    return torch.stack((scale, low), -2)


def channel_scale_zero(header: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 scale and zero `[..., 1, D]` of b-bit keys from a header fp16 `[..., 2, D]`. The scale is exact in fp32."""
    h = header.float()
    return h[..., 0:1, :] * grid_factor(bits), h[..., 1:2, :]


def quantize_keys(k: torch.Tensor, header: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes `[..., T, D]` of keys `[..., T, D]` under a per-channel header fp16 `[..., 2, D]`."""
    scale, zero = channel_scale_zero(header, bits)
    return _encode(k.float(), scale, zero, bits)


def dequantize_keys(codes: torch.Tensor, header: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 keys `[..., T, D]` from codes `[..., T, D]` and a per-channel header fp16 `[..., 2, D]`."""
    scale, zero = channel_scale_zero(header, bits)
    return codes.float() * scale + zero


def quantize_tokens(x: torch.Tensor, bits: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token quantization in `groups` equal runs of features.

    `x` any float `[..., T, D]`. Returns uint8 codes `[..., T, D]` and fp16 meta `[..., G, 2, T]` (scale, zero), the
    shape of a page's segment.
    """
    parts = x.float().unflatten(-1, (groups, -1))
    lo, hi = parts.aminmax(dim=-1)
    scale, zero = _half_range(lo, hi, levels(bits))
    codes = _encode(parts, scale.float().unsqueeze(-1), zero.float().unsqueeze(-1), bits)
    meta = torch.stack((scale, zero), -1).movedim(-3, -1)  # [..., T, G, 2] -> [..., G, 2, T]
    return codes.flatten(-2), meta


def dequantize_tokens(codes: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """fp32 `[..., T, D]` from codes `[..., T, D]` and per-token meta fp16 `[..., G, 2, T]`."""
    m = meta.float().movedim(-1, -3).unsqueeze(-1)  # [..., T, G, 2, 1]
    parts = codes.float().unflatten(-1, (meta.shape[-3], -1))
    return (parts * m[..., 0, :] + m[..., 1, :]).flatten(-2)


def convert_codes(codes: torch.Tensor, from_bits: int, to_bits: int) -> torch.Tensor:
    """uint8 codes under one fixed header at another number of bits.

    Down: code4 = round(code8 / 17), code2 = round(code4 / 5), always through 4 bits, so the result does not depend on
    the path. 17 and 5 are odd, hence there are no ties, and integer arithmetic is exact. Up is exact, because the codes
    of fewer bits lie on the finer grid.
    """
    if from_bits == 8 and to_bits < 8:
        codes = (codes.to(torch.int16) + 8).div_(17, rounding_mode="floor").to(torch.uint8)
        from_bits = 4
    if from_bits == 4 and to_bits == 2:
        codes = (codes + 2).div_(5, rounding_mode="floor")
        from_bits = 2
    if from_bits < to_bits:
        codes = codes * (levels(to_bits) // levels(from_bits))
    return codes

"""The arithmetic of `quant` for kernels, bit for bit: scales and zeros of ranges, and codes without a division per
element."""

from __future__ import annotations

import triton
import triton.language as tl

HALF_MAX: tl.constexpr = tl.constexpr(65504.0)
SMALLEST_HALF: tl.constexpr = tl.constexpr(2.0**-24)
# Adding 1.5 * 2^23 rounds a small float to a whole number, half to even, which is then in the low bits.
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
ROUNDER_BITS: tl.constexpr = tl.constexpr(0x4B400000)
# The interpreter rounds the product of a fused multiply-add.
FUSED: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def quotient(a, less, inverse):
    """a / b as IEEE division rounds it. `less` is -b, b is fp32 of at most 18 bits, `inverse` is within 2 ulp of 1 / b.

    Proof: q is off by less than 1.26 * 2^-22 of a / b. Its remainder has few bits, so r is exact, and q + r * inverse
    is off by less than 1.26 * 2^-44. A number m halfway between two floats has 25 bits. m * b never equals a, and both
    are whole numbers on a common grid, so they differ by at least one in 2^(25 + 18): a / b is at least 2^-43 of itself
    away from m, and the last sum rounds to the same side. If a is so small that r underflows, the quotient is next to 0
    either way, which is sufficient for the callers below.
    """
    q = a * inverse
    if FUSED:
        r = tl.fma(q, less, a)
    else:
        r = (a.to(tl.float64) + q.to(tl.float64) * less).to(tl.float32)
    return tl.fma(r, inverse, q)


@triton.jit
def lesser(a, b):
    """Elementwise minimum of 16-bit numbers, two at a time. `tl.minimum` would widen bf16."""
    if FUSED and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, True, 2)
    elif FUSED and a.dtype == tl.float16:
        return tl.inline_asm_elementwise("min.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, True, 2)
    else:
        return tl.minimum(a, b)


@triton.jit
def greater(a, b):
    if FUSED and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.bfloat16, True, 2)
    elif FUSED and a.dtype == tl.float16:
        return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, True, 2)
    else:
        return tl.maximum(a, b)


@triton.jit
def half_range(lo, hi, steps: tl.constexpr):
    """fp16 scale and zero of fp32 ranges cut into `steps` steps."""
    lo = tl.minimum(tl.maximum(lo, -HALF_MAX), HALF_MAX)
    hi = tl.minimum(tl.maximum(hi, -HALF_MAX), HALF_MAX)
    less = tl.full(lo.shape, -steps, tl.float32)
    return quotient(hi - lo, less, tl.full(lo.shape, 1.0 / steps, tl.float32)).to(tl.float16), lo.to(tl.float16)


@triton.jit
def grid(scale, zero, FACTOR: tl.constexpr, BITS: tl.constexpr):
    """Operands of `rounded` from fp16 scales and zeros, as fp32: (-scale, zero, inverse, top). FACTOR: see
    `quant.grid_factor`. top is exact, and 0 if the scale is 0, which makes all codes 0.
    """
    s = scale.to(tl.float32) * FACTOR
    return -s, zero.to(tl.float32), 1.0 / tl.maximum(s, SMALLEST_HALF), s * ((1 << BITS) - 1)


@triton.jit
def rounded(x, less, zero, inverse, top):
    """Codes of fp32 x plus ROUNDER. Codes grow with x, so clamping x first clamps the code."""
    return quotient(tl.minimum(tl.maximum(x - zero, 0.0), top), less, inverse) + ROUNDER


@triton.jit
def code_bits(x, less, zero, inverse, top):
    """Codes as int32 plus ROUNDER_BITS, which shifts and sums of many codes subtract once."""
    return rounded(x, less, zero, inverse, top).to(tl.int32, bitcast=True)

"""Packed codes to fp16 in Triton kernels.

Decode and the scores of a decode step use the codes directly (`nested`, `crumbs`: subnormals, with the scales folded
into the small operand). Prefill and the scores of a prompt, where many queries share a tile, dequantize it (`dequant`).
ASM is false under the interpreter. The Gluon kernel has its own conversions, because its tiles have other layouts.
"""

# ruff: noqa: RUF005  (the compiler knows no unpacking inside tuples)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NEG: tl.constexpr = tl.constexpr(-1.0e30)
# A code c in the low bits of an fp16 word is the subnormal c * 2^-24. The conversion is exact and costs one AND per two
# codes. The factor goes into the softmax scale and the final store. The MMA multiplies and adds in fp32, where neither
# 2^-24 nor the place of a nibble (2^4, 2^2) loses a bit.
CODE_UNIT: tl.constexpr = tl.constexpr(16777216.0)


@triton.jit
def _masked_bytes(x, MASK: tl.constexpr, WORD: tl.constexpr, ASM: tl.constexpr):
    """uint8 `[M, N]` -> fp16 `[M, N]` whose words are x & MASK. WORD: asm literal of MASK in both halves of a word.

    It returns one tensor. Triton 3.8 moves asm with several results into the layout of the product's operand for the
    first result only, and takes the others through shared memory. ptxas merges the PRMTs of calls with the same x.
    """
    if not ASM:
        return (x & MASK).to(tl.int16).to(tl.float16, bitcast=True)
    if MASK == 0xFF:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
            "=&r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b; prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
        " and.b32 $0, a, " + WORD + "; and.b32 $1, b, " + WORD + ";}",
        "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def nested(x, BITS: tl.constexpr, ASM: tl.constexpr):
    """uint8 codes [M, N] -> 8/BITS fp16 tensors [M, N] F0, F1, ..: the byte without its 0, 1, .. highest fields.

    The unit is 2^-24. Field j is worth F[n-1-j] - F[n-j]. That difference is taken on the small side of the product
    (the query) or at the very end (the output), so F0 is the whole byte: two PRMT spread four bytes over two registers,
    and each further tensor costs one AND per two elements (4 bits: half an instruction per code).
    """
    out = (_masked_bytes(x, 0xFF, "0x00ff00ff", ASM),)
    if BITS == 4:
        out = out + (_masked_bytes(x, 0x0F, "0x000f000f", ASM),)
    elif BITS == 2:
        out = out + (_masked_bytes(x, 0x3F, "0x003f003f", ASM), _masked_bytes(x, 0x0F, "0x000f000f", ASM))
        out = out + (_masked_bytes(x, 0x03, "0x00030003", ASM),)
    return out


@triton.jit
def crumbs(x, ASM: tl.constexpr):
    """uint8 2-bit codes [M, N] -> 4 fp16 tensors [M, N]; field j is worth code * 2^(2j - 24).

    2-bit values have one scale per group of features, so their fields cannot share a weight as in `nested`.
    """
    out = (_masked_bytes(x, 0x03, "0x00030003", ASM), _masked_bytes(x, 0x0C, "0x000c000c", ASM))
    return out + (_masked_bytes(x, 0x30, "0x00300030", ASM), _masked_bytes(x, 0xC0, "0x00c000c0", ASM))


@triton.jit
def _plain_codes(x, BITS: tl.constexpr, FIELD: tl.constexpr, s, z):
    """fp16 of field FIELD of bytes x: code * s + z, for the interpreter."""
    code = (x >> (BITS * FIELD)) & ((1 << BITS) - 1)
    return (code.to(tl.float32) * s.to(tl.float32) + z.to(tl.float32)).to(tl.float16)


@triton.jit
def dequant8(x, s, z, ASM: tl.constexpr):
    """uint8 codes [M, N] -> fp16 code * s + z; fp16 s, z of the same shape. 3 instructions for 2 elements."""
    if not ASM:
        return _plain_codes(x, 8, 0, s, z)
    # 0x64cc is the fp16 number 1024 + c; the FMA rounds once.
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, m; mov.b32 m, 0xe400e400;"
        " prmt.b32 a, $2, 0x64646464, 0x4140; prmt.b32 b, $2, 0x64646464, 0x4342;"
        " add.f16x2 a, a, m; add.f16x2 b, b, m; fma.rn.f16x2 $0, a, $3, $5; fma.rn.f16x2 $1, b, $4, $6;}",
        "=r,=r,r,r,r,r,r", [x, s, z], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def dequant4(x, s0, z0, s1, z1, ASM: tl.constexpr):
    """Both fields of bytes [M, N] as fp16: code * s + z. 3.5 instructions for 2 elements."""
    if not ASM:
        return _plain_codes(x, 4, 0, s0, z0), _plain_codes(x, 4, 1, s1, z1)
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d, m, n, k; mov.b32 m, 0xe400e400; mov.b32 n, 0x2c002c00; mov.b32 k, 0xd400d400;"
        " prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
        " lop3.b32 c, a, 0x000f000f, 0x64006400, 0xea; lop3.b32 d, b, 0x000f000f, 0x64006400, 0xea;"
        " lop3.b32 a, a, 0x00f000f0, 0x64006400, 0xea; lop3.b32 b, b, 0x00f000f0, 0x64006400, 0xea;"
        " add.f16x2 c, c, m; add.f16x2 d, d, m; fma.rn.f16x2 a, a, n, k; fma.rn.f16x2 b, b, n, k;"
        " fma.rn.f16x2 $0, c, $5, $7; fma.rn.f16x2 $1, d, $6, $8;"
        " fma.rn.f16x2 $2, a, $9, $11; fma.rn.f16x2 $3, b, $10, $12;}",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [x, s0, z0, s1, z1],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _dequant2_half(x, s0, z0, s1, z1, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Fields 0 and 1, or 2 and 3 (HIGH), of bytes with four 2-bit codes."""
    if not ASM:
        return _plain_codes(x, 2, 2 * HIGH, s0, z0), _plain_codes(x, 2, 2 * HIGH + 1, s1, z1)
    # 1024 + 4^f * c becomes c by one FMA: times 4^-f, minus 1024 * 4^-f.
    if HIGH:
        CONST: tl.constexpr = (
            "mov.b32 m, 0x2c002c00; mov.b32 k, 0xd400d400; mov.b32 n, 0x24002400; mov.b32 l, 0xcc00cc00;"
            " mov.b32 p, 0x00300030; mov.b32 q, 0x00c000c0;"
        )
    else:
        CONST: tl.constexpr = (
            "mov.b32 m, 0x3c003c00; mov.b32 k, 0xe400e400; mov.b32 n, 0x34003400; mov.b32 l, 0xdc00dc00;"
            " mov.b32 p, 0x00030003; mov.b32 q, 0x000c000c;"
        )
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d, m, n, k, l, p, q; " + CONST + " prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
        " lop3.b32 c, a, p, 0x64006400, 0xea; lop3.b32 d, b, p, 0x64006400, 0xea;"
        " lop3.b32 a, a, q, 0x64006400, 0xea; lop3.b32 b, b, q, 0x64006400, 0xea;"
        " fma.rn.f16x2 c, c, m, k; fma.rn.f16x2 d, d, m, k; fma.rn.f16x2 a, a, n, l; fma.rn.f16x2 b, b, n, l;"
        " fma.rn.f16x2 $0, c, $5, $7; fma.rn.f16x2 $1, d, $6, $8;"
        " fma.rn.f16x2 $2, a, $9, $11; fma.rn.f16x2 $3, b, $10, $12;}",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [x, s0, z0, s1, z1],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def dequant(x, s, z, BITS: tl.constexpr, ASM: tl.constexpr):
    """Bytes [M, N] -> 8 / BITS fp16 tensors [M, N]; `s`, `z` are tuples of fp16 tensors that broadcast to it."""
    shape: tl.constexpr = x.shape
    s2 = ()
    z2 = ()
    for f in tl.static_range(8 // BITS):
        s2 = s2 + (tl.broadcast_to(s[f], shape),)
        z2 = z2 + (tl.broadcast_to(z[f], shape),)
    if BITS == 8:
        return (dequant8(x, s2[0], z2[0], ASM),)
    elif BITS == 4:
        a, b = dequant4(x, s2[0], z2[0], s2[1], z2[1], ASM)
        return (a, b)
    else:
        a, b = _dequant2_half(x, s2[0], z2[0], s2[1], z2[1], False, ASM)
        c, d = _dequant2_half(x, s2[2], z2[2], s2[3], z2[3], True, ASM)
        return (a, b, c, d)


@triton.jit
def key_scales(header, KB: tl.constexpr, D: tl.constexpr):
    """Scales and zeros of a block's key channels for `dequant`, 8 / KB fields fp16 `[1, D*KB/8]` each. `header` points
    to scale and zero `[2, D]`.
    """
    DK: tl.constexpr = D * KB // 8
    at = header + tl.arange(0, DK)
    ks = ()
    kz = ()
    for f in tl.static_range(8 // KB):
        # On the grid of KB bits the scale is 1, 17 or 85 times as large.
        grid = tl.load(at + f * DK).to(tl.float32) * (255 // ((1 << KB) - 1))
        ks = ks + (grid.to(tl.float16)[None, :],)
        kz = kz + (tl.load(at + (D + f * DK))[None, :],)
    return ks, kz


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap), through exp2 because tl has no tanh; right at both ends."""
    return cap * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E / cap)) + 1.0))

"""Register layouts of the Gluon decode kernel, which turn codes into MMA operands without exchange between lanes.

A program is one warp, a tile TILE tokens. Lane = 4 * r + c, r = 0..7, c = 0..3, as in the fragments of m16n8k16. Both
products sum over an index whose order is free (features in QK, tokens in PV), and so is the row order of K: they are
chosen such that a 16-byte load brings each lane's share of a fragment:

- QK: S^T = K . q^T with K as A operand (rows: tokens) and q as B (columns: up to 8 or 16 queries). Of a token's codes,
  lane c takes 16 consecutive bytes (of each 64). Row 8 * n + r is token (r // 2) * W + 2 * n + r % 2, W = TILE / 4: so
  all tokens of a lane lie in one run of W, hence in one page, whatever the page size.
- PV: O^T = V^T . p^T with V^T as A operand (rows: byte rows of the page) and p as B. Lane c takes the W consecutive
  tokens c * W .. of a row.
- S^T has tokens along r and queries along c. p^T needs the transpose: one `movmatrix` per 8 tokens.

"order" below always means: [8 * n + 2 * c + e] <-> token c * W + 2 * n + e, and for features (k-step, half h, c, e) <->
byte (chunk, c, k-step, h, e). Reshapes and permutes with `assert_trivial` only rename registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
A_OP = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
B_OP = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))
COLUMN = gl.constexpr(gl.SliceLayout(0, MMA.value))  # one value per query
ROW = gl.constexpr(gl.SliceLayout(1, MMA.value))
LANE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # one value per lane


@gluon.constexpr_function
def _registers(count: int, axis: int, rank: int, step: int = 1) -> list[list[int]]:
    """Register bases that walk `count` (a power of two) steps along `axis`."""
    return [[step << i if a == axis else 0 for a in range(rank)] for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def lane_words(row_bytes: int) -> int:
    """int32 words that a lane takes of each chunk of a row: 4 (16 bytes), or fewer if a row has under 64 bytes."""
    return min(16, row_bytes // 4) // 4


@gluon.constexpr_function
def key_layout(tile: int, row_bytes: int):
    """int32 `[4, W, row_bytes / 4]`: run of tokens, token in it, word of its row."""
    w, n = tile // 4, lane_words(row_bytes)
    registers = _registers(n, 2, 3) + _registers(w // 2, 1, 3, 2) + _registers(row_bytes // (16 * n), 2, 3, 4 * n)
    lanes = [[0, 0, n], [0, 0, 2 * n], [0, 1, 0], [1, 0, 0], [2, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [4, w, row_bytes // 4])


@gluon.constexpr_function
def value_layout(tile: int, rows: int):
    """int32 `[rows, 4, W / 4]`: byte row, run of tokens, word of four tokens."""
    w = tile // 4
    registers = _registers(w // 4, 2, 3) + _registers(rows // 8, 0, 3, 8)
    return gl.DistributedLinearLayout(
        registers, [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [], [rows, 4, w // 4]
    )


@gluon.constexpr_function
def plain_value_layout(tile: int, dim: int):
    """int32 `[4, W, dim / 2]` of uncompressed values: run of tokens, token in it, word of two features."""
    w = tile // 4
    registers = _registers(4, 2, 3) + _registers(w, 1, 3) + _registers(dim // 64, 2, 3, 32)
    return gl.DistributedLinearLayout(
        registers, [[1, 0, 0], [2, 0, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]], [], [], [4, w, dim // 2]
    )


@gluon.constexpr_function
def meta_layout(tile: int):
    """int32 `[8, 4, W / 2]`: value group (lanes r), run of tokens, two fp16."""
    w = tile // 8
    registers = _registers(w, 2, 3)
    return gl.DistributedLinearLayout(
        registers, [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [], [8, 4, w]
    )


@gluon.constexpr_function
def token_layout(tile: int):
    """int32 `[4, W / 2]`: run of tokens, two fp16; the same in all lanes r."""
    w = tile // 8
    return gl.DistributedLinearLayout(
        _registers(w, 1, 2), [[1, 0], [2, 0], [0, 0], [0, 0], [0, 0]], [], [], [4, w]
    )


@gluon.constexpr_function
def header_layout(row_bytes: int):
    """int32 `[row_bytes / 2]`: two fp16 of a per-channel header, for keys of `row_bytes` codes per field."""
    n = lane_words(row_bytes) * 2
    registers = _registers(n, 0, 1) + _registers(row_bytes // (8 * n), 0, 1, 4 * n)
    return gl.DistributedLinearLayout(registers, [[n], [2 * n], [0], [0], [0]], [], [], [row_bytes // 2])


@gluon.constexpr_function
def header_rows_layout(blocks: int, row_bytes: int):
    """int32 `[blocks, row_bytes / 2]`: `header_layout` with one block per row (lanes r first)."""
    n = lane_words(row_bytes) * 2
    registers = _registers(n, 1, 2) + _registers(row_bytes // (8 * n), 1, 2, 4 * n) + _registers(blocks // 8, 0, 2, 8)
    return gl.DistributedLinearLayout(
        registers, [[0, n], [0, 2 * n], [1, 0], [2, 0], [4, 0]], [], [], [blocks, row_bytes // 2]
    )


@gluon.constexpr_function
def _doubled(layout):
    """Linear layout with one more dimension of 2, whose elements are neighbors in a lane's registers."""
    return gl.DistributedLinearLayout(
        [[0] * len(layout.shape) + [1]] + [[*b, 0] for b in layout.reg_bases],
        [[*b, 0] for b in layout.lane_bases],
        [],
        [],
        [*layout.shape, 2],
    )


@gluon.jit
def hidden_zero(x):
    """A zero that the compiler does not know. x: any int32 scalar.

    Values computed from it stay inside the loop in which it is taken. Otherwise the compiler computes the offsets of
    all classes' loads once at the start of the kernel and holds them in registers through the tile loops.
    """
    z = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
    return gl.multiple_of(z, 64)


@gluon.jit
def _twice(x):
    """`[..]` -> `[.., 2]`, both elements in the same register, as inline asm needs it to split a 32-bit word into two
    16-bit elements. `join` puts its dimension after the other registers, but asm packs neighbors.
    """
    layout: gl.constexpr = _doubled(gl.to_linear_layout(x.type.layout, x.type.shape))
    return gl.convert_layout(gl.join(x, x), layout, assert_trivial=True)


@gluon.jit
def pairs(x, dtype: gl.constexpr = gl.float16):
    """int32 `[..]` -> two 16-bit floats `[.., 2]`, in place."""
    x = _twice(x)
    if dtype == gl.float16:
        y = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2)
    else:
        y = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    return y


@gluon.jit
def nested(x, BITS: gl.constexpr):
    """int32 words of codes `[..]` -> 8/BITS fp16 tensors `[.., 2, 2]` (e, h: byte 2 * h + e of the word), in units of
    2^-24: the byte without its 0, 1, .. highest fields.

    A code in the low bits of an fp16 word is a subnormal, exact, and the MMA takes it at full rate. Field j is worth
    F[n-1-j] - F[n-j]; the difference is taken in the query, or in the output at the very end. Two PRMT spread four
    bytes, and only the further tensors cost an AND per two elements: half an instruction per code at 4 bits.
    """
    x = _twice(x)
    if BITS == 8:
        a, b = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
            "=r,=r,r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return (gl.join(a, b),)
    elif BITS == 4:
        a, b, c, d = gl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0, 0x4140; prmt.b32 $1, $4, 0, 0x4342;"
            " and.b32 $2, $0, 0x000f000f; and.b32 $3, $1, 0x000f000f;",
            "=&r,=&r,=r,=r,r,r", [x], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
        return (gl.join(a, b), gl.join(c, d))
    else:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            "prmt.b32 $0, $8, 0, 0x4140; prmt.b32 $1, $8, 0, 0x4342;"
            " and.b32 $2, $0, 0x003f003f; and.b32 $3, $1, 0x003f003f;"
            " and.b32 $4, $0, 0x000f000f; and.b32 $5, $1, 0x000f000f;"
            " and.b32 $6, $0, 0x00030003; and.b32 $7, $1, 0x00030003;",
            "=&r,=&r,=r,=r,=r,=r,=r,=r,r,r", [x], 
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
        return (gl.join(a, b), gl.join(c, d), gl.join(e, f), gl.join(g, h))


@gluon.jit
def crumbs(x):
    """2-bit variant of `nested`: tensor j is field j alone, worth code * 2^(2j - 24), because fields differ in weight.
    """
    x = _twice(x)
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        "{.reg .b32 a, b; prmt.b32 a, $8, 0, 0x4140; prmt.b32 b, $8, 0, 0x4342;"
        " and.b32 $0, a, 0x00030003; and.b32 $1, b, 0x00030003;"
        " and.b32 $2, a, 0x000c000c; and.b32 $3, b, 0x000c000c;"
        " and.b32 $4, a, 0x00300030; and.b32 $5, b, 0x00300030;"
        " and.b32 $6, a, 0x00c000c0; and.b32 $7, b, 0x00c000c0;}",
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [x], 
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=2,
    )  # fmt: skip
    return (gl.join(a, b), gl.join(c, d), gl.join(e, f), gl.join(g, h))


@gluon.jit
def key_operand(x, TILE: gl.constexpr, WIDTH: gl.constexpr, PLAIN: gl.constexpr = False):
    """A operand `[TILE, WIDTH]` from `[4, W, words, 2, 2]` (e, h) of `nested`, or `[4, W, words, 2]` if PLAIN."""
    if PLAIN:
        y = gl.reshape(x, [4, TILE // 8, 2, WIDTH // 32, 4, 2, 2, 2])
        y = gl.permute(y, [1, 0, 2, 3, 5, 6, 4, 7])
    else:
        n: gl.constexpr = lane_words(WIDTH)
        y = gl.reshape(x, [4, TILE // 8, 2, WIDTH // (16 * n), 4, n, 2, 2])
        y = gl.permute(y, [1, 0, 2, 3, 5, 7, 4, 6])
    return gl.convert_layout(gl.reshape(y, [TILE, WIDTH]), A_OP, assert_trivial=True)


@gluon.jit
def feature_column(x, WIDTH: gl.constexpr):
    """fp16 `[WIDTH / 2, 2]` of a header -> `[WIDTH]` in the order of features, along the rows of a B operand."""
    n: gl.constexpr = lane_words(WIDTH)
    y = gl.permute(gl.reshape(x, [WIDTH // (16 * n), 4, n, 2, 2]), [0, 2, 3, 1, 4])
    return gl.convert_layout(gl.reshape(y, [WIDTH]), gl.SliceLayout(1, B_OP), assert_trivial=True)


@gluon.jit
def feature_rows(x, BLOCKS: gl.constexpr, WIDTH: gl.constexpr):
    """fp16 `[BLOCKS, WIDTH / 2, 2]` -> A operand `[BLOCKS, WIDTH]` in the order of features."""
    n: gl.constexpr = lane_words(WIDTH)
    y = gl.permute(gl.reshape(x, [BLOCKS, WIDTH // (16 * n), 4, n, 2, 2]), [0, 1, 3, 4, 2, 5])
    return gl.convert_layout(gl.reshape(y, [BLOCKS, WIDTH]), A_OP, assert_trivial=True)


@gluon.jit
def feature_of(k, WIDTH: gl.constexpr, PLAIN: gl.constexpr = False):
    """Feature (within its field) at place `k` of the order of features."""
    n: gl.constexpr = 2 if PLAIN else lane_words(WIDTH)
    step: gl.constexpr = 4 * n
    return (k & 1) | ((k >> 3) & 1) << 1 | ((k >> 4) % n) << 2 | ((k >> 1) & 3) * step | (k >> 4) // n * (4 * step)


@gluon.jit
def value_operand(x, ROWS: gl.constexpr, TILE: gl.constexpr):
    """A operand `[ROWS, TILE]`, tokens in order, from `[ROWS, 4, W / 4, 2, 2]` (e, h) of `nested` or `crumbs`."""
    y = gl.permute(x, [0, 2, 4, 1, 3])
    return gl.convert_layout(gl.reshape(y, [ROWS, TILE]), A_OP, assert_trivial=True)


@gluon.jit
def plain_value_operand(x, D: gl.constexpr, TILE: gl.constexpr, dtype: gl.constexpr):
    """A operand `[D, TILE]` from int32 `[4, W, D / 2]` of rows of two features: 2 PRMT transpose 2 x 2 elements.

    Row (chunk, word, e, r) of the operand is feature (chunk, r, word, e): see `plain_feature_of`.
    """
    even, odd = gl.split(gl.permute(gl.reshape(x, [4, TILE // 8, 2, D // 2]), [0, 1, 3, 2]))
    # The words stay integers until here: a 16-bit value that crosses a branch or a loop takes a register of its own.
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=&r,=r,r,r", [even, odd], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    y = gl.reshape(gl.join(pairs(even, dtype), pairs(odd, dtype)), [4, TILE // 8, D // 64, 8, 4, 2, 2])
    y = gl.permute(y, [2, 4, 6, 3, 1, 0, 5])
    return gl.convert_layout(gl.reshape(y, [D, TILE]), A_OP, assert_trivial=True)


@gluon.jit
def plain_feature_of(row):
    """Feature at row `row` of `plain_value_operand`."""
    return (row >> 6) * 64 + (row & 7) * 8 + ((row >> 3) & 7)


@gluon.jit
def meta_operand(lower, upper, TILE: gl.constexpr):
    """A operand `[16, TILE]` from int32 pairs `[8, 4, W / 2]` of rows 0..7 and of rows 8..15."""
    lower = gl.reshape(gl.permute(pairs(lower), [0, 2, 1, 3]), [8, TILE])
    upper = gl.reshape(gl.permute(pairs(upper), [0, 2, 1, 3]), [8, TILE])
    y = gl.reshape(gl.permute(gl.join(lower, upper), [2, 0, 1]), [16, TILE])
    return gl.convert_layout(y, A_OP, assert_trivial=True)


@gluon.jit
def token_weights(x, TILE: gl.constexpr):
    """fp16 `[TILE]` in the order of tokens, along the rows of a B operand, from int32 pairs `[4, W / 2]`."""
    y = gl.reshape(gl.permute(pairs(x), [1, 0, 2]), [TILE])
    return gl.convert_layout(y, gl.SliceLayout(1, B_OP), assert_trivial=True)


@gluon.jit
def transpose_p(p, TILE: gl.constexpr, NQ: gl.constexpr, dtype: gl.constexpr):
    """B operand `[TILE, NQ]` in 16 bits, tokens in order, from p fp32 `[TILE, NQ]` as the MMA left it (S^T)."""
    even, odd = gl.split(gl.reshape(p, [TILE, NQ // 2, 2]))
    if dtype == gl.float16:
        y = gl.inline_asm_elementwise(
            "{.reg .b32 t; cvt.rn.f16x2.f32 t, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, t;}",
            "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = gl.inline_asm_elementwise(
            "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, t;}",
            "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    # The asm transposes each 8 x 8 block: [n, r, block, c] holds (query r, tokens 2c and 2c + 1).
    y = gl.reshape(pairs(y, dtype), [TILE // 8, 8, NQ // 8, 4, 2])
    y = gl.reshape(gl.permute(y, [0, 3, 4, 2, 1]), [TILE, NQ])
    return gl.convert_layout(y, B_OP, assert_trivial=True)

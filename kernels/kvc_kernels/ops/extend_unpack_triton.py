"""The unpacking warpgroup of `extend_hopper_triton`: pages of any format -> fp16 tiles in shared memory.

Raw bytes come by `cp.async` into a ring, two tiles ahead, and the page ids that their addresses need one tile before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

RING: gl.constexpr = gl.constexpr(3)  # raw tiles
# Who moves what: 16 bytes of a key row; 16 tokens of a value row, or of a meta row; 8 bytes or halves when unpacking.
L_KEYS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
L_RUNS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0]))
L_METAS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
L_HEADER: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
L_WORK: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _unpack4(x, s0, z0, s1, z1):
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d, m, n, k; mov.b32 m, 0xe400e400; mov.b32 n, 0x2c002c00; mov.b32 k, 0xd400d400;"
        " prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
        " lop3.b32 c, a, 0x000f000f, 0x64006400, 0xea; lop3.b32 d, b, 0x000f000f, 0x64006400, 0xea;"
        " lop3.b32 a, a, 0x00f000f0, 0x64006400, 0xea; lop3.b32 b, b, 0x00f000f0, 0x64006400, 0xea;"
        " add.f16x2 c, c, m; add.f16x2 d, d, m; fma.rn.f16x2 a, a, n, k; fma.rn.f16x2 b, b, n, k;"
        " fma.rn.f16x2 $0, c, $5, $7; fma.rn.f16x2 $1, d, $6, $8;"
        " fma.rn.f16x2 $2, a, $9, $11; fma.rn.f16x2 $3, b, $10, $12;}",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [x, s0, z0, s1, z1],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _unpack8(x, s, z):
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b, m; mov.b32 m, 0xe400e400;"
        " prmt.b32 a, $2, 0x64646464, 0x4140; prmt.b32 b, $2, 0x64646464, 0x4342;"
        " add.f16x2 a, a, m; add.f16x2 b, b, m; fma.rn.f16x2 $0, a, $3, $5; fma.rn.f16x2 $1, b, $4, $6;}",
        "=r,=r,r,r,r,r,r", [x, s, z], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _unpack2(x, s0, z0, s1, z1, HIGH: gl.constexpr):
    """Fields 0 and 1, or 2 and 3 (HIGH): 1024 + 4^f * c becomes c by an FMA with 4^-f and -1024 * 4^-f."""
    if HIGH:
        CONST: gl.constexpr = (
            "mov.b32 m, 0x2c002c00; mov.b32 k, 0xd400d400; mov.b32 n, 0x24002400; mov.b32 l, 0xcc00cc00;"
            " mov.b32 p, 0x00300030; mov.b32 q, 0x00c000c0;"
        )
    else:
        CONST: gl.constexpr = (
            "mov.b32 m, 0x3c003c00; mov.b32 k, 0xe400e400; mov.b32 n, 0x34003400; mov.b32 l, 0xdc00dc00;"
            " mov.b32 p, 0x00030003; mov.b32 q, 0x000c000c;"
        )
    return gl.inline_asm_elementwise(
        "{.reg .b32 a, b, c, d, m, n, k, l, p, q; " + CONST + " prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
        " lop3.b32 c, a, p, 0x64006400, 0xea; lop3.b32 d, b, p, 0x64006400, 0xea;"
        " lop3.b32 a, a, q, 0x64006400, 0xea; lop3.b32 b, b, q, 0x64006400, 0xea;"
        " fma.rn.f16x2 c, c, m, k; fma.rn.f16x2 d, d, m, k; fma.rn.f16x2 a, a, n, l; fma.rn.f16x2 b, b, n, l;"
        " fma.rn.f16x2 $0, c, $5, $7; fma.rn.f16x2 $1, d, $6, $8;"
        " fma.rn.f16x2 $2, a, $9, $11; fma.rn.f16x2 $3, b, $10, $12;}",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [x, s0, z0, s1, z1],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def _one_page(CLASSES):
    """Whether every packed tile lies in a single page."""
    return all(c[2] % 64 == 0 for c in CLASSES if c[0] < 16)


@gluon.jit
def _pages_of(word, table, row_stride, E: gl.constexpr, CLASSES: gl.constexpr):
    """Page ids of a tile's tokens as its copies need them: by token `[64]`, by run of 16 `[128]` and `[32]`; or
    one page three times.
    """
    cls = ((word >> 24) & 15).to(gl.int32)
    t0 = ((word >> 12) & 0xFFF).to(gl.int32)
    count = (word & 0xFFF).to(gl.int32)
    if _one_page(CLASSES):
        by_token = gl.to_tensor(0)
        for c in gl.static_range(len(CLASSES)):
            if CLASSES[c][0] < 16:
                if cls == c:
                    row = table + (word >> 32) * row_stride + CLASSES[c][3] * (E - 1)
                    STEP: gl.constexpr = 1 - 2 * CLASSES[c][3]
                    by_token = gl.load(row + STEP * (t0 // CLASSES[c][2]), mask=t0 < count, other=0)
        by_run = by_token
        by_meta = by_token
    else:
        t = gl.arange(0, 64, gl.SliceLayout(1, L_KEYS))
        run = gl.arange(0, 128, gl.SliceLayout(1, L_RUNS)) % 4 * 16
        meta = gl.arange(0, 32, gl.SliceLayout(1, L_METAS)) % 4 * 16
        by_token = gl.zeros([64], gl.int32, gl.SliceLayout(1, L_KEYS))
        by_run = gl.zeros([128], gl.int32, gl.SliceLayout(1, L_RUNS))
        by_meta = gl.zeros([32], gl.int32, gl.SliceLayout(1, L_METAS))
        for c in gl.static_range(len(CLASSES)):
            if CLASSES[c][0] < 16:
                if cls == c:
                    row = table + (word >> 32) * row_stride + CLASSES[c][3] * (E - 1)
                    T: gl.constexpr = CLASSES[c][2]
                    STEP: gl.constexpr = 1 - 2 * CLASSES[c][3]
                    by_token = gl.load(row + STEP * ((t0 + t) // T), mask=t0 + t // 16 * 16 < count, other=0)
                    by_run = gl.load(row + STEP * ((t0 + run) // T), mask=t0 + run < count, other=0)
                    by_meta = gl.load(row + STEP * ((t0 + meta) // T), mask=t0 + meta < count, other=0)
    return by_token, by_run, by_meta


@gluon.jit
def _within(t0, t, T: gl.constexpr):
    """Place of tokens t0 + t in their pages of T tokens; t0 is a multiple of 64, t below 64."""
    if T % 64 == 0:
        at = gl.multiple_of(t0 % T, 64) + t
    else:
        at = t0 + t
        at = at - at // T * T
    return at


@gluon.jit
def _fetch(
    word, by_token, by_run, by_meta, slot, raw, pages, page_bytes: gl.constexpr, headers, header_stride,
    CLASSES: gl.constexpr, c: gl.constexpr, TOKEN_KEYS: gl.constexpr, D: gl.constexpr,
):
    """Start the copies of one packed tile into place `slot` of the ring."""
    raw_k, raw_v, raw_m, raw_h = raw
    KB: gl.constexpr = CLASSES[c][0]
    VB: gl.constexpr = CLASSES[c][1]
    T: gl.constexpr = CLASSES[c][2]
    DK: gl.constexpr = D * KB // 8
    GROUPS: gl.constexpr = D // 32 if VB == 2 else 1
    t0 = gl.multiple_of(((word >> 12) & 0xFFF).to(gl.int32), 64)
    at = _within(t0, gl.arange(0, 64, gl.SliceLayout(1, L_KEYS)), T)
    base = pages + by_token.to(gl.int64) * page_bytes + at * DK
    column = gl.arange(0, 64, gl.SliceLayout(0, L_KEYS))
    for p in gl.static_range(DK // 64):
        async_copy.async_copy_global_to_shared(raw_k.index(slot * 2 + p), (base + p * 64)[:, None] + column[None, :])
    r = gl.arange(0, 128, gl.SliceLayout(1, L_RUNS))
    at = _within(t0, r % 4 * 16, T)
    base = pages + by_run.to(gl.int64) * page_bytes + at + (CLASSES[c][5] + r // 4 * T)
    column = gl.arange(0, 16, gl.SliceLayout(0, L_RUNS))
    for p in gl.static_range(D * VB // 256):
        pointers = (base + p * 32 * T)[:, None] + column[None, :]
        async_copy.async_copy_global_to_shared(raw_v.index(slot * 4 + p), pointers)
    r = gl.arange(0, 32, gl.SliceLayout(1, L_METAS))
    at = _within(t0, r % 4 * 16, T)
    base = pages + by_meta.to(gl.int64) * page_bytes + at * 2
    column = gl.arange(0, 16, gl.SliceLayout(0, L_METAS))
    pointers = (base + (CLASSES[c][6] + r // 4 % (2 * GROUPS) * (2 * T))).to(gl.pointer_type(gl.float16))
    async_copy.async_copy_global_to_shared(raw_m.index(slot), pointers[:, None] + column[None, :])
    if TOKEN_KEYS:
        pointers = (base + (CLASSES[c][4] + r // 4 % 2 * (2 * T))).to(gl.pointer_type(gl.float16))
        async_copy.async_copy_global_to_shared(raw_h.index(slot), pointers[:, None] + column[None, :])
    else:
        row = gl.arange(0, 8, gl.SliceLayout(1, L_HEADER)) % 4 * 64
        column = gl.arange(0, 64, gl.SliceLayout(0, L_HEADER))
        pointers = (headers + (word >> 32) * header_stride + row)[:, None] + column[None, :]
        header = raw_h.index(slot)._reinterpret(gl.float16, [8, 64], FLAT)
        async_copy.async_copy_global_to_shared(header, pointers)


@gluon.jit
def _unpack_keys(slot, raw_k, raw_h, k_tile, KB: gl.constexpr, TOKEN_KEYS: gl.constexpr):
    """Raw keys and their scales -> both halves of features of `k_tile`, `[64, 64]` each."""
    k0, k1 = k_tile
    meta = raw_h.index(slot)._reinterpret(gl.float16, [8, 64], FLAT)
    if TOKEN_KEYS:
        s0 = meta.slice(0, 1).permute((1, 0)).load(L_WORK)
        z0 = meta.slice(1, 1).permute((1, 0)).load(L_WORK)
        s1 = s0
        z1 = z0
    else:
        # On the grid of KB bits the scale is 1 or 17 times as large.
        factor = gl.full([1, 1], 255 // ((1 << KB) - 1), gl.float16, L_WORK)
        s0 = meta.slice(0, 1).load(L_WORK) * factor
        s1 = meta.slice(1, 1).load(L_WORK) * factor
        z0 = meta.slice(2, 1).load(L_WORK)
        z1 = meta.slice(3, 1).load(L_WORK)
    x = raw_k.index(slot * 2).load(L_WORK)
    s0, z0 = gl.broadcast(s0, x)[0], gl.broadcast(z0, x)[0]
    s1, z1 = gl.broadcast(s1, x)[0], gl.broadcast(z1, x)[0]
    if KB == 4:
        a, b = _unpack4(x, s0, z0, s1, z1)
        k0.store(a)
        k1.store(b)
    else:
        k0.store(_unpack8(x, s0, z0))
        k1.store(_unpack8(raw_k.index(slot * 2 + 1).load(L_WORK), s1, z1))


@gluon.jit
def _unpack_values(slot, count, raw_v, raw_m, v_tile, VB: gl.constexpr, D: gl.constexpr):
    """Raw values -> `v_tile` `[D, 64]`; `count` tokens of the tile are real."""
    ROWS: gl.constexpr = 32 if VB == 2 else 64
    meta = raw_m.index(slot)._reinterpret(gl.float16, [8, 64], FLAT)
    if count < 64:
        # Scales and zeros become 0 where no token is: what lies there may spell NaN, which would survive p = 0.
        x = meta.load(L_HEADER)
        meta.store(gl.where((gl.arange(0, 64, gl.SliceLayout(0, L_HEADER)) < count)[None, :], x, 0.0))
    runs = raw_v._reinterpret(gl.uint8, [RING * 128 // ROWS, ROWS, 64], FLAT)
    s = meta.slice(0, 1).load(L_WORK)
    z = meta.slice(1, 1).load(L_WORK)
    for p in gl.static_range(D * VB // 8 // ROWS):
        x = runs.index(slot * (128 // ROWS) + p).load(L_WORK)
        s0 = gl.broadcast(s, x)[0]
        z0 = gl.broadcast(z, x)[0]
        if VB == 8:
            v_tile.slice(p * 64, 64).store(_unpack8(x, s0, z0))
        elif VB == 4:
            a, b = _unpack4(x, s0, z0, s0, z0)
            v_tile.slice(0, 64).store(a)
            v_tile.slice(64, 64).store(b)
        else:
            # Every field is one group of 32 features.
            s1 = gl.broadcast(meta.slice(2, 1).load(L_WORK), x)[0]
            z1 = gl.broadcast(meta.slice(3, 1).load(L_WORK), x)[0]
            a, b = _unpack2(x, s0, z0, s1, z1, False)
            v_tile.slice(0, 32).store(a)
            v_tile.slice(32, 32).store(b)
            s0 = gl.broadcast(meta.slice(4, 1).load(L_WORK), x)[0]
            z0 = gl.broadcast(meta.slice(5, 1).load(L_WORK), x)[0]
            s1 = gl.broadcast(meta.slice(6, 1).load(L_WORK), x)[0]
            z1 = gl.broadcast(meta.slice(7, 1).load(L_WORK), x)[0]
            a, b = _unpack2(x, s0, z0, s1, z1, True)
            v_tile.slice(64, 32).store(a)
            v_tile.slice(96, 32).store(b)


@gluon.jit
def _half(x):
    """Model dtype -> fp16, what does not fit clamped."""
    return gl.minimum(gl.maximum(x.to(gl.float32), -65504.0), 65504.0).to(gl.float16)


@gluon.jit
def _dense_half(rows, live, tile, TRANSPOSE: gl.constexpr):
    """64 features of 64 rows in the model dtype into a `[64, 64]` tile; rows that are not live become 0."""
    column = gl.arange(0, 64, gl.SliceLayout(0, L_WORK))
    x = _half(gl.load(rows[:, None] + column[None, :], mask=live[:, None], other=0.0))
    if TRANSPOSE:
        tile = tile.permute((1, 0))
    tile.store(x)


@gluon.jit
def _is_dense(cls, CLASSES: gl.constexpr, OWN: gl.constexpr):
    """Whether a tile's rows are in the model dtype: new tokens, or a block that was never packed."""
    dense = cls == 15 if OWN else cls < 0
    for c in gl.static_range(len(CLASSES)):
        if CLASSES[c][0] == 16:
            dense = dense | (cls == c)
    return dense


@gluon.jit
def _dense_rows(
    word, new, new_stride, side: gl.constexpr, pages, page_bytes: gl.constexpr, table, row_stride,
    CLASSES: gl.constexpr, D: gl.constexpr,
):
    """Pointers `[64]` to a dense tile's rows of keys (side 0) or values (1), and which are there."""
    cls = ((word >> 24) & 15).to(gl.int32)
    t0 = ((word >> 12) & 0xFFF).to(gl.int32)
    t = gl.arange(0, 64, gl.SliceLayout(1, L_WORK))
    live = t < (word & 0xFFF).to(gl.int32) - t0
    rows = new + ((word >> 32) + t) * new_stride
    for c in gl.static_range(len(CLASSES)):
        if CLASSES[c][0] == 16:
            if cls == c:
                e = (t0 + t) // CLASSES[c][2]
                page = gl.load(table + (word >> 32) * row_stride + e, mask=live, other=0).to(gl.int64)
                base = (pages + page * page_bytes).to(gl.pointer_type(new.dtype.element_ty))
                rows = base + (t0 + t - e * CLASSES[c][2]) * D + side * (CLASSES[c][5] // 2)
    return rows, live


@gluon.jit
def unpack_partition(
    words, n, raw, k_smem, v_smem, bars, pages, table, row_stride, headers, header_stride, k, v, k_stride,
    v_stride, page_bytes: gl.constexpr, E: gl.constexpr, D: gl.constexpr, CLASSES: gl.constexpr,
    TOKEN_KEYS: gl.constexpr, OWN: gl.constexpr, STAGES: gl.constexpr,
):
    """Tiles words[0..n-1] into `k_smem` `[2 * STAGES, 64, 64]` and `v_smem` `[STAGES, D, 64]`, in turn.

    `table`, `headers` at this layer and head; `k`, `v` at this request's first new row and head.
    """
    k_full, k_empty, v_full, v_empty = bars
    raw_k, raw_v, raw_m, raw_h = raw
    # A program without tiles (a request without a prefix, its new tokens done elsewhere) must not read the list: what
    # lies there would be taken for a block.
    some = n > 0
    last = gl.maximum(n - 1, 0)
    next_word = gl.load(words, mask=some, other=15 << 24)
    by_token, by_run, by_meta = _pages_of(next_word, table, row_stride, E, CLASSES)
    after = gl.load(words + gl.minimum(1, last), mask=some, other=15 << 24)
    for i in range(-(RING - 1), n):
        # Everyone sees tile i, and is done with tile i - 1, whose place in the ring is filled next.
        async_copy.wait_group(RING - 2)
        gl.thread_barrier()
        j = i + RING - 1
        if j < n:
            cls = ((next_word >> 24) & 15).to(gl.int32)
            for c in gl.static_range(len(CLASSES)):
                if CLASSES[c][0] < 16:
                    if cls == c:
                        _fetch(
                            next_word, by_token, by_run, by_meta, j % RING, raw, pages, page_bytes, headers,
                            header_stride, CLASSES, c, TOKEN_KEYS, D,
                        )  # fmt: skip
        async_copy.commit_group()
        next_word = after
        by_token, by_run, by_meta = _pages_of(next_word, table, row_stride, E, CLASSES)
        after = gl.load(words + gl.minimum(j + 2, last), mask=some, other=15 << 24)
        if i >= 0:
            # Read again: carried from tile to tile as a value, words came out wrong (Triton 3.6, sm_90).
            word = gl.load(words + i)
            cls = ((word >> 24) & 15).to(gl.int32)
            count = (word & 0xFFF).to(gl.int32) - ((word >> 12) & 0xFFF).to(gl.int32)
            slot = i % RING
            stage = i % STAGES
            phase = (i // STAGES & 1) ^ 1
            k0 = k_smem.index(stage * 2)
            k1 = k_smem.index(stage * 2 + 1)
            v_tile = v_smem.index(stage)
            mbarrier.wait(k_empty.index(stage), phase)
            for c in gl.static_range(len(CLASSES)):
                if CLASSES[c][0] < 16:
                    if cls == c:
                        _unpack_keys(slot, raw_k, raw_h, (k0, k1), CLASSES[c][0], TOKEN_KEYS)
            if _is_dense(cls, CLASSES, OWN):
                rows, live = _dense_rows(
                    word, k, k_stride, 0, pages, page_bytes, table, row_stride, CLASSES, D
                )  # fmt: skip
                _dense_half(rows, live, k0, False)
                _dense_half(rows + 64, live, k1, False)
            fence_async_shared()
            mbarrier.arrive(k_full.index(stage), count=1)
            mbarrier.wait(v_empty.index(stage), phase)
            for c in gl.static_range(len(CLASSES)):
                if CLASSES[c][0] < 16:
                    if cls == c:
                        _unpack_values(slot, count, raw_v, raw_m, v_tile, CLASSES[c][1], D)
            if _is_dense(cls, CLASSES, OWN):
                rows, live = _dense_rows(
                    word, v, v_stride, 1, pages, page_bytes, table, row_stride, CLASSES, D
                )  # fmt: skip
                _dense_half(rows, live, v_tile.slice(0, 64), True)
                _dense_half(rows + 64, live, v_tile.slice(64, 64), True)
            fence_async_shared()
            mbarrier.arrive(v_full.index(stage), count=1)

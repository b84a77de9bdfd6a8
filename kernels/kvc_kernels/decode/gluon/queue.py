"""Shared-memory queue of the Gluon decode kernel: it holds the next tile outside of registers.

`cp.async` copies 16 bytes per lane from a page to shared memory and uses no register meanwhile, so 12 CTAs fit an SM,
where prefetching into registers leaves room for 8. The lanes that copy a tile's codes also read them, as
`[vectors, run or row, .., words]`, where each vector of all lanes is a contiguous row: there are no bank conflicts, and
the reads only rename registers into the layouts of `tiles.py`. Scales and zeros are copied and read by different lanes.

A queue holds one tile: `read_*` takes it out, then `copy_*` of the next one starts. The compiler inserts a barrier
wherever a buffer is read after it is written, or written after it is read. A queue is a tuple of int32 buffers. A run
is W = TILE / 4 tokens, and a vector has n words:

| place | shape                       | holds                                                                        |
|-------|-----------------------------|------------------------------------------------------------------------------|
| 0     | `[vectors, 4, 8, n]`        | key codes: (token pair, chunk), run, (token of pair, place in chunk), word   |
| 1     | `[DV / 8, 8, 4, W / 4]`     | value codes: two parts of the byte row, run, word                            |
| 2     | `[h, 8, 4, n]`              | zeros of the value groups, after them ones for the sum of p; h: half a run   |
| 3     | `[h, GROUPS, 4, n]`         | scales of the value groups                                                   |
| 4     | `[D / 2]`                   | scales of the key channels                                                   |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .tiles import MMA, _registers, header_layout, key_layout, lane_words, meta_layout, token_layout, value_layout

ONES = gl.constexpr(0x3C003C00)  # two fp16 ones
WORD = gl.constexpr(gl.pointer_type(gl.int32))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def meta_words(tile: int) -> int:
    """int32 words of per-token fp16 that a vector of a run holds: 4, or 2 if a run has only 4 tokens."""
    return min(4, tile // 8)


@gluon.constexpr_function
def keys_queue_layout(tile: int, row_bytes: int):
    """int32 `[vectors, 4, 8, n]`: a lane's part of place 0 of a queue."""
    n = lane_words(row_bytes)
    count = tile * row_bytes // 128 // n
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 1, 0, 0], [0, 2, 0, 0]]
    return gl.DistributedLinearLayout(
        _registers(n, 3, 4) + _registers(count, 0, 4), lanes, [], [], [count, 4, 8, n]
    )


@gluon.constexpr_function
def values_queue_layout(tile: int, rows: int):
    """int32 `[rows / 8, 8, 4, W / 4]`: a lane's part of place 1 of a queue."""
    n = tile // 16
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        _registers(n, 3, 4) + _registers(rows // 8, 0, 4), lanes, [], [], [rows // 8, 8, 4, n]
    )


@gluon.constexpr_function
def meta_copy_layout(tile: int, rows: int, runs_first: bool):
    """int32 `[h, rows, 4, n]`: one vector per lane; runs on the lanes that have them in place 1 (`runs_first`) or 0."""
    n = meta_words(tile)
    halves = tile // 8 // n
    runs, rest = [[0, 0, 1, 0], [0, 0, 2, 0]], _registers(halves, 0, 4) + _registers(rows, 1, 4)
    lanes = rest[:3] + [[0, 0, 0, 0]] * (3 - len(rest[:3]))
    return gl.DistributedLinearLayout(
        _registers(n, 3, 4) + rest[3:], runs + lanes if runs_first else lanes + runs, [], [], [halves, rows, 4, n]
    )


@gluon.constexpr_function
def meta_read_layout(tile: int, rows: int):
    """int32 `[h, rows, 4, n]`: the input of `meta_layout` (rows = 8) or `token_layout` (rows = 1)."""
    n = meta_words(tile)
    halves = tile // 8 // n
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0]] + [[0, i if i < rows else 0, 0, 0] for i in (1, 2, 4)]
    return gl.DistributedLinearLayout(
        _registers(n, 3, 4) + _registers(halves, 0, 4), lanes, [], [], [halves, rows, 4, n]
    )


@gluon.constexpr_function
def header_copy_layout(words: int):
    """int32 `[words]`: one vector per lane."""
    lanes = _registers(words // 4, 0, 1, 4)
    return gl.DistributedLinearLayout(
        _registers(4, 0, 1) + lanes[5:], lanes[:5] + [[0]] * (5 - len(lanes[:5])), [], [], [words]
    )


@gluon.jit
def first_token(word):
    """First token of a tile, from its word in the list."""
    return gl.multiple_of(((word >> 12) & 0xFFF).to(gl.int32), 16)


@gluon.jit
def run_pointer(pages, ids, page_bytes, first, run, TILE: gl.constexpr, T: gl.constexpr):
    """(page pointers, slots) `[4]` of the runs of TILE / 4 tokens that start at first + run * TILE / 4."""
    return pages + ids.to(gl.int64) * page_bytes, (first + run * (TILE // 4)) % T


@gluon.jit
def run_is_live(word, run, TILE: gl.constexpr):
    """Mask of the runs that have tokens. Only these are copied: for the rest, all programs would read the same page,
    and asynchronous copies bypass L1, so that page's few L2 lines would be the bottleneck.
    """
    return run * (TILE // 4) < (word & 0xFFF).to(gl.int32) - first_token(word)


@gluon.jit
def make_queue(
    D: gl.constexpr, KB: gl.constexpr, VB: gl.constexpr, GROUPS: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Buffers of the queue of one format class."""
    n: gl.constexpr = meta_words(TILE)
    halves: gl.constexpr = TILE // 8 // n
    k_layout: gl.constexpr = keys_queue_layout(TILE, D * KB // 8)
    v_layout: gl.constexpr = values_queue_layout(TILE, D * VB // 8)
    keys = gl.allocate_shared_memory(gl.int32, k_layout.shape, FLAT)
    values = gl.allocate_shared_memory(gl.int32, v_layout.shape, FLAT)
    # Rows after the groups are constant: ones where the MMA of the zeros sums up p, else zeros.
    z_layout: gl.constexpr = meta_read_layout(TILE, 8)
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, z_layout))))
    blank = gl.zeros([halves, 8, 4, n], gl.int32, layout=z_layout)
    rows = gl.where((group == GROUPS)[None, :, None, None], ONES, blank)
    zeros = gl.allocate_shared_memory(gl.int32, [halves, 8, 4, n], FLAT, rows)
    scales = gl.allocate_shared_memory(gl.int32, [halves, GROUPS, 4, n], FLAT)
    key_scales = gl.allocate_shared_memory(gl.int32, [D // 2], LINE)
    return keys, values, zeros, scales, key_scales


@gluon.jit
def _copy_meta(buffer, base, slot, live, FIRST: gl.constexpr, STEP: gl.constexpr, layout: gl.constexpr):
    """Copy fp16 rows that start FIRST bytes into a page, STEP bytes apart. base, slot, live `[4]`: of a run."""
    n: gl.constexpr = layout.shape[3]
    half = gl.arange(0, layout.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    row = gl.arange(0, layout.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    word = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    at = (half * (4 * n))[:, None, None, None] + (row * STEP)[None, :, None, None]
    at = (base + (FIRST + 2 * slot))[None, None, :, None] + at
    async_copy.async_copy_global_to_shared(
        buffer, at.to(WORD, bitcast=True) + word[None, None, None, :],
        mask=live[None, None, :, None],
    )


@gluon.jit
def copy_keys(
    queue, pages, ids, page_bytes, word, headers, header_stride, D: gl.constexpr, KB: gl.constexpr, T: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile's keys and their scales. `word`: the tile's word of `list_tiles`; ids `[4]`: its pages.
    """
    DK: gl.constexpr = D * KB // 8
    n: gl.constexpr = lane_words(DK)
    L: gl.constexpr = keys_queue_layout(TILE, DK)
    run = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    vector = gl.arange(0, L.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    step = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    base, slot = run_pointer(pages, ids, page_bytes, first_token(word), run, TILE, T)
    lane_at = (lane >> 2) * DK + (lane & 3) * (4 * n)
    at = (base + slot * DK)[None, :, None, None] + lane_at[None, None, :, None]
    CHUNKS: gl.constexpr = DK // (16 * n)
    offset = vector // CHUNKS * (2 * DK // 4) + vector % CHUNKS * (4 * n)
    at = at.to(WORD, bitcast=True) + (offset[:, None, None, None] + step[None, None, None, :])
    # Rows are masked one by one: in part-filled tiles the rows after the tokens are a tenth of all bytes read.
    left = (word & 0xFFF).to(gl.int32) - first_token(word) - run * (TILE // 4)
    left = left[None, :, None, None] - (lane >> 2)[None, None, :, None]
    live = (vector // CHUNKS * 2)[:, None, None, None] < left
    async_copy.async_copy_global_to_shared(queue[0], at, mask=live)
    at = (headers + (word >> 32) * header_stride).to(WORD, bitcast=True)
    at = at + gl.arange(0, D // 2, layout=header_copy_layout(D // 2))
    async_copy.async_copy_global_to_shared(queue[4], at)
    async_copy.commit_group()


@gluon.jit
def copy_values(
    queue, pages, ids, page_bytes, word, D: gl.constexpr, VB: gl.constexpr, T: gl.constexpr, VOFF: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile's values. `copy_value_meta` commits it as part of the same group."""
    L: gl.constexpr = values_queue_layout(TILE, D * VB // 8)
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    run = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    vector = gl.arange(0, L.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    step = gl.arange(0, L.shape[3], layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    base, slot = run_pointer(pages, ids, page_bytes, first_token(word), run, TILE, T)
    at = (base + (VOFF + slot))[None, None, :, None] + (row * T)[None, :, None, None]
    at = at.to(WORD, bitcast=True) + ((vector * (2 * T))[:, None, None, None] + step[None, None, None, :])
    live = run_is_live(word, run, TILE)[None, None, :, None]
    async_copy.async_copy_global_to_shared(queue[1], at, mask=live)


@gluon.jit
def copy_value_meta(
    queue, pages, ids, page_bytes, word, D: gl.constexpr, VB: gl.constexpr, GROUPS: gl.constexpr, T: gl.constexpr,
    VMETA: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Start the copy of a tile's zeros and scales of values."""
    M: gl.constexpr = meta_copy_layout(TILE, GROUPS, True)
    SLICE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, M)))
    m_run = gl.arange(0, 4, layout=SLICE)
    m_ids = gl.convert_layout(ids, SLICE, assert_trivial=True)
    m_base, m_slot = run_pointer(pages, m_ids, page_bytes, first_token(word), m_run, TILE, T)
    live = run_is_live(word, m_run, TILE)
    _copy_meta(queue[2].slice(0, GROUPS, dim=1), m_base, m_slot, live, VMETA + 2 * T, 4 * T, M)
    _copy_meta(queue[3], m_base, m_slot, live, VMETA, 4 * T, M)
    async_copy.commit_group()


@gluon.jit
def _pair_mask(token, live):
    """int32 mask of two fp16 of tokens `token` and token + 1, of which `live` exist."""
    return gl.where(token + 1 < live, -1, gl.where(token < live, 0xFFFF, 0))


@gluon.jit
def mask_value_meta(queue, live, GROUPS: gl.constexpr, TILE: gl.constexpr):
    """Clear zeros and scales of values after the first `live` tokens, in the queue, where a lane has few of them."""
    M: gl.constexpr = meta_copy_layout(TILE, GROUPS, True)
    half = gl.arange(0, M.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, M))))
    run = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, M))))
    word = gl.arange(0, M.shape[3], layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, M))))
    left = live - (half * (2 * M.shape[3]))[:, None, None, None] - (run * (TILE // 4))[None, None, :, None]
    mask = _pair_mask((word * 2)[None, None, None, :], left)
    zeros = queue[2].slice(0, GROUPS, dim=1)
    zeros.store(zeros.load(M) & mask)
    queue[3].store(queue[3].load(M) & mask)


@gluon.jit
def read_keys(queue, PART: gl.constexpr, PARTS: gl.constexpr, TILE: gl.constexpr, DK: gl.constexpr):
    """int32 `[4, W / PARTS, DK / 4]` in `key_layout`: part PART of each run."""
    n: gl.constexpr = lane_words(DK)
    count: gl.constexpr = TILE // PARTS * DK // 128 // n
    x = queue[0].slice(PART * count, count).load(keys_queue_layout(TILE // PARTS, DK))
    x = gl.permute(gl.reshape(x, [TILE // PARTS // 8, DK // (16 * n), 4, 2, 4, n]), [2, 0, 3, 1, 4, 5])
    x = gl.reshape(x, [4, TILE // PARTS // 4, DK // 4])
    return gl.convert_layout(x, key_layout(TILE // PARTS, DK), assert_trivial=True)


@gluon.jit
def join_rows(parts, TILE: gl.constexpr, NQ: gl.constexpr):
    """MMA results `[TILE / n, NQ]` of the n = 1 or 2 parts of `read_keys` -> `[TILE, NQ]`."""
    x = parts[0]
    if len(parts) == 2:
        x = gl.permute(gl.join(parts[0], parts[1]), [2, 0, 1])
        x = gl.convert_layout(gl.reshape(x, [TILE, NQ]), MMA, assert_trivial=True)
    return x


@gluon.jit
def read_values(queue, TILE: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """int32 `[ROWS, 4, W / 4]` in `value_layout`: byte rows FIRST, .."""
    x = queue[1].slice(FIRST // 8, ROWS // 8).load(values_queue_layout(TILE, ROWS))
    return gl.convert_layout(gl.reshape(x, [ROWS, 4, TILE // 16]), value_layout(TILE, ROWS), assert_trivial=True)


@gluon.jit
def read_header(queue, FIELD: gl.constexpr, DK: gl.constexpr):
    """int32 `[DK / 2]` in `header_layout`: scales of the channels of one field."""
    return queue[4].slice(FIELD * DK // 2, DK // 2).load(header_layout(DK))


@gluon.jit
def read_zeros(queue, TILE: gl.constexpr):
    """int32 `[8, 4, W / 2]` in `meta_layout`."""
    x = gl.permute(queue[2].load(meta_read_layout(TILE, 8)), [1, 2, 0, 3])
    return gl.convert_layout(gl.reshape(x, [8, 4, TILE // 8]), meta_layout(TILE), assert_trivial=True)


@gluon.jit
def read_scales(queue, GROUP: gl.constexpr, TILE: gl.constexpr):
    """int32 `[4, W / 2]` in `token_layout`: scales of one value group."""
    x = queue[3].slice(GROUP, 1, dim=1).load(meta_read_layout(TILE, 1))
    x = gl.permute(x, [1, 2, 0, 3])
    return gl.convert_layout(gl.reshape(x, [4, TILE // 8]), token_layout(TILE), assert_trivial=True)

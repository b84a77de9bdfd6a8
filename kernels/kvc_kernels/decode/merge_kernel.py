"""Second launch of decode attention: merge of the partial results of each query and head."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..common.unpack_kernel import NEG


@triton.jit(do_not_specialize_on_alignment=["owners", "starts"])
def merge_kernel(
    part_o, part_ml, ranges, out, out_lse, owners, starts, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr, LSE: tl.constexpr, ROWS: tl.constexpr, MULTI: tl.constexpr,
    PDL: tl.constexpr,
):
    """grid (N, H * G). Sum of the partial results of a query, weighted by 2^(m - max m); with LSE also the log-sum-exp
    to base 2, fp32 `[N, H * G]`. A partial result has ROWS rows per KV head.

    MULTI: query n belongs to request owners[n] (int32 `[N]`), whose first query is starts[owners[n]]. Otherwise each
    request has one query and ROWS is G.
    """
    if PDL:
        gdc_wait()
    n = tl.program_id(0)
    hq = tl.program_id(1)
    h = hq // G
    g = hq % G
    b = n
    if MULTI:
        b = tl.load(owners + n)
        g = g + (n - tl.load(starts + b)) * G
    first = tl.load(ranges + b)
    last = tl.load(ranges + b + 1)
    d = tl.arange(0, D)
    i = tl.arange(0, STEP)
    top = tl.full([], NEG, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for at in range(first, last, STEP):
        row = ((at + i).to(tl.int64) * H + h) * ROWS + g
        ok = at + i < last
        m = tl.load(part_ml + row * 2, mask=ok, other=NEG)
        l = tl.load(part_ml + row * 2 + 1, mask=ok, other=0.0)
        o = tl.load(part_o + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        m_new = tl.maximum(top, tl.max(m, 0))
        w = tl.exp2(m - m_new)
        keep = tl.exp2(top - m_new)
        total = total * keep + tl.sum(w * l, 0)
        acc = acc * keep + tl.sum(o * w[:, None], 0)
        top = m_new
    # A head with every token pruned, or a row without tokens, is 0 rather than NaN.
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (n * (H * G) + hq).to(tl.int64) * D + d, result.to(out.dtype.element_ty))
    if LSE:
        tl.store(out_lse + n * (H * G) + hq, tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), NEG))

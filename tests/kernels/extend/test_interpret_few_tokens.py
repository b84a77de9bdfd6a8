"""Prefills of few new tokens by the decode kernel under the interpreter, against float64 readings of the same pages.
"""

import pytest
import torch

from kvc_kernels.decode.attention import DecodeAttention
from kvc_kernels.extend.attention import ExtendAttention
from kvc_kernels.extend.few_tokens import FewTokenExtend
from tests.support.random_store import dense_head

from .test_interpret import FORMAT_LISTS, error, inputs, make_case, reference

P = 32
# Blocks 3 and 6 are uncompressed: the new tokens of each request lie in one of them.
ROWS = torch.tensor([[1, 2, 4, 3], [6, 0, 0, 0], [5, 2, 3, 0]], dtype=torch.int32)


def new_rows(store, layer, rows, prefix, new):
    """Keys and values `[N, H, D]` of the new tokens, from the pages that hold them."""
    out, p = [], store.layout.block_tokens
    for b, (before, n) in enumerate(zip(prefix, new)):
        at, block = before % p, int(rows[b, before // p])
        heads = [dense_head(store, block, layer, h, at + n) for h in range(store.layout.heads)]
        out.append([torch.stack([x[i][at:] for x in heads], 1) for i in (0, 1)])
    return [torch.cat(x) for x in zip(*out)]


def run(form, group, prefix, new, *, layer=1, cap=0.0, scale=0.2, **options):
    """(worst row error, worst log-sum-exp error) of a prefill that the decode kernel takes."""
    store = make_case(FORMAT_LISTS[form], group=group, format_ids=(1, 2, 0, 1, 2, 0), **options)
    q, *_ = inputs(store, group, sum(new), store.dtype)
    op = ExtendAttention(store, query_heads=2 * group, max_blocks=4, appended=True)
    rows = ROWS[: len(new)]
    op.plan(rows, prefix, new)
    assert op.steps.prefix == "decode"
    k, v = new_rows(store, layer, rows, prefix, new)
    out, lse = op.run(layer, q, k, v, scale=scale, logit_cap=cap, return_lse=True)
    want, sums = reference(store, layer, q, k, v, rows, prefix, new, scale=scale, logit_cap=cap, lse=True)
    return error(out, want), float((lse - sums).abs().max())


@pytest.mark.parametrize("form, group", [
    ("k4v4", 4), ("k8v8", 1), ("k2v2", 3), ("tiers", 2),
    ("plain", 5),
])  # fmt: skip
@pytest.mark.parametrize("new", [(1, 1, 1), (2, 1, 2), (3, 3, 1)])
def test_formats_groups_and_several_requests(form, group, new):
    worst, sums = run(form, group, [3 * P + 9, 11, 2 * P + 5], list(new))
    assert worst < 0.02 and sums < 0.02


@pytest.mark.parametrize("group, new", [(4, 1), (4, 2), (4, 4), (1, 16), (16, 1)])
def test_rows_of_every_width(group, new):
    """Up to 16 query rows per KV head, with the new tokens at the start and at the end of their block."""
    for prefix in (3 * P, 4 * P - new):
        worst, sums = run("k4v4", group, [prefix], [new])
        assert worst < 0.02 and sums < 0.02


def test_more_blocks_than_a_chunk():
    store = make_case(FORMAT_LISTS["k4v4"], group=2, format_ids=(1,) * 70 + (0,))
    rows, prefix, new = torch.arange(1, 72)[None].int(), [70 * P + 3], [4]
    q, *_ = inputs(store, 2, 4, store.dtype)
    op = FewTokenExtend(store, query_heads=4, max_blocks=71)
    op._operations[8] = DecodeAttention(
        store, max_batch=1, max_blocks=71, query_heads=4, query_rows=8, columns=1
    )
    op.plan(rows, prefix, new)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    op.run(0, q, out, lse, scale=0.2, logit_cap=0.0)
    k, v = new_rows(store, 0, rows, prefix, new)
    assert error(out, reference(store, 0, q, k, v, rows, prefix, new, scale=0.2)) < 0.02


def test_query_that_sees_nothing_of_first_tile():
    """Only the last block is read, and only the last queries see its second tile."""
    assert run("plain", 1, [P - 16], [16])[0] < 0.02


def test_capped_logits_in_fp16():
    assert run("k4v4", 2, [3 * P + 3], [4], cap=5.0, scale=1.0, dtype=torch.float16)[0] < 0.01


@pytest.mark.parametrize("prefix, new, fits", [
    ([64], [4], True),
    ([64], [5], False),  # 20 rows of a group of 4
    ([64 - 2], [4], False),  # the new tokens lie in two blocks
    ([64 - 4], [4], True),
    ([0], [4], False),  # nothing to read from pages
    ([0, 64], [4, 4], True),
    ([64, 64], [4, 0], False),
    ([64] * 40, [1] * 40, False),
])  # fmt: skip
def test_kernel_accepts_only_few_token_forwards(prefix, new, fits):
    store = make_case(FORMAT_LISTS["k4v4"], group=4)
    assert FewTokenExtend(store, query_heads=8, max_blocks=4).fits(prefix, new) is fits


def test_kernel_rejects_forwards_whose_new_rows_are_not_in_pages():
    store = make_case(FORMAT_LISTS["k4v4"], group=4)
    op = ExtendAttention(store, query_heads=8, max_blocks=4)
    op.plan(ROWS[:1], [3 * P], [2])
    assert op.steps.prefix == "triton"

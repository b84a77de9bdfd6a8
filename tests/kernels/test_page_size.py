"""The page size affects only memory: blocks store and return the same values at every size.

A size that its format does not divide evenly leaves the last page of every block part-filled, and with several formats
at least one always meets such sizes.
"""

import functools
import itertools

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import PoolLayout
from tests.kernels.common.test_attention_reference import error
from tests.support.pages import block_formats_of, fill, make_store, random_kv

P, LENGTH, SCALE = 64, 230, 64**-0.5
NAMES = ("k4v4", "k8v4")
EXACT = 4352  # 64 tokens of k4v4, 16 of bf16
# Pages of 16, 32, 48, 64 (and slack) and 80 tokens of k4v4; two of them also leave uncompressed pages part-filled.
SIZES = (1616, 2176, 3264, 4544, 5440)


def outputs(size: int, format_id: int, packed: int, cuts: tuple[int, ...]):
    """Prefill a prompt in `cuts`, with its first `packed` blocks packed after the first cut and the others after the
    last, then run a decode step in fp32. Returns the prefills' rows, the decoded row, and the dequantized packed
    blocks."""
    store = make_store(block_formats_of(*NAMES), block_tokens=P, head_dim=64, blocks=9, page_bytes=size)
    row, fmt = torch.tensor([4, 2, 7, 1]), store.block_formats[format_id].high
    fill(store, row, *random_kv(store, LENGTH))
    q = torch.randn(LENGTH, 6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows, done = [], 0
    for a, b in itertools.pairwise(cuts):
        args = row[None], [a], [b - a]
        rows.append(ops.extend_attention(store, 0, q[a:b], *args, scale=SCALE, fake_quant_format=[fmt]))
        last = LENGTH // P if b == LENGTH else packed
        if last > done:
            blocks = row[done:last]
            ops.compact(store, blocks, format_id, ops.keep_all(len(blocks), store.layout), from_format=0)
            done = last
    decoded = ops.decode_attention(store, 0, q[-1:].float(), row[None], torch.tensor([LENGTH]), scale=SCALE)
    return torch.cat(rows), decoded, ops.load_dense(store, 0, row[:done])[:2]


@functools.cache
def cold(size: int, format_id: int):
    return outputs(size, format_id, 0, (0, LENGTH))


def test_sizes_leave_part_filled_pages():
    page = lambda size, fmt: PoolLayout(1, 2, 64, P, size).page(FORMATS[fmt]).tokens  # noqa: E731
    assert [page(s, "k4v4") for s in SIZES] == [16, 32, 48, 64, 80]
    assert [page(s, "k8v4") for s in SIZES] == [16, 16, 32, 32, 48]
    assert [P % page(s, "bf16") for s in SIZES] == [0, 0, 4, 0, 4]


@pytest.mark.parametrize("format_id", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_stored_blocks_and_answers_do_not_depend_on_page_size(size, format_id):
    want, decoded, stored = cold(EXACT, format_id)
    for packed, cuts in ((0, (0, LENGTH)), (1, (0, 128, LENGTH)), (2, (0, 128, LENGTH)), (3, (0, 192, LENGTH))):
        rows, step, blocks = outputs(size, format_id, packed, cuts)
        assert torch.equal(rows, want)
        assert all(torch.equal(a, b) for a, b in zip(blocks, stored))
        assert torch.equal(step, cold(size, format_id)[1])
        # Decode outputs differ between sizes, because a decode step adds up 230 fp32 terms page by page.
        assert error(step, decoded) < 1e-5

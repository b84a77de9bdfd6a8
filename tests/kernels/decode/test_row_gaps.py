"""Rows with gaps: the blocks that a snapshot lists, and the end of a row's gap."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_kernels import ops


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_after_gap_move_forward(data):
    gaps, blocks, width = ops.RowGaps(5, torch.device("cpu")), {}, data.draw(st.integers(1, 9))
    for row in range(5):
        first = data.draw(st.integers(0, width))
        missing = data.draw(st.integers(0, width - first))
        gaps.open(row, first, missing)
        blocks[row] = first, missing
    assert gaps.rows == {row for row, (_, n) in blocks.items() if n}
    if data.draw(st.booleans()):
        gaps.close(3)
        blocks[3] = 0, 0
    rows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    table = torch.from_numpy(np.random.default_rng(0).integers(1, 1000, (len(rows), width)))
    before = table.tolist()
    left_out = gaps.close_up(table, torch.tensor(rows))
    for row, listed, original, n in zip(rows, table.tolist(), before, left_out.tolist()):
        first, missing = blocks[row]
        assert n == missing
        assert listed[: width - missing] == original[:first] + original[first + missing :]


def test_reset_clears_all_gaps():
    gaps = ops.RowGaps(3, torch.device("cpu"))
    gaps.open(1, 2, 3)
    gaps.reset()
    table = torch.arange(8).view(1, 8)
    assert not gaps.rows and not gaps.close_up(table, torch.tensor([1])).any()
    assert torch.equal(table, torch.arange(8).view(1, 8))

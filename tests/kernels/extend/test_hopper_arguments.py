"""Arguments of the Hopper kernels, without a GPU."""

import pytest
import torch

from kvc_kernels.extend import hopper


@pytest.mark.parametrize("offset, stride", [(0, 256), (8, 264), (1, 256), (0, 260), (4, 128)])
def test_rows_are_aligned(offset, stride):
    """Contiguous rows at an odd address are copied, too."""
    x = torch.randn(8 + 40 * stride).bfloat16().as_strided((20, 2, 128), (stride, 128, 1), offset)
    rows = hopper._rows(x)
    assert torch.equal(rows, x) and not rows.data_ptr() % 16 and all(s % 8 == 0 for s in rows.stride()[:2])
    assert (rows is x) == (offset % 8 == 0 and stride % 8 == 0)

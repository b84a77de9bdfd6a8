"""KeyDiff of whole blocks by one kernel against the layer-by-layer torch reference."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.tiering.keydiff_kernel import keydiff_blocks
from tests.kernels.compact.test_interpret import BLOCKS
from tests.support.pages import fill, make_store, random_kv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim, block_tokens", [(64, 48), (96, 64), (128, 128)])
def test_keydiff_matches_reference(head_dim, block_tokens, dtype):
    store = make_store(head_dim=head_dim, block_tokens=block_tokens, layers=2, dtype=dtype)
    k, v = random_kv(store, 3 * block_tokens, seed=4)
    k[:, 7] = 0
    fill(store, BLOCKS, k, v)
    got = keydiff_blocks(store, BLOCKS)
    want = torch.stack([ops.keydiff(ops.load_dense(store, i, BLOCKS, 0)[0]) for i in range(2)], 1)
    assert got.shape == want.shape == (3, 2, 2, block_tokens)
    assert torch.allclose(got, want, atol=2e-6)
    # A block's scores do not depend on other blocks, bit for bit.
    assert torch.equal(keydiff_blocks(store, BLOCKS[[2, 0]]), got[[2, 0]])
    assert keydiff_blocks(store, BLOCKS[:0]).shape == (0, *got.shape[1:])

"""KeyDiff by one kernel on the GPU against the torch reference on the CPU; a block's scores do not depend on other
blocks."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.store import PageStore
from tests.support.pages import fill, make_store, random_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS = torch.tensor([5, 2, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim, block_tokens", [(64, 64), (128, 128), (256, 96)])
def test_keydiff(head_dim, block_tokens, dtype):
    from kvc_kernels.tiering.keydiff_kernel import keydiff_blocks

    cpu_store = make_store(head_dim=head_dim, block_tokens=block_tokens, layers=2, dtype=dtype)
    fill(cpu_store, BLOCKS, *random_kv(cpu_store, 3 * block_tokens, seed=4))
    gpu_store = PageStore(**{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in vars(cpu_store).items()})
    got = keydiff_blocks(gpu_store, BLOCKS.cuda())
    want = torch.stack([ops.keydiff(ops.load_dense(cpu_store, i, BLOCKS, 0)[0]) for i in range(2)], 1)
    assert torch.allclose(got.cpu(), want, atol=5e-6)
    for i in range(3):
        assert torch.equal(keydiff_blocks(gpu_store, BLOCKS[i : i + 1].cuda())[0], got[i])

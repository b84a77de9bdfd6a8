"""`records.kernel` on the GPU against `records.reference`, and with records in page-locked host memory between."""

import copy

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.records import kernel, reference
from tests.kernels.records.roundtrip import BLOCKS, digests, empty_records, packed_store, stored_counts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(store):
    moved = copy.copy(store)
    for name, value in vars(store).items():
        if isinstance(value, torch.Tensor):
            setattr(moved, name, value.cuda())
    return moved


@pytest.mark.parametrize("to_format", [0, 1, 2], ids=["bf16", "k4v4", "k8v4+k4v2"])
@pytest.mark.parametrize("has_scores", [False, True])
def test_through_host_memory(has_scores, to_format):
    plain = packed_store(has_scores, to_format)
    store = on_gpu(plain)
    blocks, before = BLOCKS.cuda(), digests(plain, BLOCKS)
    want = empty_records(plain, len(BLOCKS))
    reference.write_records(plain, BLOCKS, want)
    staged = empty_records(store, len(BLOCKS)).cuda()
    kernel.write_records(store, blocks, staged)
    host = torch.empty(staged.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(staged, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, want)

    ops.release(store, blocks)
    ids = torch.tensor([4, 1, 6], device="cuda")
    kernel.take_stored(store, ids, to_format, stored_counts(plain, host).cuda())
    staged.fill_(0)
    staged.copy_(host, non_blocking=True)
    for at in range(len(ids)):  # the first launch binds the arguments of the others
        kernel.read_records(store, ids, staged[at : at + 1], first=at)
    assert digests(store, ids) == before
    ops.check_invariants(store)

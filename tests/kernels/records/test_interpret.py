"""`records.kernel` against `records.reference`, byte for byte, under Triton's interpreter."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.records import kernel
from tests.kernels.pages.test_interpret import same_state
from tests.kernels.records.roundtrip import BLOCKS, digests, empty_records, packed_store, stored_counts


@pytest.mark.parametrize("to_format", [0, 1, 2], ids=["bf16", "k4v4", "k8v4+k4v2"])
@pytest.mark.parametrize("has_scores", [False, True])
def test_kernel_equals_reference(has_scores, to_format):
    a, b = (packed_store(has_scores, to_format) for _ in range(2))
    records = [empty_records(a, len(BLOCKS)) for _ in range(2)]
    ops.write_records(a, BLOCKS, records[0])
    kernel.write_records(b, BLOCKS, records[1])
    assert torch.equal(*records)
    before, ids = digests(a, BLOCKS), torch.tensor([4, 1, 6])
    for store in (a, b):
        ops.release(store, BLOCKS)
    counts = stored_counts(a, records[0])
    ops.take_stored(a, ids, to_format, counts)
    kernel.take_stored(b, ids, to_format, counts)
    same_state(a, b)
    kernel.read_records(b, torch.cat((ids[:1] + 1, ids)), records[1], first=1)
    assert digests(b, ids) == before
    assert torch.equal(b.query_counts[ids], a.query_counts.new_tensor([7, 1, 9]))

"""`pages.kernel` and the moves built on it equal `pages.reference` page for page after any order of operations."""

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.compact.launch import compact_triton
from kvc_kernels.pages import kernel as page_kernels
from tests.support.pages import block_formats_of, free_pages, make_store, random_tiers

FORMAT_LISTS = [("k4v4",), ("k8v4+k4v2", "k4v2")]


def same_state(a, b):
    for name in ("table", "counts", "format_id", "query_counts", "cursor"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(free_pages(a), free_pages(b))
    ops.check_invariants(b)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("specs", FORMAT_LISTS)
def test_random_operations_match_reference(specs, seed):
    """Blocks go up and down until the ring has wrapped around several times."""
    gen = np.random.default_rng(seed)
    block_formats = block_formats_of(*specs)
    a, b = (make_store(block_formats, head_dim=64, layers=2, blocks=5, has_scores=True) for _ in range(2))
    for _ in range(25):
        state = a.format_id.numpy()
        free, live = np.flatnonzero(state < 0), np.flatnonzero(state[1:] >= 0) + 1
        free_blocks = len(free_pages(a)) // a.layout.block_pages_bf16
        kind = gen.integers(0, 3)
        if kind == 0 and min(free_blocks, len(free)):
            ids = gen.choice(free, gen.integers(1, min(free_blocks, len(free)) + 1), replace=False)
            ops.take_bf16(a, torch.from_numpy(ids))
            page_kernels.take_bf16(b, torch.from_numpy(ids))
        elif kind == 1 and len(live):
            # A free block among them returns no pages.
            ids = np.append(gen.choice(live, gen.integers(1, len(live) + 1), replace=False), free[:1])
            ops.release(a, torch.from_numpy(ids))
            page_kernels.release(b, torch.from_numpy(ids))
        elif len(live) and free_blocks:
            format_id = int(state[live[0]])
            ids = torch.from_numpy(live[state[live] == format_id][:free_blocks])
            target = min(format_id + 1, len(specs))
            tiers = random_tiers(a, len(ids), a.block_formats[target], gen)
            if format_id:
                tiers = torch.minimum(tiers, ops.block_tiers(a, ids, format_id))
            if gen.integers(0, 3) == 0:
                tiers = None
            pages = ops.compact(a, ids, target, tiers, from_format=format_id)
            assert torch.equal(compact_triton(b, ids, target, tiers, from_format=format_id), pages)
        same_state(a, b)
    assert int(a.cursor[0]) > a.ring.numel()


def test_empty_operations_change_nothing():
    a, b = (make_store(head_dim=64) for _ in range(2))
    none = torch.zeros(0, dtype=torch.int64)
    page_kernels.take_bf16(b, none)
    page_kernels.release(b, none)
    same_state(a, b)

"""Stores whose blocks are written to records and read back, and the checks for them."""

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.layout import RecordLayout
from tests.support.pages import block_formats_of, fill, make_store, random_kv, random_tiers

SPECS = ("k4v4", "k8v4+k4v2")
BLOCKS = torch.tensor([2, 5, 3])


def packed_store(has_scores: bool, to_format: int, seed: int = 0):
    """A store whose `BLOCKS` are full and in `to_format`; two tiers hold random tokens, and some heads hold none."""
    store = make_store(block_formats_of(*SPECS), head_dim=64, layers=2, blocks=7, has_scores=has_scores)
    fill(store, BLOCKS, *random_kv(store, len(BLOCKS) * store.layout.block_tokens, seed))
    store.query_counts[BLOCKS] = torch.tensor([7, 1, 9], dtype=torch.int32)
    if to_format:
        gen = np.random.default_rng(seed)
        tiers = random_tiers(store, len(BLOCKS), store.block_formats[to_format], gen) if to_format == 2 else None
        ops.compact(store, BLOCKS, to_format, tiers, from_format=0)
    return store


def empty_records(store, n: int) -> torch.Tensor:
    """Buffers for the largest records, filled with garbage."""
    size = RecordLayout(store.layout).num_bytes(store.layout.block_pages_bf16)
    return torch.full((n, size), 0xA5, dtype=torch.uint8)


def digests(store, blocks) -> list[str]:
    return [ops.block_digest(store, int(b)) for b in blocks]


def stored_counts(store, records: torch.Tensor) -> torch.Tensor:
    """The counts in `records`, read by the layout's documentation from the first segment."""
    heads = store.layout.layers * store.layout.heads
    return records[:, : 4 * heads].view(torch.int16).view(-1, store.layout.layers, store.layout.heads, 2)

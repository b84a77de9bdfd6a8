"""Blocks as records: blocks come back with the same content, in other pages and under other ids."""

import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.layout import RecordLayout
from tests.kernels.records.roundtrip import BLOCKS, digests, empty_records, packed_store, stored_counts


@pytest.mark.parametrize("to_format", [0, 1, 2], ids=["bf16", "k4v4", "k8v4+k4v2"])
@pytest.mark.parametrize("has_scores", [False, True])
def test_block_round_trips_with_same_bytes(has_scores, to_format):
    store = packed_store(has_scores, to_format)
    before, queries = digests(store, BLOCKS), store.query_counts[BLOCKS].clone()
    records = empty_records(store, len(BLOCKS))
    ops.write_records(store, BLOCKS, records)
    counts = stored_counts(store, records)
    assert torch.equal(counts, store.counts[BLOCKS])

    ops.release(store, BLOCKS)
    ops.take_bf16(store, torch.tensor([6]))  # makes the next free pages different ones
    ids = torch.tensor([1, 2, 4])
    ops.take_stored(store, ids, to_format, counts)
    ops.check_invariants(store)
    ops.read_records(store, ids, records)
    assert digests(store, ids) == before
    assert torch.equal(store.query_counts[ids], queries)
    ops.check_invariants(store)


def test_record_does_not_depend_on_page_ids_and_ends_with_pages():
    """Equal blocks in different pages have equal records, and nothing is written after them."""
    one, other = packed_store(False, 2), packed_store(False, 2)
    records = [empty_records(s, len(BLOCKS)) for s in (one, other)]
    ops.write_records(one, BLOCKS, records[0])
    ops.release(other, BLOCKS)
    ids = torch.tensor([4, 1, 6])
    ops.take_stored(other, ids, 2, stored_counts(one, records[0]))
    for at in range(len(ids)):
        ops.read_records(other, ids, records[0][at : at + 1], first=at)
    ops.write_records(other, ids, records[1])
    assert torch.equal(records[0], records[1])
    pages = ops.block_head_pages(one, BLOCKS).sum((1, 2)).tolist()
    layout = RecordLayout(one.layout)
    for record, n in zip(records[0], pages):
        assert (record[layout.num_bytes(n) :] == 0xA5).all()


def test_empty_list_of_blocks():
    store = packed_store(False, 1)
    none = torch.zeros(0, dtype=torch.int64)
    before = store.cursor.clone()
    ops.take_stored(store, none, 1, torch.zeros((0, 2, 2, 2), dtype=torch.int16))
    ops.write_records(store, none, empty_records(store, 0))
    ops.read_records(store, none, empty_records(store, 0))
    assert torch.equal(store.cursor, before)

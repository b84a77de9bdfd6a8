"""The queue of page-state changes: what it merges, and that merging changes nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_kvc.cache.op_queue import Compact, Load, OpLog, Release, Save, Take
from sglang_kvc.cache.transfers import Loading


def compact(ids, to_format, from_format=0):
    ids = np.array(ids)
    return Compact(ids, from_format, to_format, 10 * ids, 100 * ids, 0 * ids, 1000 * ids)


def test_queue_keeps_order_and_merges_only_neighbors():
    log = OpLog()
    for op in (
        Take(np.array([1])),
        Take(np.array([2])),
        Release(np.array([1])),
        Take(np.array([1])),
        compact([1], 1),
        compact([2], 1),
        compact([3], 2),
    ):
        log.push(op)
    seen = [(type(op).__name__, op.blocks.tolist()) for op in log.drain()]
    assert seen == [
        ("Take", [1, 2]),
        ("Release", [1]),
        ("Take", [1]),
        ("Compact", [1, 2]),
        ("Compact", [3]),
    ]
    assert len(log) == 0


def drained(*ops):
    log = OpLog()
    for op in ops:
        log.push(op)
    return [(type(op).__name__[0], op.blocks.tolist()) for op in log.drain()]


def test_compactions_of_many_requests_merge_into_one_operation():
    """Many requests end at once: each leaves a block to pack and frees others. Many grow: each has a block to pack and
    one to repack."""
    free = [Release(np.array([i])) for i in (11, 12, 13)]
    ended = [op for i in (1, 2, 3) for op in (compact([i], 1), free[i - 1])]
    assert drained(*ended) == [("C", [1, 2, 3]), ("R", [11, 12, 13])]
    grown = [op for i in (1, 2, 3) for op in (compact([i], 1), compact([10 + i], 1, 1))]
    assert drained(*grown) == [("C", [1, 2, 3]), ("C", [11, 12, 13])]
    log = OpLog()
    for op in grown:
        log.push(op)
    op = log.drain()[1]
    assert (op.from_format, op.to_format) == (1, 1)
    assert op.starts.tolist() == [110, 120, 130] and op.lengths.tolist() == [1100, 1200, 1300]


def test_compaction_stays_after_operations_it_depends_on():
    # It stays after the operation that takes its block, and after everything before that.
    assert drained(compact([1], 1), Take(np.array([2])), compact([2], 1)) == [("C", [1]), ("T", [2]), ("C", [2])]
    # It stays after an earlier move of the same block to any block format.
    twice = (compact([5], 1, 1), compact([1], 1), compact([1], 1, 1))
    assert drained(*twice) == [("C", [5]), ("C", [1]), ("C", [1])]
    assert drained(compact([1], 1, 1), compact([1], 1, 1)) == [("C", [1]), ("C", [1])]


def save(blocks, units):
    return Save(np.array(blocks), np.array(units))


def test_saves_of_many_evictions_merge_into_one_operation():
    """Each eviction saves blocks and then releases them."""
    release = [Release(np.array([i])) for i in (1, 2, 3)]
    evicted = (save([1], [[10]]), release[0], save([2], [[11, 12]]), release[1], save([3], [[13]]), release[2])
    log = OpLog()
    for op in evicted:
        log.push(op)
    one_unit, two_units, released = log.drain()
    assert one_unit.blocks.tolist() == [1, 3] and one_unit.units.tolist() == [[10], [13]]
    assert two_units.blocks.tolist() == [2] and two_units.units.tolist() == [[11, 12]]
    assert released.blocks.tolist() == [1, 2, 3]


def test_save_stays_after_operations_it_depends_on():
    first, last = save([1], [[10]]), save([2], [[11]])
    # It stays after operations on its block.
    for between in (Take(np.array([2])), compact([2], 1), Release(np.array([2]))):
        assert [name for name, _ in drained(first, between, last)] == ["S", type(between).__name__[0], "S"]
    # Saves write to the same units in the order in which they were queued, and after loads from them.
    wide = save([3], [[11, 12]])
    assert drained(first, wide, last) == [("S", [1]), ("S", [3]), ("S", [2])]
    assert drained(first, last, wide) == [("S", [1, 2]), ("S", [3])]
    assert drained(first, last, save([4], [[11]])) == [("S", [1, 2, 4])]
    load = Load(np.array([5]), 1, np.array([[11]]), Loading(np.array([5])))
    assert drained(first, load, last) == [("S", [1]), ("L", [5]), ("S", [2])]


# ---- the merged queue against the operations one by one

BLOCKS, UNITS = 6, 8
PLAN = st.tuples(
    st.sampled_from(["take", "release", "compact", "save", "load"]),
    st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3, unique=True),
    st.permutations(range(UNITS)),
    st.integers(1, 2),
)


def operations(plan):
    """Operations from `plan`: only free blocks are taken or loaded, only others are moved, saved and released. Units
    are arbitrary, also those that an earlier operation of the queue uses."""
    used: dict[int, int] = {}  # taken blocks and their formats
    for kind, ids, units, arg in plan:
        free = [b for b in ids if b not in used]
        taken = [b for b in ids if b in used]
        shaped = np.array(units[: len(free if kind == "load" else taken) * arg], dtype=np.int64).reshape(-1, arg)
        if kind == "take" and free:
            yield Take(np.array(free))
            used |= dict.fromkeys(free, 0)
        elif kind == "load" and free:
            yield Load(np.array(free), arg, shaped, Loading(np.array(free)))
            used |= dict.fromkeys(free, arg)
        elif kind == "release" and taken:
            yield Release(np.array(taken))
            for b in taken:
                del used[b]
        elif kind == "save" and taken:
            yield Save(np.array(taken), shaped)
        elif kind == "compact" and (alike := [b for b in taken if used[b] == used[taken[0]]]):
            yield compact(alike, arg, used[alike[0]])
            used |= dict.fromkeys(alike, arg)


def run(ops):
    """Content of all blocks and units after `ops`."""
    blocks: dict[int, object] = {}
    units: dict[int, object] = {}
    for op in ops:
        for i, b in enumerate(op.blocks.tolist()):
            if isinstance(op, Take):
                blocks[b] = "new"
            elif isinstance(op, Release):
                del blocks[b]
            elif isinstance(op, Compact):
                blocks[b] = ("packed", op.to_format, blocks[b])
            elif isinstance(op, Save):
                units |= {u: (k, blocks[b]) for k, u in enumerate(op.units[i].tolist())}
            else:
                blocks[b] = ("loaded", op.format_id, *(units.get(u) for u in op.units[i].tolist()))
    return blocks, units


@settings(max_examples=1000)
@given(st.lists(PLAN, max_size=20))
def test_merging_changes_no_block_and_no_record(plan):
    ops = list(operations(plan))
    log = OpLog()
    for op in ops:
        log.push(op)
    merged = log.drain()
    assert sum(len(op.blocks) for op in merged) == sum(len(op.blocks) for op in ops)
    assert run(merged) == run(ops)

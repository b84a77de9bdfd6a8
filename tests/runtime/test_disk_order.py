"""Which files of the disk tier make room for others: those used least recently, and of a prompt its last blocks."""

from __future__ import annotations

import random
import time
from array import array

import numpy as np
import pytest
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_kvc.adapter.block_key import BlockKey
from sglang_kvc.cache import disk_tier
from sglang_kvc.cache.block_store import HEADER_BYTES
from sglang_kvc.cache.disk_store import DiskStore
from sglang_kvc.cache.use_order import BLOCK_NS, UseOrder

from .model import P
from .overlap import Overlap
from .test_disk_store import MODEL, STORED, key_of, record_of
from .test_disk_tier import stored, tier, written  # noqa: F401
from .test_stored_prompts import EVERYTHING, finish_writes, run, serve, tokens

SIZE, FILE = 300 + HEADER_BYTES, 9880  # bytes of a file: with `record_of`, and of a packed block


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that the test advances."""
    now = [1_000]
    for name in ("time_ns", "monotonic_ns"):
        monkeypatch.setattr(time, name, lambda: now[0] * 10**9)
    return now


def keys_of(prompt: list[int]) -> list[bytes]:
    return [bytes.fromhex(h) for h in get_storage_hash_str(BlockKey(array("q", prompt), None), None, page_size=P)]


def ask(server: Overlap, prompt: list[int]) -> int:
    """Answer `prompt`; returns its number of cached blocks."""
    server.submit([*prompt, 1], [5], None, None)
    run(server)
    finish_writes(server)
    return list(server.requests.values())[-1].cached_tokens // P


def found(server: Overlap, prompt: list[int]) -> int:
    """Number of blocks of `prompt` that a lookup finds in files."""
    return len(server.tree_cache.disk.store.find(keys_of(prompt)))


def test_order_equals_sorted_uses():
    draw, order, uses = random.Random(0), UseOrder(), {}
    for step in range(3000):
        match draw.randrange(4):
            case 0 | 1:
                order.add(key_of(step), step * 10**6)
                uses[key_of(step)] = step * 10**6
            case 2 if uses:
                begin = draw.randrange(step)
                touched = [key_of(i) for i in range(begin, begin + 9)]
                order.touch(touched, step * 10**6)
                uses.update({k: max(uses[k], step * 10**6 - i * BLOCK_NS) for i, k in enumerate(touched) if k in uses})
            case 3:
                while not order.settle(corrections=3):
                    pass
                oldest = order.oldest()
                assert oldest == min(uses, key=uses.__getitem__, default=None)
                if oldest is not None:
                    order.remove(oldest)
                    del uses[oldest]
    assert order.uses == uses and len(uses) > 100


def test_block_used_before_all_files_is_not_written(tmp_path):
    store = DiskStore(tmp_path, MODEL, limit=2 * SIZE)
    assert store.write(key_of(0), STORED, record_of(0), 10) and store.write(key_of(1), STORED, record_of(1), 30)
    assert not store.write(key_of(2), STORED, record_of(2), 5)
    assert store.write(key_of(3), STORED, record_of(3), 20)
    assert [store.record_bytes(key_of(i)) is not None for i in range(4)] == [False, True, False, True]
    store.touch([key_of(3)], 40)
    assert store.write(key_of(4), STORED, record_of(4), 35) and store.record_bytes(key_of(3)) is not None
    assert store.num_bytes == 2 * SIZE == sum(path.stat().st_size for path in store.folder.rglob("*.kvc"))


def test_shared_prefix_outlives_what_continues_it(tmp_path, clock):
    """The first blocks of all prompts stay on the device, where hits do not read their files. Twice as many other
    blocks are written as the disk holds."""
    head, sessions = tokens(1, 4), [tokens(10 + k, 2) for k in range(12)]
    with serve(tmp_path, disk_size=10 * FILE) as server:
        store = server.tree_cache.disk.store
        for own in sessions:
            ask(server, head + own)
            clock[0] += 2
            assert found(server, head + own) == 6
        assert store.bytes_written > 2 * store.limit
        assert 0 < found(server, head + sessions[-2]) - 4 and found(server, head + sessions[0]) == 4
    with serve(tmp_path, disk_size=10 * FILE) as server:
        assert ask(server, head + sessions[-1]) == 6


def test_last_blocks_of_a_prompt_go_first(tmp_path, clock):
    prompt, other = tokens(1, 8), tokens(2, 3)
    with serve(tmp_path, disk_size=9 * FILE) as server:
        ask(server, prompt)
        clock[0] += 2
        ask(server, other)
        assert found(server, other) == 3
        assert found(server, prompt) == len(server.tree_cache.disk.store) - 3 >= 4


def test_eviction_writes_keep_their_prefix(tmp_path, clock):
    """A prefix was written long before the blocks that continue it, which only their eviction writes."""
    prompt = tokens(1, 6)
    with serve(tmp_path, disk_size=1 << 20) as server:
        tree = server.tree_cache
        ask(server, prompt[: 3 * P])
        clock[0] += 60
        tree.back_up = lambda node_id: None
        ask(server, prompt)
        assert found(server, prompt) == 3
        clock[0] += 60
        tree.evict(EVERYTHING)
        finish_writes(server)
        assert found(server, prompt) == 6
        uses = [tree.disk.store._order[key] for key in keys_of(prompt)]
        assert uses == sorted(uses, reverse=True) and len({*uses}) == 6


def test_read_prompt_counts_as_used(tmp_path, clock):
    prompt = tokens(1, 3)
    with serve(tmp_path, disk_size=1 << 20) as server:
        ask(server, prompt)
    with serve(tmp_path, disk_size=1 << 20) as server:
        clock[0] += 60
        assert ask(server, prompt) == 3
        order = server.tree_cache.disk.store._order
        assert [order[key] for key in keys_of(prompt)] == [clock[0] * 10**9 - BLOCK_NS * i for i in range(3)]


def test_running_request_counts_as_a_use(tmp_path, clock):
    """It hits blocks on the device, and its files could go before it ends."""
    prompt = tokens(1, 3)
    with serve(tmp_path, disk_size=1 << 20) as server:
        ask(server, prompt)
        clock[0] += 60
        server.submit([*prompt, 1], [5] * 100, None, None)
        run(server, lambda: len(list(server.requests.values())[-1].output_ids) > 2)
        order = server.tree_cache.disk.store._order
        assert [order[key] for key in keys_of(prompt)] == [clock[0] * 10**9 - BLOCK_NS * i for i in range(3)]
        run(server)


def test_use_counts_for_blocks_that_wait_for_their_write(clock, tier):  # noqa: F811
    keys = written(tier, stored(tier, 3))
    clock[0] += 60
    tier.touch(keys, tier.use_time())
    tier._writers.turn(1)
    clock[0] += 60
    assert [tier.store._order[key] for key in keys] == [1060 * 10**9 - BLOCK_NS * i for i in range(3)]
    tier.poll()
    assert not tier._writes


def test_uses_within_a_second_are_noted_once(tmp_path, clock, monkeypatch):
    """Many requests with one long prefix that end at the same time touch its files once."""
    touched = []
    with serve(tmp_path, disk_size=1 << 20) as server:
        touch = server.tree_cache.disk.touch
        monkeypatch.setattr(
            server.tree_cache.disk, "touch", lambda keys, use: touched.append(len(keys)) or touch(keys, use)
        )
        ask(server, tokens(1, 6))
        clock[0] += disk_tier.USE_SECONDS + 1
        touched.clear()
        for k in range(4):
            ask(server, tokens(1, 6) + tokens(10 + k, 1))
        assert np.sum(touched) == 6 + 4


def test_next_server_knows_the_last_uses(tmp_path, clock):
    """The order of the first server, which was killed, decides what the next one removes: hits on the device count, and
    blocks of one prompt keep their order."""
    old, used, new = tokens(1, 3), tokens(2, 3), tokens(3, 3)
    with serve(tmp_path, disk_size=1 << 20) as server:
        for prompt in (used, old, new, used):
            ask(server, prompt)
            clock[0] += 60
        server.tree_cache.disk.store.save_uses()
    assert [len(DiskStore(*place(server), limit=FILE * n).find(keys_of(used))) for n in (8, 6, 3)] == [3, 3, 3]
    assert [len(DiskStore(*place(server), limit=FILE * n).find(keys_of(used))) for n in (2, 1)] == [2, 1]


def place(server: Overlap) -> tuple:
    """Folder and identity of a server's store."""
    store = server.tree_cache.disk.store
    return store.folder.parent, store.identity


def test_written_files_have_the_time_of_their_use(tmp_path):
    store = DiskStore(tmp_path, MODEL)
    for i, use in enumerate([5 * 10**9 + 3000, 5 * 10**9 + 1000, 5 * 10**9 + 2000]):
        store.write(key_of(i), STORED, record_of(i), use)
        assert store.path(key_of(i)).stat().st_mtime_ns == use
    kept = DiskStore(tmp_path, MODEL, limit=2 * SIZE)
    assert [kept.record_bytes(key_of(i)) is not None for i in range(3)] == [True, False, True]


def test_times_in_the_future_count_as_now(tmp_path, clock):
    """After the clock was set back, new files still replace old ones."""
    store = DiskStore(tmp_path, MODEL, limit=2 * SIZE)
    for i in range(2):
        store.write(key_of(i), STORED, record_of(i))
    clock[0] -= 500
    store = DiskStore(tmp_path, MODEL, limit=2 * SIZE)
    clock[0] += 1
    assert store.write(key_of(2), STORED, record_of(2))


def test_uses_are_saved_by_a_thread(clock, tier, monkeypatch):  # noqa: F811
    keys = written(tier, stored(tier, 2))
    tier._writers.turn(1)
    clock[0] += 60
    tier.touch(keys, tier.use_time())
    tier.poll()
    assert not tier._writers.tasks
    tier._save_at = time.monotonic()
    tier.poll()
    assert tier.store.path(keys[0]).stat().st_mtime_ns == 1000 * 10**9
    tier._writers.turn(1)
    assert [tier.store.path(key).stat().st_mtime_ns for key in keys] == [1060 * 10**9, 1060 * 10**9 - BLOCK_NS]


def test_clock_that_is_set_back_does_not_change_the_order(tmp_path, clock, monkeypatch):
    one, two, three = (tokens(i, 8) for i in (1, 2, 3))
    with serve(tmp_path, disk_size=9 * FILE) as server:
        clock[0] += 10_000
        ask(server, one)
        monkeypatch.setattr(time, "time_ns", lambda: 0)
        for prompt in (two, three):
            clock[0] += 5
            ask(server, prompt)
        assert [found(server, prompt) for prompt in (one, two, three)] == [0, 1, 8]


def test_removed_keys_leave_the_queue():
    order = UseOrder()
    for step in range(20):
        keys = [key_of(100 * step + i) for i in range(50)]
        for key in keys:
            order.add(key, step)
        for key in keys[:-1]:
            order.remove(key)
    assert len(order.uses) == 20 and len(order._queue) < 200
    order.settle()
    assert order.oldest() == key_of(49)

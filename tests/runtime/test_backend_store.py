"""Records in SGLang's storage backends: reads return exactly what was written, or nothing."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from sglang.srt.runtime_context import get_parallel

from sglang_kvc.adapter.backend_store import BackendStore
from sglang_kvc.cache.block_store import HEADER_BYTES
from sglang_kvc.cache.disk_tier import DiskTier
from sglang_kvc.errors import ConfigError

from . import memory_backend
from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_disk_store import MODEL, OTHER, STORED, key_of
from .test_starved import Threads

DYNAMIC = {"module_path": memory_backend.__name__, "backend_name": "memory"}
BACKENDS = ("file", "memory", "address", "hf3fs")


class Place:
    """The storage shared by the stores of one test; each `store()` belongs to another server."""

    def __init__(self, kind: str, folder, tier):
        self.kind, self.folder, self.tier = kind, folder, tier

    def store(self, identity: bytes = MODEL) -> BackendStore:
        if self.kind in ("file", "hf3fs"):
            extra = {"file_storage_path": str(self.folder), "use_mock_hf3fs_client": True}
            return BackendStore.create(self.kind, extra, self.tier, identity)
        name = {"memory": "MemoryBackend", "address": "AddressBackend"}[self.kind]
        extra = {**DYNAMIC, "class_name": name, "place": str(self.folder), "interface_v1": self.kind == "address"}
        return BackendStore.create("dynamic", extra, self.tier, identity)

    def values(self) -> dict[str, bytes]:
        if self.kind == "file":
            return {path.name: path.read_bytes() for path in self.folder.iterdir()}
        return dict(memory_backend.PLACES[f"{self.folder} 0"])

    def change(self, name: str, value: bytes) -> None:
        if self.kind == "file":
            (self.folder / name).write_bytes(value)
        else:
            memory_backend.PLACES[f"{self.folder} 0"][name] = value


@pytest.fixture(scope="module")
def tier():
    runtime = make_runtime(high="k4v4", window=0, host_memory=200_000)
    runtime.attach_host_tier()
    return runtime.host_tier


@pytest.fixture
def place(request, tmp_path, tier, monkeypatch):
    config = tmp_path / "hf3fs.json"
    config.write_text(
        json.dumps({"file_path_prefix": str(tmp_path / "blocks"), "file_size": 1 << 22, "numjobs": 2, "entries": 2})
    )
    monkeypatch.setenv("SGLANG_HICACHE_HF3FS_CONFIG_PATH", str(config))
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # hf3fs would install signal handlers in this process
    with get_parallel().override(tp_rank=0, tp_size=1):
        yield Place(request.param, tmp_path / "values", tier)


def on_backends(*kinds: str):
    return pytest.mark.parametrize("place", kinds, indirect=True)


def record_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def sizes_of(store: BackendStore) -> list[int]:
    """Record sizes in bytes for each number of pages, not all of them multiples of a unit."""
    return [count * store.unit_bytes - 7 * i for i, count in enumerate(sorted(store._counts))]


def read(store: BackendStore, key: bytes):
    (num_bytes,) = store.find([key]) or [0]
    record = np.zeros(num_bytes, dtype=np.uint8)
    return store.read(key, record), record


@on_backends(*BACKENDS)
def test_records_of_all_sizes_round_trip(place):
    store = place.store()
    sizes = sizes_of(store)
    assert len(sizes) == 2
    for i, size in enumerate(sizes):
        assert store.write(key_of(i), STORED, record_of(i, size))
    assert store.find([key_of(i) for i in range(4)]) == [c * store.unit_bytes for c in sorted(store._counts)]
    for i, size in enumerate(sizes):
        stored, record = read(store, key_of(i))
        assert stored == STORED and (record[:size] == record_of(i, size)).all()
    assert store.bytes_read == store.bytes_written == sum(store._counts) * store.pool.size_per_token
    assert len(store) == 2 and not store.damaged


@on_backends("file", "memory", "address")
def test_records_are_found_only_by_server_of_same_identity(place):
    """A server with the same identity finds the records, one with another identity does not, and a cleared backend has
    none."""
    store = place.store()
    size = sizes_of(store)[0]
    store.write(key_of(1), STORED, record_of(1, size))
    stored, record = read(place.store(), key_of(1))
    assert stored == STORED and (record == record_of(1, size)).all()
    assert not place.store(OTHER).find([key_of(1)]) and not store.of(OTHER).find([key_of(1)])
    assert store.of(MODEL) is store
    store.write(key_of(1), STORED, record_of(2, size))  # an existing record stays
    assert (read(store, key_of(1))[1] == record_of(1, size)).all() and len(store) == 1
    store.clear()
    assert not place.values() and not place.store().find([key_of(1)])


@on_backends("file", "memory", "address")
def test_long_prompt_is_looked_up_in_few_calls(place):
    """Records of two sizes, many more than fit into one call, are found up to the first missing one."""
    store = place.store()
    small, large = sizes_of(store)
    for i in range(150):
        store.write(key_of(i), STORED, record_of(i, small if i < 140 else large))
    for i in (151, 152):
        store.write(key_of(i), STORED, record_of(i, small))
    units = store.unit_bytes
    keys = [key_of(i) for i in range(153)]
    assert store.find(keys) == [units] * 140 + [max(store._counts) * units] * 10


@on_backends("file", "memory", "address")
@pytest.mark.parametrize("harm", ["cut", "grown", "flipped", "swapped", "gone"])
def test_damaged_values_are_not_served(place, harm, caplog):
    """No damaged value is served; one with a wrong checksum or of another block is counted and not asked for again."""
    store = place.store()
    size = sizes_of(store)[1]
    for i in (1, 2):
        store.write(key_of(i), STORED, record_of(i, size))
    names = {i: [n for n in place.values() if n.startswith(store.names(key_of(i), 1)[0][:64])] for i in (1, 2)}
    kept, draw = place.values(), np.random.default_rng(0)
    for name in names[1]:
        value = bytearray(kept[name])
        match harm:
            case "cut":
                value = value[:-1]
            case "grown":
                value += b"x"
            case "flipped":
                value[draw.integers(HEADER_BYTES + 100)] ^= 4
            case "swapped":
                value = bytearray(kept[name.replace(names[1][0][:64], names[2][0][:64])])
            case "gone":
                value = bytearray()
        place.change(name, bytes(value))
    stored, record = read(store, key_of(1))
    if harm == "grown" and place.kind == "file":  # the backend reads exactly the written bytes and nothing after them
        assert stored == STORED and (record[:size] == record_of(1, size)).all()
        return
    assert stored is None
    if harm in ("flipped", "swapped"):
        assert store.damaged == 1 and "is not used" in caplog.text
        assert not store.find([key_of(1), key_of(2)]) and not store.find([key_of(1)])
    assert read(store, key_of(2))[0] == STORED


@on_backends("memory", "address")
def test_concurrent_threads_read_and_write_correctly(place, monkeypatch):
    """Each record is written once and read correctly, and the backend sees one reader and one writer at a time."""
    store, inside, peak = place.store(), Counter(), Counter()
    names = ("batch_get_v1", "batch_set_v1") if store.by_address else ("batch_get", "batch_set")
    for name in names:
        call = getattr(store.backend, name)

        def watched(*args, name=name, call=call):
            inside[name] += 1
            peak[name] = max(peak[name], inside[name])
            time.sleep(0.001)
            result = call(*args)
            inside[name] -= 1
            return result

        monkeypatch.setattr(store.backend, name, watched)
    small, large = sizes_of(store)

    def write_and_read(i: int) -> bool:
        size = large if i % 3 else small
        assert store.write(key_of(i), STORED, record_of(i, size))
        stored, record = read(store, key_of(i))
        return stored == STORED and bool((record[:size] == record_of(i, size)).all())

    with ThreadPoolExecutor(2 * store.threads) as threads:
        assert all(threads.map(lambda i: write_and_read(i % 9), range(90)))
    assert len(store) == 9 and peak == dict.fromkeys(names, 1) and store._spare.qsize() == 2 * store.threads


@on_backends("memory", "address")
def test_failing_backend_logs_once_until_it_recovers(place, caplog):
    """A failing backend causes one log line until it answers again."""
    store = place.store()
    size = sizes_of(store)[0]
    store.write(key_of(1), STORED, record_of(1, size))
    store.backend.broken = True
    for _ in range(3):
        assert not store.write(key_of(2), STORED, record_of(2, size))
        assert store.find([key_of(1)]) == [] and store.read(key_of(1), np.zeros(store.unit_bytes, np.uint8)) is None
    assert caplog.text.count("nobody answers") == 1 and not store.damaged
    store.backend.broken = False
    assert store.write(key_of(2), STORED, record_of(2, size)) and read(store, key_of(1))[0] == STORED


def test_backend_that_fails_to_start_is_rejected(tier):
    with get_parallel().override(tp_rank=0, tp_size=1), pytest.raises(ConfigError) as e:
        BackendStore.create("dynamic", {**DYNAMIC, "class_name": "MemoryBackend"}, tier, MODEL)
    assert "dynamic cannot be started ('place')" in str(e.value)


@on_backends("memory")
def test_slow_lookup_is_skipped(place, monkeypatch):
    """The prompt proceeds without the lookup, and so do later prompts until the backend has answered."""
    monkeypatch.setattr("sglang_kvc.cache.disk_tier.LOOKUP_SECONDS", 0.0)
    tier = DiskTier(place.tier, place.store())
    tasks: list[Future] = []
    monkeypatch.setattr(tier._lookup_thread, "submit", lambda *args: tasks.append(Future()) or tasks[-1])
    first = tier.lookup([key_of(1)])
    second = tier.lookup([key_of(1)])
    assert first.finished and second.finished and first.sizes == second.sizes == [] and len(tasks) == 1
    tasks[0].set_result([100])
    tier.lookup([key_of(1)])
    assert len(tasks) == 2 and first.sizes == [100]
    tier.close()


def test_prompts_are_computed_when_backend_hangs(tmp_path, monkeypatch):
    """They wait for a limited time and are then computed. A running server can neither attach nor detach a backend."""
    monkeypatch.setattr("sglang_kvc.cache.disk_tier.LOOKUP_SECONDS", 0.02)
    runtime = make_runtime(high="k4v4", window=0, host_memory=200_000, storage="dynamic")
    with get_parallel().override(tp_rank=0, tp_size=1), configured(runtime, 2 * P, retract_every=1000):
        server = Overlap(runtime, 2 * P, disable=False, server_args=memory_backend.server_args(str(tmp_path)))
        tree = server.tree_cache
        tree.disk._lookup_thread = lookers = Threads(random.Random(0))  # never answers
        ended = tree.transfers_ended
        for i in range(3):
            server.submit([100 * i + j for j in range(P + 3)], [5000 + i], None, None)
        until = time.monotonic() + 30
        while server.busy and time.monotonic() < until:
            server.turn()
        assert [list(r.output_ids) for r in server.requests.values()] == [[5000], [5001], [5002]]
        assert lookers.tasks and not tree.ongoing_prefetch
        assert tree.transfers_ended > ended
        for done, reason in (tree.attach_storage_backend("file"), tree.detach_storage_backend()):
            assert not done and "running server" in reason

"""Files of the disk tier: reads return exactly what was written, or nothing."""

from __future__ import annotations

import errno
import io
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from sglang_kvc.cache import disk_store
from sglang_kvc.cache.block_store import HEADER_BYTES, Stored
from sglang_kvc.cache.disk_store import DiskStore
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.conflicts import check_disk

MODEL, OTHER = bytes(32), b"\1" * 32
STORED = Stored(format_id=2, pages=5, start=256)


def key_of(i: int) -> bytes:
    return i.to_bytes(32, "big")


def record_of(seed: int, size: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def read(store: DiskStore, key: bytes, size: int = 300):
    record = np.empty(size, dtype=np.uint8)
    return store.read(key, record), record


def test_record_round_trips_within_and_across_servers(tmp_path):
    store = DiskStore(tmp_path, MODEL)
    assert store.write(key_of(1), STORED, record_of(1))
    assert store.record_bytes(key_of(1)) == 300 and store.record_bytes(key_of(2)) is None
    for reader in (store, DiskStore(tmp_path, MODEL)):
        stored, record = read(reader, key_of(1))
        assert stored == STORED and (record == record_of(1)).all()
        assert len(reader) == 1 and reader.num_bytes == 300 + HEADER_BYTES and not reader.damaged
    assert read(store, key_of(2))[0] is None
    store.write(key_of(2), STORED, record_of(2))
    other = DiskStore(tmp_path, MODEL)
    other.clear()
    assert not len(other) and not len(DiskStore(tmp_path, MODEL)) and read(store, key_of(2))[0] is None
    assert read(store, key_of(1))[0] is None and not len(store) and not store.num_bytes and not store.damaged


def test_files_of_another_model_are_ignored_and_kept(tmp_path):
    store, other_store = DiskStore(tmp_path, MODEL), DiskStore(tmp_path, OTHER)
    store.write(key_of(1), STORED, record_of(1))
    assert not len(DiskStore(tmp_path, OTHER)) and read(other_store, key_of(1))[0] is None
    # A file of another model is copied to the right name.
    other_store.path(key_of(1)).parent.mkdir(exist_ok=True)
    os.link(store.path(key_of(1)), other_store.path(key_of(1)))
    assert read(DiskStore(tmp_path, OTHER), key_of(1))[0] is None
    assert read(store, key_of(1))[0] == STORED
    assert store.of(MODEL) is store and store.of(OTHER).folder == other_store.folder


def test_totals_outlive_a_change_of_weights(tmp_path):
    """Writes begun under the old weights count, too."""
    store = DiskStore(tmp_path, MODEL)
    store.write(key_of(1), STORED, record_of(1))
    read(store, key_of(1))
    other = store.of(OTHER)
    store.write(key_of(2), STORED, record_of(2))
    other.write(key_of(3), STORED, record_of(3))
    other.forget(key_of(3), "a test")
    for each in (store, other, other.of(MODEL)):
        size = 300 + HEADER_BYTES
        assert (each.bytes_written, each.bytes_read, each.damaged) == (3 * size, size, 1)


def test_limit_holds_for_the_files_of_all_weights(tmp_path):
    """Files of earlier weights go first, the least recently used ones first among them. Weights that come back find
    those that are left."""
    size = 300 + HEADER_BYTES
    first = DiskStore(tmp_path, MODEL, limit=4 * size)
    for i in range(4):
        first.write(key_of(i), STORED, record_of(i))
    first.touch([key_of(0)], time.time_ns())

    def left(store: DiskStore) -> list[int]:
        return [i for i in range(10) if store.record_bytes(key_of(i)) is not None]

    second = first.of(OTHER)
    for i in (4, 5):
        assert second.write(key_of(i), STORED, record_of(i))
    assert left(first) == [0, 3] and left(second) == [4, 5]
    assert not first.write(key_of(6), STORED, record_of(6), use=1)  # older than its own files
    assert first.write(key_of(6), STORED, record_of(6)) and left(second) == [4, 5]
    third = second.of(b"\2" * 32)
    third.write(key_of(7), STORED, record_of(7))
    again = third.of(MODEL)
    assert again is first and left(again) == [6]
    again.write(key_of(8), STORED, record_of(8))
    assert (left(first), left(second), left(third)) == ([6, 8], [5], [7])
    assert again.num_bytes == 4 * size == sum(path.stat().st_size for path in tmp_path.rglob("*.kvc"))
    for i in range(3):
        again = again.of(bytes([3 + i]) * 32)
    assert len(again._account.stores) == 5, "stores without files are kept"


def test_damaged_files_are_skipped_counted_and_removed(tmp_path):
    """Files that are truncated, extended, have a flipped bit, or bear another block's name are skipped, counted and
    removed."""
    store, draw = DiskStore(tmp_path, MODEL), random.Random(0)
    for i in range(1000):
        key = key_of(i)
        store.write(key, STORED, record_of(i))
        path = store.path(key)
        content = bytearray(path.read_bytes())
        match i % 4:
            case 0:
                content = content[: draw.randrange(len(content))]
            case 1:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            case 2:
                content += bytes(draw.randint(1, 9))
            case 3:
                store.write(key_of(10**6 + i), STORED, record_of(i))
                content = store.path(key_of(10**6 + i)).read_bytes()
        path.write_bytes(content)
        assert read(store, key)[0] is None
        assert not path.exists() and store.record_bytes(key) is None and store.damaged == i + 1


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.EACCES], ids=os.strerror)
def test_file_that_cannot_be_read_stays(tmp_path, monkeypatch, caplog, error):
    """It is missed until the next server, or until it is written again; one line is logged."""
    store, size = DiskStore(tmp_path, MODEL), 300 + HEADER_BYTES
    for i in range(3):
        store.write(key_of(i), STORED, record_of(i))

    def fail(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as broken:
        broken.setattr("builtins.open", fail)
        assert [read(store, key_of(i))[0] for i in range(2)] == [None, None]
    assert not store.damaged and caplog.text.count(os.strerror(error)) == 1
    assert store.find([key_of(0)]) == store.find([key_of(1)]) == [] and store.find([key_of(2)]) == [300]
    assert DiskStore(tmp_path, MODEL).find([key_of(i) for i in range(3)]) == [300] * 3
    store.write(key_of(0), STORED, record_of(0, 200))
    assert store.find([key_of(0)]) == [200] and read(store, key_of(0), 200)[0] == STORED
    assert store.num_bytes == 3 * size - 100 == sum(path.stat().st_size for path in store.folder.rglob("*.kvc"))


def test_file_of_another_size_stays(tmp_path):
    """A second server has packed a block with other tokens, which the first one does not know. Its next lookup does."""
    first, second = DiskStore(tmp_path, MODEL), DiskStore(tmp_path, MODEL)
    for size in (500, 200):
        second.clear()
        first.write(key_of(1), STORED, record_of(1))
        second.write(key_of(1), STORED, record_of(2, size))
        assert read(first, key_of(1))[0] is None and not first.damaged
        assert first.find([key_of(1)]) == [size] and first.num_bytes == size + HEADER_BYTES
        stored, record = read(first, key_of(1), size)
        assert stored == STORED and (record == record_of(2, size)).all()
        first.clear()
        assert not first.num_bytes


def test_least_recently_used_file_is_evicted_first(tmp_path):
    size = 300 + HEADER_BYTES
    store = DiskStore(tmp_path, MODEL, limit=3 * size)
    for i in range(3):
        store.write(key_of(i), STORED, record_of(i))
    store.touch([key_of(0)], time.time_ns())
    store.write(key_of(3), STORED, record_of(3))
    assert [store.record_bytes(key_of(i)) is not None for i in range(4)] == [True, False, True, True]
    assert len(list(store.folder.rglob("*.kvc"))) == 3 and store.num_bytes == 3 * size
    assert not store.write(key_of(4), STORED, record_of(4, 4 * size)) and len(store) == 3


def test_smaller_limit_applies_at_start(tmp_path):
    size = 300 + HEADER_BYTES
    before = DiskStore(tmp_path, MODEL, limit=3 * size)
    for i in range(3):
        before.write(key_of(i), STORED, record_of(i))
    assert len(DiskStore(tmp_path, MODEL)) == 3  # existing files do not count against a limit that was not set
    store = DiskStore(tmp_path, MODEL, limit=2 * size)
    assert len(store) == len(list(store.folder.rglob("*.kvc"))) == 2 and store.num_bytes == 2 * size
    assert not len(DiskStore(tmp_path, MODEL, limit=0)) and not list(store.folder.rglob("*.kvc"))


def test_files_of_another_user_are_read_but_make_no_room(tmp_path, monkeypatch, caplog):
    """The server starts with a smaller limit on a folder whose files it may not remove. It says so once, and once more
    when it writes."""
    size = 300 + HEADER_BYTES
    before = DiskStore(tmp_path, MODEL, limit=3 * size)
    for i in range(3):
        before.write(key_of(i), STORED, record_of(i))

    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    store = DiskStore(tmp_path, MODEL, limit=2 * size)
    assert caplog.text.count("cannot be removed") == 1 and "Permission denied" in caplog.text
    assert len(store) == 3 and store.num_bytes == 3 * size and read(store, key_of(0))[0] == STORED
    for i in range(3, 6):
        assert not store.write(key_of(i), STORED, record_of(i))
    assert len(store) == 3 and store.num_bytes == 3 * size and caplog.text.count("cannot be written") == 1
    monkeypatch.undo()
    assert store.write(key_of(3), STORED, record_of(3)) and store.find([key_of(1)]) == [] and len(store) == 2


def test_unreadable_folder_counts_as_empty(tmp_path, monkeypatch, caplog):
    DiskStore(tmp_path, MODEL).write(key_of(1), STORED, record_of(1))

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert not len(DiskStore(tmp_path, MODEL))
    assert caplog.text.count("cannot be read (Permission denied)") == 1


def test_ranks_share_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    assert DiskStore(tmp_path, MODEL).limit == 8 * 10**8
    assert DiskStore(tmp_path, MODEL, ranks=8).limit == 10**8
    assert DiskStore(tmp_path, MODEL, limit=10**7, ranks=8).limit == 10**7  # of each rank


def test_failed_write_loses_only_its_file(tmp_path, monkeypatch, caplog):
    """Failed writes leave no file and are logged once; the next successful write is found."""
    store = DiskStore(tmp_path, MODEL)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        assert not store.write(key_of(1), STORED, record_of(1))
        assert not store.write(key_of(2), STORED, record_of(2))
    assert "No space left" in caplog.text and caplog.text.count("cannot be written") == 1
    assert not [p for p in store.folder.rglob("*") if p.is_file()] and not len(store) and not store.num_bytes
    assert store.write(key_of(1), STORED, record_of(1)) and read(store, key_of(1))[0] == STORED


def test_old_files_make_room_on_full_disk(tmp_path, monkeypatch):
    """Other programs leave room for two files: a third one replaces the oldest, and larger ones are skipped."""
    store = DiskStore(tmp_path, MODEL)
    size, replace = 300 + HEADER_BYTES, os.replace

    def full_disk(source, target):
        if sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file()) > 2 * size:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    assert all(store.write(key_of(i), STORED, record_of(i)) for i in range(3))
    assert [store.record_bytes(key_of(i)) is not None for i in range(3)] == [False, True, True]
    assert store.num_bytes == 2 * size == sum(path.stat().st_size for path in store.folder.rglob("*.kvc"))
    assert not store.write(key_of(3), STORED, record_of(3, 2 * size)) and not len(store) and not store.num_bytes
    assert store.write(key_of(4), STORED, record_of(4)) and read(store, key_of(4))[0] == STORED


def test_start_removes_unfinished_files_of_ended_servers(tmp_path):
    """Unfinished files are removed at the start if their process has ended or they are old. A running server finishes
    its own. Files that are not ours stay."""
    store = DiskStore(tmp_path, MODEL)
    store.write(key_of(1), STORED, record_of(1))
    ended = subprocess.Popen(["true"])
    ended.wait()
    running, name = os.getppid(), store.path(key_of(1)).name
    stays = {f".{name}.{running}.5": True, f".{name}.{ended.pid}.5": False, f".{name}.{os.getpid()}.5": False}
    stays |= {f".{name}.{running}.6": False, "notes.txt": True, ".hidden": True}
    for odd in stays:
        store.path(key_of(1)).with_name(odd).write_bytes(b"half")
    hours_ago = time.time() - 2 * 3600
    os.utime(store.path(key_of(1)).with_name(f".{name}.{running}.6"), (hours_ago, hours_ago))
    assert len(DiskStore(tmp_path, MODEL)) == 1
    assert {odd: store.path(key_of(1)).with_name(odd).exists() for odd in stays} == stays


def test_start_of_another_server_leaves_a_write_under_way(tmp_path, caplog):
    """Another process opens the folder while a file is being written."""
    store, begun, opened = DiskStore(tmp_path, MODEL), threading.Event(), threading.Event()
    replace = os.replace

    def slow(source, target):
        begun.set()
        opened.wait(60)
        replace(source, target)

    code = "import sys; from sglang_kvc.cache.disk_store import DiskStore; DiskStore(sys.argv[1], bytes(32))"
    with patch.object(os, "replace", slow), ThreadPoolExecutor(1) as thread:
        writing = thread.submit(store.write, key_of(1), STORED, record_of(1))
        assert begun.wait(60)
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
        opened.set()
        assert writing.result(60) and not caplog.text
    assert read(store, key_of(1))[0] == STORED


def test_short_write_on_full_disk_leaves_no_file(tmp_path):
    """The system writes only a part and reports its size; the partial file is removed."""
    store = DiskStore(tmp_path, MODEL)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 100, before[1]))
    try:
        assert not store.write(key_of(1), STORED, record_of(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [p for p in store.folder.rglob("*") if p.is_file()] and not len(store) and not store.num_bytes


@pytest.mark.parametrize("existing", [False, True], ids=["new", "of an earlier version"])
def test_only_the_owner_may_read_files(tmp_path, existing):
    disk = tmp_path / "disk"
    umask = os.umask(0o022)
    try:
        if existing:
            (disk / MODEL.hex()[:16]).mkdir(parents=True)
        else:
            check_disk(KvcConfig(disk=str(disk), host_memory=1 << 20))
        store = DiskStore(disk, MODEL)
        store.write(key_of(1), STORED, record_of(1))
        shutil.rmtree(store.folder)
        store.write(key_of(2), STORED, record_of(2))
    finally:
        os.umask(umask)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [disk, *disk.rglob("*")]}
    assert modes.pop(disk) == (0o755 if existing else 0o700)
    assert list(modes.values()) == [0o700, 0o700, 0o600]


def test_store_writes_after_folder_vanishes(tmp_path):
    store = DiskStore(tmp_path, MODEL)
    shutil.rmtree(store.folder)
    assert store.write(key_of(1), STORED, record_of(1)) and read(store, key_of(1))[0] == STORED


def test_concurrent_writes_of_same_block_count_once(tmp_path):
    """Each file counts once, and files being written also count."""
    size = 300 + HEADER_BYTES
    store, folder_bytes = DiskStore(tmp_path, MODEL, limit=5 * size), []
    write_file = store._write_file

    def slow(*args) -> bool:
        time.sleep(0.001)
        folder_bytes.append(sum(p.stat().st_size for p in store.folder.rglob("*.kvc")))
        return write_file(*args)

    store._write_file = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: store.write(key_of(i % 7), STORED, record_of(i % 7)), range(200)))
    files = [p.stat().st_size for p in store.folder.rglob("*.kvc")]
    assert store.num_bytes == sum(files) == size * len(store) <= store.limit and max(folder_bytes) <= store.limit


def test_empty_folders_of_earlier_weights_are_removed(tmp_path):
    store = DiskStore(tmp_path, MODEL, limit=4 * (300 + HEADER_BYTES))
    for update in range(20):
        store = store.of(bytes([update]) * 32)
        for i in range(4):
            assert store.write(key_of(100 * update + i), STORED, record_of(i))
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) <= 2 * 5 and all(store.path(key_of(1900 + i)).exists() for i in range(4))


def test_clear_reports_files_that_cannot_be_removed(tmp_path, monkeypatch, caplog):
    store = DiskStore(tmp_path, MODEL, limit=10_000)
    store.write(key_of(1), STORED, record_of(1))

    def refuse(self, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert not store.clear() and "cannot be removed" in caplog.text
    assert store.clear()


def test_short_reads_of_a_file_system_do_not_look_like_damage(tmp_path, monkeypatch):
    class Short(io.FileIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:100])

    def short(path, mode, buffering=-1):
        return Short(path) if buffering == 0 else io.BufferedReader(Short(path))

    store = DiskStore(tmp_path, MODEL, limit=100_000)
    record = np.resize(np.arange(256, dtype=np.uint8), 50_000)
    assert store.write(key_of(1), STORED, record)
    monkeypatch.setattr(disk_store, "open", short, raising=False)
    read = np.zeros_like(record)
    assert store.read(key_of(1), read) == STORED and (read == record).all() and not store.damaged

"""Files of the disk tier, one record each. A damaged file is removed and logged."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .block_store import HEADER_BYTES, Stored, header, is_for, parse_header, record_size
from .use_order import UseOrder

logger = logging.getLogger("sglang_kvc")

SUFFIX = ".kvc"
FOLDER_MODE = 0o700  # records tell what users wrote
UNFINISHED = re.compile(r"\..*\.kvc\.(\d{1,9})\.\d+")  # name of a file that is being written; with the process id
UNFINISHED_SECONDS = 3600.0  # no write takes so long; its process id may belong to another process now
FULL = (errno.ENOSPC, errno.EDQUOT)
DEFAULT_SHARE = 0.8  # share of the space that is free or taken by its own files, if no limit is given


@dataclass
class _Account:
    """What the stores of all identities share that a process has opened in one folder.

    limit, num_bytes: maximum bytes of their files, and present bytes, including files being written. written, read,
    damaged: totals. stores: by identity, the one in use last; files of earlier ones make room first.
    """

    limit: int = 0
    num_bytes: int = 0
    written: int = 0
    read: int = 0
    damaged: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stores: dict[bytes, DiskStore] = field(default_factory=dict)


class DiskStore:
    """A `BlockStore` in `folder`, at most `limit` bytes of files; the least recently used ones go first (`UseOrder`).
    The modification time of a file is its last use, so that the next server knows the order.

    Without a limit, the stores of the `ranks` ranks of this host share most of the free space. The limit holds for the
    files of all identities that the process has opened with `of`. Files of other identities stay for the server that
    wrote them. The methods may be called by several threads.
    """

    threads, local = 4, True

    def __init__(
        self, folder: str | Path, identity: bytes, limit: int | None = None, ranks: int = 1,
        account: _Account | None = None
    ):  # fmt: skip
        self.folder = Path(folder) / identity.hex()[:16]
        with contextlib.suppress(OSError):  # the first write tries again and logs the error
            self.folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            self.folder.chmod(FOLDER_MODE)  # an earlier version created it for all users
        self.identity = identity
        self._failed = {"read": False, "written": False}  # the last one failed: one line is logged until one succeeds
        self._writing: set[bytes] = set()  # keys that are being written
        self._unreadable: set[bytes] = set()  # keys of files whose read failed; they may be intact
        files = list(stored_files(self.folder))
        self._sizes = {key: size for _, key, size in files}
        self._order = UseOrder((use, key) for use, key, _ in files)
        num_bytes = sum(self._sizes.values())
        if account is None:
            room = shutil.disk_usage(folder).free / ranks + num_bytes
            account = _Account(int(room * DEFAULT_SHARE) if limit is None else limit)
        self._account, self._lock = account, account.lock
        with self._lock:
            account.num_bytes += num_bytes
            account.stores[identity] = self
        try:
            self._shrink_to(self.limit, math.inf)  # an earlier server may have had a higher limit
        except OSError as error:
            logger.warning(
                "kvc: files in %s cannot be removed (%s) and take %.2f of %.2f GiB, so no block is written; make the "
                "server's user the owner of the folder, or delete it",
                folder, error, self.num_bytes / 2**30, self.limit / 2**30,
            )  # fmt: skip

    def of(self, identity: bytes) -> DiskStore:
        """The store of another identity in the same folder, which is in use from now on; this store if the identity is
        the same."""
        if identity == self.identity:
            return self
        stores = self._account.stores
        with self._lock:
            empty = [store for store in [*stores.values()][:-1] if not len(store) and not store._writing]
            for store in empty:
                del stores[store.identity]
            known = stores.pop(identity, None)
            if known is not None:
                stores[identity] = known
        for store in empty:
            if store is not known:
                store._remove_folders()
        return known or DiskStore(self.folder.parent, identity, account=self._account)

    def _remove_folders(self) -> None:
        """Remove the folders of this identity that are empty."""
        for path in (*map(Path, _entries(self.folder)), self.folder):
            with contextlib.suppress(OSError):
                path.rmdir()

    @property
    def limit(self) -> int:
        return self._account.limit

    @property
    def num_bytes(self) -> int:
        """Bytes of the files of all identities that the process has opened."""
        return self._account.num_bytes

    @property
    def bytes_written(self) -> int:
        return self._account.written

    @property
    def bytes_read(self) -> int:
        return self._account.read

    @property
    def damaged(self) -> int:
        return self._account.damaged

    def __len__(self) -> int:
        return len(self._sizes)

    def record_bytes(self, key: bytes) -> int | None:
        """Bytes of the record of `key`; None if there is no file, or if it could not be read."""
        with self._lock:
            size = None if key in self._unreadable else self._sizes.get(key)
        return None if size is None else size - HEADER_BYTES

    def find(self, keys: Sequence[bytes]) -> list[int]:
        sizes: list[int] = []
        for key in keys:
            size = self.record_bytes(key)
            if size is None:
                break
            sizes.append(size)
        return sizes

    def path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / (name + SUFFIX)

    def touch(self, keys: Sequence[bytes], use: int) -> None:
        with self._lock:
            self._order.touch(keys, use)

    def save_uses(self) -> None:
        with self._lock:
            touched = self._order.take_touched()
        for key in touched:
            if (use := self._order.uses.get(key)) is not None:
                with contextlib.suppress(OSError):
                    os.utime(self.path(key), ns=(use, use))

    def write(self, key: bytes, stored: Stored, record: np.ndarray, use: int | None = None) -> bool:
        """Write `record`, uint8; returns whether it is stored. A broken disk loses only this file, and so does one that
        stays full after files that were used before `use` made room. use: None for now."""
        size, written = HEADER_BYTES + record.nbytes, False
        use = time.time_ns() if use is None else use
        with self._lock:
            if key in self._sizes and key not in self._unreadable:
                self._order.touch([key], use)
                return True
            if size > self.limit or key in self._writing:
                return False
            self._writing.add(key)
            self._account.num_bytes += size
        try:
            written = self._shrink_to(self.limit, use) and self._write_with_room(key, stored, record, use)
        except OSError as error:
            self._note_failure("written", "a block cannot be written to %s and is skipped: %s", self.folder, error)
        with self._lock:
            self._writing.discard(key)
            if written:
                self._failed["written"] = False
                self._add(key, size, use)
                self._account.written += size
            self._account.num_bytes -= size
        return written

    def _shrink_to(self, limit: int, use: float) -> bool:
        """Remove files until the rest, including files being written, takes at most `limit` bytes: first those of
        earlier identities, then those of this one that were last used before `use`, the oldest first. Returns whether
        the rest does. Raises OSError if a file cannot be removed; it still counts."""
        while True:
            with self._lock:
                if self.num_bytes <= limit:
                    return True
                stores = self._account.stores.values()
                store = next(store for store in (*stores, self) if store is self or len(store))
                if settled := store._order.settle():
                    key = store._order.oldest()
                    if key is None or (store is self and self._order[key] > use):
                        return False
                    size, used = store._sizes[key], store._order[key]
                    store._drop(key)
            if not settled:
                time.sleep(1e-4)  # lets the scheduler's thread have the lock
                continue
            try:
                store.path(key).unlink(missing_ok=True)
            except OSError:
                with self._lock:
                    store._add(key, size, used)
                raise

    def _add(self, key: bytes, size: int, use: int) -> None:
        """Note a file, which may have replaced an unreadable one. The caller holds the lock."""
        self._account.num_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._order.add(key, use)
        self._unreadable.discard(key)

    def _set_size(self, key: bytes, size: int) -> None:
        """Correct the bytes of the file of `key`, if it is known. The caller holds the lock."""
        if key in self._sizes:
            self._account.num_bytes += size - self._sizes[key]
            self._sizes[key] = size

    def _drop(self, key: bytes) -> None:
        """Forget the file of `key`, if there is one. The caller holds the lock."""
        self._account.num_bytes -= self._sizes.pop(key, 0)
        self._order.remove(key)
        self._unreadable.discard(key)

    def _note_failure(self, done: str, text: str, *args: object) -> None:
        if not self._failed[done]:
            logger.warning("kvc: " + text, *args)
        self._failed[done] = True

    def _write_with_room(self, key: bytes, stored: Stored, record: np.ndarray, use: int) -> bool:
        """Write the file. If other programs have filled the disk, old files of this size make room for it."""
        size = HEADER_BYTES + record.nbytes
        try:
            return self._write_file(key, stored, record, use)
        except OSError as error:
            if error.errno not in FULL or not self._shrink_to(self.num_bytes - size, use):
                raise
        return self._write_file(key, stored, record, use)

    def _write_file(self, key: bytes, stored: Stored, record: np.ndarray, use: int) -> bool:
        path = self.path(key)
        for folder in (self.folder, path.parent):
            folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")  # matches UNFINISHED
        try:
            with open(temporary, "wb", opener=_private) as file:  # buffered: a short write raises
                file.write(header(self.identity, key, stored, record))
                file.write(record.data)
            os.utime(temporary, ns=(use, use))
            os.replace(temporary, path)
        except OSError:
            _remove(temporary)
            raise
        return True

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)
        _remove(self.path(key))

    def clear(self) -> bool:
        """Remove all files of this identity."""
        failed: OSError | None = None
        for key in list(self._sizes):
            with self._lock:
                self._drop(key)
            try:
                self.path(key).unlink(missing_ok=True)
            except OSError as error:
                failed = error
        if failed is not None:
            logger.warning("kvc: some files in %s cannot be removed: %s", self.folder, failed)
        return failed is None

    def read(self, key: bytes, record: np.ndarray) -> Stored | None:
        """Read a record of `record.nbytes` bytes into `record`, uint8. None if the file is missing, damaged, of
        another size or cannot be read. Only a damaged file is removed. One that cannot be read is not found until it is
        written again."""
        path = self.path(key)
        try:
            with open(path, "rb") as file:  # buffered: a file system may return less than it was asked for
                head = file.read(HEADER_BYTES)
                num_read = file.readinto(record.data)
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:  # another server of this folder removed it
            with self._lock:
                self._drop(key)
            return None
        except OSError as error:  # the file may be intact
            self._note_failure("read", "%s cannot be read, and its tokens are computed: %s", path, error)
            with self._lock:
                self._unreadable.add(key)
            return None
        self._failed["read"] = False
        whole = len(head) == HEADER_BYTES
        complete = whole and num_read == record.nbytes == size - HEADER_BYTES
        if whole and not complete and record_size(head) == size - HEADER_BYTES and is_for(self.identity, key, head):
            with self._lock:  # another server of this folder has written the block with other tokens in it
                self._set_size(key, size)
            return None
        stored = parse_header(self.identity, key, head, record) if complete else "its size is wrong"
        if isinstance(stored, str):
            self.forget(key, stored)
            return None
        with self._lock:
            self._account.read += HEADER_BYTES + num_read
        return stored

    def forget(self, key: bytes, reason: str) -> None:
        """Remove the file of `key`, which is damaged."""
        path = self.path(key)
        logger.warning("kvc: %s is not used (%s) and removed", path, reason)
        with self._lock:
            self._account.damaged += 1
            self._drop(key)
        _remove(path)


def _private(path: str, flags: int) -> int:
    """An opener for files that only this user may read."""
    return os.open(path, flags, 0o600)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def stored_files(folder: Path) -> Iterator[tuple[int, bytes, int]]:
    """Last use, key and size of every file in `folder`. Unfinished files of servers that have ended are removed."""
    now = time.time_ns()
    for part in _entries(folder):
        for entry in _entries(part):
            name, dot, suffix = entry.name.partition(".")
            try:
                key = bytes.fromhex(name)
            except ValueError:
                key = b""
            with contextlib.suppress(OSError):  # another server of this folder may have removed it
                if dot + suffix == SUFFIX and len(key) == 32:
                    status = entry.stat()
                    yield min(status.st_mtime_ns, now), key, status.st_size  # the clock may have been set back
                elif (unfinished := UNFINISHED.fullmatch(entry.name)) is not None:
                    if not _runs(int(unfinished[1])) or now - entry.stat().st_mtime_ns > 1e9 * UNFINISHED_SECONDS:
                        os.unlink(entry.path)


def _entries(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        logger.warning("kvc: %s cannot be read (%s), and its files are not used", os.fspath(folder), error.strerror)
        return []


def _runs(pid: int) -> bool:
    """Whether another process with this id runs. No file of this process is unfinished when it opens the folder."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True

"""Records in a storage backend of SGLang (`--hicache-storage-backend`), in place of files.

Backends store pages of one size. A record and its header take as many pages as they need, each under its own name.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_parallel

from kvc_kernels.layout import align_up
from sglang_kvc.errors import ConfigError

from ..cache.block_store import HEADER_BYTES, Stored, header, parse_header, record_size
from .staging_pool import StagingPool

if TYPE_CHECKING:
    from ..cache.host_tier import HostTier

logger = logging.getLogger("sglang_kvc")
BY_ADDRESS = ("mooncake", "hf3fs", "nixl", "seaweedfs")  # they copy from and to the host pool themselves
ALIGN = 8192  # bytes; makes both halves of a page multiples of direct I/O's alignment


class BackendStore:
    """A `BlockStore` in `backend`.

    counts: possible numbers of pages of a record. A page holds one unit of host memory. The names of a record's pages
    contain their number, so finding them tells the record's size. A backend cannot remove a record, so a damaged one is
    ignored from then on. Like SGLang, this store calls the backend from at most one reading, one writing and one lookup
    thread at a time. Its threads copy and check records in parallel.
    """

    threads, local, limit = 4, False, 0

    def __init__(
        self, backend: HiCacheStorage, pool: StagingPool, by_address: bool, unit_bytes: int, counts: Sequence[int],
        identity: bytes
    ):  # fmt: skip
        self.backend, self.pool, self.by_address = backend, pool, by_address
        self.unit_bytes, self.identity = unit_bytes, identity
        self.bytes_written = self.bytes_read = self.damaged = 0
        self._written = 0  # records
        self._counts = list(counts)  # most recently seen first
        self._damaged: set[bytes] = set()
        self._failed = False  # the last call failed; its failure is logged once
        self._locks = {"read": threading.Lock(), "write": threading.Lock()}
        self._spare: SimpleQueue[int] = SimpleQueue()  # first page of each part of the pool that no thread uses
        for first in range(0, pool.page_num, max(counts)):
            self._spare.put(first)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()

    @classmethod
    def create(cls, name: str, extra: dict[str, Any], tier: HostTier, identity: bytes) -> BackendStore:
        """A store in a backend that SGLang creates; `extra`: the values of `--hicache-storage-backend-extra-config`."""
        parallel, layout = get_parallel(), tier.layout
        formats = tier.runtime.store.block_formats
        pages = {f.pages or layout.record.pool.block_pages_bf16 for f in formats}
        exact = all(f.exact for f in formats[1:])
        counts = sorted(map(layout.units_for, pages)) if exact else range(1, tier.units.shape[1] + 1)
        config = HiCacheStorageConfig(
            tp_rank=parallel.tp_rank, tp_size=parallel.tp_size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True, model_name="kvc",
            extra_config=extra,
        )  # fmt: skip
        pool = StagingPool(2 * cls.threads * max(counts), align_up(HEADER_BYTES + layout.unit_bytes, ALIGN))
        try:
            backend = StorageBackendFactory.create_backend(name, config, pool)
        except Exception as error:
            raise ConfigError(
                f"--hicache-storage-backend {name} cannot be started ({error}); install its requirements, or correct "
                "--hicache-storage-backend-extra-config."
            ) from error
        by_address = name in BY_ADDRESS or (name == "dynamic" and bool(extra.get("interface_v1", 0)))
        logger.info("kvc: the storage backend %s stores blocks", name)
        return cls(backend, pool, by_address, layout.unit_bytes, counts, identity)

    def of(self, identity: bytes) -> BackendStore:
        if identity == self.identity:
            return self
        other = copy.copy(self)
        other.identity, other._damaged = identity, set()
        return other

    def __len__(self) -> int:
        """Records that this server has written."""
        return self._written

    @property
    def num_bytes(self) -> int:
        return self.bytes_written

    def record_bytes(self, key: bytes) -> None:
        """Return None: only a call of the backend would tell."""

    def names(self, key: bytes, count: int) -> list[str]:
        """Names of the pages of a record with `count` pages."""
        name = hashlib.blake2b(self.identity + key, digest_size=32).hexdigest()
        return [f"{name}-{count}-{i}" for i in range(count)]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        intact = next((n for n, key in enumerate(keys) if key in self._damaged), len(keys))
        sizes: list[int] = []
        while len(sizes) < intact:
            batch = keys[len(sizes) : min(intact, len(sizes) + STORAGE_BATCH_SIZE)]
            for count in self._counts:
                num_found = self._exist([self.names(key, count)[0] for key in batch])
                if num_found > 0:
                    sizes += [count * self.unit_bytes] * num_found
                    self._counts = [count, *(c for c in self._counts if c != count)]
                    break
            else:
                break
        return sizes

    def _exist(self, names: list[str]) -> int:
        """Number of `names` up to the first one that is not stored."""
        try:
            return min(int(self.backend.batch_exists(names, None)), len(names))
        except Exception as error:
            self._note_failure(error)
            return 0

    def touch(self, keys: Sequence[bytes], use: int) -> None:
        """Do nothing: the backend manages its own space."""

    def save_uses(self) -> None:
        """Do nothing, like `touch`."""

    def write(self, key: bytes, stored: Stored, record: np.ndarray, use: int | None = None) -> bool:
        count, size = -(-record.nbytes // self.unit_bytes), HEADER_BYTES + record.nbytes
        head, names = header(self.identity, key, stored, record), self.names(key, count)
        with self._pages(count) as (indices, value):
            value[:HEADER_BYTES] = np.frombuffer(head, dtype=np.uint8)
            value[HEADER_BYTES:size], value[size:] = record, 0
            with self._locks["write"]:
                if self._exist(names) == count:
                    return True
                if not self._move("write", names, indices):
                    return False
                self._written += 1
                self.bytes_written += value.nbytes
        return True

    def read(self, key: bytes, record: np.ndarray) -> Stored | None:
        """Read a record of at most `record.nbytes` bytes, which is a multiple of the unit size."""
        names = self.names(key, record.nbytes // self.unit_bytes)
        with self._pages(len(names)) as (indices, value):
            with self._locks["read"]:
                if not self._move("read", names, indices):
                    return None
                self.bytes_read += value.nbytes
            head = value[:HEADER_BYTES].tobytes()
            size = record_size(head)
            stored: Stored | str = "its size is wrong"
            if 0 <= size <= record.nbytes:
                record[:size] = value[HEADER_BYTES : HEADER_BYTES + size]
                stored = parse_header(self.identity, key, head, record[:size])
        if isinstance(stored, str):
            self.forget(key, stored)
            return None
        return stored

    @contextmanager
    def _pages(self, count: int) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Adjacent pages of the pool for one thread: their indices, int64 `[count]`, and their bytes."""
        first = self._spare.get()
        try:
            yield torch.arange(first, first + count), self.pool.value(first, count)
        finally:
            self._spare.put(first)

    def _move(self, direction: str, names: list[str], indices: torch.Tensor) -> bool:
        """Move pages between the pool and the backend; returns whether all were moved."""
        try:
            if self.by_address:
                move = self.backend.batch_get_v1 if direction == "read" else self.backend.batch_set_v1
                done = all(move(names, indices, None))
            else:
                pages = [self.pool.get_data_page(i) for i in indices]
                done = self._fill(names, pages) if direction == "read" else bool(self.backend.batch_set(names, pages))
        except Exception as error:
            self._note_failure(error)
            return False
        self._failed &= not done
        return done

    def _fill(self, names: list[str], pages: list[torch.Tensor]) -> bool:
        """Read into `pages`, views of the pool. A backend may return its own tensors instead, which are copied."""
        received: Any = self.backend.batch_get(names, pages)
        if received is None or any(page is None for page in received):
            return False
        for page, data in zip(pages, received, strict=True):
            if data.data_ptr() != page.data_ptr():
                page.copy_(data.view(torch.uint8).view(-1))
        return True

    def _note_failure(self, error: Exception) -> None:
        if not self._failed:
            kind, name = type(error).__name__, type(self.backend).__name__
            logger.warning("kvc: the storage backend %s failed, and blocks are skipped: %s: %s", name, kind, error)
        self._failed = True

    def forget(self, key: bytes, reason: str) -> None:
        name = self.names(key, 1)[0].partition("-")[0]
        logger.warning("kvc: %s of the storage backend is not used (%s)", name, reason)
        self.damaged += 1
        self._damaged.add(key)

    def remove(self, key: bytes) -> None:
        """Do nothing: SGLang's backends cannot remove single records."""

    def clear(self) -> bool:
        """Remove everything in the backend, including records of other servers."""
        try:
            self.backend.clear()
        except Exception as error:
            kind, name = type(error).__name__, type(self.backend).__name__
            logger.warning("kvc: the storage backend %s cannot be cleared: %s: %s", name, kind, error)
            return False
        self._damaged.clear()
        return True


def backend_settings(args: Any) -> dict[str, Any]:
    """The backend's settings from server arguments, without those for SGLang's own prefetching."""
    text = args.hicache_storage_backend_extra_config
    extra = HybridCacheController.parse_storage_backend_extra_config(text)[0]
    if args.file_storage_path:
        extra.setdefault("file_storage_path", args.file_storage_path)
    return extra

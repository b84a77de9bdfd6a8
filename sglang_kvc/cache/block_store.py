"""What the disk tier asks of a place that keeps records, and the header that every record has there.

A record is served only if it was written for the same model, settings and key, and if every byte is as it was written.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MAGIC = b"kvcblock"
VERSION = 1
# magic, version, identity, key, format id, pages, start, bytes of the record; the checksum of both follows.
_FIELDS = struct.Struct("<8sI32s32sBxxxqqq")
CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True)
class Stored:
    """What a header says of the block: its storage format, its pages, and the position of its first token."""

    format_id: int
    pages: int
    start: int


class BlockStore(Protocol):
    """A place for records, each under a key (32 bytes) that names a block by the tokens up to its end.

    identity: 32 bytes that name model, weights, layout and settings. Records of another identity are never read.
    threads: number of threads that may read at a time, and of as many that may write beside them.
    local: whether `find` answers at once; else one more thread asks, beside them.
    num_bytes, limit: bytes that are kept, and the most; limit 0 where the store does not say.
    """

    identity: bytes
    threads: int
    local: bool
    limit: int
    bytes_written: int
    bytes_read: int
    damaged: int

    @property
    def num_bytes(self) -> int: ...

    def __len__(self) -> int:
        """Records that are kept."""

    def of(self, identity: bytes) -> BlockStore:
        """The store of another identity in the same place; this one if it is the same."""

    def record_bytes(self, key: bytes) -> int | None:
        """Bytes of the record of `key`, if it is known at once that it is there."""

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes, at least, of the records of `keys`, up to the first one that is not there."""

    def write(self, key: bytes, stored: Stored, record: np.ndarray) -> bool:
        """Keep `record`, uint8; returns whether it is there. A failure costs the record alone."""

    def read(self, key: bytes, record: np.ndarray) -> Stored | None:
        """Read the record of `key` into `record`, uint8, of the size that `find` gave. None if it is not there, or not
        as written."""

    def forget(self, key: bytes, why: str) -> None:
        """Never serve the record of `key`, which is not as it was written."""

    def clear(self) -> None:
        """Remove all records of this identity."""


def header(identity: bytes, key: bytes, stored: Stored, record: np.ndarray) -> bytes:
    """The header of `record`, uint8: `HEADER_BYTES` bytes."""
    fields = _FIELDS.pack(MAGIC, VERSION, identity, key, stored.format_id, stored.pages, stored.start, record.nbytes)
    return fields + checksum(fields, record)


def record_size(header: bytes) -> int:
    """Bytes of the record behind a whole header. Nothing is checked."""
    return _FIELDS.unpack(header[: _FIELDS.size])[-1]


def opened(identity: bytes, key: bytes, header: bytes, record: np.ndarray) -> Stored | str:
    """What a whole header says of `record`, uint8; or a text, why they are not what was written for `key`."""
    fields = header[: _FIELDS.size]
    magic, version, whose, name, format_id, pages, start, size = _FIELDS.unpack(fields)
    if (magic, version, whose, name, size) != (MAGIC, VERSION, identity, key, record.nbytes):
        return "it belongs to something else"
    if checksum(fields, record) != header[_FIELDS.size :]:
        return "its checksum is wrong"
    return Stored(format_id, pages, start)


def checksum(fields: bytes, record: np.ndarray) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=CHECKSUM_BYTES)
    digest.update(record.data)
    return digest.digest()

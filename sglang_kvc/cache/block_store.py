"""The interface of a record store (files or a storage backend), and the header of every record in it.

A record is served only if it was written for the same model, settings and key, and no byte has changed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MAGIC = b"kvcblock"
VERSION = 1  # rises when headers, records or the arithmetic of packing change
# magic, version, identity, key, format id + prompt * 2^8, pages, start, bytes of the record. The checksum of header and
# record follows.
_FIELDS = struct.Struct("<8sI32s32sIqqq")
CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True)
class Stored:
    """The block's facts in a record header: storage format, pages, position of the first token, and its record `prompt`
    in `Blocks`, below 2^24."""

    format_id: int
    pages: int
    start: int
    prompt: int = 0


class BlockStore(Protocol):
    """A store of records. A key (32 bytes) names a block by all tokens up to its end.

    identity: 32 bytes that name model, weights, layout and settings. Records with another identity are never read.
    threads: number of threads that may read at a time; the same number may write.
    local: whether `find` answers at once. Otherwise one more thread may call it at the same time.
    num_bytes, limit: bytes stored, and their maximum; limit is 0 if unknown.
    bytes_written, bytes_read, damaged: totals since start; they pass to the stores of other identities.
    """

    identity: bytes
    threads: int
    local: bool

    @property
    def limit(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...

    @property
    def damaged(self) -> int: ...

    def __len__(self) -> int:
        """Number of stored records."""

    def of(self, identity: bytes) -> BlockStore:
        """The store of another identity in the same place; this store if the identity is the same."""

    def record_bytes(self, key: bytes) -> int | None:
        """Bytes of the record of `key`, None if it is not stored or a lookup would take time."""

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of the records of `keys` up to the first missing one. A store may round them up."""

    def touch(self, keys: Sequence[bytes], use: int) -> None:
        """Note a use of adjacent blocks of a prompt, of the first one at `use`, in nanoseconds since the epoch. It only
        changes which records make room for others."""

    def save_uses(self) -> None:
        """Keep the uses noted so far for the next server. Called in a thread."""

    def write(self, key: bytes, stored: Stored, record: np.ndarray, use: int | None = None) -> bool:
        """Store `record`, uint8; returns whether it is stored. A failure loses only this record. use: time of its last
        use in nanoseconds since the epoch."""

    def read(self, key: bytes, record: np.ndarray) -> Stored | None:
        """Read the record of `key` into `record`, uint8, of the size that `find` gave. None if it is missing or
        damaged."""

    def forget(self, key: bytes, reason: str) -> None:
        """Never serve the record of `key` again, because it is damaged."""

    def remove(self, key: bytes) -> None:
        """Remove the record of `key`, if the store can remove single records."""

    def clear(self) -> bool:
        """Remove all records of this identity; returns whether none is left. A failure is logged."""


def header(identity: bytes, key: bytes, stored: Stored, record: np.ndarray) -> bytes:
    """The header of `record`, uint8: `HEADER_BYTES` bytes."""
    facts = stored.format_id | stored.prompt << 8, stored.pages, stored.start
    fields = _FIELDS.pack(MAGIC, VERSION, identity, key, *facts, record.nbytes)
    return fields + checksum(fields, record)


def record_size(header: bytes) -> int:
    """Bytes of the record that follows `header`, which is complete but not checked."""
    return _FIELDS.unpack(header[: _FIELDS.size])[-1]


def is_for(identity: bytes, key: bytes, header: bytes) -> bool:
    """Whether a complete header names this block. It is not checked further."""
    return _FIELDS.unpack(header[: _FIELDS.size])[:4] == (MAGIC, VERSION, identity, key)


def parse_header(identity: bytes, key: bytes, header: bytes, record: np.ndarray) -> Stored | str:
    """The facts in the header of `record`, uint8; a text with the reason if header and record were not written for
    `key` or are damaged."""
    fields = header[: _FIELDS.size]
    *names, format_and_prompt, pages, start, size = _FIELDS.unpack(fields)
    if (*names, size) != (MAGIC, VERSION, identity, key, record.nbytes):
        return "its header belongs to another record"
    if checksum(fields, record) != header[_FIELDS.size :]:
        return "its checksum is wrong"
    prompt, format_id = divmod(format_and_prompt, 1 << 8)
    return Stored(format_id, pages, start, prompt)


def checksum(fields: bytes, record: np.ndarray) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=CHECKSUM_BYTES)
    digest.update(record.data)
    return digest.digest()

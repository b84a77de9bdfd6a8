"""The identity of a server's blocks: everything except their tokens that their content depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime import Runtime


def identity(runtime: Runtime) -> bytes:
    """32 bytes that name the weights, the layout, the storage formats and the settings of the policy."""
    config, policy, store = runtime.config, runtime.policy, runtime.store
    parts = [
        runtime.weights().hex(), asdict(runtime.layout), [asdict(f) for f in store.block_formats], str(store.dtype),
        policy.name, config.window, {f.name: str(getattr(config, f.name)) for f in fields(policy)},
        _file_digest(config.calibration),
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=32).digest()


def _file_digest(path: str | None) -> str:
    """Digest of a file's content; empty without a file."""
    return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()

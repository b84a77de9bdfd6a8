"""The identity of a server's blocks: everything except their tokens that their content depends on.

It errs on the side of a cold cache: a setting that may change a block counts, even if it rarely does.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_kernels.formats import BF16
from kvc_kernels.layout import RecordLayout

from .block_store import VERSION

if TYPE_CHECKING:
    from .runtime import Runtime

# Settings that decide where blocks are kept, for how long and for whom. The calibration file counts by its content.
NO_EFFECT = {
    "memory", "host_memory", "disk", "disk_size", "storage", "eviction", "trust", "allow_lossless", "allow_one_shot",
    "one_shot", "calibration", "running_share",
}  # fmt: skip


def identity(runtime: Runtime) -> bytes:
    """32 bytes that name the model, its weights, the layout, the storage formats and the settings of the policy."""
    layout, store = runtime.layout, runtime.store
    page_formats = {f for block in store.block_formats for f in (block.high, block.low) if f is not None} | {BF16}
    parts = {
        "version": VERSION,
        "model": runtime.model(),
        "weights": runtime.weights().hex(),
        "layout": asdict(layout),
        "record": RecordLayout(layout).offsets,
        "pages": {f.name: layout.page(f).segments for f in page_formats},
        "formats": [asdict(f) for f in store.block_formats],
        "dtype": str(store.dtype),
        "device": store.device.type,
        "policy": runtime.policy.name,
        "settings": [_settings(runtime.config), _settings(runtime.policy)],
        "calibration": runtime.calibration_digest,
    }
    if runtime.policy.counts_last_queries:
        parts["queries"] = "of the prompt"  # earlier servers counted the last ones of every chunk
    if runtime.policy.collects_scores:
        parts["means"] = "of each token"  # earlier servers divided scores by the queries after the block
    return hashlib.blake2b(canonical(parts).encode(), digest_size=32).digest()


def file_digest(path: str | None) -> str:
    """Digest of a file's content; empty without a file."""
    return "" if path is None else hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def _settings(part: Any) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in fields(part) if f.name not in NO_EFFECT}


def canonical(value: Any) -> str:
    """JSON text of `value` that is equal in every process. Objects count by their fields or, without any, by their
    text without addresses."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(canonical, value))
    if not isinstance(value, type):
        if is_dataclass(value):
            parts = {f.name: getattr(value, f.name) for f in fields(value)}
            return [type(value).__qualname__, _plain(parts)]
        if hasattr(value, "to_dict"):
            return [type(value).__qualname__, _plain(value.to_dict())]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

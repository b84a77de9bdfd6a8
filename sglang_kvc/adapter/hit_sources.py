"""Sources of a prompt's cached tokens: the device, host memory and the disk.

SGLang loads stored blocks when it admits a prompt, and counts them there. Here they come back earlier and are on the
device by then. A prompt therefore remembers which of its tokens were moved for it. Prompts that only waited for the
same transfer hit the device, as in SGLang, so no token counts twice.
"""

from __future__ import annotations

from typing import Any


def note_loaded(req: Any, begin: int, end: int) -> None:
    """Tokens `begin` .. `end` - 1 of `req` were loaded from host memory for it."""
    req.kvc_loaded = _joined(getattr(req, "kvc_loaded", None), begin, end)


def note_read(req: Any, begin: int, end: int) -> None:
    """Tokens `begin` .. `end` - 1 of `req` were read from files or a storage backend for it."""
    req.kvc_read = _joined(getattr(req, "kvc_read", None), begin, end)


def count_hits(req: Any) -> None:
    """Tell SGLang how many tokens of the prefix at admission were loaded, and how many of these were read before."""
    if (loaded := getattr(req, "kvc_loaded", None)) is None:
        return
    begin, end = loaded[0], min(loaded[1], req.prefix_len)
    first, last = getattr(req, "kvc_read", (0, 0))
    req.kvc_host_hits = max(0, end - begin)
    req.storage_hit_length = max(0, min(end, last) - max(begin, first))


def _joined(span: tuple[int, int] | None, begin: int, end: int) -> tuple[int, int]:
    """One span around all transfers of a prompt, since each continues the prefix or replaces its lost end."""
    return (begin, end) if span is None else (min(span[0], begin), max(span[1], end))

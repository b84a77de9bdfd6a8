"""Hints of a request about later prompts, in SGLang's `custom_params`.

`{"kvc_done": true}` says that no prompt continues it. `--kvc-eviction reuse` then evicts its blocks first; other orders
ignore it.
"""

from __future__ import annotations

import reprlib
from typing import Any

DONE = "kvc_done"


def is_last(custom_params: Any) -> bool:
    """Whether the request says that no prompt continues it. ValueError for a value other than true and false."""
    value = custom_params.get(DONE) if isinstance(custom_params, dict) else None
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ValueError(
        f'custom_params["{DONE}"] is {reprlib.repr(value)}, which is neither true nor false; give true if no prompt '
        f"continues this one, or omit it."
    )

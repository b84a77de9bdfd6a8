"""Hints of a request about later prompts of its session, in SGLang's `custom_params`.

`--kvc-eviction reuse` reads them; other orders ignore them.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

DONE, TTL, STEPS = "kvc_done", "kvc_ttl", "kvc_steps"
MOST_SECONDS, MOST_STEPS = 24 * 3600, 10**6


@dataclass(frozen=True)
class Hints:
    """done: no prompt continues this one.
    ttl: seconds after the end of the request until the session counts as finished; None: never.
    steps: steps of the workflow until the session runs again; None: unknown.
    """

    done: bool = False
    ttl: float | None = None
    steps: int | None = None

    @classmethod
    def parse(cls, custom_params: Any) -> Hints:
        """The hints in a request's custom parameters. ValueError for a bad value: one sentence."""
        if not isinstance(custom_params, dict):
            return cls()
        done, ttl, steps = map(custom_params.get, (DONE, TTL, STEPS))
        if not (done is None or isinstance(done, bool)):
            why = "neither true nor false; give true if no prompt continues this one, or omit it"
            raise ValueError(_refusal(DONE, done, why))
        if not (ttl is None or _in_range(ttl, int | float, MOST_SECONDS)):
            why = f"not a number from 0 to {MOST_SECONDS}; give the seconds to keep the session's blocks, or omit it"
            raise ValueError(_refusal(TTL, ttl, why))
        if not (steps is None or _in_range(steps, int, MOST_STEPS)):
            why = f"not an integer from 0 to {MOST_STEPS}; give the steps until the session runs again, or omit it"
            raise ValueError(_refusal(STEPS, steps, why))
        return cls(bool(done), ttl, steps)


def _in_range(value: Any, kind: Any, most: int) -> bool:
    """Whether `value` is a number of this kind from 0 to `most`; NaN is not."""
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value <= most


def _refusal(name: str, value: Any, why: str) -> str:
    return f'custom_params["{name}"] is {reprlib.repr(value)}, which is {why}.'

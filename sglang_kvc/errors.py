"""`ConfigError`, and helpers for error messages."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting that cannot be served. The message is one sentence: what, why, and what to do instead."""


def flag(name: str) -> str:
    """Command-line option that sets the field `name` of `KvcConfig`."""
    return "--kvc-" + name.replace("_", "-")


def listed(names: Iterable[str]) -> str:
    """'a, b or c'."""
    *head, last = names
    return f"{', '.join(head)} or {last}" if head else last

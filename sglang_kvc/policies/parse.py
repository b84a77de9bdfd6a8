"""A part of a composed policy as the user writes it: `name`, or `name:field=value,field=value`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def build(text: str, kinds: dict[str, type[T]], option: str) -> T:
    """The part that `text` names among `kinds`, with its fields set. ValueError, in one sentence, names `option`."""
    name, _, settings = text.partition(":")
    if name not in kinds:
        raise ValueError(f"{option} {name!r} does not exist; choose {_listed(kinds)}.")
    known: dict[str, Any] = {f.name: f.default for f in fields(kinds[name])}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        field, _, value = setting.partition("=")
        if field not in known:
            instead = f"set {_listed(known)}" if known else f"write {name} alone"
            raise ValueError(f"{option} {name} has no setting {field!r}; {instead}.")
        try:
            given[field] = _TRUTH[value] if isinstance(known[field], bool) else type(known[field])(value)
        except (KeyError, ValueError):
            kind = type(known[field]).__name__
            raise ValueError(
                f"{option} {name} cannot have {field} {value!r}, which is not of kind {kind}; give one like "
                f"{name}:{field}={known[field]}."
            ) from None
    try:
        return kinds[name](**given)
    except ValueError as e:
        raise ValueError(f"{option} {text} cannot be used, because {e}; leave {name}'s settings out.") from e


def _listed(names) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]

"""Conversion of a policy's settings from text to values, and back for logs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from kvc_kernels.ops import STRIDES, ScoreSampling
from sglang_kvc.errors import ConfigError, flag, listed

_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Part:
    """Base of scorers and shares. Written as `name`, or `name:field=value,field=value`."""

    name: ClassVar[str]

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tensors that the calibration file must hold."""
        return ()

    def __str__(self) -> str:
        """Text that `parse_part` turns into an equal part: the name, and the settings that are not defaults."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        settings = ",".join(f"{name}={str(value).lower()}" for name, value in changed)
        return f"{self.name}:{settings}" if settings else self.name


P = TypeVar("P", bound=Part)


def parse_part(text: str, kinds: dict[str, type[P]], option: str) -> P:
    """The part of `kinds` that `text` names, with its settings. `option` is the flag that error messages name."""
    name, _, settings = text.partition(":")
    if name not in kinds:
        raise ConfigError(f"{option} {name!r} does not exist; choose {listed(kinds)}.")
    defaults: dict[str, Any] = {f.name: f.default for f in fields(kinds[name])}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        field, _, value = setting.partition("=")
        if field not in defaults:
            instead = f"set {listed(defaults)}" if defaults else f"write {name} alone"
            raise ConfigError(f"{option} {name} has no setting {field!r}; {instead}.")
        kind = type(defaults[field])
        try:
            given[field] = _TRUTH[value] if kind is bool else kind(value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{option} {name} cannot have {field} {value!r}, because it is not of type {kind.__name__}; give one "
                f"like {name}:{field}={defaults[field]}."
            ) from None
    try:
        return kinds[name](**given)
    except ValueError as e:
        raise ConfigError(f"{option} {text} cannot be used, because {e}; drop the settings of {name}.") from e


def parse_observe(text: str | int) -> ScoreSampling:
    """`all` queries, one in s (`all/s`), or the last n of a prompt."""
    text = str(text).lower()
    kind, _, stride = text.partition("/")
    if kind == "all" and (stride or "1") in map(str, STRIDES) and text != "all/":
        return ScoreSampling(stride=int(stride or 1))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"{flag('observe')} {text!r} is not a number of queries; give 'all', 'all/16' for one in 16 (powers of two "
            "up to 64), or a whole number from 1, like 32."
        )
    return ScoreSampling(int(text))


def observe_text(sampling: ScoreSampling) -> str:
    """Text that `parse_observe` turns into `sampling`."""
    if sampling.window is not None:
        return str(sampling.window)
    return "all" if sampling.stride == 1 else f"all/{sampling.stride}"

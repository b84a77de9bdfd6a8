"""What a calibration file decides about a server: defaults where the user gave none, and refusals.

A refusal is one sentence: what, why, and what to do instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_kvc.calibration.model_fingerprint import Identity
from sglang_kvc.options.request_quality import names

if TYPE_CHECKING:
    from sglang_kvc.calibration.verdicts import Findings
    from sglang_kvc.options.config import KvcConfig

AGAIN = "make one with sglang-kvc calibrate"


def findings(path: str) -> Findings | None:
    """What the file found, None where it holds tensors alone. `ConfigError` when it cannot be read."""
    from sglang_kvc.calibration.verdicts import read
    from sglang_kvc.options.config import ConfigError

    try:
        return read(path)
    except ValueError as e:
        raise ConfigError(f"--kvc-calibration {path} cannot be used, because {e}; {AGAIN}.") from None


def defaults(policy: str, options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Settings of `policy` that the file knows better than `options`, the policy's own, and that were not `given`.

    The recommended format for `quantise`; for `leankv` both thresholds, for the ladder that they were measured with.
    """
    if given.get("calibration") is None or policy not in ("quantise", "leankv"):
        return {}
    found = findings(given["calibration"])
    if found is None:
        return {}
    if policy == "quantise":
        return {} if "high" in given else {"high": found.recommended}
    t, ladder = found.thresholds, {**options, **given}
    same = (ladder["high"], ladder["low"]) == (t.high, t.low)
    if not same or "alpha_high" in given or "alpha_low" in given:
        return {}
    return {"alpha_high": t.alpha_high, "alpha_low": t.alpha_low}


def check_formats(config: KvcConfig) -> bool:
    """`ConfigError` for a format of the ladder that the file saw break the model; whether it has verdicts at all."""
    from sglang_kvc.calibration.verdicts import BREAKS
    from sglang_kvc.options.config import ConfigError

    found = findings(config.calibration)
    if found is None:
        return False
    offered = (("levels", name) for name in names(config.levels))
    for option, name in (("high", config.high), ("low", config.low), *offered):
        record = found.of(name) if name else None
        if record and record["verdict"] == BREAKS:
            instead = f"choose --kvc-high {found.recommended}" if option == "high" else "choose one with more bits"
            raise ConfigError(
                f"--kvc-{option} {name} cannot be served with --kvc-calibration "
                f"{config.calibration}, because that found that it breaks this model (KL to bf16 of "
                f"{record['kl_mean']:.2g} nats per token); {instead}, or drop the file to serve it nevertheless."
            )
    return True


def check_identity(config: KvcConfig, identity: Identity | None) -> None:
    """`ConfigError` when the file is that of a model other than `identity`; None and a file without one pass."""
    from sglang_kvc.options.config import ConfigError

    found = findings(config.calibration) if config.calibration else None
    if found is not None and identity is not None and found.identity != identity:
        raise ConfigError(
            f"--kvc-calibration {config.calibration} cannot be used, because it was made for {found.identity}, and "
            f"this model is {identity}; make one of this model with sglang-kvc calibrate, or drop it."
        )

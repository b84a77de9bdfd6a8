"""Defaults and refusals from the file of `--kvc-calibration`: settings that the user did not give, formats that break
the model, a file of another model."""

from __future__ import annotations

from typing import Any

from kvc_kernels.formats import BF16
from sglang_kvc.calibration.model_fingerprint import Identity
from sglang_kvc.calibration.verdicts import BREAKS, Findings, read
from sglang_kvc.errors import ConfigError, flag
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import make_policy
from sglang_kvc.policies.allocation import Xkv
from sglang_kvc.policies.ladder import steps

CALIBRATE = "make one with sglang-kvc calibrate"


def findings_of(path: str) -> Findings | None:
    """Findings in the file, None if it holds only tensors. `ConfigError` when it cannot be read."""
    try:
        return read(path)
    except ValueError as e:
        raise ConfigError(f"{flag('calibration')} {path} cannot be used, because {e}; {CALIBRATE}.") from None


def defaults_of(policy: str, options: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Settings that the file measured for this model, to replace the policy's own defaults `options`.

    The recommended format for `quantize`; for `leankv` both thresholds, if its formats are those that they were
    measured with; for the share `xkv` the fraction of kept tokens. Settings in `given` are the user's and stay.
    """
    settings = {**options, **given}
    xkv = isinstance(settings.get("share"), Xkv)
    if given.get("calibration") is None or not (policy in ("quantize", "leankv") or xkv):
        return {}
    findings = findings_of(given["calibration"])
    if findings is None:
        return {}
    if policy == "quantize":
        if "high" in given:
            return {}
        if findings.recommended == BF16.name:
            raise ConfigError(
                f"{flag('calibration')} {given['calibration']} recommends no packed format for this model, so nothing "
                f"would be compressed; choose one with {flag('high')}, or serve the model with --kv-backend default."
            )
        return {"high": findings.recommended}
    if xkv:
        least = findings.least_memory
        return {} if least is None or given.keys() & {"keep", "budget"} else {"keep": least.keep}
    t = findings.thresholds
    same = (settings["high"], settings["low"]) == (t.high, t.low)
    if not same or "alpha_high" in given or "alpha_low" in given:
        return {}
    return {"alpha_high": t.alpha_high, "alpha_low": t.alpha_low}


def check_verdicts(config: KvcConfig) -> None:
    """`ConfigError` for a format that breaks the model according to the file, and for a file without effect."""
    if config.calibration is None:
        return
    findings = findings_of(config.calibration)
    if findings is not None:
        _check_formats(config, findings)
    elif not make_policy(config).needs:
        raise ConfigError(
            f"{flag('calibration')} {config.calibration} has no effect with policy {config.policy}, which needs no "
            f"statistics, and the file judges no formats; drop it, or {CALIBRATE}."
        )


def _check_formats(config: KvcConfig, findings: Findings) -> None:
    named = [("high", config.high), ("low", config.low), *(("levels", name) for name in config.levels)]
    for option, name in (*named, *(("floor", name) for name in steps(config.high, config.floor))):
        record = findings.of(name) if name else None
        if record and record["verdict"] == BREAKS:
            best = f"choose {flag('high')} {findings.recommended}"
            instead = best if option == "high" else "choose one with more bits"
            raise ConfigError(
                f"{flag(option)} {name} cannot be served with {flag('calibration')} {config.calibration}, because "
                f"calibration found that it breaks this model (KL to bf16 of {record['kl_mean']:.2g} nats per token); "
                f"{instead}, or drop the file to serve it anyway."
            )


def check_identity(config: KvcConfig, identity: Identity | None) -> None:
    """`ConfigError` for the file of a model other than `identity`. An `identity` of None passes, and so does a file
    without findings."""
    findings = findings_of(config.calibration) if config.calibration else None
    if findings is not None and identity is not None and findings.identity != identity:
        raise ConfigError(
            f"{flag('calibration')} {config.calibration} cannot be used, because it was made for {findings.identity}, "
            f"and this model is {identity}; make one of this model with sglang-kvc calibrate, or drop it."
        )

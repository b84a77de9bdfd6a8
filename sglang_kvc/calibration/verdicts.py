"""Findings of a calibration file: the model it was made for, a verdict per format, thresholds, XKV's least memory.

They are JSON in the metadata of the safetensors file, under one key. A file without them holds tensors alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_kvc.calibration.model_fingerprint import Identity

KEY = "sglang-kvc"
VERSION = 2
OK, LOSES, BREAKS = "ok", "loses", "breaks"  # verdicts; `measure.formats` has their limits


@dataclass(frozen=True)
class Chosen:
    """LeanKV's thresholds and the formats they were measured with. 0 means no low tier, or no token pruned."""

    alpha_high: float
    alpha_low: float
    high: str
    low: str


@dataclass(frozen=True)
class LeastMemory:
    """XKV's least memory for a wanted retention (equation 18).

    `keep`: share of the tokens that retains the share `retention` of the attention, mean over layers. `layers`: the
    share of each layer. `ratio`: compression of packed blocks with policy `xkv` at `keep`, all metadata included.
    """

    retention: float
    keep: float
    ratio: float
    layers: tuple[float, ...]


@dataclass(frozen=True)
class Findings:
    """`formats`: records with `format`, `token_bytes`, `kl_mean`, `kl_p99`, `nll_delta`, `top1_equal`,
    `verdict`. `recommended`: the smallest format that is ok, "bf16" if none is. `tried`: effect of each
    pair of thresholds. `settings`: tokens, block size, dtype, device. `least_memory`: None if no retention was wanted.
    """

    identity: Identity
    settings: dict[str, Any]
    formats: tuple[dict[str, Any], ...]
    recommended: str
    thresholds: Chosen
    tried: tuple[dict[str, Any], ...] = ()
    least_memory: LeastMemory | None = None

    def of(self, fmt: str) -> dict[str, Any] | None:
        """The record of one format, None if it was not measured."""
        return next((r for r in self.formats if r["format"] == fmt), None)

    def metadata(self) -> dict[str, str]:
        record = asdict(self)
        if self.least_memory is None:
            del record["least_memory"]  # readers of earlier versions do not know it
        return {KEY: json.dumps({"version": VERSION, **record})}


class _TokenKeys(Exception):
    """The file has verdicts for keys quantized per token."""


def _from_version_1(record: dict[str, Any]) -> dict[str, Any]:
    """Version 1 has a key mode in each record, "channel" or "token"; only keys per channel are supported."""
    if record["thresholds"].pop("key_mode") != "channel" or "channel" not in record["recommended"]:
        raise _TokenKeys
    formats = [r for r in record["formats"] if r.pop("key_mode") == "channel"]
    return {**record, "formats": formats, "recommended": record["recommended"]["channel"]}


def read(path: str) -> Findings | None:
    """Findings in the file, None for a file of tensors alone. ValueError, in one clause, when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError) as e:
        raise ValueError(f"the file cannot be read ({str(e).splitlines()[0].rstrip('.')})") from None
    if text is None:
        return None
    try:
        record = json.loads(text)
        version = record.pop("version")
        if version == 1:
            record = _from_version_1(record)
        elif version != VERSION:
            raise ValueError
        record["identity"] = Identity(**record["identity"])
        record["thresholds"] = Chosen(**record["thresholds"])
        record |= {name: tuple(record[name]) for name in ("formats", "tried")}
        if least := record.get("least_memory"):
            record["least_memory"] = LeastMemory(**{**least, "layers": tuple(least["layers"])})
        return Findings(**record)
    except _TokenKeys:
        raise ValueError("it was made for keys quantized per token, which are not supported") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("its findings were written by another version") from None

"""Fingerprint of a model, by which a server recognizes the calibration file of its own model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

# Fields that change keys, values or queries. Paths, dtypes and token ids differ between copies of a model.
_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# Numbers, and lists of numbers, of the rotary embedding: of all kinds, Llama 3, YaRN and LongRoPE.
_ROPE_FIELDS = (
    "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "short_factor", "long_factor",
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """A model as its config file shows it. Weights do not count, so a fine-tune has its base's identity."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    fingerprint: str

    def __str__(self) -> str:
        return (
            f"{self.architecture} with {self.layers} layers, {self.heads} heads of size {self.head_dim}, "
            f"{self.kv_heads} of K and V, config {self.fingerprint}"
        )


def identity_of(hf_config: Any) -> Identity:
    """Identity from a transformers config. Sizes that it lacks, or has per layer, are 0; such models are not served."""
    try:
        text = hf_config.get_text_config()
    except (AttributeError, ValueError):  # not a class of transformers, or several text configs
        text = hf_config
    heads = _size(text, "num_attention_heads")
    head_dim = _size(text, "head_dim") or (_size(text, "hidden_size") // heads if heads else 0)
    architectures = getattr(hf_config, "architectures", None) or ("unknown",)
    return Identity(
        architecture=architectures[0],
        layers=_size(text, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(text, "num_key_value_heads") or heads,
        head_dim=head_dim,
        fingerprint=_fingerprint(text, head_dim),
    )


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _fingerprint(text: Any, head_dim: int) -> str:
    """First 12 hex digits of the SHA-256 of the fields above."""
    known: dict[str, Any] = {name: str(getattr(text, name, None)) for name in _FIELDS}
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope if isinstance(rope, dict) else {}
    scaling = getattr(text, "rope_scaling", None)
    merged = {"rope_theta": getattr(text, "rope_theta", None), **(scaling if isinstance(scaling, dict) else {}), **rope}
    known |= _rotary(merged) | {"head_dim": head_dim}
    known |= {kind: _rotary(of_kind) for kind, of_kind in rope.items() if isinstance(of_kind, dict)}  # of layers
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def _rotary(parameters: dict[str, Any]) -> dict[str, Any]:
    """The fields of one rotary embedding. Numbers are floats: a theta may be read as 10000 or 10000.0."""
    given = {name: parameters.get(name) for name in _ROPE_FIELDS}
    numbers = {name: float(x) for name, x in given.items() if isinstance(x, (int, float))}
    lists = {name: [float(x) for x in xs] for name, xs in given.items() if isinstance(xs, list)}
    return {**numbers, **lists, "rope_type": parameters.get("rope_type") or parameters.get("type") or "default"}

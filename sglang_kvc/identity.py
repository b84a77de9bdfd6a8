"""Which model it is: what a calibration file and a server compare before the one trusts the other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

# What changes keys, values or queries. Paths, dtypes and token ids do not enter: they differ between copies.
_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_ROPE_FIELDS = ("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Identity:
    """A model as its config file shows it; weights are not looked at, so that a fine-tune has its base's identity."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.architecture} with {self.layers} layers, {self.heads} heads of size {self.head_dim}, "
            f"{self.kv_heads} of K and V, config {self.fingerprint}"
        )


def identity_of(hf_config: Any) -> Identity:
    """From a transformers config; sizes that it does not have (models that cannot be served) are 0."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    head_dim = getattr(text, "head_dim", None) or (int(getattr(text, "hidden_size", 0) or 0) // heads if heads else 0)
    architectures = getattr(hf_config, "architectures", None) or ("unknown",)
    return Identity(
        architecture=architectures[0],
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        fingerprint=_fingerprint(text, int(head_dim)),
    )


def _fingerprint(text: Any, head_dim: int) -> str:
    """12 hex digits of the SHA-256 of the fields that matter."""
    known: dict[str, Any] = {name: getattr(text, name, None) for name in _FIELDS}
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope if isinstance(rope, dict) else {}
    scaling = getattr(text, "rope_scaling", None)
    merged = {"rope_theta": getattr(text, "rope_theta", None), **(scaling if isinstance(scaling, dict) else {}), **rope}
    # As text of one form: a theta may be read as 10000 or 10000.0.
    known |= {name: float(merged[name]) for name in _ROPE_FIELDS if isinstance(merged.get(name), (int, float))}
    known |= {"rope_type": merged.get("rope_type") or merged.get("type") or "default", "head_dim": head_dim}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]

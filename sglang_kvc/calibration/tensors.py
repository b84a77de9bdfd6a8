"""Tensors of a calibration file: statistics of one model, measured on text, for scorers and shares.

| tensor                 | shape            | meaning                                                             |
|------------------------|------------------|---------------------------------------------------------------------|
| `query_mean`           | `[L, Hq, D]`     | mean of a head's queries                                            |
| `query_covariance`     | `[L, Hq, D, D]`  | their covariance                                                    |
| `query_samples`        | `[L, Hq, M, D]`  | M of them, before rotation                                          |
| `rotary_frequencies`   | `[R/2]`          | radians per position; if present, queries are those before rotation |
| `importance_retention` | `[L, U]`         | attention that the best (u + 1) / U of a prompt's tokens get        |
| `attention_entropy`    | `[L]`            | mean entropy of a query's attention, nats                           |
| `attention_shift`      | `[L]`            | variance of a token's attention over queries, summed over tokens    |
| `attention_variance`   | `[L]`            | variance over tokens of the attention summed over queries           |
| `head_retrieval`       | `[L, H]`         | attention of a KV head to what it has read before                   |
| `gate_*`               |                  | trained gates, see `policies/scorers/gate.py`                       |

Tensors are read as fp32. A file may lack tensors that no policy needs. `sglang-kvc calibrate` writes all of them except
gates, and its findings in the metadata (`verdicts.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from safetensors import SafetensorError, safe_open

from kvc_kernels import ops
from kvc_kernels.layout import PoolLayout

Calibration = Mapping[str, torch.Tensor]
# Read on the CPU, which counts pages before any score is known.
BY_LAYER = ("importance_retention", "attention_entropy", "attention_shift", "attention_variance")
_QUERIES = {"query_mean": 3, "query_covariance": 4, "query_samples": 4}  # their dimensions
_GATES = ("gate_in", "gate_in_bias", "gate_out", "gate_out_bias")
# These hold all heads of the model; a tensor-parallel rank does not know which heads are its own.
BY_HEAD = (*_QUERIES, "head_retrieval", *_GATES)


def tensor_names(path: str) -> set[str]:
    """Names of the tensors in the file. ValueError, in one clause, when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as e:
        raise ValueError(f"the file cannot be read ({str(e).splitlines()[0].rstrip('.')})") from None


@functools.lru_cache(maxsize=4)
def load(path: str, device: torch.device) -> Calibration:
    """All tensors of the file, fp32, on `device`; those of `BY_LAYER` on the CPU."""
    return {name: x if name in BY_LAYER else x.to(device) for name, x in _read(path).items()}


@functools.lru_cache(maxsize=4)
def _read(path: str) -> Calibration:
    """The file is read once, at the start of a server. It may change while the server runs."""
    names = tensor_names(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).float() for name in sorted(names)}


def check_shapes(path: str, names: Iterable[str], layout: PoolLayout) -> None:
    """Raise ValueError, in one sentence, when tensors `names` of the file do not fit the model of `layout`."""
    tensors = load(path, torch.device("cpu"))
    for name in {*names, "rotary_frequencies"} & set(tensors):
        x = tensors[name]
        if not (_fits(name, x, layout) and bool(x.isfinite().all())):
            raise ValueError(
                f"--kvc-calibration {path} does not fit this model, because its {name} {list(x.shape)} is not made for "
                f"{layout.layers} layers with {layout.heads} KV heads of size {layout.head_dim}; calibrate this model"
            )


def _fits(name: str, x: torch.Tensor, layout: PoolLayout) -> bool:
    layers, heads, d = layout.layers, layout.heads, layout.head_dim
    if name == "rotary_frequencies":
        return x.dim() == 1 and x.numel() <= d // 2
    if name == "importance_retention":
        if x.dim() != 2 or x.shape[0] != layers or not x.shape[1]:
            return False
        return bool((x >= 0).all() and (x <= 1 + 1e-3).all()) and ops.is_concave(x)
    if name in BY_LAYER:
        return x.shape == (layers,) and bool((x >= 0).all()) and float(x.sum()) > 0
    if name == "head_retrieval":
        return x.shape == (layers, heads)
    if name in _GATES:
        hidden = x.shape[2] if x.dim() > 2 else 0
        shapes = ((layers, heads, hidden, 2 * d), (layers, heads, hidden), (layers, heads, hidden), (layers, heads))
        return x.shape == shapes[_GATES.index(name)]
    sizes = x.shape[3:] if name == "query_samples" else x.shape[2:]
    return (
        x.dim() == _QUERIES[name]
        and x.shape[0] == layers
        and x.shape[1] % heads == 0 < x.shape[1]
        and all(n == d for n in sizes)
    )

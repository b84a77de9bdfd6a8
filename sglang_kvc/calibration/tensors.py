"""Tensors of a calibration file: statistics of one model, measured on text, for scorers and shares.

| tensor               | shape            | meaning                                                             |
|----------------------|------------------|---------------------------------------------------------------------|
| `query_mean`         | `[L, Hq, D]`     | mean of a head's queries                                            |
| `query_covariance`   | `[L, Hq, D, D]`  | their covariance                                                    |
| `rotary_frequencies` | `[R/2]`          | radians per position; if present, queries are those before rotation |
| `layer_shares`       | `[L]`            | share of the kept pages that each layer gets, in any unit           |

Read as fp32. A file may lack tensors that nothing asks for. `sglang-kvc calibrate` writes all of them,
`retention_curves` `[L, P]` (from which it computes the shares), and its findings in the metadata (`verdicts.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from safetensors import SafetensorError, safe_open

from kvc_kernels.layout import PoolLayout

Calibration = Mapping[str, torch.Tensor]


def tensor_names(path: str) -> set[str]:
    """Names of the tensors in the file. ValueError, in one clause, when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as e:
        raise ValueError(f"the file cannot be read ({str(e).splitlines()[0].rstrip('.')})") from None


@functools.lru_cache(maxsize=4)
def load(path: str, device: torch.device) -> Calibration:
    """All tensors of the file, fp32, on `device`; `layer_shares` stays on the CPU, which counts pages."""
    names = tensor_names(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).float() for name in sorted(names)}
    return {name: x if name == "layer_shares" else x.to(device) for name, x in tensors.items()}


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
    if name == "rotary_frequencies":
        return x.dim() == 1 and x.numel() <= layout.head_dim // 2
    if name == "layer_shares":
        return x.shape == (layout.layers,) and bool((x >= 0).all()) and float(x.sum()) > 0
    dims = 3 if name == "query_mean" else 4
    return (
        x.dim() == dims
        and x.shape[0] == layout.layers
        and x.shape[1] % layout.heads == 0
        and all(n == layout.head_dim for n in x.shape[2:])
    )

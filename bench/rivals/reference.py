"""Decode attention in float64 over the stored tokens of a case."""

from __future__ import annotations

import torch


def attend(case, request: int) -> torch.Tensor:
    """fp64 `[Hq, D]` of one request: its `q[B, Hq, D]` over `dense(layer, request)`, keys and values `[tokens, D]` head
    by head, as a case may keep other tokens for each."""
    dense = case.dense(0, request)
    dim = case.q.shape[-1]
    out = []
    for q, (keys, values) in zip(case.q[request].double().view(len(dense), -1, dim), dense):
        out.append((q @ keys.T * dim**-0.5).softmax(-1) @ values)
    return torch.cat(out)


def error(case) -> float:
    """Relative error of layer 0 of a case, written over NaN."""
    out = case.run(0).double()
    want = torch.stack([attend(case, r) for r in range(case.batch)])
    return ((out - want).norm() / want.norm()).item()

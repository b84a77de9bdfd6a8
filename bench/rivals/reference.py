"""Reference of decode attention in float64 over the stored tokens of a case."""

from __future__ import annotations

import torch


def attend(case, request: int) -> torch.Tensor:
    """Output of one request, fp64 `[Hq, D]`. `case.dense` returns keys and values `[tokens, D]` by head, because heads
    may have different numbers of tokens."""
    dense = case.dense(0, request)
    dim = case.q.shape[-1]
    out = []
    for q, (keys, values) in zip(case.q[request].double().view(len(dense), -1, dim), dense):
        out.append((q @ keys.T * dim**-0.5).softmax(-1) @ values)
    return torch.cat(out)


def error(case) -> float:
    """Relative error of a case in layer 0. The output buffer starts as NaN."""
    out = case.run(0).double()
    want = torch.stack([attend(case, r) for r in range(case.batch)])
    return ((out - want).norm() / want.norm()).item()

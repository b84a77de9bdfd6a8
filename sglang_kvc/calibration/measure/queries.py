"""Mean and covariance of each head's queries, for the scorer `expected-attention`, and a sample of them, for `dapq` and
`cake`.

Queries are taken before the rotary embedding if it can be undone (arXiv 2510.00636 rotates them to future positions),
else after it. Sums are fp64, layer by layer.
"""

from __future__ import annotations

import torch

from kvc_kernels import ops


def rotary_frequencies(model: torch.nn.Module) -> torch.Tensor | None:
    """fp32 `[R/2]`, radians per position; None unless all layers rotate alike and independently of length."""
    rotations = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    kinds = {getattr(m, "rope_type", "default") for m in rotations}
    # Frequencies of other types depend on the length of the sequence.
    if len(rotations) != 1 or not kinds <= {"default", "linear", "llama3", "yarn"}:
        return None
    return rotations[0].inv_freq.detach().float().cpu()


def unrotate(x: torch.Tensor, frequencies: torch.Tensor, first: int = 0) -> torch.Tensor:
    """fp32 `[..., n, D]` at positions first .. first + n - 1 without the rotation of the pairs (j, j + R/2)."""
    positions = torch.arange(first, first + x.shape[-2], device=x.device)
    return ops.rotated(x.float(), -positions, frequencies.to(x.device))


def same_before_rotation(
    k: torch.Tensor, ids: torch.Tensor, frequencies: torch.Tensor, tolerance: float = 0.05
) -> bool:
    """Whether `frequencies` undo this model's rotation, judged by the first layer's keys `k` `[H, n, D]`.

    Before rotation these keys depend on the token alone, so a token that comes twice in `ids` `[n]` must have equal
    keys. (Some models pair features differently.) False if no token occurs twice.
    """
    plain = unrotate(k, frequencies)
    order = ids.sort(stable=True).indices
    twice = ids[order][1:] == ids[order][:-1]
    a, b = plain[:, order[1:][twice]], plain[:, order[:-1][twice]]
    if not a.numel():
        return False
    return bool((a - b).norm() <= tolerance * a.norm())


SAMPLES = 16  # queries of a head


class QueryStatistics:
    """Collects means `[L, Hq, D]`, covariances `[L, Hq, D, D]` and samples `[L, Hq, SAMPLES, D]` in fp32."""

    def __init__(self, layers: int):
        self.mean: list[torch.Tensor] = [torch.empty(0)] * layers
        self.covariance: list[torch.Tensor] = [torch.empty(0)] * layers
        self._samples: list[torch.Tensor] = [torch.empty(0)] * layers

    def add(self, layer: int, q: torch.Tensor) -> None:
        """Add all queries of a layer, `[Hq, n, D]`. The covariance is divided by n, and the samples are evenly spaced.
        """
        n = q.shape[1]
        self._samples[layer] = q[:, [(2 * i + 1) * n // (2 * SAMPLES) for i in range(SAMPLES)]].float().cpu()
        x = q.double()
        mean = x.mean(1)
        x = x - mean.unsqueeze(1)
        self.mean[layer] = mean.float().cpu()
        self.covariance[layer] = (x.transpose(1, 2) @ x / q.shape[1]).float().cpu()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"query_mean": torch.stack(self.mean), "query_covariance": torch.stack(self.covariance)}

    def samples(self) -> torch.Tensor:
        return torch.stack(self._samples)

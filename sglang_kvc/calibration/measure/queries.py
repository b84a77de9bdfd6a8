"""Mean and covariance of each head's queries, as the scorer `expected-attention` reads them.

Before the rotary embedding where that can be undone (arXiv 2510.00636 rotates them to the positions to come), else as
they are. Sums in fp64, layer by layer.
"""

from __future__ import annotations

import torch


def rotary_frequencies(model: torch.nn.Module) -> torch.Tensor | None:
    """fp32 `[R/2]`, radians per position, if the model rotates all layers alike and at any length; else None."""
    found = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    kinds = {getattr(m, "rope_type", "default") for m in found}
    # Of the others frequencies depend on the length of the sequence.
    if len(found) != 1 or not kinds <= {"default", "linear", "llama3", "yarn"}:
        return None
    return found[0].inv_freq.detach().float().cpu()


def unrotate(x: torch.Tensor, frequencies: torch.Tensor, first: int = 0) -> torch.Tensor:
    """fp32 `[..., n, D]` at positions first .. first + n - 1 without the rotation of the pairs (j, j + R/2)."""
    half = frequencies.numel()
    t = torch.arange(first, first + x.shape[-2], device=x.device)
    angle = t[:, None].double() * frequencies.to(x.device).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin, rest), dim=-1)


def same_before_rotation(
    k: torch.Tensor, ids: torch.Tensor, frequencies: torch.Tensor, tolerance: float = 0.05
) -> bool:
    """Whether `frequencies` undo this model's rotation, seen on the first layer's keys `[H, n, D]`.

    Those depend on the token alone until they are rotated: a token that comes twice in `ids` `[n]` must have the same
    key. (Some models pair features in another way.) False where no token repeats.
    """
    plain = unrotate(k, frequencies)
    order = ids.sort(stable=True).indices
    twice = ids[order][1:] == ids[order][:-1]
    a, b = plain[:, order[1:][twice]], plain[:, order[:-1][twice]]
    if not a.numel():
        return False
    return bool((a - b).norm() <= tolerance * a.norm())


class QueryStatistics:
    """Collects `[L, Hq, D]` means and `[L, Hq, D, D]` covariances, fp32 in the end."""

    def __init__(self, layers: int):
        self.mean: list[torch.Tensor] = [torch.empty(0)] * layers
        self.covariance: list[torch.Tensor] = [torch.empty(0)] * layers

    def add(self, layer: int, q: torch.Tensor) -> None:
        """All queries of a layer, `[Hq, n, D]`. The covariance is that of the n given (divided by n)."""
        x = q.double()
        mean = x.mean(1)
        x = x - mean.unsqueeze(1)
        self.mean[layer] = mean.float().cpu()
        self.covariance[layer] = (x.transpose(1, 2) @ x / q.shape[1]).float().cpu()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"query_mean": torch.stack(self.mean), "query_covariance": torch.stack(self.covariance)}

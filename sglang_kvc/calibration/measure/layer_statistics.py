"""Statistics of each layer's attention over a whole prompt, from which shares divide pages among layers, and scorers
choose heads.

A prompt is the text up to each of `PREFIXES` ends, and its queries are the last ones before that end. Values of the
prompts are averaged.
"""

from __future__ import annotations

import torch
from torch.nn.functional import avg_pool1d

from kvc_kernels import ops
from kvc_kernels.ops import query_weights

WINDOW, POOL = 8, 7  # XKV: number of last queries of a prompt, and of tokens in an average
CAKE_WINDOW = 32  # last queries of a prompt for entropy and shift
UNITS = 256  # points of a retention curve
PREFIXES = 4  # prompts: the first quarter of the text, the first half, ...
NEAR = 4  # tokens on each side of the one that a retrieval head should find


def window_attention(q: torch.Tensor, k: torch.Tensor, scale: float, end: int, window: int) -> torch.Tensor:
    """Probabilities fp32 `[H, G, window, end]` of the last `window` queries before `end`.

    q `[Hq, n, D]`, k `[H, n, D]`.
    """
    return query_weights(q[:, end - window : end], k[:, :end], None, 0, window, scale, 0.0)


def importance(weights: torch.Tensor) -> torch.Tensor:
    """XKV's importance vector (equation 3), fp32 `[n]`: mean over heads and queries of `weights` `[H, G, w, n]`, then
    the average over `POOL` neighbors."""
    return ops.pool_scores(weights.mean((0, 1)).mean(0, keepdim=True), POOL, "mean")[0]


def retention(importance: torch.Tensor) -> torch.Tensor:
    """XKV's retention curve (equation 4), fp64 `[UNITS]`: share of `importance` `[n]` in the best (u + 1) / UNITS of
    the tokens, linear between whole tokens."""
    curve = ops.retention_curves(importance.unsqueeze(0).cpu())[0]
    curve = torch.cat((curve.new_zeros(1), curve))
    at = torch.arange(1, UNITS + 1, dtype=torch.float64) * len(importance) / UNITS
    below = at.floor().long().clamp(max=len(importance) - 1)
    return torch.lerp(curve[below], curve[below + 1], at - below)


def entropy_and_shift(weights: torch.Tensor) -> tuple[float, float]:
    """CAKE's spatial dispersion and temporal shift (arXiv 2503.12491) of `weights` `[H, G, w, n]`.

    The first is the mean entropy of a query's attention, in nats: `-sum_i A_ji log A_ji`. The second is the variance of
    a token's attention over the queries, summed over tokens: `sum_i Var_j A_ji`; mean over heads. The tokens of the
    window do not count.
    """
    a = weights[..., : -weights.shape[2]]
    spread = -torch.xlogy(a, a).sum(-1).mean()
    return float(spread), float(a.var(-2).sum(-1).mean())


class LayerStatistics:
    """Collects the statistics of one text, layer by layer."""

    def __init__(self, layers: int, tokens: int):
        """`tokens` of the text."""
        self.ends = [tokens * (i + 1) // PREFIXES for i in range(PREFIXES)]
        self._curves = torch.zeros(layers, UNITS, dtype=torch.float64)
        self._values = torch.zeros(3, layers, dtype=torch.float64)

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor, scale: float) -> None:
        """A layer's queries `[Hq, n, D]` and keys `[H, n, D]`, and `sums` fp32 `[H, n]`: a token's attention from all
        queries.
        """
        for end in self.ends:
            weights = window_attention(q, k, scale, end, CAKE_WINDOW)
            self._curves[layer] += retention(importance(weights[..., -WINDOW:, :])) / PREFIXES
            spread, shift = entropy_and_shift(weights)
            self._values[:2, layer] += torch.tensor((spread, shift)) / PREFIXES
        self._values[2, layer] = float(sums.double().var(-1).mean())

    def tensors(self) -> dict[str, torch.Tensor]:
        entropy, shift, variance = self._values.float()
        return {
            "importance_retention": self._curves.float(),
            "attention_entropy": entropy,
            "attention_shift": shift,
            "attention_variance": variance,
        }


def head_retrieval(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Retrieval score of each KV head, fp32 `[H]`, on a text that is repeated once.

    The mean, over the queries of the second copy and the query heads of a KV head, of the attention to the `NEAR`
    tokens on both sides of the query's successor in the first copy. q `[Hq, 2m, D]`, k `[H, 2m, D]`.
    """
    n = k.shape[1]
    m = n // 2
    weights = window_attention(q, k, scale, n, m)[..., :m].mean(1)  # [H, m, m]: second copy to first copy
    near = avg_pool1d(weights, 2 * NEAR + 1, stride=1, padding=NEAR) * (2 * NEAR + 1)
    return near.diagonal(1, -2, -1).mean(-1)

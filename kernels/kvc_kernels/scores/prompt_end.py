"""Attention by the end of a prompt: the last queries of each layer, and the scores that they give all tokens.

Plain torch on every device; nothing here waits for one.
"""

from __future__ import annotations

import torch

from ..common.softmax import MAX_ELEMENTS, query_weights
from ..compact.reference import read_bf16
from ..store import PageStore


class LastQueries:
    """The last w query rows of one prompt in every layer, model dtype `[L, w, Hq, D]`, whatever chunks it comes in."""

    def __init__(self, store: PageStore, query_heads: int, window: int):
        layout = store.layout
        shape = (layout.layers, window, query_heads, layout.head_dim)
        self.rows = torch.zeros(shape, dtype=store.dtype, device=store.device)
        self.scaling = [(1.0, 0.0)] * layout.layers  # scale and logit cap of each layer

    def add(self, layer: int, rows: torch.Tensor, *, scale: float, logit_cap: float) -> None:
        """Append `rows[n, Hq, D]`, the queries of the next n tokens; only the last w rows stay."""
        mine, window = self.rows[layer], self.rows.shape[1]
        new = min(window, len(rows))
        if new < window:
            mine[: window - new] = mine[new:].clone()
        mine[window - new :] = rows[len(rows) - new :]
        self.scaling[layer] = scale, logit_cap


def prompt_scores(
    store: PageStore, layer: int, blocks: torch.Tensor, tokens: int, queries: LastQueries
) -> torch.Tensor:
    """Squared attention that the last w queries of a prompt give its tokens, fp32 `[H, tokens]` (KV-Compress, equations
    8 and 10, squared): the sum over these queries and the query heads of a group of A^2.

    `blocks[nb]`: uncompressed blocks that hold the prompt of `tokens` >= w tokens. Heads are taken a few at a time, so
    that temporaries stay small.
    """
    layout, rows = store.layout, queries.rows[layer]
    scale, logit_cap = queries.scaling[layer]
    window, group = rows.shape[0], rows.shape[1] // layout.heads
    step = max(1, MAX_ELEMENTS // (tokens * max(layout.head_dim, group * window)))
    out = torch.empty((layout.heads, tokens), device=store.device)
    for at in range(0, layout.heads, step):
        end = min(at + step, layout.heads)
        table = store.table[blocks, layer, at:end].transpose(0, 1)  # [heads, nb, E]
        keys = read_bf16(store, table.flatten(0, 1)).keys.reshape(end - at, -1, layout.head_dim)[:, :tokens]
        q = rows[:, at * group : end * group].transpose(0, 1)
        weights = query_weights(q, keys, None, 0, window, scale, logit_cap)
        out[at:end] = weights.square_().sum((1, 2))
    return out

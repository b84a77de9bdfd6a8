"""Slow references of the tokens that a one-shot prompt keeps, in numpy."""

from __future__ import annotations

import numpy as np

from sglang_kvc.cache.one_shot import POOL, REACH, SHARE, SINKS, WINDOW

from .model import H, L, P


def slow_scores(k: np.ndarray, q: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Pooled scores of tokens with keys `k[S, D]` for the queries `q[w, 2, D]` of a head; `seen[w, S]`."""
    scores = np.zeros(len(k))
    for queries, mask in zip(q, seen):
        for query in queries:
            e = np.exp(k @ query * 0.3) * mask
            scores += (e / e.sum()) ** 2
    scores[:SINKS] = 0
    near = [scores[max(0, i - POOL // 2) : i + POOL // 2 + 1].max() for i in range(len(scores))]
    return np.array([max(x, SHARE * max(near[max(0, i - REACH) : i + 1])) for i, x in enumerate(near)])


def slow_kept(
    k: np.ndarray,
    q: np.ndarray,
    pages: int,
    max_pages: int,
    t: int,
    present: dict[tuple[int, int], list[int]] | None = None,
) -> dict[tuple[int, int], list[int]]:
    """The tokens that each head keeps of the full blocks of a prompt with stored keys `k[L, H, S, D]`. After an
    earlier selection, `present` lists the tokens that each head still stores."""
    tokens, entries = 1 + max(present[0, 0]) if present else k.shape[2], []
    full = tokens // P * P
    for layer in range(L):
        for head in range(H):
            positions = np.array(present[layer, head] if present else range(tokens))
            seen = positions <= (tokens - WINDOW + np.arange(WINDOW))[:, None]
            pooled = slow_scores(k[layer, head], q[layer, :, 2 * head : 2 * head + 2], seen)[positions < full]
            positions = positions[positions < full]
            pooled[(positions < SINKS) | (positions >= tokens - WINDOW)] = np.inf
            order = sorted(range(len(positions)), key=lambda i: (-pooled[i], i))
            for j in range(min(max_pages, len(order) // t)):
                page = order[j * t : (j + 1) * t]
                entries.append((j > 0, -pooled[page[0]], (layer, head), j, positions[page].tolist()))
    kept = {(layer, head): [] for layer in range(L) for head in range(H)}
    for _, _, head, _, page in sorted(entries)[:pages]:
        kept[head] += page
    return kept

"""Attention that tokens receive, collected while queries are alive (LeanKV section 4: significance)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..store import PageStore
from .dense import block_scores
from .gather import Part
from .weights import MAX_ELEMENTS, query_weights

REDUCTIONS = ("max", "sum", "squares")


@dataclass(frozen=True)
class Observe:
    """Collect from all new queries of a forward, or from the last `window` of every request's.

    `reduce`: what becomes of the G query heads of a KV head, each with its sum over a request's queries of one forward:
    their maximum, their sum, or the sum of their squares.
    """

    window: int | None = None
    reduce: str = "max"

    def __post_init__(self):
        if self.reduce not in REDUCTIONS:
            raise ValueError(f"{self.reduce!r} is none of {', '.join(REDUCTIONS)}")

    def over_heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[H, G, S]` -> `[H, S]`."""
        if self.reduce == "max":
            return x.amax(1)
        return (x if self.reduce == "sum" else x.square()).sum(1)


def observe_decode(
    store: PageStore, parts: list[Part], weights: tuple[torch.Tensor, ...], observe: Observe
) -> None:
    """Add one query's probabilities, reduced over the query heads of a KV head; `weights` fp32 `[H, G, S]` a part.

    What the query pays its own token, the last one, is left out.
    """
    for i, (part, w) in enumerate(zip(parts, weights)):
        received = observe.over_heads(w)
        if i == len(parts) - 1:
            received[:, -1] = 0
        part.add_scores(store, received)


def observe_extend(
    store: PageStore,
    parts: list[Part],
    sizes: list[int],
    q: torch.Tensor,
    k: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
    logit_cap: float,
    observe: Observe,
) -> None:
    """Add the column sums of the chosen queries' probabilities, reduced over the query heads of a KV head.

    `q[Hq, new, D]`, `k[H, S, D]`, `valid` bool `[H, S]` or None; `sizes` dense tokens of each part. The diagonal (a
    token's attention to itself) is left out.
    """
    new, slots = q.shape[1], k.shape[1]
    first = 0 if observe.window is None else max(0, new - observe.window)
    step = max(1, MAX_ELEMENTS // (slots * q.shape[0]))
    total = torch.zeros((k.shape[0], q.shape[0] // k.shape[0], slots), device=q.device)
    for at in range(first, new, step):
        rows = min(step, new - at)
        w = query_weights(q, k, valid, at, rows, scale, logit_cap)
        w.diagonal(slots - new + at, dim1=-2, dim2=-1).zero_()
        total += w.sum(-2)
    for part, received in zip(parts, observe.over_heads(total).split(sizes, -1)):
        part.add_scores(store, received)


def note_observers(
    store: PageStore,
    row_blocks: torch.Tensor,
    prefix_lens: list[int] | torch.Tensor,
    extend_lens: list[int] | torch.Tensor,
    window: int | None,
) -> None:
    """Once a forward: observed[block] += observing queries that stand behind the block's last token.

    `row_blocks[B, NB]` block ids, `prefix_lens[B]`, `extend_lens[B]` (1 each in decode).
    """
    prefix, new = (torch.as_tensor(x, device=store.device).long().unsqueeze(1) for x in (prefix_lens, extend_lens))
    end = prefix + new
    first = prefix if window is None else torch.maximum(prefix, end - window)
    p = store.layout.block_tokens
    behind = (torch.arange(row_blocks.shape[1], device=store.device) + 1) * p
    count = (end - torch.maximum(first, behind)).clamp_(min=0)
    store.observed.index_add_(0, row_blocks.long().flatten(), count.flatten().to(torch.int32))


def significance(
    store: PageStore, blocks: torch.Tensor, window: int | None = None, rung: int | None = None
) -> torch.Tensor:
    """Mean attention that each token of full `blocks[n]` received, fp32 `[n, L, H, P]` in token order.

    Score over observing queries: those behind the block and, when all queries observe, the P-1-j later ones of the
    block itself. Give `rung` when all blocks share a known one: then nothing is read on the host.
    """
    p = store.layout.block_tokens
    observers = store.observed[blocks].view(-1, 1, 1, 1).float()
    if window is None:
        observers = observers + torch.arange(p - 1, -1, -1, device=store.device)
    return block_scores(store, blocks, rung) / observers.clamp(min=1)

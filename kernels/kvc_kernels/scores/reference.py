"""Attention scores in plain torch: sums of attention probabilities per cached token, collected while queries are
available.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ..common.softmax import MAX_ELEMENTS, query_weights
from ..pages.dense import block_scores
from ..pages.gather import Merge, Part, part_weights, request_parts, valid_mask
from ..store import PageStore
from .recurrence import recurred

REDUCE = ("max", "sum", "squares", "worst", "recurrence")
STRIDES = (1, 2, 4, 8, 16, 32, 64)
DECODE_STRIDE = 32  # one decode step in 32 costs under 3 % of decode time (docs/kernels/compaction.md)


@dataclass(frozen=True)
class ScoreSampling:
    """Rule for collecting attention scores: the queries that count, and the reduction to one number per token and KV
    head.

    Queries: all of a prompt, or its last `window`, however it is cut into forwards, and those of decode steps. A
    query's attention to its own token never counts. With `skip` v, its attention to the v - 1 tokens before it does not
    count either (KV-Compress, equation 19: queries i >= j + v), as far as those are still uncompressed, which a recent
    window of v tokens ensures.

    Each probability is raised to `power` (1 or 2) and summed over queries. The G query heads of a KV head are then
    reduced by `max`, `sum`, or `squares` (the sum of squares). Forwards add up. With `worst` the largest probability of
    all queries, query heads and forwards counts instead (DefensiveKV), and once, whatever the stride.

    With `recurrence` the score is a word of `recurrence.py` (LazyEviction). A query finds a token important if one of
    its G heads pays it at least `alpha`, which no other reduction reads. A prefill counts as its last such query and
    adds no interval, so that chunks do not matter.

    Sampling: only queries whose position i has (i + 1) % s == 0 are used, and each counts s times. s is `stride` in a
    prompt and `decode_stride` during decode. The sequence alone decides which queries count, sums keep their
    expectation, and a block's last token always counts for the block. Both strides are powers of two up to 64, which
    divide every block, and `stride` divides the window. ValueError for other values.
    """

    window: int | None = None
    reduce: str = "max"
    power: int = 1
    skip: int = 0
    stride: int = 1
    decode_stride: int = DECODE_STRIDE
    alpha: float = 0.0

    def __post_init__(self) -> None:
        valid = self.reduce in REDUCE and self.power in (1, 2)
        if not valid or self.skip < 0 or (self.window is not None and self.window < 1):
            raise ValueError(
                f"attention is collected from 1 query or more, to the power 1 or 2, and reduced by {', '.join(REDUCE)}"
            )
        if any(s not in STRIDES for s in (self.stride, self.decode_stride)) or (self.window or 0) % self.stride:
            raise ValueError(
                f"attention is collected from one query in {', '.join(map(str, STRIDES))}, and a window is a multiple "
                "of that stride"
            )
        if (self.reduce == "recurrence") != (0 < self.alpha <= 1):
            raise ValueError("attention is collected with a threshold alpha above 0 and up to 1 for recurrence alone")

    def raised(self, weights: torch.Tensor) -> torch.Tensor:
        """Probabilities to the power, in place if it is not 1."""
        return weights if self.power == 1 else weights.square_()

    def reduced(self, scores: torch.Tensor) -> torch.Tensor:
        """Reduction over the query heads of a KV head: `[H, G, S]` -> `[H, S]`."""
        if self.reduce in ("max", "worst", "recurrence"):
            return scores.amax(1)
        return (scores if self.reduce == "sum" else scores.square()).sum(1)

    @property
    def sums(self) -> bool:
        """Whether the probabilities of several queries add up."""
        return self.reduce not in ("worst", "recurrence")

    def merge(self, decoding: bool) -> Merge | None:
        """New scores from those before a forward and its own; None: their sum."""
        if self.reduce == "recurrence":
            return partial(recurred, timed=decoding)
        return torch.maximum if self.reduce == "worst" else None

    def counted(self, end: int, new: int, prompt: int) -> int:
        """Number of queries that count among the `new` ones of a forward at whose end `end` tokens of a request are
        written. They are its last ones. `prompt`: tokens of the request's whole prompt; later queries all count."""
        return new if self.window is None else max(0, min(new, end - prompt + self.window))

    @property
    def nearest(self) -> int:
        """Number of tokens up to and including a query's own whose probability does not count."""
        return max(1, self.skip)

    def decoding(self, position: int) -> bool:
        """Whether the decode step whose query has position `position` is sampled."""
        return (position + 1) % self.decode_stride == 0


def add_decode_scores(
    store: PageStore, parts: list[Part], weights: tuple[torch.Tensor, ...], sampling: ScoreSampling, tokens: int
) -> None:
    """Add one query's probabilities, reduced according to `sampling`; `weights` fp32 `[H, G, S]` per part, of a query
    at position `tokens` - 1.

    The query's attention to its own token, the last one, does not count.
    """
    for i, (part, w) in enumerate(zip(parts, weights)):
        scores = sampling.reduced(w if sampling.power == 1 else w.square())
        if sampling.sums:
            scores = scores * sampling.decode_stride
        elif sampling.reduce == "recurrence":
            scores = (scores >= sampling.alpha) * float(tokens)
        if i == len(parts) - 1:
            scores[:, -sampling.nearest :] = 0
        part.add_scores(store, scores, sampling.merge(decoding=True))


def add_prefill_scores(
    store: PageStore,
    parts: list[Part],
    sizes: list[int],
    tokens: int,
    q: torch.Tensor,
    k: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
    logit_cap: float,
    sampling: ScoreSampling,
    counted: int,
) -> None:
    """Add the column sums of the last `counted` queries' probabilities (`worst`: keep their maxima; `recurrence`: the
    last important query), reduced over the query heads of a KV head.

    `q[Hq, new, D]`, `k[H, S, D]`, `valid` bool `[H, S]` or None; `sizes`: dense tokens of each part; `tokens`: length
    of the request. The diagonal (a token's attention to itself) and the diagonals below it that `sampling.skip` names
    do not count.
    """
    new, slots = q.shape[1], k.shape[1]
    plain = slots - sizes[-1]  # only the last part, which is uncompressed, is in sequence order, from a block boundary
    offset = tokens - new + 1
    step = max(1, MAX_ELEMENTS // (slots * q.shape[0]))
    total = torch.zeros((k.shape[0], q.shape[0] // k.shape[0], slots), device=q.device)
    for at in range(new - counted, new, step):
        rows = min(step, new - at)
        w = query_weights(q, k, valid, at, rows, scale, logit_cap)
        for back in range(sampling.nearest):
            w[..., plain:].diagonal(sizes[-1] - new + at - back, dim1=-2, dim2=-1).zero_()
        ends = torch.arange(at, at + rows, device=w.device) + offset
        sampled = ends % sampling.stride == 0
        paid = sampling.raised(w[:, :, sampled])
        if sampling.reduce == "recurrence":
            paid = (paid >= sampling.alpha) * ends[sampled, None].float()
        if sampling.sums:
            total += paid.sum(-2)
        elif paid.shape[-2]:
            total = torch.maximum(total, paid.amax(-2))
    reduced = sampling.reduced(total) * (sampling.stride if sampling.sums else 1)
    for part, scores in zip(parts, reduced.split(sizes, -1)):
        part.add_scores(store, scores, sampling.merge(decoding=False))


def collect_decode(
    store: PageStore,
    layer: int,
    q: torch.Tensor,
    row_blocks: torch.Tensor,
    seq_lens: list[int],
    sampling: ScoreSampling,
    *,
    scale: float,
    logit_cap: float = 0.0,
) -> None:
    """Add the attention of a decode step's queries `q[B, Hq, D]` to the tokens' scores, for requests whose step is
    sampled.

    `row_blocks` int64 `[B, NB]`, `seq_lens[B]` with the new token counted.
    """
    p = store.layout.block_tokens
    for i, n in enumerate(seq_lens):
        if sampling.decoding(n - 1):
            blocks = row_blocks[i, : -(-n // p)]
            parts = request_parts(store, layer, blocks, store.format_id[blocks].tolist(), n)
            if parts:
                add_decode_scores(store, parts, part_weights(parts, q[i], scale, logit_cap), sampling, n)


def collect_prefill(
    store: PageStore,
    layer: int,
    q: torch.Tensor,
    row_blocks: torch.Tensor,
    prefix_lens: list[int],
    extend_lens: list[int],
    sampling: ScoreSampling,
    *,
    prompt_lens: list[int] | None = None,
    scale: float,
    logit_cap: float = 0.0,
) -> None:
    """Add the attention of the new queries `q[N, Hq, D]` to the tokens' scores; arguments as in `extend_attention`."""
    p, at = store.layout.block_tokens, 0
    for i, (prefix, new) in enumerate(zip(prefix_lens, extend_lens)):
        end = prefix + new
        counted = sampling.counted(end, new, prompt_lens[i] if prompt_lens else end)
        if not counted:
            at += new
            continue
        blocks = row_blocks[i, : -(-end // p)]
        parts = request_parts(store, layer, blocks, store.format_id[blocks].tolist(), end)
        keys = [part.dense(q.dtype)[0] for part in parts]
        sizes = [k.shape[1] for k in keys]
        query, valid = q[at : at + new].movedim(0, 1), valid_mask(parts, sizes)
        add_prefill_scores(
            store, parts, sizes, end, query, torch.cat(keys, 1), valid, scale, logit_cap, sampling, counted
        )
        at += new


class ReferenceScores:
    """Attention scores in plain torch, behind the interface of `AttentionScores`: `plan` or `plan_decode` once a
    forward, then `add` for each layer."""

    def __init__(
        self, store: PageStore, *, sampling: ScoreSampling, query_heads: int = 0, max_batch: int = 0,
        max_blocks: int = 0
    ):
        """The sizes bound buffers of the kernels; plain torch has none."""
        self.store, self.sampling = store, sampling

    def plan(
        self, row_blocks: torch.Tensor, prefix_lens: list[int], extend_lens: list[int],
        prompt_lens: list[int] | None = None
    ) -> None:
        """A prefill: `row_blocks[B, NB]`, lengths on the host, as in `extend_attention`."""
        self._collect = partial(collect_prefill, prompt_lens=prompt_lens)
        self._lists = row_blocks.long(), prefix_lens, extend_lens

    def plan_decode(self, row_blocks: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """A decode step: `row_blocks[B, >= NB]`, `seq_lens[B]`; the lengths are read on the host."""
        lens = seq_lens.tolist()
        columns = -(-max(lens, default=0) // self.store.layout.block_tokens)
        self._collect, self._lists = collect_decode, (row_blocks[:, :columns].long(), lens)

    def add(self, layer: int, q: torch.Tensor, lse: None = None, *, scale: float, logit_cap: float = 0.0) -> None:
        """Add the attention of the sampled queries of `q[N, Hq, D]` to the scores of all stored tokens."""
        self._collect(self.store, layer, q, *self._lists, self.sampling, scale=scale, logit_cap=logit_cap)


def count_queries(
    store: PageStore,
    row_blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    counted: torch.Tensor | None,
    sampling: ScoreSampling,
) -> None:
    """Update the query counts once per forward: query_counts[block] += counted queries after the block's last token.

    `row_blocks[B, NB]` block ids, `seq_lens[B]` with the new tokens, `counted[B]`: how many of the last ones
    have queries that count (`ScoreSampling.counted`), None in a decode step; all on the store's device. One query per
    stride is sampled and counts for all of them.
    """
    decoding = counted is None
    stride = sampling.decode_stride if decoding else sampling.stride
    end = seq_lens.long().unsqueeze(1)
    first = end - 1 if decoding else end - counted.long().unsqueeze(1)
    p = store.layout.block_tokens
    block_end = (torch.arange(row_blocks.shape[1], device=store.device) + 1) * p
    sampled = (end // stride - torch.maximum(first, block_end) // stride).clamp_(min=0) * stride
    store.query_counts.index_add_(0, row_blocks.long().flatten(), sampled.flatten().to(torch.int32))


def queries_of_tokens(
    store: PageStore, blocks: torch.Tensor, starts: torch.Tensor, prompts: torch.Tensor, sampling: ScoreSampling
) -> torch.Tensor:
    """Counted queries that met each token of full `blocks[n]`, int64 `[n, P]`: those after the block, which
    `query_counts` holds, and the later ones of the block itself, which follow from positions.

    `starts[n]`: position of each block's first token. `prompts[n]`: tokens of the whole prompt of the request that
    wrote the block; its decode queries begin there.
    """
    p = store.layout.block_tokens
    first, prompt = starts.long().unsqueeze(1), prompts.long().unsqueeze(1)
    later, end = first + torch.arange(p, device=first.device) + sampling.nearest, first + p
    begin = later if sampling.window is None else torch.maximum(later, prompt - sampling.window)
    own = _sampled(begin, torch.minimum(end, prompt), sampling.stride)
    own += _sampled(torch.maximum(later, prompt), end, sampling.decode_stride)
    return store.query_counts[blocks].long().unsqueeze(1) + own


def _sampled(begin: torch.Tensor, end: torch.Tensor, stride: int) -> torch.Tensor:
    """Number of queries at positions begin .. end - 1, counted by one in `stride`."""
    return (end // stride - begin // stride).clamp_(min=0) * stride


def mean_attention_scores(
    store: PageStore,
    blocks: torch.Tensor,
    starts: torch.Tensor,
    prompts: torch.Tensor,
    sampling: ScoreSampling,
    format_id: int | None = None,
) -> torch.Tensor:
    """Mean attention score of each token of full `blocks[n]`, fp32 `[n, L, H, P]` in token order: its score divided by
    `queries_of_tokens`, or by 1 if no query met it. A known common `format_id` of all blocks avoids the read on the
    host."""
    num_queries = queries_of_tokens(store, blocks, starts, prompts, sampling)[:, None, None].float()
    return block_scores(store, blocks, format_id) / num_queries.clamp(min=1)

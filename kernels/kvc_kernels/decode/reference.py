"""Decode attention over pages: the plain-torch reference of the kernels.

Requests are taken one by one, so an answer does not depend on its batch. Packed blocks are multiplied as codes.
"""

from __future__ import annotations

import torch

from ..common.dense_attention import explicit_attention, sdpa
from ..pages.gather import PlainPart, part_weights, request_parts, sequence_rows
from ..scores.reference import ScoreSampling, collect_decode
from ..store import PageStore


def decode_attention(
    store: PageStore,
    layer: int,
    q: torch.Tensor,
    row_blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sampling: ScoreSampling | None = None,
    seq_lens_cpu: list[int] | None = None,
    window: int = -1,
) -> torch.Tensor:
    """One query per request: `q[B, Hq, D]` against `row_blocks[B, NB]` (block ids) -> `[B, Hq, D]` in q's dtype.

    `seq_lens[B]` counts the new token, whose K/V were appended before. `seq_lens_cpu` is the same as a list, which
    saves a copy to the host. `scale` multiplies the logits, then `logit_cap` > 0 caps them as cap * tanh(x / cap). With
    `sampling` the probabilities of the steps that it samples are added to the tokens' scores. `window` >= 0: a query
    sees its own token and `window` tokens before it; for blocks that keep every token, and without `sampling`.
    """
    lens = seq_lens.tolist() if seq_lens_cpu is None else seq_lens_cpu
    p = store.layout.block_tokens
    row_blocks = row_blocks.long()
    row_format_ids = store.format_id[row_blocks].tolist()
    out = torch.empty_like(q)
    for i, n in enumerate(lens):
        num_blocks = -(-n // p)
        blocks, format_ids = row_blocks[i, :num_blocks], row_format_ids[i][:num_blocks]
        if window >= 0:
            first = max(0, n - 1 - window) // p
            k, v = sequence_rows(store, layer, blocks[first:], format_ids[first:], n - first * p)
            qkv = q[i].unsqueeze(1), k[:, -window - 1 :], v[:, -window - 1 :]
            o = explicit_attention(*qkv, None, scale, logit_cap) if logit_cap > 0 else sdpa(*qkv, scale=scale)
            out[i] = o[:, 0]
            continue
        parts = request_parts(store, layer, blocks, format_ids, n)
        if not parts:  # every token of every head is pruned
            out[i] = 0
        elif len(parts) == 1 and isinstance(parts[0], PlainPart) and logit_cap <= 0:
            out[i] = sdpa(q[i].unsqueeze(1), *parts[0].dense(q.dtype), scale=scale)[:, 0]
        else:
            weights = part_weights(parts, q[i], scale, logit_cap)
            o = torch.stack([part.weigh(w) for part, w in zip(parts, weights)]).sum(0)
            out[i] = o.view(-1, q.shape[-1]).to(q.dtype)
    if sampling is not None and window < 0:
        collect_decode(store, layer, q, row_blocks, lens, sampling, scale=scale, logit_cap=logit_cap)
    return out


class ReferenceDecode:
    """`decode_attention` behind the interface of `DecodeAttention`: `plan` once a step, `run` for each layer."""

    def __init__(
        self, store: PageStore, *, max_batch: int = 0, max_blocks: int = 0, query_heads: int = 0, window: int = -1
    ):
        """`window` as in `decode_attention`. The sizes bound buffers of the kernels; plain torch has none."""
        self.store, self.window = store, window

    def plan(self, row_blocks: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """`row_blocks[B, >= NB]`, `seq_lens[B]`; the lengths are read on the host."""
        self.lens = seq_lens.tolist()
        columns = -(-max(self.lens, default=0) // self.store.layout.block_tokens)
        self.row_blocks, self.seq_lens = row_blocks[:, :columns], seq_lens

    def run(
        self, layer: int, q: torch.Tensor, *, scale: float, logit_cap: float = 0.0, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`q[B, Hq, D]` -> `[B, Hq, D]`. `lse` stays unwritten: `ReferenceScores` needs none."""
        return decode_attention(
            self.store,
            layer,
            q,
            self.row_blocks,
            self.seq_lens,
            scale=scale,
            logit_cap=logit_cap,
            seq_lens_cpu=self.lens,
            window=self.window,
        )

"""Prefill of few new tokens per request by the decode kernel, with several queries per request.

The last token of a cached prompt and a short speculative verify read a long prefix for few query rows. Like decode they
are bound by memory bandwidth, so the decode kernel serves them: it unpacks codes once for all rows of a KV head (new
token x query head of its group) and splits the prefix over all CTAs. One token per request is a decode step.
"""

from __future__ import annotations

import torch

from ..common.upload import upload
from ..decode.attention import DecodeAttention
from ..store import PageStore

TIERS = (8, 16)  # query rows of a KV head per CTA; with more, a warp has too few registers
MAX_REQUESTS = 32


class FewTokenExtend:
    """`plan` once a forward that `fits`, then `run` for each layer, after its new rows were appended to their pages."""

    def __init__(self, store: PageStore, *, query_heads: int, max_blocks: int):
        self.store = store
        self.group = query_heads // store.layout.heads
        # By query rows; 0: one token per request. Made at once, so that no forward compiles, allocates or waits.
        self._operations = {
            rows: DecodeAttention(
                store, max_batch=MAX_REQUESTS, max_blocks=max_blocks, query_heads=query_heads, query_rows=rows
            )
            for rows in (0, *TIERS)
            if rows == 0 or 2 * self.group <= rows
        }

    def fits(self, prefix_lens: list[int], extend_lens: list[int]) -> bool:
        """Whether every request has few new tokens, all in one block, and some request has a prefix."""
        p = self.store.layout.block_tokens
        longest = max(extend_lens, default=0)
        return (
            (longest == 1 or 1 < longest * self.group <= TIERS[-1])
            and len(extend_lens) <= MAX_REQUESTS
            and any(prefix_lens)
            and all(n and before % p + n <= p for before, n in zip(prefix_lens, extend_lens))
        )

    def plan(self, row_blocks: torch.Tensor, prefix_lens: list[int], extend_lens: list[int]) -> None:
        """`row_blocks` int32 `[B, NB]` on the device, lengths on the host. Does not sync."""
        starts, request_of_query = [0], []
        for request, n in enumerate(extend_lens):
            starts.append(starts[-1] + n)
            request_of_query += [request] * n
        lens = [before + n for before, n in zip(prefix_lens, extend_lens)]
        lists = upload(lens + starts + request_of_query, self.store.device)
        lens, starts, owners = lists.split((len(lens), len(starts), len(request_of_query)))
        query_rows = max(extend_lens) * self.group
        single = len(request_of_query) == len(extend_lens)
        self._operation = self._operations[0 if single else min(rows for rows in TIERS if rows >= query_rows)]
        self._operation.plan(row_blocks, lens, starts, owners)

    def run(self, layer: int, q, out, lse, *, scale: float, logit_cap: float) -> None:
        """`q[N, Hq, D]` -> `out`, and the log-sum-exp to base 2 to `lse` fp32 `[N, Hq]` unless it is None."""
        self._operation.run(layer, q, scale=scale, logit_cap=logit_cap, out=out, lse=lse)

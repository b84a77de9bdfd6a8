"""Extend attention with few new tokens per request: the decode kernel, with several queries per request.

A tool result of a few tokens, the last token of a cached prompt and a speculative verify read a long prefix for few
query rows. They are bound by bytes, as decode is, so the decode kernel serves them: codes are unpacked once for all
rows of a KV head (new token x query head of its group), and the prefix is split over all programs.
"""

from __future__ import annotations

import torch

from ..store import PageStore
from .decode_attention_triton import DecodeAttention, Tuning

# Query rows of a KV head -> launch parameters. More rows need more registers, hence more warps.
TUNINGS = {rows: Tuning("triton", warps, plain_tile=16 * warps) for rows, warps in ((8, 1), (16, 1), (32, 2), (64, 4))}
MOST_REQUESTS = 32


class FewTokenExtend:
    """`plan` once a forward that `fits`, then `run` for each layer, after its new rows were appended to their pages."""

    def __init__(self, store: PageStore, *, query_heads: int, max_blocks: int):
        self.store, self.query_heads, self.max_blocks = store, query_heads, max_blocks
        self.group = query_heads // store.layout.heads
        # A warp takes 16 tokens of a tile, and a tile lies in one block.
        self.most_rows = max(rows for rows, t in TUNINGS.items() if 16 * t.warps <= store.layout.block_tokens)
        self._operations: dict[int, DecodeAttention] = {}

    def fits(self, prefix_lens: list[int], extend_lens: list[int]) -> bool:
        """Whether every request has few new tokens, all in one block, and some request has a prefix."""
        p = self.store.layout.block_tokens
        return (
            0 < max(extend_lens, default=0) * self.group <= self.most_rows
            and len(extend_lens) <= MOST_REQUESTS
            and any(prefix_lens)
            and all(n and before % p + n <= p for before, n in zip(prefix_lens, extend_lens))
        )

    def plan(self, row_blocks: torch.Tensor, prefix_lens: list[int], extend_lens: list[int]) -> None:
        """`row_blocks` int32 `[B, NB]` on the device, lengths on the host. Does not sync."""
        need = max(extend_lens) * self.group
        self._operation = self._sized(min(rows for rows in TUNINGS if rows >= need))
        starts, owners = [0], []
        for request, n in enumerate(extend_lens):
            starts.append(starts[-1] + n)
            owners += [request] * n
        lens = [before + n for before, n in zip(prefix_lens, extend_lens)]
        host = torch.tensor(lens + starts + owners, dtype=torch.int32)
        device = self.store.device
        whole = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
        lens, starts, owners = whole.split((len(lens), len(starts), len(owners)))
        self._operation.plan(row_blocks, lens, starts, owners)

    def _sized(self, rows: int) -> DecodeAttention:
        if rows not in self._operations:
            self._operations[rows] = DecodeAttention(
                self.store, max_batch=MOST_REQUESTS, max_blocks=self.max_blocks, query_heads=self.query_heads,
                tuning=TUNINGS[rows], query_rows=rows,
            )  # fmt: skip
        return self._operations[rows]

    def run(self, layer: int, q, out, lse, *, scale: float, logit_cap: float) -> None:
        """`q[N, Hq, D]` -> `out`, and the log-sum-exp to base 2 to `lse` fp32 `[N, Hq]` unless it is None."""
        self._operation.run(layer, q, scale=scale, logit_cap=logit_cap, out=out, lse=lse)

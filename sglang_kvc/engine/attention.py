"""The attention of one server: appends new tokens to their pages and attends to them, layer by layer.

Follows FlashInfer's plan/run split: `plan_*` once a forward, `decode` or `extend` once a layer. The operations choose
plain torch or kernels by the store's device (`kvc_kernels.ops`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from kvc_kernels import ops
from kvc_kernels.formats import Format
from kvc_kernels.store import PageStore


@dataclass
class Snapshot:
    """The request rows and lengths of one forward, shared by all layers.

    Taken once, so that no kernel reads `req_to_token` while the scheduler may already be rewriting the row of a
    finished request. B requests, N new tokens, NB blocks of the longest request.

    `row_blocks` `[B, NB]`: block table. `seq_lens` `[B]`: lengths with the new tokens counted. `write_blocks` and
    `write_offsets` `[N]`: block of each new token and its place there. The `_cpu` lists hold lengths on the host;
    `prefix_lens_cpu` and `extend_lens_cpu` are None in a decode step. `fake_quant_format[B]`: format in which queries
    of a request see its full blocks fake-quantized, None for exact. If the list itself is None, all requests have the
    server's format.
    `waiting_cpu[B]`: indices of the full blocks of each prefix that are still uncompressed; None if no prefix has any.
    `whole`: packed blocks hold P tokens each, unless the policy drops some. `last_queries`: query rows that one-shot
    prompts store, and their destination. `prompt_lens_cpu[B]`: tokens of each whole prompt, of which this forward may
    run a chunk; None if all prompts end here.

    `row_blocks` and the lengths do not include the gaps of one-shot prompts.
    """

    row_blocks: torch.Tensor
    seq_lens: torch.Tensor
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    seq_lens_cpu: list[int]
    prefix_lens_cpu: list[int] | None = None
    extend_lens_cpu: list[int] | None = None
    fake_quant_format: list[Format | None] | None = None
    waiting_cpu: list[list[int]] | None = None
    whole: bool = True
    last_queries: Sequence[tuple[slice, ops.LastQueries]] = ()
    prompt_lens_cpu: list[int] | None = None


class Attention:
    """Planned operations over static buffers, so that a decode step can be captured in a CUDA graph.

    With `sampling`, attention scores are collected after each layer's attention, from its log-sum-exp.
    """

    def __init__(
        self,
        store: PageStore,
        sampling: ops.ScoreSampling | None,
        fake_quant_format: Format | None = None,
        *,
        query_heads: int,
        max_batch: int,
        max_blocks: int,
        windows: Collection[int] = (),
    ):
        """`fake_quant_format`: format in which queries of a prompt see full blocks before their own fake-quantized,
        None for exact. `max_batch` requests of `max_blocks` blocks each. `windows`: sliding windows of the model's
        layers, without -1; each has its own plan."""
        self.store, self.sampling, self.fake_quant_format = store, sampling, fake_quant_format
        self.append = ops.LayerAppend(store)
        self.decoders = {
            window: ops.DecodeAttention(
                store, max_batch=max_batch, max_blocks=max_blocks, query_heads=query_heads, window=window
            )
            for window in (-1, *windows)
        }
        full = ops.ExtendAttention(
            store, query_heads=query_heads, max_blocks=max_blocks, fake_quant_format=fake_quant_format, appended=True
        )
        self.extenders = {-1: full} | {
            window: ops.WindowedExtend(
                store, query_heads=query_heads, window=window, fake_quant_format=fake_quant_format, ragged=full.ragged
            )
            for window in windows
        }
        self.scores = self.lse = None
        if sampling is not None:
            self.scores = ops.AttentionScores(
                store, query_heads=query_heads, sampling=sampling, max_batch=max_batch, max_blocks=max_blocks
            )
            self.lse = torch.empty((max_batch, query_heads), dtype=torch.float32, device=store.device)
        self.rows = torch.zeros((max_batch, max_blocks), dtype=torch.int32, device=store.device)
        self.lens = torch.ones(max_batch, dtype=torch.int32, device=store.device)
        self.write = torch.zeros((2, max_batch), dtype=torch.int64, device=store.device)

    def plan_decode(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: list[int],
        gaps: ops.RowGaps | None = None,
    ) -> Snapshot:
        """Copy rows `req_pool_indices[B]` of `req_to_token[R, C]` into the static buffers, without their gaps, and cut
        the step into work items. Does not wait for a GPU."""
        n, columns = len(seq_lens), -(-max(seq_lens_cpu) // self.store.layout.block_tokens)
        ops.decode_snapshot(
            self.store, req_to_token, req_pool_indices, seq_lens, self.rows, self.lens, self.write, columns=columns
        )
        # Full rows, because a captured step takes sizes from their shape, which must not depend on the lengths.
        rows, lens = self.rows[:n], self.lens[:n]
        if gaps is not None and gaps.rows:
            lens -= gaps.close_up(rows[:, :columns], req_pool_indices) * self.store.layout.block_tokens
        for decoder in self.decoders.values():
            decoder.plan(rows, lens)
        if self.scores is not None:
            self.scores.plan_decode(rows, lens)
        self.snap = Snapshot(rows[:, :columns], lens, self.write[0, :n], self.write[1, :n], seq_lens_cpu)
        self.append.plan(self.snap.write_blocks, self.snap.write_offsets)
        return self.snap

    def plan_extend(self, snap: Snapshot) -> None:
        """Cut a prefill, with or without cached prefixes, into work items. Does not wait for a GPU."""
        self.snap, rows = snap, snap.row_blocks.int()
        lens = snap.prefix_lens_cpu, snap.extend_lens_cpu
        self.append.plan(snap.write_blocks, snap.write_offsets)
        for extender in self.extenders.values():
            extender.plan(rows, *lens, snap.waiting_cpu, snap.fake_quant_format, snap.whole)
        if self.scores is not None:
            self.scores.plan(rows, *lens, snap.prompt_lens_cpu)

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        logit_cap: float,
        window: int = -1,
    ) -> torch.Tensor:
        """One layer of the planned decode step: `q[B, Hq, D]`, new `k`, `v` `[B, H, D]` -> `[B, Hq, D]`.

        `window` >= 0: a query sees its own token and `window` tokens before it; -1: all.
        """
        self.append.run(layer, k, v)
        if self.scores is None or window >= 0:
            return self.decoders[window].run(layer, q, scale=scale, logit_cap=logit_cap)
        lse = self.lse[: len(q)]
        out = self.decoders[window].run(layer, q, scale=scale, logit_cap=logit_cap, lse=lse)
        self.scores.add(layer, q, lse, scale=scale, logit_cap=logit_cap)
        return out

    def extend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        logit_cap: float,
        window: int = -1,
    ) -> torch.Tensor:
        """One layer of the planned prefill: `q[N, Hq, D]`, new `k`, `v` `[N, H, D]` -> `[N, Hq, D]`."""
        snap, extender = self.snap, self.extenders[window]
        self.append.run(layer, k, v)
        for rows, queries in snap.last_queries:
            queries.add(layer, q[rows], scale=scale, logit_cap=logit_cap)
        if self.scores is None or window >= 0:
            return extender.run(layer, q, k, v, scale=scale, logit_cap=logit_cap)
        out, lse = extender.run(layer, q, k, v, scale=scale, logit_cap=logit_cap, return_lse=True)
        self.scores.add(layer, q, lse, scale=scale, logit_cap=logit_cap)
        return out

    def note(self, snap: Snapshot, new: torch.Tensor | None) -> None:
        """Add this forward's queries to the query count of every block before them; `new[B]`: new tokens of each
        request, None in a decode step. A sampling with a window counts fewer, which are uploaded. Does not wait for a
        GPU."""
        if new is not None and self.sampling.window is not None:
            ends = snap.seq_lens_cpu
            counted = map(self.sampling.counted, ends, snap.extend_lens_cpu, snap.prompt_lens_cpu or ends)
            new = self.store.upload(torch.tensor(list(counted), dtype=torch.int32))
        ops.count_queries(self.store, snap.row_blocks, snap.seq_lens, new, self.sampling)

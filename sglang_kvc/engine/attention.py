"""What the backend runs in a layer, by device: the torch references on the CPU, the Triton kernels on a GPU.

Both follow FlashInfer's plan/run split: `plan_*` once a forward, `decode`/`extend` once a layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from kvc_kernels import ops
from kvc_kernels.layout import Format
from kvc_kernels.store import PageStore


@dataclass
class Snapshot:
    """What all layers of one forward use; taken once, so that no kernel reads `req_to_token` while the scheduler may
    already be rewriting a finished request's row for another.

    `row_blocks` `[B, NB]` block ids of each request, `seq_lens` `[B]` with the new tokens counted; `write_blocks` and
    `write_offsets` `[N]` where each new token goes. The `_cpu` lists say the same without a sync; those behind the
    first are None while decoding. `stored_as[B]`: as what each request's full blocks are seen by queries behind them,
    None as they are; no list at all: as the server's policy has it. `waiting_cpu[B]`: places of the full blocks of each
    prefix that are uncompressed as yet; None where there are none or nobody asks.
    """

    row_blocks: torch.Tensor
    seq_lens: torch.Tensor
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    seq_lens_cpu: list[int]
    prefix_lens_cpu: list[int] | None = None
    extend_lens_cpu: list[int] | None = None
    stored_as: list[Format | None] | None = None
    waiting_cpu: list[list[int]] | None = None


class Attention(Protocol):
    """`q[N, Hq, D]`, `k` and `v` `[N, H, D]` -> `[N, Hq, D]`; new rows are written to their pages on the way.

    `window` >= 0: a query sees its own token and so many before it; -1: all.

    `stored_as`: as what a prompt's queries see full blocks before their own by the server's policy, None where they see
    them as they are.
    """

    stored_as: Format | None

    def plan_decode(
        self,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: list[int],
    ) -> Snapshot:
        """Take the snapshot of a decode step: rows `req_pool_indices[B]` of `req_to_token[R, C]`."""
        ...

    def decode(self, layer: int, q, k, v, *, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor: ...

    def plan_extend(self, snap: Snapshot) -> None: ...

    def extend(self, layer: int, q, k, v, *, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor: ...

    def note(self, snap: Snapshot, new: torch.Tensor | None) -> None:
        """Count this forward's observers of every block; `new[B]` tokens of each request, None while decoding."""
        ...


class TorchAttention:
    """Plain torch, request by request. The reference, and what serves without a GPU."""

    append = staticmethod(ops.append)
    copy_step = staticmethod(ops.decode_snapshot)

    def __init__(self, store: PageStore, observe: ops.Observe | None, stored_as: Format | None = None):
        self.store, self.observe, self.stored_as = store, observe, stored_as

    def _buffers(self, requests: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where a decode step is copied to: rows, lengths and write targets as `ops.decode_snapshot` has them."""
        device = self.store.device
        return (
            torch.empty((requests, blocks), dtype=torch.int32, device=device),
            torch.empty(requests, dtype=torch.int32, device=device),
            torch.empty((2, requests), dtype=torch.int64, device=device),
        )

    def plan_decode(self, req_to_token, req_pool_indices, seq_lens, seq_lens_cpu) -> Snapshot:
        n, p = len(seq_lens), self.store.layout.block_tokens
        columns = -(-max(seq_lens_cpu) // p)
        rows, lens, write = buffers = self._buffers(n, columns)
        self.copy_step(req_to_token, req_pool_indices, seq_lens, *buffers, block_tokens=p, columns=columns)
        self.snap = Snapshot(rows[:n, :columns], lens[:n], write[0, :n], write[1, :n], seq_lens_cpu)
        return self.snap

    def plan_extend(self, snap: Snapshot) -> None:
        self.snap = snap

    def _append(self, layer: int, k, v) -> None:
        self.append(self.store, layer, self.snap.write_blocks, self.snap.write_offsets, k, v)

    def decode(self, layer: int, q, k, v, *, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor:
        self._append(layer, k, v)
        snap = self.snap
        return ops.decode_attention(
            self.store,
            layer,
            q,
            snap.row_blocks,
            snap.seq_lens,
            scale=scale,
            logit_cap=logit_cap,
            observe=self.observe,
            seq_lens_cpu=snap.seq_lens_cpu,
            window=window,
        )

    def extend(self, layer: int, q, k, v, *, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor:
        self._append(layer, k, v)
        snap = self.snap
        return ops.extend_attention(
            self.store,
            layer,
            q,
            snap.row_blocks,
            snap.prefix_lens_cpu,
            snap.extend_lens_cpu,
            scale=scale,
            logit_cap=logit_cap,
            observe=self.observe,
            stored_as=self._stored_as(),
            window=window,
        )

    def note(self, snap: Snapshot, new: torch.Tensor | None) -> None:
        seen = self.observe
        stride = seen.decode_stride if new is None else seen.stride
        new = torch.ones_like(snap.seq_lens) if new is None else new
        ops.note_observers(self.store, snap.row_blocks, snap.seq_lens - new, new, seen.window, stride)

    def _stored_as(self) -> list[Format | None]:
        """For each request of this forward: as what its full blocks are seen."""
        return self.snap.stored_as or [self.stored_as] * len(self.snap.seq_lens_cpu)


class TritonAttention(TorchAttention):
    """Triton kernels over static buffers: a decode step can be captured in a CUDA graph.

    With `observe`, a second launch a layer collects the attention that stored tokens receive, from the first one's
    log-sum-exp.
    """

    def __init__(
        self,
        store: PageStore,
        observe: ops.Observe | None,
        stored_as: Format | None = None,
        *,
        query_heads: int,
        max_batch: int,
        max_blocks: int,
        windows: Collection[int] = (),
    ):
        """`windows`: those of the model's layers, without -1; each has a plan of its own."""
        super().__init__(store, observe, stored_as)
        from kvc_kernels.append.kernel import append_triton
        from kvc_kernels.decode.attention import DecodeAttention
        from kvc_kernels.decode.snapshot_kernel import decode_snapshot_triton
        from kvc_kernels.extend.attention import ExtendAttention
        from kvc_kernels.extend.windowed import WindowedExtend
        from kvc_kernels.scores.count_kernel import note_observers_triton
        from kvc_kernels.scores.prefill_kernel import ReceivedAttention

        device = store.device
        self.append, self.copy_step = append_triton, decode_snapshot_triton
        self.note_observers = note_observers_triton
        self.decoders = {
            w: DecodeAttention(store, max_batch=max_batch, max_blocks=max_blocks, query_heads=query_heads, window=w)
            for w in (-1, *windows)
        }
        self.extender = ExtendAttention(
            store, query_heads=query_heads, max_blocks=max_blocks, stored_as=stored_as, appended=True
        )
        self.windowed = {
            w: WindowedExtend(
                store, query_heads=query_heads, window=w, stored_as=stored_as, ragged=self.extender.ragged
            )
            for w in windows
        }
        self.rows = torch.zeros((max_batch, max_blocks), dtype=torch.int32, device=device)
        self.lens = torch.ones(max_batch, dtype=torch.int32, device=device)
        self.write = torch.zeros((2, max_batch), dtype=torch.int64, device=device)
        self.received = None
        if observe is not None:
            self.received = ReceivedAttention(
                store, query_heads=query_heads, observe=observe, max_batch=max_batch, max_blocks=max_blocks
            )
            self.lse = torch.empty((max_batch, query_heads), dtype=torch.float32, device=device)

    def _buffers(self, requests: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.rows, self.lens, self.write

    def plan_decode(self, req_to_token, req_pool_indices, seq_lens, seq_lens_cpu) -> Snapshot:
        """Copy the step into the static buffers and cut it into work items; nothing here waits for the device."""
        snap = super().plan_decode(req_to_token, req_pool_indices, seq_lens, seq_lens_cpu)
        # Whole rows: what a captured step takes from their shape must not depend on the lengths.
        rows = self.rows[: len(seq_lens)]
        for decoder in self.decoders.values():
            decoder.plan(rows, snap.seq_lens)
        if self.received is not None:
            self.received.plan_decode(rows, snap.seq_lens)
        return snap

    def decode(self, layer: int, q, k, v, *, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor:
        self._append(layer, k, v)
        decoder = self.decoders[window]
        if self.received is None:
            return decoder.run(layer, q, scale=scale, logit_cap=logit_cap)
        lse = self.lse[: len(q)]
        out = decoder.run(layer, q, scale=scale, logit_cap=logit_cap, lse=lse)
        self.received.add(layer, q, lse, scale=scale, logit_cap=logit_cap)
        return out

    def plan_extend(self, snap: Snapshot) -> None:
        self.snap, rows = snap, snap.row_blocks.int()
        # One format is staged. Requests at another level see their own new blocks as they are.
        exact = [f is not self.stored_as for f in self._stored_as()]
        for extender in (self.extender, *self.windowed.values()):
            extender.plan(  # type: ignore[attr-defined]
                rows, snap.prefix_lens_cpu, snap.extend_lens_cpu, snap.waiting_cpu, exact if any(exact) else None
            )
        if self.received is not None:
            self.received.plan(rows, snap.prefix_lens_cpu, snap.extend_lens_cpu)

    def extend(self, layer: int, q, k, v, *, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor:
        self._append(layer, k, v)
        if window >= 0:
            return self.windowed[window].run(layer, q, scale=scale, logit_cap=logit_cap)
        if self.received is None:
            return self.extender.run(layer, q, k, v, scale=scale, logit_cap=logit_cap)
        out, lse = self.extender.run(layer, q, k, v, scale=scale, logit_cap=logit_cap, return_lse=True)
        self.received.add(layer, q, lse, scale=scale, logit_cap=logit_cap)
        return out

    def note(self, snap: Snapshot, new: torch.Tensor | None) -> None:
        self.note_observers(self.store, snap.row_blocks, snap.seq_lens, new, self.observe)


def make_attention(
    store: PageStore,
    observe: ops.Observe | None,
    stored_as: Format | None,
    *,
    query_heads: int,
    max_batch: int,
    max_blocks: int,
    windows: Collection[int] = (),
) -> Attention:
    """`windows`: of the layers that have one, as they give it to `decode` and `extend`."""
    if store.device.type != "cuda":
        return TorchAttention(store, observe, stored_as)
    return TritonAttention(
        store, observe, stored_as, query_heads=query_heads, max_batch=max_batch, max_blocks=max_blocks, windows=windows
    )

"""Device side of the cache: runs queued operations on the page store and starts the copy of page counts to the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.store import PageStore

from ..policies import Evidence, Policy
from .one_shot import POOL, REACH, SHARE, SINKS
from .op_queue import Compact, EndGap, Load, Op, PackPrompt, Release, Save, Take, Thin

if TYPE_CHECKING:
    from .transfers import Transfers

RANKED_SCORES = 1 << 22  # maximum number of scores that one set of launches ranks, unless a single layer has more


@dataclass
class PendingCounts:
    """Page counts of a compaction whose outcome depends on the data, on their way to the host.

    step: the forward at whose start the compaction ran.
    format_id: the blocks' format after it. They may have been moved again since.
    blocks, generation: int64, int32 `[n]`.
    counts: pages per block `[n]`; on a GPU pinned host memory, valid once forward `step` has finished.
    """

    step: int
    format_id: int
    blocks: np.ndarray
    generation: np.ndarray
    counts: torch.Tensor


def _equal_groups(groups: np.ndarray, wave: int) -> Iterator[tuple[int, int, int]]:
    """Equal neighbors among `groups[g, 2]` that fit a wave together, at least one: pages of each, blocks of all, and
    their number. Answers of the same length are planned by the same launches."""
    for (blocks, pages), equal in itertools.groupby(groups.tolist()):
        left = len(list(equal))
        while left:
            number = min(left, max(1, wave // blocks))
            yield pages, number * blocks, number
            left -= number


class PageOps:
    """Operations on `store`. `reserve_pages`: pages that a compaction may draw on."""

    def __init__(self, store: PageStore, policy: Policy, reserve_pages: int):
        self.store, self.policy, self.reserve_pages = store, policy, reserve_pages
        self._sampling = policy.score_sampling
        self.transfers: Transfers | None = None  # None without a host tier
        self.gaps = ops.RowGaps(0, store.device)  # replaced by one with the rows of `req_to_token`

    def run(self, op: Op, step: int) -> list[PendingCounts]:
        """Launch `op` at the start of forward `step`."""
        if isinstance(op, Take):
            ops.take_bf16(self.store, self.store.upload(op.blocks))
        elif isinstance(op, Release):
            ops.release(self.store, self.store.upload(op.blocks))
        elif isinstance(op, Save):
            self.transfers.save(op.blocks, op.units)
        elif isinstance(op, Load):
            self.transfers.load(op.blocks, op.format_id, op.units, op.loading)
        elif isinstance(op, PackPrompt):
            self._pack_prompt(op)
        elif isinstance(op, Thin):
            self._thin(op)
        elif isinstance(op, EndGap):
            self.gaps.close(op.row)
        else:
            return self._compact(op, step)
        return []

    def _pack_prompt(self, op: PackPrompt) -> None:
        """Rank the tokens of each head, let the pages of all heads compete, and pack the winners."""
        store, layout, plan, p = self.store, self.store.layout, op.plan, self.store.layout.block_tokens
        blocks, page_tokens = store.upload(op.blocks), layout.page(store.block_formats[op.to_format].high).tokens
        best, worth = self._token_table(plan.kept_blocks * p), []
        for rows, pooled in self._pooled_scores(op, blocks, 0, op.full * p):
            best[rows], page_worth = ops.ranked_tokens(pooled, best.shape[1], page_tokens, SINKS, plan.last)
            worth.append(page_worth)
        pages = ops.sequence_quota(torch.cat(worth), plan.pages, plan.floor).view(layout.layers, layout.heads)
        ops.pack_kept(
            store, blocks[: op.full], plan.kept_blocks, op.to_format, best.unflatten(0, pages.shape), pages,
            packed=op.packed, into=store.upload(op.into),
        )  # fmt: skip
        self.gaps.open(op.row, plan.kept_blocks, op.gap)

    def _thin(self, op: Thin) -> None:
        """Let every head keep as many of its best tokens as the blocks `into` hold, by the attention of the probe. The
        first tokens of the prompt always stay, for the final competition."""
        store, layout, p = self.store, self.store.layout, self.store.layout.block_tokens
        blocks, into = store.upload(op.blocks), store.upload(op.into)
        fmt, end, best = store.block_formats[op.to_format].high, op.packed + op.count, self._token_table(len(into) * p)
        for rows, pooled in self._pooled_scores(op, blocks, op.packed * p, end * p):
            best[rows] = ops.ranked_tokens(pooled, best.shape[1], p, 0 if op.packed else SINKS, 0)[0]
        pages = torch.full((layout.layers, layout.heads), len(into) * layout.pages_for(fmt, p), device=store.device)
        ops.pack_kept(
            store, blocks[op.packed : end], len(into), op.to_format, best.unflatten(0, pages.shape), pages, into=into
        )
        self.gaps.open(op.row, op.packed + len(into), op.gap)

    def _token_table(self, tokens: int) -> torch.Tensor:
        """Memory for the ranked tokens of all heads, int32 `[L * H, tokens]`."""
        layout = self.store.layout
        return torch.empty((layout.layers * layout.heads, tokens), dtype=torch.int32, device=self.store.device)

    def _pooled_scores(
        self, op: PackPrompt | Thin, blocks: torch.Tensor, first: int, end: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Scores `[n * H, end - first]` of the tokens first .. end - 1 with those of their neighbors, for n layers at a
        time, and the rows of these layers' heads among all. Sinks are always kept, and the attention they draw says
        nothing about the tokens after them."""
        heads = self.store.layout.heads
        for layers in op.queries.groups(max(1, RANKED_SCORES // (heads * op.tokens))):
            scores = ops.prompt_scores(
                self.store, layers, blocks, op.tokens, op.queries, packed=op.packed, format_id=op.to_format
            ).flatten(0, 1)
            scores[:, :SINKS].zero_()
            pooled = ops.carry_scores(ops.pool_scores(scores, POOL), REACH, SHARE)
            del scores  # not needed while this group is ranked
            yield slice(layers.start * heads, layers.stop * heads), pooled[:, first:end]

    def _compact(self, op: Compact, step: int) -> list[PendingCounts]:
        """Plan and move, in waves whose destination pages fit the reserve."""
        target, pending = self.store.block_formats[op.to_format], []
        wave = max(1, self.reserve_pages // target.pages)
        wave -= wave % 2 if wave > 1 else 0  # the ids of every wave begin at a multiple of 16 bytes
        for part, blocks, tiers in self._plans(op, wave):
            counts = ops.compact(self.store, blocks, op.to_format, tiers, from_format=op.from_format)
            if not target.exact:
                moved = op.to_format, op.blocks[part], op.generations[part]
                pending.append(PendingCounts(step, *moved, self._to_host(counts)))
        return pending

    def _plans(self, op: Compact, wave: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        """Waves of `op`, their blocks on the device, and their tiers."""
        target, n, first = self.store.block_formats[op.to_format], len(op.blocks), 0
        for pages, count, answers in _equal_groups(op.groups, wave):
            evidence = self._evidence(op, slice(first, first + count))
            tiers = self.policy.compete(evidence, target, pages, answers)
            for at in range(0, count, wave):
                part = slice(at, min(at + wave, count))
                yield slice(first + at, first + part.stop), evidence.blocks[part], tiers[part]
            first += count
        keeps_all = self.policy.keeps_all or op.to_format == self.policy.unplanned_format
        for at in range(first, n, wave):  # without groups
            part = slice(at, min(at + wave, n))
            if keeps_all:
                yield part, self.store.upload(op.blocks[part]), None
            else:
                evidence = self._evidence(op, part)
                yield part, evidence.blocks, self.policy.plan(evidence, target)

    def _evidence(self, op: Compact, part: slice) -> Evidence:
        n = part.stop - part.start
        rows = np.zeros((4, n + n % 2), dtype=np.int64)  # each row begins at a multiple of 16 bytes
        rows[:, :n] = op.blocks[part], op.starts[part], op.lengths[part], op.prompts[part]
        blocks, starts, lengths, prompts = self.store.upload(rows)[:, :n].unbind()
        return Evidence(self.store, blocks, starts, lengths, prompts, op.from_format, self._sampling)

    def _to_host(self, counts: torch.Tensor) -> torch.Tensor:
        if not self.store.on_gpu:
            return counts
        host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        return host.copy_(counts, non_blocking=True)

    @property
    def loads_left(self) -> bool:
        """Whether copies of loads are still to be launched."""
        return self.transfers is not None and bool(self.transfers.fills)

    def launch_loads(self, *, all_of_them: bool) -> None:
        """Launch copies of loads: all of them, or as many as a flush may."""
        if self.transfers is not None:
            self.transfers.launch_fills(all_of_them=all_of_them)

    def synchronize(self) -> None:
        if self.store.on_gpu:
            torch.cuda.synchronize(self.store.device)

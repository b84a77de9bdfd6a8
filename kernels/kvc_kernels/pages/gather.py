"""Parts of one request's stored tokens of one layer, grouped by format: the input of the attention reference.

A *part* is all blocks of a request that share a format. Slots of packed parts are padded to whole pages of the longest
head, with a mask. Their tokens stay in stored order, which attention permits. Uncompressed parts are in sequence order
and hold the request's last tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..common import quant
from ..common.bits import bf16_rows, key_bytes, segment, unpack_features, value_bytes, value_meta
from ..common.softmax import softmax
from ..formats import BF16
from ..layout import BlockFormat, PageLayout
from ..store import SCRATCH_PAGE, PageStore

Merge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class PlainPart:
    """Blocks in the model dtype. `k`, `v` `[H, S, D]`; `ids` int64 `[H, nb, E]`; H KV heads, S tokens."""

    page: PageLayout
    ids: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_tokens: int
    valid: torch.Tensor | None = None  # None: every slot holds a token

    @property
    def slots(self) -> int:
        return self.k.shape[1]

    def logits(self, q: torch.Tensor) -> torch.Tensor:
        """Unscaled logits fp32 `[H, G, S]` of q fp32 `[H, G, D]`."""
        return torch.bmm(q, self.k.float().transpose(1, 2))

    def weigh(self, p: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the values fp32 `[H, G, D]` by probabilities fp32 `[H, G, S]`."""
        return torch.bmm(p, self.v.float())

    def dense(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k.to(dtype), self.v.to(dtype)

    def add_scores(self, store: PageStore, scores: torch.Tensor, merge: Merge | None = None) -> None:
        """Add fp32 `[H, S]` to the scores of the slots. `merge(before, scores)` gives the new scores in place of sums.
        """
        heads, blocks, entries = self.ids.shape
        full = scores.new_zeros((heads, blocks * self.block_tokens))
        full[:, : self.slots] = scores
        padded = scores.new_zeros((heads, blocks, entries * self.page.tokens))
        padded[..., : self.block_tokens] = full.view(heads, blocks, -1)
        _add_scores(store, self.page, self.ids, padded, merge)


@dataclass
class PackedPart:
    """Blocks of one packed format. `raw` uint8 `[H, nb, pages, page_bytes]`, `ids` int64 `[H, nb, pages]`.

    `valid` bool `[H, S]` with S = nb * pages * T, None if every slot holds a token. `header` fp16 `[H, nb, 2, D]`.
    `count` int: tokens of every head of every block if that is one number, else 0.
    """

    page: PageLayout
    ids: torch.Tensor
    raw: torch.Tensor
    header: torch.Tensor
    valid: torch.Tensor | None
    count: int

    @property
    def slots(self) -> int:
        return self.ids.shape[1] * self.ids.shape[2] * self.page.tokens

    def logits(self, q: torch.Tensor) -> torch.Tensor:
        """Unscaled logits fp32 `[H, G, S]` of q fp32 `[H, G, D]`; undefined where not valid.

        Scale and zero are folded into the query instead of the codes: `(q * scale) . code + q . zero`.
        """
        heads, blocks, pages, _ = self.raw.shape
        group, bits = q.shape[1], self.page.format.key_bits
        packed = key_bytes(self.page, self.raw)
        scale, zero = quant.channel_scale_zero(self.header, bits)
        folded = (q.unsqueeze(1) * scale).flatten(0, 1)  # [H * nb, G, D]
        bias = q.unsqueeze(1) @ zero.transpose(-1, -2)  # [H, nb, G, 1]
        out, width = None, self.page.key_row_bytes
        for j in range(8 // bits):
            codes = _field(packed, bits, j).view(heads * blocks, pages * self.page.tokens, width)
            part = folded[..., j * width : (j + 1) * width]
            dots = torch.bmm(part, codes.transpose(1, 2))
            out = dots if out is None else out.add_(dots)
        out = out.view(heads, blocks, group, -1)
        out += bias
        return out.transpose(1, 2).reshape(heads, group, -1)

    def weigh(self, p: torch.Tensor) -> torch.Tensor:
        """Sum of p * (scale * code + zero), fp32 `[H, G, D]`, for probabilities p fp32 `[H, G, S]`, 0 where not valid.
        """
        heads, group = p.shape[:2]
        t, f, d = self.page.tokens, self.page.format, self.page.head_dim
        flat, p = p, p.reshape(heads, group, -1, t).transpose(1, 2)  # [H, N, G, T] with N pages of all blocks
        meta = value_meta(self.page, self.raw).flatten(1, 2).float()  # [H, N, groups, 2, T]
        if self.valid is not None:
            # Slots after a head's tokens may lie in the scratch page, whose bytes may be NaN.
            meta = meta.masked_fill(~self.valid.view(heads, -1, 1, 1, t), 0)
        packed = value_bytes(self.page, self.raw).flatten(1, 2)  # [H, N, D*bits/8, T]
        width, groups = self.page.value_row_bytes, self.page.value_groups
        run = min(width, d // groups)  # features in a row that share a field and a group
        out = p.new_empty((heads, group, d))
        weights = [(p * meta[:, :, g, 0].unsqueeze(2)).flatten(0, 1) for g in range(groups)]
        for j in range(8 // f.value_bits):
            codes = _field(packed, f.value_bits, j)
            for at in range(0, width, run):
                first = j * width + at
                rows = codes[:, :, at : at + run].flatten(0, 1)
                dots = torch.bmm(weights[first * groups // d], rows.transpose(1, 2))
                out[..., first : first + run] = dots.view(heads, -1, group, run).sum(1)
        zeros = torch.bmm(flat, meta[:, :, :, 1].transpose(2, 3).reshape(heads, -1, groups))
        return out.view(heads, group, groups, -1).add_(zeros.unsqueeze(-1)).view(heads, group, d)

    def dense(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V `[H, S, D]` in `dtype`, 0 where not valid; S has no padding if all heads hold `count` tokens."""
        f, page = self.page.format, self.page
        k = unpack_features(key_bytes(page, self.raw), f.key_bits)
        k = quant.dequantize_keys(k.flatten(2, 3), self.header, f.key_bits)
        v = unpack_features(value_bytes(page, self.raw), f.value_bits, -2).transpose(-1, -2)
        v = quant.dequantize_tokens(v, value_meta(page, self.raw)).flatten(2, 3)
        if self.count:
            return tuple(x[:, :, : self.count].to(dtype).flatten(1, 2) for x in (k, v))
        k, v = (x.to(dtype).flatten(1, 2) for x in (k, v))
        empty = ~self.valid.unsqueeze(-1)
        return k.masked_fill_(empty, 0), v.masked_fill_(empty, 0)

    def add_scores(self, store: PageStore, scores: torch.Tensor, merge: Merge | None = None) -> None:
        """As in `PlainPart`; S as in `logits` or as in `dense`."""
        heads, blocks, pages = self.ids.shape
        if scores.shape[1] != self.slots:
            padded = scores.new_zeros((heads, blocks, pages * self.page.tokens))
            padded[..., : self.count] = scores.view(heads, blocks, -1)
            scores = padded
        _add_scores(store, self.page, self.ids, scores, merge)


Part = PlainPart | PackedPart


def _field(packed: torch.Tensor, bits: int, j: int) -> torch.Tensor:
    """fp32 codes of field j of bytes, contiguous."""
    if bits == 8:
        return packed.float(memory_format=torch.contiguous_format)
    field = packed >> (j * bits) if j else packed
    if (j + 1) * bits < 8:
        field = field & ((1 << bits) - 1)
    return field.float(memory_format=torch.contiguous_format)


def _add_scores(
    store: PageStore, page: PageLayout, ids: torch.Tensor, scores: torch.Tensor, merge: Merge | None
) -> None:
    words = segment(page, store.pages, "scores", torch.float32)
    ids, scores = ids.flatten(), scores.reshape(-1, page.tokens)
    if merge is not None:  # the scratch page may occur more than once, and nothing reads it
        words[ids] = merge(words[ids], scores)
    else:
        words.index_add_(0, ids, scores)


def gather_pages(store: PageStore, ids: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., page_bytes]` of page ids `[...]`."""
    return store.pages.index_select(0, ids.flatten()).view(*ids.shape, store.layout.page_bytes)


def _plain(store: PageStore, layer: int, blocks: torch.Tensor, tokens: int) -> PlainPart:
    """The first `tokens` tokens of uncompressed `blocks[nb]`."""
    g, page = store.layout, store.layout.page(BF16)
    ids = store.table[blocks, layer].transpose(0, 1).long()
    k, v = bf16_rows(page, gather_pages(store, ids), store.dtype)  # [H, nb, E, T0, D]
    k, v = (x.flatten(2, 3)[:, :, : g.block_tokens].flatten(1, 2)[:, :tokens] for x in (k, v))
    return PlainPart(page, ids, k, v, g.block_tokens)


def _packed(store: PageStore, layer: int, blocks: torch.Tensor, block_format: BlockFormat) -> list[PackedPart]:
    """Both tiers of `blocks[nb]`, all at `block_format`, without tiers that hold no tokens."""
    g, out = store.layout, []
    table = store.table[blocks, layer].transpose(0, 1).long()
    counts = store.counts[blocks, layer].permute(2, 1, 0).long()  # [2, H, nb]
    header = store.headers[blocks, layer].transpose(0, 1)
    limits = [x.tolist() for x in counts.flatten(1).aminmax(dim=1)]
    for tier, fmt in enumerate((block_format.high, block_format.low)):
        min_tokens, max_tokens = limits[0][tier], limits[1][tier]
        if fmt is None or not max_tokens:
            continue
        page, head_tokens = g.page(fmt), counts[tier].unsqueeze(-1)
        pages = -(-max_tokens // page.tokens)
        ids = table[..., :pages] if tier == 0 else table[..., -pages:].flip(-1)
        full = min_tokens == max_tokens
        if not full:
            ids = torch.where(torch.arange(pages, device=ids.device) * page.tokens < head_tokens, ids, SCRATCH_PAGE)
        valid = None
        if not full or max_tokens < pages * page.tokens:
            valid = (torch.arange(pages * page.tokens, device=ids.device) < head_tokens).flatten(1)
        out.append(PackedPart(page, ids, gather_pages(store, ids), header, valid, max_tokens if full else 0))
    return out


def request_parts(store: PageStore, layer: int, blocks: torch.Tensor, format_ids: list[int], tokens: int) -> list[Part]:
    """Parts of a request of `tokens` tokens in `blocks[nb]` with `format_ids`: packed parts first, then the
    uncompressed one.

    Only the last block may be part-filled, and then it is uncompressed. A free block (format id -1) belongs to a
    request that ended while its last step was in flight. It is read as if it were scratch.
    """
    format_ids = [max(r, 0) for r in format_ids]
    kinds = sorted(set(format_ids), reverse=True)
    p = store.layout.block_tokens
    parts: list[Part] = []
    for r in kinds:
        format_blocks = blocks
        if len(kinds) > 1:
            index = [i for i, x in enumerate(format_ids) if x == r]
            contiguous = index[-1] - index[0] + 1 == len(index)
            chosen = slice(index[0], index[-1] + 1) if contiguous else torch.tensor(index).to(blocks.device)
            format_blocks = blocks[chosen]
        if r:
            parts += _packed(store, layer, format_blocks, store.block_formats[r])
        else:
            short = len(format_ids) * p - tokens if format_ids[-1] == 0 else 0
            parts.append(_plain(store, layer, format_blocks, format_blocks.numel() * p - short))
    return parts


def sequence_rows(
    store: PageStore, layer: int, blocks: torch.Tensor, format_ids: list[int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V `[H, tokens, D]` in the model dtype and in sequence order, of blocks that keep every token.

    Arguments as in `request_parts`. A sliding window depends on positions and therefore on this order.
    """
    g, p = store.layout, store.layout.block_tokens
    rows = torch.empty((2, g.heads, len(format_ids), p, g.head_dim), dtype=store.dtype, device=store.device)
    format_ids = [max(r, 0) for r in format_ids]
    for r in sorted(set(format_ids)):
        index = torch.tensor([i for i, x in enumerate(format_ids) if x == r], device=store.device)
        num_tokens = len(index) * p - (len(format_ids) * p - tokens if format_ids[-1] == r == 0 else 0)
        (part,) = request_parts(store, layer, blocks[index], [r] * len(index), num_tokens)
        for to, x in zip(rows, part.dense(store.dtype)):
            whole = to.new_zeros((g.heads, len(index) * p, g.head_dim))
            whole[:, :num_tokens] = x
            to[:, index] = whole.unflatten(1, (-1, p))
    k, v = rows.flatten(2, 3)[:, :, :tokens]
    return k, v


def _logits(parts: list[Part], q: torch.Tensor, cap: float) -> torch.Tensor:
    """fp32 `[H, G, S]` over all parts' slots for scaled q fp32 `[H, G, D]`, capped, -inf where nothing is stored."""
    out = []
    for x in parts:
        logits = x.logits(q)
        if cap > 0:
            logits = torch.tanh_(logits / cap).mul_(cap)
        if x.valid is not None:
            logits.masked_fill_(~x.valid.unsqueeze(1), -torch.inf)
        out.append(logits)
    return out[0] if len(out) == 1 else torch.cat(out, -1)


def part_weights(parts: list[Part], q: torch.Tensor, scale: float, cap: float) -> tuple[torch.Tensor, ...]:
    """Probabilities fp32 `[H, G, S]` of each part for one query `q[Hq, D]`; G query heads a KV head, S slots."""
    grouped = q.float().view(parts[0].ids.shape[0], -1, q.shape[-1]) * scale
    return softmax(_logits(parts, grouped, cap)).split([part.slots for part in parts], -1)


def valid_mask(parts: list[Part], sizes: list[int]) -> torch.Tensor | None:
    """bool `[H, S]` over the parts' dense tokens, None when every slot holds one."""
    if all(x.valid is None or (not isinstance(x, PlainPart) and x.count) for x in parts):
        return None
    masks = []
    for x, n in zip(parts, sizes):
        full = x.valid is None or bool(x.count)
        masks.append(x.ids.new_ones((x.ids.shape[0], n), dtype=torch.bool) if full else x.valid)
    return torch.cat(masks, 1)

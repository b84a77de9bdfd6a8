"""Attention of new tokens over pages: the plain-torch reference of the kernels.

Requests are processed one by one, so an answer does not depend on its batch. Packed blocks are dequantized to the model
dtype.
"""

from __future__ import annotations

import torch

from ..common.dense_attention import explicit_attention, sdpa
from ..common.softmax import MAX_ELEMENTS, causal_mask
from ..formats import Format
from ..pages.gather import Part, request_parts, sequence_rows, valid_mask
from ..scores.reference import ScoreSampling, collect_prefill
from ..store import PageStore
from .fake_quant import fake_quantize

# The CPU kernel tiles queries by 256 from 768 on, by 64 or 32 below. A row's bits depend on the rows of its tile.
SDPA_TILE, SDPA_TILED_FROM = 256, 768


def extend_attention(
    store: PageStore,
    layer: int,
    q: torch.Tensor,
    row_blocks: torch.Tensor,
    prefix_lens: list[int] | torch.Tensor,
    extend_lens: list[int],
    *,
    scale: float,
    logit_cap: float = 0.0,
    sampling: ScoreSampling | None = None,
    prompt_lens: list[int] | None = None,
    fake_quant_format: list[Format | None] | None = None,
    window: int = -1,
) -> torch.Tensor:
    """Causal attention of the new tokens of B requests: `q[N, Hq, D]`, `extend_lens[B]` rows each -> `[N, Hq, D]`.

    Row j of request i has position prefix_lens[i] + j and sees all tokens up to its own. The new K/V are already
    appended to uncompressed blocks. The remaining arguments are those of `decode_attention`. `sampling` takes the last
    queries of prompts of `prompt_lens[B]` tokens, None if all of them end here.

    `fake_quant_format[i]` is the one format in which all tokens of each block of request i will be packed. A query
    then sees earlier blocks fake-quantized and its own block exact, so a token's output depends on the tokens before it
    alone: neither on which of them were cached nor on how the prompt was cut into chunks.
    """
    prefixes = prefix_lens.tolist() if isinstance(prefix_lens, torch.Tensor) else prefix_lens
    p = store.layout.block_tokens
    row_blocks = row_blocks.long()
    format_ids = store.format_id[row_blocks].tolist()
    out = torch.empty_like(q)
    at = 0
    for i, (prefix, new) in enumerate(zip(prefixes, extend_lens)):
        if not new:
            continue
        nb = -(-(prefix + new) // p)
        blocks, block_format_ids = row_blocks[i, :nb], format_ids[i][:nb]
        rows = q[at : at + new]
        fmt = fake_quant_format[i] if fake_quant_format else None
        if window >= 0:
            k, v, base = _window_rows(store, layer, blocks, block_format_ids, prefix, prefix + new, window, fmt)
            if fmt is None:
                out[at : at + new] = _masked(rows.movedim(0, 1), k, v, None, scale, logit_cap, window).movedim(1, 0)
            else:
                out[at : at + new] = _extend_fake_quant(store, rows, k, v, base, fmt, scale, logit_cap, window)
        else:
            parts = request_parts(store, layer, blocks, block_format_ids, prefix + new)
            if fmt is None:
                out[at : at + new] = _extend_one(store, rows, parts, new, scale, logit_cap)
            else:
                # The last part is the uncompressed one: it holds the open block, and blocks that wait to be packed.
                k, v = (torch.cat(x, 1) for x in zip(*(x.dense(q.dtype) for x in parts)))
                base = k.shape[1] - parts[-1].slots
                out[at : at + new] = _extend_fake_quant(store, rows, k, v, base, fmt, scale, logit_cap)
        at += new
    if sampling is not None and window < 0 and not any(fake_quant_format or ()):
        collect_prefill(
            store, layer, q, row_blocks, prefixes, extend_lens, sampling, prompt_lens=prompt_lens, scale=scale,
            logit_cap=logit_cap,
        )  # fmt: skip
    return out


def _window_rows(
    store: PageStore,
    layer: int,
    blocks: torch.Tensor,
    format_ids: list[int],
    first: int,
    tokens: int,
    window: int,
    fmt: Format | None,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K, V `[H, S, D]` of the last S of a request's `tokens`, and the index among these S where the block of token
    `first` begins. S starts at the block of the earliest token that `first` sees. Blocks before that of `first` are
    fake-quantized to `fmt`, if given.
    """
    p = store.layout.block_tokens
    start = max(0, first - window) // p
    base = first // p - start
    k, v = sequence_rows(store, layer, blocks[start:], format_ids[start:], tokens - start * p)
    if fmt is not None:
        for i, format_id in enumerate(format_ids[start : start + base]):
            if format_id <= 0:
                block = slice(i * p, (i + 1) * p)
                k[:, block], v[:, block] = fake_quantize(store.layout, fmt, k[:, block], v[:, block])
    return k, v, base * p


def _extend_one(
    store: PageStore,
    q: torch.Tensor,
    parts: list[Part],
    new: int,
    scale: float,
    logit_cap: float,
) -> torch.Tensor:
    """`q[new, Hq, D]` of one request against its parts -> `[new, Hq, D]`."""
    dense = [x.dense(q.dtype) for x in parts]
    k, v = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in zip(*dense))
    query = q.movedim(0, 1)  # [Hq, new, D]
    valid = valid_mask(parts, [x[0].shape[1] for x in dense])
    if logit_cap > 0:
        out = _masked(query, k, v, valid, scale, logit_cap)
    elif new == k.shape[1] or (len(store.block_formats) == 1 and valid is None):
        # Equal bits beyond the prompt's first chunk cost extra rows and matter only where nothing is ever compressed.
        out = _sdpa_exact(query, k, v, scale)
    else:
        out = _masked(query, k, v, valid, scale, logit_cap)
    return out.movedim(1, 0)


def _extend_fake_quant(
    store: PageStore,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    base: int,
    fmt: Format,
    scale: float,
    logit_cap: float,
    window: int = -1,
) -> torch.Tensor:
    """Attention of `q[new, Hq, D]` of one request over `k`, `v` `[H, S, D]`, block by block -> `[new, Hq, D]`.

    From `base` on, a block boundary, tokens are uncompressed and in sequence order. `k` and `v` are overwritten with
    the fake-quantized blocks.
    """
    p, new, slots = store.layout.block_tokens, q.shape[0], k.shape[1]
    full = (slots - base) // p
    plain = (x[:, base : base + full * p].unflatten(1, (full, p)) for x in (k, v))
    stored = fake_quantize(store.layout, fmt, *plain)
    query, out, done = q.movedim(0, 1), torch.empty_like(q), 0
    for j in range(-(-(slots - base) // p)):
        begin, end = base + j * p, min(base + (j + 1) * p, slots)
        rows = new - (slots - end) - done
        if rows > 0:
            seen = slice(0 if window < 0 else max(0, end - rows - window), end)
            o = _masked(query[:, done : done + rows], k[:, seen], v[:, seen], None, scale, logit_cap, window)
            out[done : done + rows] = o.movedim(1, 0)
            done += rows
        if j < full:
            k[:, begin:end], v[:, begin:end] = (x[:, j].to(q.dtype) for x in stored)
    return out


def _sdpa_exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention with the bits of stock SGLang, which runs all positions as queries and keeps the new ones.

    For long prefixes the queries start at a tile boundary of the kernel, with an explicit mask. The result is bit-equal
    for all lengths tested, as long as the tile size is the one of all rows.
    """
    new, slots = q.shape[1], k.shape[1]
    start = max(0, min(slots - new, slots - SDPA_TILED_FROM) // SDPA_TILE * SDPA_TILE)
    rows = q.new_zeros((q.shape[0], slots - start, q.shape[2]))
    rows[:, slots - new - start :] = q
    if start == 0:
        return sdpa(rows, k, v, scale=scale, causal=True)[:, slots - new :]
    mask = causal_mask(0, slots - start, slots, slots - start, q.device)
    return sdpa(rows, k, v, scale=scale, mask=mask)[:, slots - new - start :]


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
    logit_cap: float,
    window: int = -1,
) -> torch.Tensor:
    """Attention of `q[Hq, new, D]`, the last tokens of `k`, `v` `[H, S, D]`, with explicit masks -> `[Hq, new, D]`.
    Queries are processed in chunks that bound the masks.
    """
    if logit_cap > 0:
        return explicit_attention(q, k, v, valid, scale, logit_cap, window)
    heads, new, slots = q.shape[0], q.shape[1], k.shape[1]
    if valid is not None:
        valid = valid.repeat_interleave(heads // k.shape[0], 0).unsqueeze(1)
    step = max(1, MAX_ELEMENTS // (slots * (1 if valid is None else heads)))
    out = []
    for at in range(0, new, step):
        rows = min(step, new - at)
        mask = causal_mask(at, rows, slots, new, q.device, window)
        if valid is not None:
            mask = (mask & valid).unsqueeze(0)
        out.append(sdpa(q[:, at : at + rows], k, v, scale=scale, mask=mask))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


class ReferenceExtend:
    """`extend_attention` behind the interface of `ExtendAttention`: `plan` once a forward, `run` for each layer."""

    ragged = None  # no prefill library

    def __init__(
        self,
        store: PageStore,
        *,
        query_heads: int = 0,
        max_blocks: int = 0,
        window: int = -1,
        fake_quant_format: Format | None = None,
        appended: bool = True,
        ragged: None = None,
    ):
        """`window` and `fake_quant_format` as in `extend_attention`. The rest is for the kernels, and changes nothing
        here: new rows are always read from their pages."""
        self.store, self.window, self.fake_quant_format = store, window, fake_quant_format

    def plan(
        self,
        row_blocks: torch.Tensor,
        prefix_lens: list[int],
        extend_lens: list[int],
        waiting: list[list[int]] | None = None,
        formats: list[Format | None] | None = None,
        whole: bool = True,
    ) -> None:
        """`formats[B]`: `fake_quant_format` of each request, by default that of the operation. `waiting` and `whole`
        are read off the blocks here."""
        self.lists = (row_blocks, prefix_lens, extend_lens)
        self.formats = formats or [self.fake_quant_format] * len(extend_lens)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        logit_cap: float = 0.0,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """`q[N, Hq, D]` -> `[N, Hq, D]`; with `return_lse` also None, for `ReferenceScores` needs no log-sum-exp."""
        out = extend_attention(
            self.store,
            layer,
            q,
            *self.lists,
            scale=scale,
            logit_cap=logit_cap,
            fake_quant_format=self.formats,
            window=self.window,
        )
        return (out, None) if return_lse else out

"""Attention over pages: the plain-torch reference of the kernels.

Requests are processed one by one, so an answer does not depend on its batch. A request whose blocks are all
uncompressed goes through `scaled_dot_product_attention` in the form of SGLang's torch_native backend and gives the same
bits. Packed blocks are multiplied as codes (decode) or dequantized to the model dtype (prefill).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..extend.fake_quant import as_stored
from ..layout import Format
from ..pages.gather import Part, PlainPart, request_parts, sequence_rows
from ..scores.reference import Observe, observe_decode, observe_extend
from ..store import PageStore
from .softmax import MAX_ELEMENTS, causal_mask, query_weights, softmax

# The CPU kernel tiles queries by 256 from 768 on, by 64 or 32 below. A row's bits depend on the rows of its tile.
SDPA_TILE, SDPA_TILED_FROM = 256, 768


def decode_attention(
    store: PageStore,
    layer: int,
    q: torch.Tensor,
    row_blocks: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    observe: Observe | None = None,
    seq_lens_cpu: list[int] | None = None,
    window: int = -1,
) -> torch.Tensor:
    """Attention of one query per request: `q[B, Hq, D]` over `row_blocks[B, NB]` (block ids) -> `[B, Hq, D]` in q's
    dtype.

    `seq_lens[B]` includes the new token, whose K/V are already appended. `seq_lens_cpu` holds the same numbers as a
    list and saves a read back. `scale` multiplies the logits; then `logit_cap` > 0 caps them as cap * tanh(x / cap).
    With `observe` the probabilities of the sampled steps are added to the tokens' attention scores. `window` >= 0: a
    query sees its own token and `window` tokens before it; only for blocks that keep every token, and without
    `observe`.
    """
    lens = seq_lens.tolist() if seq_lens_cpu is None else seq_lens_cpu
    heads, p = store.layout.heads, store.layout.block_tokens
    row_blocks = row_blocks.long()
    rungs = store.rung[row_blocks].tolist()
    out = torch.empty_like(q)
    for i, n in enumerate(lens):
        nb = -(-n // p)
        if window >= 0:
            k, v, _ = _window_rows(store, layer, row_blocks[i, :nb], rungs[i][:nb], n - 1, n, window, None)
            args = q[i].unsqueeze(1), k[:, -window - 1 :], v[:, -window - 1 :]
            out[i] = (_explicit(*args, None, scale, logit_cap) if logit_cap > 0 else _sdpa(*args, scale=scale))[:, 0]
            continue
        parts = request_parts(store, layer, row_blocks[i, :nb], rungs[i][:nb], n)
        if not parts:  # every token of every head is pruned
            out[i] = 0
            continue
        plain = len(parts) == 1 and isinstance(parts[0], PlainPart)
        observed = observe is not None and observe.decoding(n - 1)
        if plain and logit_cap <= 0:
            out[i] = _sdpa(q[i].unsqueeze(1), *parts[0].dense(q.dtype), scale=scale)[:, 0]
            if not observed:
                continue
        grouped = q[i].float().view(heads, -1, q.shape[-1]) * scale
        weights = softmax(_logits(parts, grouped, logit_cap))
        spans = weights.split([x.slots for x in parts], -1)
        if not (plain and logit_cap <= 0):
            o = torch.stack([x.weigh(w) for x, w in zip(parts, spans)]).sum(0)
            out[i] = o.view(-1, q.shape[-1]).to(q.dtype)
        if observed:
            observe_decode(store, parts, spans, observe)
    return out


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
    observe: Observe | None = None,
    stored_as: list[Format | None] | None = None,
    window: int = -1,
) -> torch.Tensor:
    """Causal attention of the new tokens of B requests: `q[N, Hq, D]`, `extend_lens[B]` rows each -> `[N, Hq, D]`.

    Row j of request i has position prefix_lens[i] + j and sees all tokens up to its own. The new K/V are already
    appended to uncompressed blocks. The remaining arguments are those of `decode_attention`.

    `stored_as[i]` is the format in which every block of request i will be packed whole. A query then sees earlier
    blocks fake-quantized and its own block exact, so a token's output depends on the tokens before it alone: neither on
    which of them were cached nor on how the prompt was cut into chunks.
    """
    prefixes = prefix_lens.tolist() if isinstance(prefix_lens, torch.Tensor) else prefix_lens
    p = store.layout.block_tokens
    row_blocks = row_blocks.long()
    rungs = store.rung[row_blocks].tolist()
    out = torch.empty_like(q)
    at = 0
    for i, (prefix, new) in enumerate(zip(prefixes, extend_lens)):
        if not new:
            continue
        nb = -(-(prefix + new) // p)
        blocks, block_rungs = row_blocks[i, :nb], rungs[i][:nb]
        rows = q[at : at + new]
        fmt = stored_as[i] if stored_as else None
        if window >= 0:
            k, v, base = _window_rows(store, layer, blocks, block_rungs, prefix, prefix + new, window, fmt)
            if fmt is None:
                out[at : at + new] = _masked(rows.movedim(0, 1), k, v, None, scale, logit_cap, window).movedim(1, 0)
            else:
                out[at : at + new] = _extend_stored(store, rows, k, v, base, fmt, scale, logit_cap, window)
        else:
            parts = request_parts(store, layer, blocks, block_rungs, prefix + new)
            if fmt is None:
                out[at : at + new] = _extend_one(store, rows, parts, new, scale, logit_cap, observe)
            else:
                # The last part is the uncompressed one: it holds the open block, and blocks that wait to be packed.
                k, v = (torch.cat(x, 1) for x in zip(*(x.dense(q.dtype) for x in parts)))
                base = k.shape[1] - parts[-1].slots
                out[at : at + new] = _extend_stored(store, rows, k, v, base, fmt, scale, logit_cap)
        at += new
    return out


def _window_rows(
    store: PageStore,
    layer: int,
    blocks: torch.Tensor,
    rungs: list[int],
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
    k, v = sequence_rows(store, layer, blocks[start:], rungs[start:], tokens - start * p)
    if fmt is not None:
        for i, rung in enumerate(rungs[start : start + base]):
            if rung <= 0:
                block = slice(i * p, (i + 1) * p)
                k[:, block], v[:, block] = as_stored(store.layout, fmt, k[:, block], v[:, block])
    return k, v, base * p


def _logits(parts: list[Part], q: torch.Tensor, cap: float) -> torch.Tensor:
    """Capped logits fp32 `[H, G, S]` over all parts' slots for scaled q fp32 `[H, G, D]`; -inf in empty slots."""
    out = []
    for x in parts:
        logits = x.logits(q)
        if cap > 0:
            logits = torch.tanh_(logits / cap).mul_(cap)
        if x.valid is not None:
            logits.masked_fill_(~x.valid.unsqueeze(1), -torch.inf)
        out.append(logits)
    return out[0] if len(out) == 1 else torch.cat(out, -1)


def _sdpa(q, k, v, *, scale, mask=None, causal=False) -> torch.Tensor:
    """q `[Hq, N, D]`, k and v `[H, S, D]` -> `[Hq, N, D]`."""
    return scaled_dot_product_attention(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        enable_gqa=q.shape[0] != k.shape[0],
        scale=scale,
        is_causal=causal,
    ).squeeze(0)


def _extend_one(
    store: PageStore,
    q: torch.Tensor,
    parts: list[Part],
    new: int,
    scale: float,
    logit_cap: float,
    observe: Observe | None,
) -> torch.Tensor:
    """`q[new, Hq, D]` of one request against its parts -> `[new, Hq, D]`."""
    dense = [x.dense(q.dtype) for x in parts]
    k, v = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in zip(*dense))
    query = q.movedim(0, 1)  # [Hq, new, D]
    valid = stored_mask(parts, [x[0].shape[1] for x in dense])
    if logit_cap > 0:
        out = _masked(query, k, v, valid, scale, logit_cap)
    elif new == k.shape[1] or (len(store.ladder) == 1 and valid is None):
        # Equal bits beyond the prompt's first chunk cost extra rows and matter only where nothing is ever compressed.
        out = _sdpa_exact(query, k, v, scale)
    else:
        out = _masked(query, k, v, valid, scale, logit_cap)
    if observe is not None:
        sizes = [x[0].shape[1] for x in dense]
        observe_extend(store, parts, sizes, query, k, valid, scale, logit_cap, observe)
    return out.movedim(1, 0)


def _extend_stored(
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
    whole = (slots - base) // p
    plain = (x[:, base : base + whole * p].unflatten(1, (whole, p)) for x in (k, v))
    stored = as_stored(store.layout, fmt, *plain)
    query, out, done = q.movedim(0, 1), torch.empty_like(q), 0
    for j in range(-(-(slots - base) // p)):
        begin, end = base + j * p, min(base + (j + 1) * p, slots)
        rows = new - (slots - end) - done
        if rows > 0:
            seen = slice(0 if window < 0 else max(0, end - rows - window), end)
            o = _masked(query[:, done : done + rows], k[:, seen], v[:, seen], None, scale, logit_cap, window)
            out[done : done + rows] = o.movedim(1, 0)
            done += rows
        if j < whole:
            k[:, begin:end], v[:, begin:end] = (x[:, j].to(q.dtype) for x in stored)
    return out


def stored_mask(parts: list[Part], sizes: list[int]) -> torch.Tensor | None:
    """Mask bool `[H, S]` of the parts' dense tokens, None if every slot holds a token."""
    if all(x.valid is None or (not isinstance(x, PlainPart) and x.count) for x in parts):
        return None
    masks = []
    for x, n in zip(parts, sizes):
        full = x.valid is None or bool(x.count)
        masks.append(x.ids.new_ones((x.ids.shape[0], n), dtype=torch.bool) if full else x.valid)
    return torch.cat(masks, 1)


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
        return _sdpa(rows, k, v, scale=scale, causal=True)[:, slots - new :]
    mask = causal_mask(0, slots - start, slots, slots - start, q.device)
    return _sdpa(rows, k, v, scale=scale, mask=mask)[:, slots - new - start :]


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
        return _explicit(q, k, v, valid, scale, logit_cap, window)
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
        out.append(_sdpa(q[:, at : at + rows], k, v, scale=scale, mask=mask))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def _explicit(q, k, v, valid, scale: float, logit_cap: float, window: int = -1) -> torch.Tensor:
    """Attention with an fp32 softmax written out, for capped logits: `[Hq, new, D]`."""
    step = max(1, MAX_ELEMENTS // (k.shape[1] * q.shape[0]))
    out = torch.empty_like(q)
    for at in range(0, q.shape[1], step):
        rows = min(step, q.shape[1] - at)
        w = query_weights(q, k, valid, at, rows, scale, logit_cap, window)
        o = w.flatten(1, 2) @ v.float()
        out[:, at : at + rows] = o.view(q.shape[0], rows, -1).to(q.dtype)
    return out

"""An independent record of K and V: every token's rows in every layer follow from its whole history.

A block that lies under a prefix other than the one that filled it, is overwritten, or loses its pages shows up as wrong
rows to every reader.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.common.bits import segment
from kvc_kernels.formats import BF16
from kvc_kernels.store import PageStore
from sglang_kvc.cache.one_shot import SINKS, WINDOW

from .model import D, H, L, P

PARTS = (9973, 10007, 10009)
weights = 0  # version of the model's weights; a server may change it while nothing is cached
_gen = torch.Generator().manual_seed(0)
# A token's rows are the sum of one entry of each table, `[entries, K or V, L, H, D]`: whole numbers from -9 to 6, which
# bf16 holds exactly. Two histories have equal rows with a probability of 1e-12, which for a prompt of 4096 tokens makes
# 1e-5.
_TABLES = [torch.randint(-3, 3, (n, 2, L, H, D), generator=_gen, dtype=torch.int8) for n in PARTS]
# Attention scores of a token, by which LeanKV plans, `[entries, L, H]`.
_SCORES = torch.empty(PARTS[0], L, H).exponential_(0.4, generator=_gen)


def history(tokens: list[int], namespace: str | None) -> np.ndarray:
    """One number per token, int64 `[len(tokens)]`, that depends on all tokens up to it, the namespace and the
    weights."""
    out, state = [], zlib.crc32((namespace or "").encode(), weights)
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        out.append(state)
    return np.array(out, dtype=np.int64)


def rows(numbers: np.ndarray) -> torch.Tensor:
    """Rows fp32 `[*numbers.shape, K or V, L, H, D]` of tokens with these histories."""
    out = 0
    for size, table in zip(PARTS, _TABLES):
        out, numbers = out + table[numbers % size].float(), numbers // size
    return out


def write(
    store: PageStore, req_to_token: torch.Tensor, reqs: list, spans: list[tuple[int, int]], numbers: list[np.ndarray]
) -> None:
    """Write what a forward writes to the pages: in every layer the rows of the new tokens, with histories `numbers`,
    and the scores that attention adds."""
    slots = torch.cat([req_to_token[r.kv.req_pool_idx, first:last] for r, (first, last) in zip(reqs, spans)]).long()
    write_rows(store, slots, np.concatenate(numbers))
    if store.layout.has_scores:
        table = torch.zeros((len(reqs), max(-(-last // P) for _, last in spans)), dtype=torch.long)
        for i, (r, (_, last)) in enumerate(zip(reqs, spans)):
            table[i, : -(-last // P)] = req_to_token[r.kv.req_pool_idx, 0:last:P] // P
        lens = torch.tensor([(last, last - first) for first, last in spans])
        ops.count_queries(store, table, *lens.T, ops.ScoreSampling())


def write_rows(store: PageStore, slots: torch.Tensor, numbers: np.ndarray) -> None:
    """Write tokens with histories `numbers[n]` to `slots[n]` of every layer, with their attention scores."""
    blocks, places = slots // P, slots % P
    assert (store.format_id[blocks] == 0).all(), "a forward writes to a packed or free block"
    assert len(set(slots.tolist())) == len(slots), "two tokens are written to one slot"
    new = rows(numbers)
    for layer in range(L):
        ops.append(store, layer, blocks, places, new[:, 0, layer].bfloat16(), new[:, 1, layer].bfloat16())
    if store.layout.has_scores:
        page = store.layout.page(BF16)
        scores = segment(page, store.pages, "scores", torch.float32)
        pages = store.table[blocks, :, :, places // page.tokens].long()
        scores[pages, (places % page.tokens)[:, None, None]] = _SCORES[numbers % PARTS[0]]


def check(
    store: PageStore, blocks: dict[int, np.ndarray], keeps_all: bool, ladder: tuple[int, ...] = ()
) -> None:
    """Assert that each block stores the tokens with these histories (of an open block: the first of them).

    `keeps_all`: the policy drops no token and has one tier. `ladder`: formats that a block may have passed through in
    turn.
    """
    ids = torch.tensor(list(blocks))
    format_ids = store.format_id[ids]
    assert (format_ids >= 0).all(), f"free blocks are read: {ids[format_ids < 0].tolist()}"
    for format_id in sorted(set(format_ids.tolist())):
        selected = ids[format_ids == format_id]
        counts = torch.tensor([len(blocks[b]) for b in selected.tolist()])
        live = torch.arange(P) < counts[:, None]
        assert format_id == 0 or live.all(), "a block is packed before it is full"
        want = rows(np.stack([np.resize(blocks[b], P) for b in selected.tolist()]))
        want = want.permute(2, 3, 0, 4, 1, 5)  # [K or V, L, n, H, P, D]
        for layer in range(L):
            k, v, tier = ops.load_dense(store, layer, selected, format_id)
            assert not keeps_all or (tier == 2).all(), "a token is gone"
            _check_rows(store, format_id, (k, v), tier * live[:, None], want[:, layer], ladder)


def queries(numbers: np.ndarray, layer: int) -> torch.Tensor:
    """Query rows bf16 `[n, H, D]` of tokens with these histories: those of their keys."""
    return rows(numbers)[:, 0, layer].bfloat16()


def check_kept(store: PageStore, kept: list[int], numbers: np.ndarray, prompt: int, steps: int = 1) -> None:
    """Assert that the packed blocks `kept` hold some of the tokens with histories `numbers`, the full blocks of a
    prompt of `prompt` tokens: each head holds whole pages of distinct tokens in the order of their positions, among
    them the prompt's first and last tokens. `steps`: how often keys were packed."""
    ids = torch.tensor(kept)
    (format_id,) = set(store.format_id[ids].tolist())
    always = {*range(SINKS), *range(max(0, prompt - WINDOW), len(numbers))}
    want = rows(numbers).permute(2, 1, 3, 0, 4)  # [L, K or V, H, S, D]
    t = store.layout.page(store.block_formats[format_id].high).tokens
    for layer in range(L):
        k, v, tier = ops.load_dense(store, layer, ids, format_id)
        for head in range(H):
            stored = tier[:, head].flatten() == 2
            counts = stored.view(len(kept), P).sum(1)
            assert not (counts[1:] > 0)[counts[:-1] < P].any() and stored.sum() % t == 0, "a block is not dense"
            keys, values = (x[:, head].flatten(0, 1)[stored] for x in (k, v))
            place = torch.cdist(keys, want[layer, 0, head]).argmin(-1)
            assert (place.diff() > 0).all(), "kept tokens are out of order, or doubled"
            assert always <= set(place.tolist()), "a head lost the prompt's first or last tokens"
            for got, x, roundings in ((keys, want[layer, 0, head], steps), (values, want[layer, 1, head], 1)):
                assert (got - x[place]).abs().max() <= 0.6 * roundings, "a kept token has other rows"


def _check_rows(
    store: PageStore, format_id: int, stored, tier: torch.Tensor, want: torch.Tensor, ladder: tuple[int, ...]
) -> None:
    """Compare K and V `[n, H, P, D]` stored at `tier` `[n, H, P]` with the expected ones, `[2, n, H, P, D]`."""
    spec = store.block_formats[format_id]
    if format_id and not store.layout.has_scores and (tier != 2).any():
        place = _places(stored[0], want[0], tier).unsqueeze(-1).expand(want.shape[1:])
        want = torch.stack([x.gather(2, place) for x in want])
    for name, got, right in zip("KV", stored, want):
        allowed = torch.zeros(3)
        if format_id:
            bits = [getattr(f, "key_bits" if name == "K" else "value_bits") for f in (spec.low or spec.high, spec.high)]
            # Half a quantization step over a range of 15, plus the rounding of the scale; a low token may have been a
            # high one before.
            allowed[2] = 0.1 + 7.5 / (2 ** bits[1] - 1)
            allowed[1] = allowed[2] + 0.1 + 7.5 / (2 ** bits[0] - 1)
            before = ladder[: ladder.index(format_id)] if format_id in ladder else ()
            widths = {getattr(store.block_formats[i].high, "key_bits" if name == "K" else "value_bits") for i in before}
            allowed += sum(0.1 + 7.5 / (2**width - 1) for width in widths - {bits[1]})
        error = (got - right).abs().amax(-1)
        exceeds = (error > allowed[tier.long()]) & (tier > 0)
        count = int(exceeds.sum())
        assert not count, f"{name} of {count} tokens at format {format_id} is off by {error[exceeds].max():.1f}"


def _places(keys: torch.Tensor, want: torch.Tensor, tier: torch.Tensor) -> torch.Tensor:
    """The tokens `[n, H, P]` that a head stores where pages hold no positions, found by their nearest keys. Each tier
    has its tokens in order, and no token is stored twice."""
    place = torch.cdist(keys, want).argmin(-1)
    for name in (1, 2):
        tier_places = torch.where(tier == name, place, -1)
        last = torch.cat((torch.full_like(tier_places[..., :1], -1), tier_places.cummax(-1).values[..., :-1]), -1)
        assert ((tier_places > last) | (tier != name)).all(), "stored tokens are out of order, or doubled"
    return place

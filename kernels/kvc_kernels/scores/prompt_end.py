"""Attention by the end of a prompt: the last queries of each layer, and the scores that they give all tokens.

Plain torch on every device, without waiting for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ..common import quant
from ..common.bits import key_bytes, unpack_features
from ..common.softmax import MAX_ELEMENTS, query_weights
from ..compact.reference import read_bf16
from ..store import PageStore

# Upper bound of the elements of a temporary. A CPU maps the pages of a larger one anew each time it is allocated.
STEP_ELEMENTS = {"cpu": 1 << 20, "cuda": MAX_ELEMENTS}


class LastQueries:
    """The last w query rows of one prompt before its last `tail` tokens, in every layer, model dtype `[L, w, Hq, D]`,
    however it is chunked."""

    def __init__(self, store: PageStore, query_heads: int, window: int, tail: int = 0):
        self.tail = tail
        layout = store.layout
        shape = (layout.layers, window, query_heads, layout.head_dim)
        self.rows = torch.zeros(shape, dtype=store.dtype, device=store.device)
        self.scaling = [(1.0, 0.0)] * layout.layers  # scale and logit cap of each layer

    def add(self, layer: int, rows: torch.Tensor, *, scale: float, logit_cap: float) -> None:
        """Append `rows[n, Hq, D]`, the queries of the next n tokens; only the last w rows stay."""
        stored, window = self.rows[layer], self.rows.shape[1]
        new = min(window, len(rows))
        if new < window:
            stored[: window - new] = stored[new:].clone()
        stored[window - new :] = rows[len(rows) - new :]
        self.scaling[layer] = scale, logit_cap

    def groups(self, most: int) -> Iterator[slice]:
        """Up to `most` neighboring layers at a time, of equal scale and logit cap."""
        for _, equal in itertools.groupby(range(len(self.scaling)), lambda layer: self.scaling[layer]):
            layers = list(equal)
            for at in range(0, len(layers), most):
                yield slice(layers[at], layers[at : at + most][-1] + 1)


def prompt_scores(
    store: PageStore,
    layers: slice,
    blocks: torch.Tensor,
    tokens: int,
    queries: LastQueries,
    *,
    packed: int = 0,
    format_id: int = 0,
) -> torch.Tensor:
    """Squared attention that the last w queries of a prompt give its tokens, fp32 `[n, H, tokens]` for n `layers` of
    equal scale and logit cap (KV-Compress, equations 8 and 10, squared): the sum over these queries and the query heads
    of a group of A^2.

    `blocks[nb]`: the blocks that hold `tokens` >= w + tail tokens of the prompt. The first `packed` of them hold all of
    theirs at `format_id`, the others are uncompressed. The last w tokens before the tail are the queries' own; the tail
    gets 0. Heads are taken a few at a time, so that temporaries stay small.
    """
    layout, rows = store.layout, queries.rows[layers]
    scale, logit_cap = queries.scaling[layers.start]
    window, group = rows.shape[1], rows.shape[2] // layout.heads
    heads = rows.shape[0] * layout.heads  # of all layers
    table = store.table[blocks, layers].flatten(1, 2).transpose(0, 1)  # [n * H, nb, E]
    headers = store.headers[blocks[:packed], layers].flatten(1, 2).transpose(0, 1)
    q_rows = rows.transpose(1, 2).flatten(0, 1)  # [n * Hq, w, D]
    step = max(1, STEP_ELEMENTS[store.device.type] // (tokens * max(layout.head_dim, group * window)))
    out, seen = torch.zeros((heads, tokens), device=store.device), tokens - queries.tail
    for at in range(0, heads, step):
        end = min(at + step, heads)
        keys = stored_keys(store, table[at:end], headers[at:end], packed, format_id)[:, :seen]
        weights = query_weights(q_rows[at * group : end * group], keys, None, 0, window, scale, logit_cap)
        out[at:end, :seen] = weights.square_().sum((1, 2))
    return out.view(-1, layout.heads, tokens)


def stored_keys(
    store: PageStore, table: torch.Tensor, headers: torch.Tensor, packed: int, format_id: int
) -> torch.Tensor:
    """Keys of m heads of nb blocks with the pages `table` `[m, nb, E]`, `[m, nb * P, D]`: the first `packed` blocks
    hold P tokens each at `format_id` with the key headers fp16 `[m, packed, 2, D]`, the others are uncompressed. In the
    model dtype if none is packed, else fp32."""
    layout, parts = store.layout, []
    if packed:
        page = layout.page(store.block_formats[format_id].high)
        ids = table[:, :packed, : layout.pages_for(page.format, layout.block_tokens)].long()
        codes = unpack_features(key_bytes(page, store.pages[ids]), page.format.key_bits)
        codes = codes.flatten(2, 3)[:, :, : layout.block_tokens]
        parts.append(quant.dequantize_keys(codes, headers, page.format.key_bits).flatten(1, 2))
    if packed < table.shape[1]:
        plain = read_bf16(store, table[:, packed:].flatten(0, 1)).keys.reshape(table.shape[0], -1, layout.head_dim)
        parts.append(plain.float() if parts else plain)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

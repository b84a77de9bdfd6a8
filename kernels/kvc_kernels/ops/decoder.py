"""Which of the decode kernels reads which store."""

from __future__ import annotations

from ..store import PageStore
from .decode_attention_triton import DecodeAttention
from .decode_share_triton import ShareDecodeAttention


def make_decoder(store: PageStore, *, even: bool, **kw) -> DecodeAttention:
    """The decode attention of `store`; `kw` as for `DecodeAttention`.

    `even`: all heads keep as many tokens of a block. Where a policy prunes head by head, or mixes two formats, as many
    programs for each head as for another leave some of them idle, and they are dealt by the tiles that a head has
    (bench/kernels/NOTES.md).
    """
    if even:
        return DecodeAttention(store, **kw)
    return ShareDecodeAttention(store, exact=True, **kw)

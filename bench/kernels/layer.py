"""One decoder layer of an 8B-shaped model with random weights: what a prefill or a decode step costs around the cache.

Hidden size 4096, 32 query heads, 8 KV heads, head_dim 128, MLP 14336, 32 layers. Four products and attention; norms,
rotations and the sampler are left out, so that an overhead in per cent of it is rather too large than too small.
"""

from __future__ import annotations

import torch

from .common import time_graph

HIDDEN, HEADS, GROUP, DIM, MLP, LAYERS = 4096, 8, 4, 128, 14336, 32
SHAPES = ((HIDDEN, (GROUP + 2) * HEADS * DIM), (GROUP * HEADS * DIM, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))


def products_ms(tokens: int) -> float:
    """Milliseconds of a layer's four matrix products for `tokens` rows; weights of two layers, so that L2 is cold."""
    weights = [[torch.randn(s, device="cuda").bfloat16() for s in SHAPES] for _ in range(2)]
    inputs = [torch.randn((tokens, s[0]), device="cuda").bfloat16() for s in SHAPES]

    def layer(i: int) -> None:
        for x, w in zip(inputs, weights[i % 2]):
            x @ w

    return time_graph(layer, inner=4)


def prefill_ms(tokens: int) -> float:
    """A layer's prefill of one prompt: products, and causal attention by FlashInfer."""
    import flashinfer

    qkv = torch.randn((tokens, (GROUP + 2) * HEADS, DIM), device="cuda").bfloat16()
    q, k, v = qkv.split((GROUP * HEADS, HEADS, HEADS), 1)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    wrapper.plan(starts, starts, GROUP * HEADS, HEADS, DIM, causal=True, q_data_type=torch.bfloat16)
    return products_ms(tokens) + time_graph(lambda _: wrapper.run(q, k, v), inner=3)

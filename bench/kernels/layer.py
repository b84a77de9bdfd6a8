"""Modeled time of one decoder layer of an 8B-shaped model with random weights, for relative overheads.

Hidden size 4096, 32 query heads, 8 KV heads, head_dim 128, MLP 14336, 32 layers. The model covers four matrix products
and attention. Without norms, rotations and the sampler, relative overheads are rather too high than too low.
"""

from __future__ import annotations

import torch

from .common import time_graph

HIDDEN, HEADS, GROUP, DIM, MLP, LAYERS = 4096, 8, 4, 128, 14336, 32
SHAPES = ((HIDDEN, (GROUP + 2) * HEADS * DIM), (GROUP * HEADS * DIM, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))


def products_ms(tokens: int) -> float:
    """Milliseconds of a layer's four matrix products for `tokens` rows. Two layers alternate, so that L2 is cold."""
    weights = [[torch.randn(s, device="cuda").bfloat16() for s in SHAPES] for _ in range(2)]
    inputs = [torch.randn((tokens, s[0]), device="cuda").bfloat16() for s in SHAPES]

    def layer(i: int) -> None:
        for x, w in zip(inputs, weights[i % 2]):
            x @ w

    return time_graph(layer, inner=4)


def prefill_ms(tokens: int) -> float:
    """Milliseconds of a layer's prefill of one prompt: matrix products, and causal attention by the served library."""
    from kvc_kernels.extend.dense_prefill import ragged_prefill

    qkv = torch.randn((tokens, (GROUP + 2) * HEADS, DIM), device="cuda").bfloat16()
    q, k, v = qkv.split((GROUP * HEADS, HEADS, HEADS), 1)
    library = ragged_prefill(
        torch.device("cuda"), query_heads=GROUP * HEADS, heads=HEADS, head_dim=DIM, dtype=torch.bfloat16
    )
    library.plan([tokens])
    attend = time_graph(lambda _: library.run(q, k, v, scale=DIM**-0.5, logit_cap=0.0, lse=False), inner=3)
    return products_ms(tokens) + attend

"""Trained gates that rate tokens by their keys and values (Locret, arXiv 2410.01805)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from .base import RowScorer


@dataclass(frozen=True)
class Gate(RowScorer):
    """`s_i = w2 . relu(W1 [k_i, v_i] + b1) + b2`, a network of F hidden units for each KV head.

    The calibration file holds `gate_in` `[L, H, F, 2D]` (W1), `gate_in_bias` `[L, H, F]`, `gate_out` `[L, H, F]` (w2)
    and `gate_out_bias` `[L, H]`. k_i is the key before its rotary embedding, which `rotary_frequencies` undo. Any
    training method will do; `python -m sglang_kvc.calibration.measure.gates` trains on the largest attention that later
    queries of a text pay to a token, which Locret calls its causal importance.

    Assumed: the gate reads key and value. Locret's also reads the token's query, and other gates read hidden states
    (TRIM-KV, Attention-Gate); neither is stored in the cache.
    """

    name: ClassVar[str] = "gate"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("gate_in", "gate_in_bias", "gate_out", "gate_out_bias", "rotary_frequencies")

    def score_layer(self, evidence, layer: int) -> torch.Tensor:
        stats = evidence.calibration
        keys, values = evidence.rows(layer)
        keys = ops.rotated(keys, -evidence.positions()[:, None], stats["rotary_frequencies"])
        return ops.gate_scores(torch.cat((keys, values), -1), *(stats[name][layer] for name in self.needs[:4]))

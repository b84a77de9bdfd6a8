"""The list of scorers: adding one is a file in this folder and a line here."""

from __future__ import annotations

from .base import RowScorer, Scorer
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .keydiff import KeyDiff
from .kv_compress import KvCompress, KvCompressFull
from .mean_attention import MeanAttention
from .random import Random
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM

SCORERS: dict[str, type[Scorer]] = {
    s.name: s
    for s in (
        KeyDiff,
        ExpectedAttention,
        MeanAttention,
        KvCompress,
        KvCompressFull,
        H2O,
        SnapKV,
        StreamingLLM,
        Random,
    )
}

__all__ = ["SCORERS", "RowScorer", "Scorer"]

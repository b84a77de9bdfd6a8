"""Scorers. Adding one takes a file in this folder and a line in `SCORERS`.

Scorers of `published/` collect attention scores and are not recommended; see there.
"""

from ..published.compresskv import CompressKV
from ..published.defensivekv import DefensiveKV
from ..published.h2o import H2O
from ..published.kv_compress import KvCompress, KvCompressFull
from ..published.lazy_eviction import LazyEviction
from ..published.mean_attention import MeanAttention
from ..published.snapkv import SnapKV
from .base import RowScorer, Scorer
from .cake import Cake
from .dapq import DapQ
from .expected_attention import ExpectedAttention
from .gate import Gate
from .keydiff import KeyDiff
from .random import Random
from .streaming_llm import StreamingLLM

SCORERS: dict[str, type[Scorer]] = {
    s.name: s
    for s in (
        KeyDiff,
        ExpectedAttention,
        DapQ,
        Cake,
        Gate,
        StreamingLLM,
        Random,
        # published/
        MeanAttention,
        KvCompress,
        KvCompressFull,
        H2O,
        SnapKV,
        DefensiveKV,
        LazyEviction,
        CompressKV,
    )
}

__all__ = ["SCORERS", "KeyDiff", "RowScorer", "Scorer"]

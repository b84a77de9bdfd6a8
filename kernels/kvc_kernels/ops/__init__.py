"""Operations on a `PageStore` in plain torch, one file an operation."""

from .append import append
from .attention import decode_attention, extend_attention
from .compact import compact
from .dense import block_digest, block_scores, block_tiers, load_dense
from .observe import Observe, note_observers, significance
from .plan import keep_all, quota, threshold
from .ring import block_head_pages, check_invariants, release, take_bf16

__all__ = [
    "Observe",
    "append",
    "block_digest",
    "block_head_pages",
    "block_scores",
    "block_tiers",
    "check_invariants",
    "compact",
    "decode_attention",
    "extend_attention",
    "keep_all",
    "load_dense",
    "note_observers",
    "quota",
    "release",
    "significance",
    "take_bf16",
    "threshold",
]

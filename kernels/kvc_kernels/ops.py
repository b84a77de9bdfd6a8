"""Operations on a `PageStore` in plain torch; each comes from the folder of its operation."""

from .append.reference import append
from .common.attention_reference import decode_attention, extend_attention
from .compact.reference import compact
from .decode.snapshot import decode_snapshot
from .pages.dense import block_digest, block_scores, block_tiers, load_dense
from .pages.reference import block_head_pages, check_invariants, release, take_bf16
from .scores.reference import Observe, note_observers, significance
from .tiering.apportion import apportion, greedy_allocation, pyramid, retention_curves, spread
from .tiering.importance import expected_attention, future_keys, hashed_scores, keydiff, pool_scores
from .tiering.quota import keep_all, quota, threshold
from .tiering.thresholds import Thresholds, plan_thresholds

__all__ = [
    "Observe",
    "Thresholds",
    "append",
    "apportion",
    "block_digest",
    "block_head_pages",
    "block_scores",
    "block_tiers",
    "check_invariants",
    "compact",
    "decode_attention",
    "decode_snapshot",
    "expected_attention",
    "extend_attention",
    "future_keys",
    "greedy_allocation",
    "hashed_scores",
    "keep_all",
    "keydiff",
    "load_dense",
    "note_observers",
    "plan_thresholds",
    "pool_scores",
    "pyramid",
    "quota",
    "release",
    "retention_curves",
    "significance",
    "spread",
    "take_bf16",
    "threshold",
]

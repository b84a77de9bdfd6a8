"""Operations on a `PageStore`: plain torch, one file an operation; see `docs/contract.md`."""

from .append import append
from .compact import compact
from .dense import block_digest, block_scores, block_tiers, load_dense
from .plan import keep_all
from .ring import check_invariants, release, take_bf16

__all__ = [
    "append",
    "block_digest",
    "block_scores",
    "block_tiers",
    "check_invariants",
    "compact",
    "keep_all",
    "load_dense",
    "release",
    "take_bf16",
]

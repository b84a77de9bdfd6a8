"""Policies: what is kept, at which precision. Tensor work is in `kvc_kernels.ops`; nothing here imports sglang."""

from .allocation import SHARES
from .base import BLOCK, SEQUENCE, Evidence, Policy
from .prune import Prune
from .registry import POLICIES, make_policy
from .scorers import SCORERS

__all__ = ["BLOCK", "POLICIES", "SCORERS", "SEQUENCE", "SHARES", "Evidence", "Policy", "Prune", "make_policy"]

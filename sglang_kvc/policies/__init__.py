"""Policies: what is kept, at which precision. Tensor work is in `kvc_kernels.ops`; nothing here imports sglang."""

from .base import BLOCK, SEQUENCE, Evidence, Policy
from .registry import POLICIES

__all__ = ["BLOCK", "POLICIES", "SEQUENCE", "Evidence", "Policy"]

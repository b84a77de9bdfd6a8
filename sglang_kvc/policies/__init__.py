"""Policies: the choice of tokens that a packed block keeps, and of their precision. Tensor work is in `kvc_kernels`.

* `base.py`: `Policy`, and the `Evidence` that a plan may look at.
* `quantize.py`, `prune.py`: the two recommended policies; `presets.py` has compositions of them under short names.
* `scorers/`, `allocation.py`: the parts of `prune`.
* `published/`: LeanKV and the scorers and presets of papers, available but not recommended.
* `budget.py`, `parse.py`: values of settings and their text.
* `registry.py`: the list of policies.
"""

# ruff: noqa: F401  (this package exports what it imports)

from .allocation import SHARES
from .base import BLOCK, LOSSLESS, SEQUENCE, Evidence, Policy
from .prune import Prune
from .registry import POLICIES, make_policy
from .scorers import SCORERS

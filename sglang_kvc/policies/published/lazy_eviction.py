"""LazyEviction (arXiv 2506.15969): a token is kept while its next important attention is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvc_kernels import ops

from ..scorers.base import Scorer

EPSILON = 1e-5  # of the authors' code


@dataclass(frozen=True)
class LazyEviction(Scorer):
    """`s_i = 2 sigma(-(t - TS_i) / MRI_i) + [MRI_i > 0] 2 sigma(1 - MRI_i)` at step t, sigma the logistic function.

    TS_i is the last step whose query paid token i at least `alpha`, at first the token's own step. MRI_i is the longest
    interval between two such steps, at first 0. The first term falls while a token is overdue, and the second prefers
    short intervals. The paper evicts every W steps, after it has watched a token for W steps: `--kvc-lag`.

    Assumed: the query heads of a KV head share one TS and one MRI; the paper's code keeps both for each query head. A
    query's attention to its own token does not count. The interval between a token's own step and its first use counts
    only until the second use. Prompts are planned, too: all queries of a prompt, or one in `stride`, count as a single
    use by the last of them that pays `alpha`. Where a plan has no length, t is the last use of any token of the block.
    With `decode_stride` s one step in s is read, and intervals are counted in s steps. Intervals end at 4095 tokens and
    positions at 260,094. The authors' code adds 1 to the argument of the first term, and the formula here does not. The
    equations come from summaries of the paper and a copy of its code, `alpha` from a report of a run of that code.
    """

    name: ClassVar[str] = "lazy-eviction"
    sums: ClassVar[bool] = False
    alpha: float = 1e-4
    stride: int = 1
    decode_stride: int = 1

    @property
    def sampling(self) -> ops.ScoreSampling:
        return ops.ScoreSampling(
            reduce="recurrence", stride=self.stride, decode_stride=self.decode_stride, alpha=self.alpha
        )

    def score(self, evidence) -> torch.Tensor:
        used, interval = ops.recurrence(evidence.attention_scores())
        own = (evidence.positions() + 1)[:, None, None, :]
        last = torch.maximum(used, own)
        interval = torch.where((used > 0) & (interval == 0), last - own, interval)
        now = torch.maximum(last.amax((1, 2, 3)), evidence.lengths.float()).view(-1, 1, 1, 1)
        step = (evidence.sampling or self.sampling).decode_stride
        longest = interval / step
        due = 2 * torch.sigmoid(-(now - last) / step / (longest + EPSILON))
        often = 2 * torch.sigmoid((1 - longest).clamp(max=0))
        return due + torch.where(longest > 0, often, 0)

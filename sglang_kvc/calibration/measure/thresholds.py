"""LeanKV's thresholds (arXiv 2412.03131, section 4): alpha_high first, then alpha_low.

The first three quarters of the text are a prompt, whose tokens are stored high, low or not at all by their attention
scores from the prompt's later queries, as the policy `leankv` does. The rest is read after that prompt, and its
predictions are compared with those after the exact prompt. alpha_high is the largest of 1 .. 5 whose mean KL, with
nothing pruned, is at most `LOSS`, the limit for a format to be ok. With it, alpha_low is the largest of 0.02 and 0.04
that adds at most `PRUNING_LOSS`. This limit is small, because predictions hardly show a missing token until it is
needed. For the same reason larger values are not tried: with 0.1, which passes, answers are lost
(docs/quality-research.md). If no value qualifies, the threshold is 0: no low tier, or no token pruned. `answers.py`
chooses by answers instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import PoolLayout
from kvc_kernels.ops import HIGH, PRUNED, fake_quantize
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration.verdicts import Chosen
from sglang_kvc.options.resolve import resolve_config
from sglang_kvc.policies import make_policy
from sglang_kvc.policies.published.leankv import LeanKV

from .attention import causal
from .capture import Attend, run
from .formats import OK_MEAN, Difference, compare
from .progress import Progress

ALPHA_HIGH = (1.0, 2.0, 3.0, 4.0, 5.0)
ALPHA_LOW = (0.02, 0.04)
LOSS, PRUNING_LOSS = OK_MEAN, OK_MEAN / 4  # nats per token


@dataclass(frozen=True)
class ThresholdResult:
    alpha_high: float
    alpha_low: float
    high: float  # share of the prompt's tokens, over all heads
    low: float
    pruned: float
    difference: Difference

    def to_dict(self) -> dict[str, Any]:
        out = asdict(self)
        difference = out.pop("difference")
        return {**out, **difference}


@dataclass
class Prompt:
    """K, V and attention scores of the prompt's first n tokens (whole blocks), one entry per layer."""

    k: list[torch.Tensor]  # [H, n, D]
    v: list[torch.Tensor]
    scores: list[torch.Tensor]  # fp32 [H, n]
    kept: list[torch.Tensor] | None = None  # bool [H, n]; None: all tokens

    @classmethod
    def of(cls, layers: int) -> Prompt:
        return cls(*([torch.empty(0)] * layers for _ in range(3)))

    def add(self, layer: int, k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor, n: int) -> None:
        """`sums` fp32 `[H, G, m]`: probabilities summed over the later queries of m tokens, n of which are kept here.
        Scores: means, max over G."""
        num_queries = torch.arange(sums.shape[-1] - 1, -1, -1, device=k.device).clamp(min=1)
        self.k[layer], self.v[layer] = k[:, :n].clone(), v[:, :n].clone()
        self.scores[layer] = (sums.amax(1) / num_queries)[:, :n]

    @property
    def tokens(self) -> int:
        return self.k[0].shape[1]


def plan(
    scores: torch.Tensor, layout: PoolLayout, policy: LeanKV, alpha_high: float, alpha_low: float
) -> torch.Tensor:
    """Tiers int8 `[H, n]` of one layer's prompt, by the policy's rule for prompts."""
    p = layout.block_tokens
    by_block = scores.unflatten(1, (-1, p)).movedim(0, 1).unsqueeze(1)  # [blocks, 1, H, P]
    positions = torch.arange(scores.shape[1], device=scores.device).view(-1, p)
    pages = [layout.page(FORMATS[f]).tokens for f in (policy.high, policy.low)]
    everything = torch.full(by_block.shape, HIGH, dtype=torch.int8, device=scores.device)
    tiers = ops.threshold(by_block, positions + 1.0, alpha_high, alpha_low, everything, *pages)
    return tiers[:, 0].movedim(1, 0).flatten(1)


def fake_quant_rows(
    k: torch.Tensor, v: torch.Tensor, tiers: torch.Tensor, layout: PoolLayout, policy: LeanKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V `[H, n, D]` fake-quantized as blocks with these tiers; rows of pruned tokens are meaningless.

    Key scales of a block span the tokens that it keeps, so a kept token stands in for each pruned one.
    """
    p = layout.block_tokens
    kept = (tiers != PRUNED).unflatten(1, (-1, p))
    keys, values = (x.unflatten(1, (-1, p)) for x in (k, v))
    first_kept = kept.to(torch.int8).argmax(-1)[..., None, None].expand(-1, -1, 1, k.shape[-1])
    keys = torch.where(kept.unsqueeze(-1), keys, keys.gather(2, first_kept))
    high, low = (fake_quantize(layout, FORMATS[f], keys, values) for f in (policy.high, policy.low))
    is_high = (tiers == HIGH).unsqueeze(-1)
    k, v = (torch.where(is_high, a.flatten(1, 2), b.flatten(1, 2)) for a, b in zip(high, low))
    return k, v


def stored(prompt: Prompt, tiers: list[torch.Tensor], layout: PoolLayout, policy: LeanKV) -> Prompt:
    """The prompt as a server stores it with `tiers` `[H, n]` of each layer."""
    rows = [fake_quant_rows(k, v, t, layout, policy) for k, v, t in zip(prompt.k, prompt.v, tiers, strict=True)]
    return Prompt([k for k, _ in rows], [v for _, v in rows], prompt.scores, [t != PRUNED for t in tiers])


def after_prompt(prompt: Prompt, step: Callable[[int], None] = lambda layer: None) -> Attend:
    """Attention of tokens after the prompt."""

    def attend(layer, q, k, v, scale):
        keys, values, valid = torch.cat((prompt.k[layer], k), 1), torch.cat((prompt.v[layer], v), 1), None
        if prompt.kept is not None:
            valid = torch.cat((prompt.kept[layer], prompt.kept[layer].new_ones(k.shape[:2])), 1)
        out = causal(q, keys, values, scale, valid)
        step(layer)
        return out

    return attend


def geometry(shape: tuple[int, int, int], block: int) -> tuple[LeanKV, PoolLayout]:
    """The policy and the layout of a server with its defaults; `shape` is (L, H, D)."""
    config = resolve_config(SimpleNamespace(kvc_policy="leankv", kvc_block_size=block))
    policy = cast(LeanKV, make_policy(config))
    return policy, make_layout(config, policy, layers=shape[0], heads=shape[1], head_dim=shape[2])


def measure(
    model: torch.nn.Module,
    ids: torch.Tensor,
    prompt: Prompt,
    shape: tuple[int, int, int],
    block: int,
    progress: Progress,
) -> tuple[Chosen, list[ThresholdResult]]:
    """The chosen thresholds, and all results. `ids` `[N]`: the text, of which the first tokens are the prompt."""
    policy, layout = geometry(shape, block)
    rest = ids[prompt.tokens :]
    scored = torch.arange(len(rest) - 1, device=ids.device)

    def predictions(name: str, prompt: Prompt) -> torch.Tensor:
        attend = after_prompt(prompt, lambda layer: progress.step(name, layer, shape[0]))
        return run(model, rest, attend, scored, prompt.tokens)

    exact = predictions("thresholds, exact", prompt)

    def result(alpha_high: float, alpha_low: float) -> ThresholdResult:
        tiers = [plan(s, layout, policy, alpha_high, alpha_low) for s in prompt.scores]
        name = f"alpha_high {alpha_high:g}, alpha_low {alpha_low:g}"
        difference = compare(exact, predictions(name, stored(prompt, tiers, layout, policy)), rest[1:])
        stacked = torch.stack(tiers)
        high, low, pruned = ((stacked == t).double().mean().item() for t in (HIGH, 1, PRUNED))
        return ThresholdResult(alpha_high, alpha_low, high, low, pruned, difference)

    first = [result(a, 0.0) for a in ALPHA_HIGH]
    alpha_high = max([r.alpha_high for r in first if r.difference.kl_mean <= LOSS], default=0.0)
    if not alpha_high:
        first.append(result(0.0, 0.0))
    limit = next(r.difference.kl_mean for r in first if r.alpha_high == alpha_high) + PRUNING_LOSS
    second = [result(alpha_high, a) for a in ALPHA_LOW]
    alpha_low = max([r.alpha_low for r in second if r.difference.kl_mean <= limit], default=0.0)
    return Chosen(alpha_high, alpha_low, policy.high, policy.low), first + second

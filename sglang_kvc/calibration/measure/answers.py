"""LeanKV's thresholds chosen by answers, as LeanKV (arXiv 2412.03131) chooses them by the accuracy on MATH.

The whole blocks of a prompt are stored by a pair of thresholds, as the policy `leankv` does after a prefill. The rest
of the prompt and a known answer are read after them. The answer is right if each of its tokens is the most likely one,
which is the same as a greedy exact match. Only answers that the exact cache gives count.

alpha_high is the largest of 1 .. 5 that, with nothing pruned, loses at most one in `ONE_IN` of these answers. With it,
alpha_low is the largest of `ALPHA_LOW` within the same limit. All smaller values must be within the limit, too. If no
value qualifies, the threshold is 0: no low tier, or no token pruned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvc_kernels.layout import PoolLayout
from kvc_kernels.ops import HIGH, PRUNED
from sglang_kvc.calibration.verdicts import Chosen

from .answer_items import Question, SharedPrompt
from .attention import by_block
from .attention_scores import attention_scores
from .capture import CalibrateError, run
from .progress import Progress
from .thresholds import ALPHA_HIGH, Prompt, after_prompt, geometry, plan, stored

ALPHA_LOW = (0.02, 0.04, 0.1, 0.3)
ONE_IN = 100
SWEEPS = 2  # over all prompts: one for alpha_high, one for alpha_low


@dataclass
class AnswerResult:
    """Answers that one pair of thresholds keeps, of those that the exact cache gives."""

    alpha_high: float
    alpha_low: float
    right: int = 0
    of: int = 0
    tiers: torch.Tensor = field(default_factory=lambda: torch.zeros(HIGH + 1, dtype=torch.int64))  # tokens per tier

    def to_dict(self) -> dict[str, Any]:
        shares = (self.tiers / self.tiers.sum()).tolist()
        return {
            "alpha_high": self.alpha_high,
            "alpha_low": self.alpha_low,
            "high": shares[HIGH],
            "low": shares[1],
            "pruned": shares[PRUNED],
            "answers": {"right": self.right, "of": self.of},
        }


def choose(sweep: Callable[[list[tuple[float, float]]], list[AnswerResult]]) -> tuple[float, float, list[AnswerResult]]:
    """alpha_high, alpha_low and all results; `sweep` gives the result of each pair."""
    first = sweep([(a, 0.0) for a in ALPHA_HIGH])
    alpha_high = _largest([(r.alpha_high, r) for r in first])
    second = sweep([(alpha_high, a) for a in ALPHA_LOW])
    return alpha_high, _largest([(r.alpha_low, r) for r in second]), first + second


def _largest(results: list[tuple[float, AnswerResult]]) -> float:
    """The largest value, ascending, that is within the limit as all smaller ones are; 0 if none is."""
    within = itertools.takewhile(lambda x: x[1].of - x[1].right <= x[1].of // ONE_IN, results)
    return max((value for value, _ in within), default=0.0)


def exact_prompt(model: torch.nn.Module, shared: SharedPrompt, layout: PoolLayout, step) -> Prompt:
    """K, V and scores of the planned tokens. As in a server, all queries of the shared text count."""
    ids = torch.tensor(shared.ids, device=model.device)
    prompt = Prompt.of(layout.layers)

    def attend(layer, q, k, v, scale):
        (sums,) = attention_scores(q, k, scale, (len(ids),))
        prompt.add(layer, k, v, sums, shared.planned)
        out = by_block(q, k, v, scale, layout.block_tokens, None)
        step(layer)
        return out

    run(model, ids, attend, torch.zeros(1, dtype=torch.int64, device=ids.device))
    return prompt


def right(model: torch.nn.Module, prompt: Prompt, question: Question) -> bool:
    """Whether every token of the answer is the most likely one after this prompt."""
    rest = torch.tensor(question.rest, device=model.device)
    scored = torch.arange(len(rest) - question.answer_tokens - 1, len(rest) - 1, device=model.device)
    logits = run(model, rest[:-1], after_prompt(prompt), scored, prompt.tokens)
    return bool((logits.argmax(-1) == rest[scored + 1]).all())


def measure(
    model: torch.nn.Module,
    prompts: list[SharedPrompt],
    shape: tuple[int, int, int],
    block: int,
    progress: Progress,
) -> tuple[Chosen, list[AnswerResult]]:
    """The chosen thresholds, and all results. K and V of one prompt at a time are in memory, twice."""
    policy, layout = geometry(shape, block)

    def sweep(pairs: list[tuple[float, float]]) -> list[AnswerResult]:
        results = [AnswerResult(*pair) for pair in pairs]
        for i, shared in enumerate(prompts, 1):
            name = f"answers, prompt {i} of {len(prompts)}"
            prompt = exact_prompt(model, shared, layout, lambda layer, name=name: progress.step(name, layer, shape[0]))
            given = [q for q in shared.questions if right(model, prompt, q)]
            for r in results if given else ():
                tiers = [plan(scores, layout, policy, r.alpha_high, r.alpha_low) for scores in prompt.scores]
                packed = stored(prompt, tiers, layout, policy)
                r.right += sum(right(model, packed, q) for q in given)
                r.of += len(given)
                r.tiers += torch.stack(tiers).flatten().long().bincount(minlength=HIGH + 1).cpu()
        if not results[0].of:
            raise CalibrateError(
                "the exact cache gives no answer of --answers; give answers that the model itself writes, with the "
                "space before them"
            )
        return results

    alpha_high, alpha_low, tried = choose(sweep)
    return Chosen(alpha_high, alpha_low, policy.high, policy.low), tried

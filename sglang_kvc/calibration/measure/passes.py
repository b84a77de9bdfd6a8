"""All measurements on one model and one text, in order of their dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from sglang_kvc.calibration.model_fingerprint import Identity, identity_of
from sglang_kvc.calibration.verdicts import Chosen, Findings, LeastMemory

from . import answers, formats, thresholds
from .answer_items import SharedPrompt
from .answers import AnswerResult
from .attention import by_block, causal
from .attention_scores import attention_scores
from .capture import CalibrateError, run
from .formats import FormatResult
from .layer_statistics import LayerStatistics, head_retrieval
from .least_memory import least_memory
from .progress import Progress
from .queries import QueryStatistics, rotary_frequencies, same_before_rotation, unrotate
from .thresholds import Prompt, ThresholdResult

BLOCK = 128
MAX_SCORED = 1024  # number of compared predictions; their logits are in memory twice
MIN_BLOCKS = 4
REPEATED = 512  # tokens of the text that are read twice, to find the retrieval heads


@dataclass
class Calibration:
    """Results. `tensors` go to the file; `settings` say how they were measured."""

    identity: Identity
    settings: dict[str, Any]
    formats: list[FormatResult]
    tensors: dict[str, torch.Tensor]
    chosen: Chosen
    tried: Sequence[ThresholdResult | AnswerResult] = field(default_factory=list)
    least_memory: LeastMemory | None = None

    def findings(self) -> Findings:
        """Metadata of the file."""
        return Findings(
            identity=self.identity,
            settings=self.settings,
            formats=tuple(r.to_dict() for r in self.formats),
            recommended=formats.recommended(self.formats),
            thresholds=self.chosen,
            tried=tuple(r.to_dict() for r in self.tried),
            least_memory=self.least_memory,
        )

    def save(self, path: str | Path) -> None:
        tensors = {name: x.contiguous() for name, x in self.tensors.items()}
        # Not `save_file`, whose file only its owner can read: a server may run as another user.
        Path(path).write_bytes(save(tensors, metadata=self.findings().metadata()))


def calibrate(
    model: torch.nn.Module,
    ids: torch.Tensor,
    *,
    block: int = BLOCK,
    progress: Progress | None = None,
    prompts: list[SharedPrompt] | None = None,
    retention: float | None = None,
) -> Calibration:
    """Measure everything on tokens `ids`, int64 `[N]` on the model's device. CalibrateError if the text is too short.

    The answers to `prompts` choose LeanKV's thresholds; None: the text does. `retention`: share of the attention that
    XKV's least memory retains. Peak memory besides the model: K and V of the text, and of three quarters of it or twice
    those of a prompt, one layer's attention, and the logits of `MAX_SCORED` tokens.
    """
    identity = identity_of(model.config)
    n, layers = len(ids), identity.layers
    if n < MIN_BLOCKS * block:
        raise CalibrateError(
            f"the text has {n} tokens, and the effect of earlier blocks on later ones needs {MIN_BLOCKS} blocks of "
            f"{block}; give a longer text, or a higher --tokens"
        )
    by_text = 2 + len(thresholds.ALPHA_HIGH) + len(thresholds.ALPHA_LOW)  # one may not be needed
    progress = progress or Progress()
    progress.begin((2 + len(formats.PACKED) + (by_text if prompts is None else answers.SWEEPS * len(prompts))) * layers)
    # Evenly spaced predictions from the second block on, whose queries attend to a packed block.
    scored = torch.arange(block, n - 1, -(-(n - 1 - block) // MAX_SCORED), device=ids.device)
    shape = (layers, identity.kv_heads, identity.head_dim)
    chosen: Chosen
    tried: Sequence[ThresholdResult | AnswerResult]
    if prompts is not None:  # before the text, so that answers which the model does not give end the command early
        chosen, tried = answers.measure(model, prompts, shape, block, progress)

    prompt = Prompt.of(layers)
    prompt_tokens = 3 * n // 4 // block * block
    queries = QueryStatistics(layers)
    statistics = LayerStatistics(layers, n)
    frequencies = rotary_frequencies(model)

    def attend(layer, q, k, v, scale):
        nonlocal frequencies
        if layer == 0 and frequencies is not None and not same_before_rotation(k, ids, frequencies):
            frequencies = None
        queries.add(layer, q if frequencies is None else unrotate(q, frequencies))
        early, late = attention_scores(q, k, scale, (prompt_tokens, n))
        prompt.add(layer, k, v, early[..., :prompt_tokens], prompt_tokens)
        statistics.add(layer, q, k, late.sum(1), scale)
        out = by_block(q, k, v, scale, block, None)
        progress.step("capture", layer, layers)
        return out

    exact = run(model, ids, attend, scored)
    results = formats.measure(model, ids, scored, exact, shape, block, progress)
    del exact
    if prompts is None:
        chosen, tried = thresholds.measure(model, ids, prompt, shape, block, progress)
    per_head = retrieval(model, ids[: min(REPEATED, n // 2)], shape, progress)

    progress.end()
    tensors = {**queries.tensors(), **statistics.tensors(), "head_retrieval": per_head}
    if frequencies is not None:
        tensors |= {"rotary_frequencies": frequencies, "query_samples": queries.samples()}
    settings = {
        "tokens": n,
        "block_size": block,
        "scored": len(scored),
        "prompt_tokens": prompt_tokens,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": ids.device.type,
    }
    if prompts is not None:
        settings["answers"] = {"prompts": len(prompts), "items": sum(len(p.questions) for p in prompts)}
    least = None if retention is None else least_memory(tensors["importance_retention"], retention, shape, block)
    return Calibration(identity, settings, results, tensors, chosen, tried, least)


def retrieval(
    model: torch.nn.Module, ids: torch.Tensor, shape: tuple[int, int, int], progress: Progress
) -> torch.Tensor:
    """`head_retrieval` of every layer on `ids` `[m]` and their repetition, fp32 `[L, H]`."""
    per_head = torch.empty(shape[:2])

    def attend(layer, q, k, v, scale):
        per_head[layer] = head_retrieval(q, k, scale).cpu()
        progress.step("retrieval", layer, shape[0])
        return causal(q, k, v, scale)

    run(model, torch.cat((ids, ids)), attend, torch.zeros(1, dtype=torch.int64, device=ids.device))
    return per_head

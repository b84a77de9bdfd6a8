"""Replaces a model's attention: every layer calls a function with its rotated q, k and v, and uses its result.

Uses the attention interface of transformers 5 (`AttentionInterface.register`, a function that is called with
`(module, query, key, value, attention_mask, scaling=, ...)`). The model itself is unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from transformers import AttentionInterface

NAME = "kvc_calibrate"
# layer, q [Hq, n, D], k [H, n, D], v [H, n, D], scale -> output [Hq, n, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
# Arguments of transformers' attention that make it differ from softmax(q.k) over all earlier tokens.
_OTHER_KINDS = ("sliding_window", "softcap", "s_aux")

_active: list[Attend] = []


class CalibrateError(RuntimeError):
    """The model cannot be calibrated; the message says why and what to do."""


def _dispatch(module, query, key, value, attention_mask, scaling=None, **kwargs):
    if any(kwargs.get(name) is not None for name in _OTHER_KINDS) or query.shape[0] != 1:
        raise CalibrateError(
            "this model's layers do not all attend to every earlier token by a plain softmax, and such models cannot "
            "be served compressed; serve it with --kv-backend default"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _active[-1](module.layer_idx, query[0], key[0], value[0], scale)
    return out.transpose(0, 1).unsqueeze(0).contiguous(), None


@contextlib.contextmanager
def attending(model: torch.nn.Module, attend: Attend) -> Iterator[None]:
    """Context in which `attend` replaces every attention layer of `model`, for batches of one sequence without a
    cache."""
    AttentionInterface.register(NAME, _dispatch)
    config = model.config
    before = config._attn_implementation
    model.set_attn_implementation(NAME)
    _active.append(attend)
    try:
        yield
    finally:
        _active.pop()
        model.set_attn_implementation(before)


@torch.inference_mode()
def run(
    model: torch.nn.Module, ids: torch.Tensor, attend: Attend, scored: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """Logits `[len(scored), V]`, in the model's dtype, for tokens `ids` `[n]` at positions first .. first + n - 1.

    `scored` int64: indices into `ids`; the logits predict their successors.
    """
    positions = torch.arange(first, first + len(ids), device=ids.device)
    with attending(model, attend):
        out = model(
            ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, logits_to_keep=scored
        )
    return out.logits[0]

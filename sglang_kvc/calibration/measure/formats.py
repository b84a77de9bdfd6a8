"""Effect of each packed format on the model's predictions, and a verdict.

The text is read once per format (teacher forcing), and every prediction is compared with that of the exact cache by
KL(exact || packed). By Pinsker's inequality, the probability that moves to other tokens is at most sqrt(KL / 2).

| verdict  | when                                  | reason for the limit                                              |
|----------|---------------------------------------|-------------------------------------------------------------------|
| `ok`     | mean <= 0.02 and p99 <= 0.2 nats      | at most 10 % of the probability moves, a third at 1 token in 100; |
|          |                                       | two bf16 implementations differ by about 0.002                    |
| `breaks` | mean > 0.2 nats                       | a third of the probability may move at every token                |
| `loses`  | between                               | easy tasks and short contexts survive it                          |

The NLL alone does not suffice, because predictions can change and remain as good on average.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import PoolLayout
from kvc_kernels.ops import fake_quantize
from sglang_kvc.cache.sizing import make_layout
from sglang_kvc.calibration.verdicts import BREAKS, LOSES, OK
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.options.validate import MIN_KEY_BITS
from sglang_kvc.policies import make_policy
from sglang_kvc.policies.budget import token_bytes

from .attention import by_block
from .capture import run
from .progress import Progress

OK_MEAN, OK_P99, BREAKS_MEAN = 0.02, 0.2, 0.2  # nats per token
PACKED = tuple(name for name, fmt in FORMATS.items() if fmt.packed)
ROWS = 128  # predictions compared at a time: [ROWS, V] in fp32


@dataclass(frozen=True)
class Difference:
    """Difference of predictions from those of the exact cache, over n tokens, in nats per token."""

    kl_mean: float
    kl_p99: float
    nll_delta: float
    top1_equal: float


@dataclass(frozen=True)
class FormatResult:
    """A format, its bytes per token of a packed block with all metadata, and its effect."""

    format: str
    token_bytes: float
    difference: Difference

    @property
    def verdict(self) -> str:
        return verdict(self.difference)

    def to_dict(self) -> dict[str, Any]:
        out = {"format": self.format, "token_bytes": self.token_bytes}
        return {**out, **asdict(self.difference), "verdict": self.verdict}


def verdict(d: Difference) -> str:
    """The verdict by the table above; NaN breaks."""
    if not d.kl_mean <= BREAKS_MEAN:
        return BREAKS
    return OK if d.kl_mean <= OK_MEAN and d.kl_p99 <= OK_P99 else LOSES


def recommended(results: list[FormatResult]) -> str:
    """The smallest format that is ok; "bf16" when none is."""
    ok = [r for r in results if r.verdict == OK]
    return min(ok, key=lambda r: r.token_bytes).format if ok else "bf16"


def compare(exact: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> Difference:
    """`exact`, `logits` `[n, V]` of any float dtype; `targets` int64 `[n]`, the tokens of the text."""
    kl, nll, same = [], [], []
    for at in range(0, len(targets), ROWS):
        p, q = (x[at : at + ROWS].float().log_softmax(-1) for x in (exact, logits))
        target = targets[at : at + ROWS, None]
        kl.append((p.exp() * (p - q)).sum(-1))
        nll.append((p.gather(1, target) - q.gather(1, target)).squeeze(1))
        same.append(p.argmax(-1) == q.argmax(-1))
    per_token = torch.cat(kl).double()
    return Difference(
        kl_mean=per_token.mean().item(),
        kl_p99=per_token.quantile(0.99).item(),
        nll_delta=torch.cat(nll).double().mean().item(),
        top1_equal=torch.cat(same).double().mean().item(),
    )


def layout_for(fmt: str, shape: tuple[int, int, int], block: int) -> tuple[PoolLayout, float]:
    """The server's geometry for this format, and bytes per token of its packed blocks; `shape` is (L, H, D)."""
    config = KvcConfig(high=fmt, block_size=block)
    layers, heads, head_dim = shape
    layout = make_layout(config, make_policy(config), layers=layers, heads=heads, head_dim=head_dim)
    return layout, token_bytes(layout, layout.block_pages(FORMATS[fmt]))


def measure(
    model: torch.nn.Module,
    ids: torch.Tensor,
    scored: torch.Tensor,
    exact: torch.Tensor,
    shape: tuple[int, int, int],
    block: int,
    progress: Progress,
) -> list[FormatResult]:
    """Every packed format that the kernels have at this head size. `exact` are the logits of the exact cache at
    `scored`.

    The exact pass must be `attend.by_block` without a format, so that its own difference is 0.
    """
    out, targets = [], ids[scored + 1]
    for name in PACKED:
        if shape[2] * FORMATS[name].key_bits < MIN_KEY_BITS:
            continue  # the server refuses it
        layout, size = layout_for(name, shape, block)

        def attend(layer, q, k, v, scale, layout=layout, name=name):
            result = by_block(q, k, v, scale, block, functools.partial(fake_quantize, layout, FORMATS[name]))
            progress.step(name, layer, shape[0])
            return result

        logits = run(model, ids, attend, scored)
        out.append(FormatResult(name, size, compare(exact, logits, targets)))
    return out

"""Trains a gate for each KV head, for the scorer `gate`, and adds the gates to a calibration file.

    python -m sglang_kvc.calibration.measure.gates --model-path M --text T --calibration FILE [--tokens 8192]

A gate learns from a token's key (before its rotary embedding) and value the logarithm of the largest attention that any
later query of the text pays to it, the maximum over the query heads of its KV head: Locret's causal importance (arXiv
2410.01805). The text is read in pieces of `PIECE` tokens. Needs torch and transformers, not SGLang.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn.functional import smooth_l1_loss

from kvc_kernels import ops
from kvc_kernels.ops import query_weights

from .attention import causal
from .capture import CalibrateError, run
from .command import device_named, load
from .queries import rotary_frequencies, same_before_rotation, unrotate

PIECE, END = 1024, 128  # tokens of a piece, and tokens at its end that are skipped because too few queries follow
MIN_ATTENTION = 1e-6  # lower bound of attention, for its logarithm
BATCH, RATE = 256, 3e-3
UNKNOWN_ROTATION = (
    "gates read keys before their rotary embedding, which cannot be undone for this model; use another scorer"
)


@dataclass(frozen=True)
class Examples:
    """Training examples: `rows` fp16 `[L * H, n, 2D]`, `targets` fp32 `[L * H, n]`."""

    rows: torch.Tensor
    targets: torch.Tensor


def largest_attention(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Largest probability that a later query pays to each token, fp32 `[H, n]`; q `[Hq, n, D]`, k `[H, n, D]`."""
    weights = query_weights(q, k, None, 0, q.shape[1], scale, 0.0)
    weights.diagonal(dim1=-2, dim2=-1).zero_()
    return weights.amax((1, 2))


def collect(model: torch.nn.Module, ids: torch.Tensor, frequencies: torch.Tensor) -> Examples:
    """The examples of one piece `ids` `[n]`."""
    rows: dict[int, torch.Tensor] = {}
    targets: dict[int, torch.Tensor] = {}

    def attend(layer, q, k, v, scale):
        if layer == 0 and not same_before_rotation(k, ids, frequencies):
            raise CalibrateError(UNKNOWN_ROTATION)
        examples = slice(0, k.shape[1] - END)
        plain = unrotate(k, frequencies)[:, examples]
        rows[layer] = torch.cat((plain, v[:, examples].float()), -1).half()
        targets[layer] = largest_attention(q, k, scale)[:, examples].clamp(min=MIN_ATTENTION).log()
        return causal(q, k, v, scale)

    run(model, ids, attend, torch.zeros(1, dtype=torch.int64, device=ids.device))
    layers = range(len(rows))
    return Examples(torch.cat([rows[i] for i in layers]), torch.cat([targets[i] for i in layers]))


def train(examples: Examples, hidden: int, steps: int) -> tuple[torch.Tensor, ...]:
    """Weights, biases, output weights and output biases of L * H gates of `hidden` units: arguments of `gate_scores`.

    Adam on a smooth L1 loss. Features are standardized for the training; the returned weights apply to the original
    features.
    """
    heads, n, width = examples.rows.shape
    generator = torch.Generator().manual_seed(0)
    device = examples.rows.device
    mean, spread = (torch.empty(heads, width, device=device) for _ in range(2))
    for i in range(heads):  # one head at a time: fp32 of all rows would be twice as large
        mean[i], spread[i] = examples.rows[i].float().mean(0), examples.rows[i].float().std(0).clamp(min=1e-3)
    parameters = [
        torch.randn(heads, hidden, width, generator=generator).to(device) * width**-0.5,
        torch.zeros(heads, hidden, device=device),
        torch.randn(heads, hidden, generator=generator).to(device) * hidden**-0.5,
        examples.targets.mean(-1),
    ]
    for x in parameters:
        x.requires_grad_()
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        at = torch.randint(n, (BATCH,), generator=generator).to(device)
        x = (examples.rows[:, at].float() - mean.unsqueeze(1)) / spread.unsqueeze(1)
        loss = smooth_l1_loss(ops.gate_scores(x, *parameters), examples.targets[:, at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    weights, biases, out, out_bias = (x.detach() for x in parameters)
    weights = weights / spread.unsqueeze(1)
    return weights, biases - (weights @ mean.unsqueeze(-1)).squeeze(-1), out, out_bias


def correlation(gates: tuple[torch.Tensor, ...], examples: Examples) -> float:
    """Mean over heads of the correlation between the gates' scores and the targets."""
    pairs = [
        torch.corrcoef(torch.stack((ops.gate_scores(examples.rows[i].float()[None], *(g[i : i + 1] for g in gates))[0],
                                    examples.targets[i])))[0, 1]
        for i in range(len(examples.rows))
    ]  # fmt: skip
    return float(torch.stack(pairs).mean())


def gates(
    model: torch.nn.Module, ids: torch.Tensor, *, hidden: int = 32, steps: int = 600
) -> tuple[dict[str, torch.Tensor], float]:
    """Tensors for the calibration file, and the correlation on the last piece of `ids` `[N]`, which is not trained on.

    CalibrateError for a model whose rotary embedding is unknown, and for fewer than two pieces.
    """
    frequencies = rotary_frequencies(model)
    if frequencies is None:
        raise CalibrateError(UNKNOWN_ROTATION)
    pieces = [ids[i : i + PIECE] for i in range(0, len(ids) - PIECE + 1, PIECE)]
    if len(pieces) < 2:
        raise CalibrateError(f"gates need {2 * PIECE} tokens of text, but this text has {len(ids)}; give a longer one")
    examples = [collect(model, piece, frequencies) for piece in pieces]
    text = Examples(torch.cat([x.rows for x in examples[:-1]], 1), torch.cat([x.targets for x in examples[:-1]], 1))
    trained = train(text, hidden, steps)
    layers = model.config.get_text_config().num_hidden_layers
    names = ("gate_in", "gate_in_bias", "gate_out", "gate_out_bias")
    tensors = {name: x.unflatten(0, (layers, -1)).cpu().contiguous() for name, x in zip(names, trained)}
    return {**tensors, "rotary_frequencies": frequencies}, correlation(trained, examples[-1])


def add_tensors(path: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write `tensors` into the calibration file at `path`, which keeps its other tensors and its findings. A missing
    file is created."""
    present: dict[str, torch.Tensor] = {}
    metadata = None
    if Path(path).exists():
        try:
            with safe_open(path, framework="pt") as file:
                present, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
        except (OSError, SafetensorError) as e:
            raise CalibrateError(f"--calibration {path} cannot be read ({e}); give another file") from None
    Path(path).write_bytes(save({**present, **tensors}, metadata=metadata))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--text", required=True, help="a file of plain text, like what will be served")
    parser.add_argument("--calibration", required=True, help="the file that gets the gates")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--hidden", type=int, default=32, help="units of a gate")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args(argv)
    try:
        words = Path(args.text).read_text(encoding="utf-8")
        device = device_named(args.device)
        model, ids = load(args.model_path, words, args.tokens)
        ids = torch.tensor(ids, device=device)
        tensors, held_out = gates(model.to(device), ids, hidden=args.hidden, steps=args.steps)
        add_tensors(args.calibration, tensors)
    except (CalibrateError, OSError, UnicodeDecodeError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"gates in {args.calibration}; correlation with attention on held-out text: {held_out:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

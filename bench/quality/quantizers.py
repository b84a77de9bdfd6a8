"""Comparison of quantization methods for keys and values, by the KL of predictions from those of an exact cache.

    python -m bench.quality.quantizers [--model smollm2|qwen-0.5b|qwen-1.5b] [--tokens 1024] [--block 128] [--groups]

A transformers model simulates the methods, including methods without a page format. A query sees earlier blocks
quantized and its own block exact. Either keys or values are quantized; the other side stays exact. Scales and zeros are
fp16, as in a page. `offset` subtracts each channel's mean, computed once over another text. `H` first rotates by a
Hadamard matrix along head_dim. `fitted` scales clip the extremes of a group. `dual scales` are KVarN's. `bits` counts
scales and zeros, but no static offsets. `--groups` only measures keys per channel in groups of 16 tokens (MiniKV's
sub-channel keys) to a full block.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from bench import common
from bench.quality import fetch
from sglang_kvc.calibration.measure import command
from sglang_kvc.calibration.measure.attention import by_block
from sglang_kvc.calibration.measure.capture import run
from sglang_kvc.calibration.measure.formats import compare

Rows = torch.Tensor  # [H, NB, P, D]
Quantizer = Callable[[Rows, torch.Tensor], Rows]  # rows and the layer's offset [H, 1, 1, D] -> dequantized rows


def affine(x: Rows, bits: int, dim: int) -> Rows:
    """Round to 2^bits levels between minimum and maximum along `dim`."""
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((hi - lo) / (2**bits - 1)).half().float()
    zero = lo.half().float()
    codes = ((x - zero) / scale.masked_fill(scale == 0, torch.inf)).round().clamp(0, 2**bits - 1)
    return codes * scale + zero


def per_channel(x: Rows, offset: torch.Tensor, *, bits: int) -> Rows:
    return affine(x, bits, -2)


def sub_channel(x: Rows, offset: torch.Tensor, *, bits: int, group: int) -> Rows:
    """Scales per channel and `group` consecutive tokens (MiniKV, arXiv 2411.18077, section 4.1)."""
    return affine(x.unflatten(-2, (-1, group)), bits, -2).flatten(-3, -2)


def per_token(x: Rows, offset: torch.Tensor, *, bits: int, group: int = 0) -> Rows:
    group = group or x.shape[-1]
    return affine(x.unflatten(-1, (-1, group)), bits, -1).flatten(-2)


def fitted(x: Rows, offset: torch.Tensor, *, bits: int, dim: int, group: int = 0) -> Rows:
    """Like `affine`, with the range shrunk by the factor that minimizes the squared error."""
    x = x.unflatten(-1, (-1, group)) if group else x
    lo, hi = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    best, min_error = x, torch.full_like(lo, torch.inf)
    for factor in torch.arange(1, 0.59, -0.05).tolist():
        inner = x.clamp((lo + hi) / 2 + (lo - hi) / 2 * factor, (lo + hi) / 2 + (hi - lo) / 2 * factor)
        stored = affine(inner, bits, dim)
        error = (stored - x).square().sum(dim, keepdim=True)
        best, min_error = torch.where(error < min_error, stored, best), torch.minimum(error, min_error)
    return best.flatten(-2) if group else best


def dual_scaled(x: Rows, offset: torch.Tensor, *, inner: Quantizer, rounds: int = 8) -> Rows:
    """Divide channels and tokens alternately by their standard deviations, then apply `inner` (KVarN, arXiv
    2606.03458)."""
    scales = [torch.ones_like(x[..., :1, :]), torch.ones_like(x[..., :1])]
    for step in range(2 * rounds):
        deviation = (x / scales[0] / scales[1]).std(-2 + step % 2, keepdim=True)
        scales[step % 2] = scales[step % 2] * deviation.masked_fill(deviation == 0, 1)
    size = scales[0].mean(-1, keepdim=True)  # channel scales are ratios, for fp16; the token's scale has the rest
    channel, token = (scales[0] / size).half().float(), scales[1] * size
    return inner(x / channel / token, offset) * channel * token


def e4m3(x: Rows, offset: torch.Tensor) -> Rows:
    """fp8 without calibrated scales, as in stock SGLang."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def minus_offset(x: Rows, offset: torch.Tensor, *, inner: Quantizer) -> Rows:
    return inner(x - offset, offset) + offset


def rotated(x: Rows, offset: torch.Tensor, *, inner: Quantizer) -> Rows:
    h = hadamard(x.shape[-1]).to(x.device)
    return inner(x @ h, offset) @ h.T


def hadamard(n: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix divided by sqrt(n). n is a power of two."""
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / n**0.5


def methods(side: str, head_dim: int, block: int) -> Iterator[tuple[str, float, Quantizer]]:
    """Name, bits per element and quantizer of each method for keys or values."""
    part = functools.partial

    def token(bits: int, group: int = 0) -> float:
        return bits + 32 / (group or head_dim)

    for bits in (8, 4, 2) if side == "keys" else (8, 4):
        yield f"int{bits} per token", token(bits), part(per_token, bits=bits)
    if side == "values":
        for group in (16, 32, 64, 0):
            if group < head_dim:
                yield f"int2 in groups of {group or head_dim}", token(2, group), part(per_token, bits=2, group=group)
        yield "fp8 e4m3", 8, e4m3
        two, small = part(per_token, bits=2, group=32), part(fitted, bits=2, dim=-1, group=32)
        yield "int3 per token", token(3), part(per_token, bits=3)
        yield "int2 in groups of 32, fitted", token(2, 32), small
        yield "int2 in groups of 32, H", token(2, 32), part(rotated, inner=two)
        yield "int2 in groups of 32, fitted, H", token(2, 32), part(rotated, inner=small)
        dual = part(rotated, inner=part(dual_scaled, inner=two))
        yield "int2 in groups of 32, dual scales, H", token(2, 32) + 16 / block, dual
        dual = part(rotated, inner=part(dual_scaled, inner=part(per_token, bits=2)))
        yield "int2 per token, dual scales, H", token(2) + 16 / block, dual
        return
    for bits in (8, 4, 2):
        yield f"int{bits} per channel of a block", bits + 32 / block, part(per_channel, bits=bits)
    yield "int4 per channel of a block, fitted", 4 + 32 / block, part(fitted, bits=4, dim=-2)
    dual = part(rotated, inner=part(dual_scaled, inner=part(per_channel, bits=4)))
    yield "int4 per channel of a block, dual scales, H", 4 + 48 / block, dual
    four = part(per_token, bits=4)
    yield "int4 per token in groups of 32", token(4, 32), part(per_token, bits=4, group=32)
    yield "int4 per token, H", token(4), part(rotated, inner=four)
    yield "int4 per token, offset", token(4), part(minus_offset, inner=four)
    yield "int4 per token, offset, H", token(4), part(minus_offset, inner=part(rotated, inner=four))
    yield "fp8 e4m3", 8, e4m3
    yield "fp8 e4m3, offset", 8, part(minus_offset, inner=e4m3)


def groups(block: int) -> Iterator[tuple[str, float, Quantizer]]:
    """Name, bits per element and quantizer of keys per channel, in groups of tokens."""
    part = functools.partial
    for bits, group in ((2, 16), (2, 32), (2, 64), (3, 32)):
        yield f"int{bits} in groups of {group} tokens", bits + 32 / group, part(sub_channel, bits=bits, group=group)
    for bits in (2, 3, 4):
        yield f"int{bits} per block", bits + 32 / block, part(per_channel, bits=bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--groups", action="store_true")
    args = parser.parse_args()
    n, block = args.tokens, args.block
    model, text = command.load(str(fetch.MODELS[args.model]()), fetch.essays().read_text(), 3 * n)
    # Offsets come from another text than the measured one.
    other, ids = torch.tensor(text[:n]), torch.tensor(text[-n:])
    scored = torch.arange(block, n - 1)
    offsets: dict[int, torch.Tensor] = {}

    def watch(layer, q, k, v, scale):
        offsets[layer] = k.float().mean(1)[:, None, None]
        return by_block(q, k, v, scale, block, None)

    def plain(layer, q, k, v, scale):
        return by_block(q, k, v, scale, block, None)

    run(model, other, watch, scored[:1])
    exact = run(model, ids, plain, scored)
    head_dim, rows = next(iter(offsets.values())).shape[-1], []
    for side in ("keys",) if args.groups else ("keys", "values"):
        for name, bits, quantizer in groups(block) if args.groups else methods(side, head_dim, block):

            def attend(layer, q, k, v, scale, side=side, quantizer=quantizer):
                def stored(keys, values):
                    x = keys if side == "keys" else values
                    x = quantizer(x.float(), offsets[layer]).to(x.dtype)
                    return (x, values) if side == "keys" else (keys, x)

                return by_block(q, k, v, scale, block, stored)

            result = compare(exact, run(model, ids, attend, scored), ids[scored + 1])
            rows.append({"side": side, "name": name, "bits": bits, **asdict(result)})
            kl = f"KL mean {result.kl_mean:.4f}  p99 {result.kl_p99:.3f}"
            print(f"{side:7} {name:32} {bits:6.2f} bits  {kl}", flush=True)
            numbers = {"model": args.model, "tokens": n, "block": block, "rows": rows}
            stem = "key_groups" if args.groups else "quantizers"
            common.write_result(f"quality/{stem}_{args.model}", numbers, quiet=True)


if __name__ == "__main__":
    main()

"""Figures of `sglang-kvc calibrate` for the models of the quality benchmarks.

    python -m bench.quality.calibrate [--model smollm2|qwen-0.5b] [--tokens 2048]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from bench import common
from bench.quality import fetch
from sglang_kvc.calibration.measure import command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="where to keep the calibration file; default: not kept")
    parser.add_argument("--plot", help="plot of the figures, a .png file")
    args = parser.parse_args()
    model, text = str(fetch.MODELS[args.model]()), str(fetch.essays())
    wall, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        out = str(args.out or Path(folder) / "calibration.safetensors")
        report = command.run(model, text, out, tokens=args.tokens, device=args.device, picture=args.plot)
        tensors = shares(out)
    seconds = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
    print(command.table(report))
    numbers = {"model": args.model, **seconds, **asdict(report), **tensors}
    common.write_result(f"calibrate/{args.model}", numbers)


def shares(path: str) -> dict[str, list]:
    """XKV's share of each layer at several fractions of kept tokens, and the attention retained by a quarter of a
    prompt's tokens."""
    from safetensors import safe_open

    from kvc_kernels import ops

    with safe_open(path, framework="pt") as file:
        curves = file.get_tensor("importance_retention")
    layers, units = curves.shape
    layer_shares = []
    for fraction in (0.05, 0.25, 0.5):
        n = max(layers, round(fraction * layers * units))
        layer_shares.append([fraction, [x / n for x in ops.greedy_allocation(curves, n, 1)]])
    return {
        "layer_shares": layer_shares,
        "retained_by_a_quarter": curves[:, units // 4 - 1].tolist(),
    }


if __name__ == "__main__":
    main()

"""Runs `sglang-kvc calibrate` on the models of the quality measurements and records its figures.

    python -m bench.quality.calibrate [--model smollm2|qwen-0.5b] [--tokens 2048]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench import common
from bench.quality import fetch
from sglang_kvc.calibration.measure import command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=list(fetch.MODELS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="keep the calibration file")
    parser.add_argument("--plot", help="and draw it, as .png")
    args = parser.parse_args()
    model, text = str(fetch.MODELS[args.model]()), str(fetch.essays())
    wall, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        out = str(args.out or Path(folder) / "calibration.safetensors")
        found = command.run(model, text, out, tokens=args.tokens, device=args.device, picture=args.plot)
        tensors = shares(out)
    seconds = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
    print(command.table(found))
    numbers = {"model": args.model, **seconds, **found.to_dict(), **tensors}
    common.write_result(f"calibrate/{args.model}", numbers)


def shares(path: str) -> dict[str, list]:
    """XKV's share of each layer at several fractions of kept tokens, and the attention that a quarter of a prompt's
    tokens retains."""
    from safetensors import safe_open

    from kvc_kernels import ops

    with safe_open(path, framework="pt") as file:
        curves = file.get_tensor("importance_retention")
    layers, units = curves.shape
    of = {kept: max(layers, round(kept * layers * units)) for kept in (0.05, 0.25, 0.5)}
    return {
        "layer_shares": [[kept, [x / n for x in ops.greedy_allocation(curves, n, 1)]] for kept, n in of.items()],
        "retained_by_a_quarter": curves[:, units // 4 - 1].tolist(),
    }


if __name__ == "__main__":
    main()

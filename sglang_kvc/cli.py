"""The `sglang-kvc` command: inspects a running server, calibrates a model, fetches the demo model."""

from __future__ import annotations

import argparse
import sys

from sglang_kvc.demo import model as demo_model
from sglang_kvc.stats import inspect


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="sglang-kvc", description="Companion of SGLang's --kv-backend kvc.")
    commands = top.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="show the cache statistics of a running server")
    look.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    look.add_argument("--api-key", help="the server's --api-key, if it has one")
    look.add_argument("--json", action="store_true", help="print the statistics as JSON")
    look.add_argument("--map", metavar="FILE", help="draw the tokens kept by layer and head; .html, .svg or .png")
    measure = commands.add_parser("calibrate", help="measure the effect of compression on a model")
    measure.add_argument("--model-path", required=True, metavar="DIR", help="the model's folder, or its name on a hub")
    measure.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text, like the prompts to be served")
    measure.add_argument(
        "--out", default="calibration.safetensors", metavar="FILE", help="for --kvc-calibration (default: %(default)s)"
    )
    measure.add_argument("--tokens", type=int, default=4096, help="tokens of the text to read (default: %(default)s)")
    measure.add_argument(
        "--answers",
        metavar="FILE",
        help='choose LeanKV\'s thresholds by these answers; JSON lines with "prompt", "answer" and maybe "context"',
    )
    measure.add_argument(
        "--retention",
        type=float,
        metavar="SHARE",
        help="find the fewest tokens that retain this share of the attention, like 0.95, for --kvc-policy xkv",
    )
    measure.add_argument("--device", default="auto", help="cuda, cpu or auto: the GPU if there is one")
    measure.add_argument("--plot", metavar="FILE", help="plot the results, as .png")
    commands.add_parser("demo", help="fetch the demo model once and print its folder")
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "demo":
        return demo_model.main()
    if args.command == "calibrate":
        # Late: torch and transformers take seconds, and only this command needs them.
        from sglang_kvc.calibration.measure import command

        return command.main(args)
    try:
        return inspect.run(args.url, api_key=args.api_key, as_json=args.json, map_file=args.map)
    except inspect.InspectError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())

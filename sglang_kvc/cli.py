"""The `sglang-kvc` command: `inspect` a running server, fetch the `demo` model."""

from __future__ import annotations

import argparse
import sys

from sglang_kvc import demo, inspect


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="sglang-kvc", description="Companion of SGLang's --kv-backend kvc.")
    commands = top.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="show what a running server's cache holds")
    look.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    look.add_argument("--api-key", help="the server's --api-key, if it has one")
    look.add_argument("--json", action="store_true", help="print the raw figures as JSON")
    look.add_argument("--map", metavar="FILE", help="draw kept tokens by layer and head; .html, .svg or .png")
    commands.add_parser("demo", help="fetch the demo model once and print its folder")
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "demo":
        return demo.main()
    try:
        return inspect.run(args.url, api_key=args.api_key, as_json=args.json, map_file=args.map)
    except inspect.InspectError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Options and servers of benchmarks that also run a tiny model on the CPU engine."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench import common
from bench.e2e import arms, serving
from bench.tiny import tiny_model


def arguments(p: argparse.ArgumentParser, argv: list[str] | None, *, tokens: int, name: str) -> argparse.Namespace:
    """Parse the options of `p` and the common options. All other options of `bench.e2e.serving` get its defaults."""
    p.add_argument("--tokens", type=int, default=tokens, help="KV memory of every server, in bf16 tokens")
    p.add_argument("--formats", default="k4v4", help="formats of our servers, separated by commas")
    p.add_argument("--stock-backends", default="", help=serving.BACKENDS_HELP)
    p.add_argument("--only", default="", help="names of servers to run, separated by commas; default: all")
    p.add_argument("--no-prefill-graphs", action="store_true", help="turn off prefill CUDA graphs on all servers")
    p.add_argument("--model", help="model folder; default: a tiny random model")
    p.add_argument("--load-format", default="auto")
    p.add_argument("--server-args", default="", help="additional options of every server")
    p.add_argument("--append", action="store_true", help="keep the rows of the result file and add to them")
    p.add_argument("--name", default="", help=f"name of the result file; default: {name}_CARD")
    args = p.parse_args(argv)
    args.stock_backends = args.stock_backends or common.default_attention()
    args.name = args.name or serving.result_name(name)
    defaults = serving.arguments(["--model", args.model or "", "--quick"])
    return argparse.Namespace(**{**vars(defaults), **vars(args)})


def model(args: argparse.Namespace) -> str:
    return args.model or str(tiny_model(Path(tempfile.mkdtemp(prefix="kvc-tiny-"))))


def servers(args: argparse.Namespace, *cpu_options: str) -> dict[str, list[str]]:
    """Name -> options of a server. All servers have the KV memory of `args.tokens` bf16 tokens. On a CPU, stock serves
    only bf16."""
    if common.has_gpu():
        return {name: options for name, (options, _) in serving.servers(args).items()}
    options = ["--max-total-tokens", str(args.tokens), *cpu_options]
    out = {"bf16": common.stock(*options)}
    out |= {f"kvc_{f}": common.kvc(f, *options, memory=None) for f in args.formats.split(",")}
    return arms.select(out, args.only)

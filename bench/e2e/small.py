"""Helpers of benchmarks that also run on the CPU engine: options, and servers with a tiny model."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench import common
from bench.e2e import arms, serving
from bench.tiny import tiny_model


def arguments(p: argparse.ArgumentParser, argv: list[str] | None, *, tokens: int, name: str) -> argparse.Namespace:
    """Parse the options of `p` and the common ones, with `bench.e2e.serving`'s defaults for the rest."""
    p.add_argument("--tokens", type=int, default=tokens, help="bf16 tokens whose memory every server gets")
    p.add_argument("--formats", default="k4v4", help="formats of our servers, separated by commas")
    p.add_argument("--stock-backends", default="", help=serving.BACKENDS_HELP)
    p.add_argument("--only", default="", help="names of servers to run, separated by commas; empty: all")
    p.add_argument("--no-prefill-graphs", action="store_true", help="no server captures prefills")
    p.add_argument("--model", help="default: a new tiny one")
    p.add_argument("--load-format", default="auto")
    p.add_argument("--server-args", default="", help="more options for every server")
    p.add_argument("--append", action="store_true", help="go on with the result file of an earlier call")
    p.add_argument("--name", default="", help=f"of the result file; default: {name}_CARD")
    a = p.parse_args(argv)
    a.stock_backends = a.stock_backends or common.default_attention()
    a.name = a.name or serving.named(name)
    usual = serving.arguments(["--model", a.model or "", "--quick"])
    return argparse.Namespace(**{**vars(usual), **vars(a)})


def model(a: argparse.Namespace) -> str:
    return a.model or str(tiny_model(Path(tempfile.mkdtemp(prefix="kvc-tiny-"))))


def servers(a: argparse.Namespace, *on_cpu: str) -> dict[str, list[str]]:
    """name -> options, all with the memory of `a.tokens` bf16 tokens: stock and ours; on a CPU stock in bf16 alone."""
    if common.has_gpu():
        return {name: options for name, (options, _) in serving.servers(a).items()}
    memory = ["--max-total-tokens", str(a.tokens), *on_cpu]
    out = {"bf16": common.stock(*memory)}
    out |= {f"kvc_{f}": common.kvc(f, *memory, memory=None) for f in a.formats.split(",")}
    return arms.chosen(out, a.only)

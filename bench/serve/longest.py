"""Longest prompt that a server takes, in equal KV memory.

    python -m bench.serve.longest [--memory 16MiB] [--chunk 256]                       # a tiny model
    python -m bench.serve.longest --memory 1GB --chunk 1024 --model qwen-1.5b --context 1000000 \
        --cells stock,k4v4,oneshot-8x,oneshot-16x --name serve/longest_gpu

All servers have the same KV memory. A cell is a server: stock bf16, stock fp8, a format or a policy. `oneshot-8x` is a
quality that a request asks the `k4v4` server for. Each server states its limit. It must serve a prompt of that length,
and our server must refuse a longer one. The model's context exceeds all limits. Answers are not checked.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from bench import common
from bench.client import RequestRefused
from bench.quality import fetch
from bench.tiny import tiny_model
from sglang_kvc.options.resolve import resolve_config

NAME = "serve/longest"
ANSWER, SEED = 8, 7
STOCK = {"stock": [], "stock-fp8": ["--kv-cache-dtype", "fp8_e4m3"]}  # their options
POLICIES = {"kv-compress-8x": "kv-compress+budget=8x+high=k4v4"}  # cells whose names differ from `common.kvc_settings`
CELLS = (*STOCK, "k8v4", "k4v4", "leankv", "kv-compress-8x", "oneshot-8x")


def token_bytes(model: Path) -> int:
    """Bytes of a token's keys and values in bf16."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 4 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim


def by_server(cells: list[str]) -> dict[str, dict[str, str | None]]:
    """Server -> cells that it measures -> quality that their requests ask for."""
    out: dict[str, dict[str, str | None]] = {}
    for cell in cells:
        if cell.startswith("oneshot-"):
            out.setdefault("k4v4", {})[cell] = cell.replace("oneshot-", "one-shot:")
        else:
            out.setdefault(cell, {})[cell] = None
    return out


def server_options(name: str, model: Path, args: argparse.Namespace) -> list[str]:
    options = ["--context-length", str(args.context), "--max-running-requests", "2"]
    options += common.ON_GPU.split() if common.has_gpu() else []
    if name not in STOCK:
        options += ["--chunked-prefill-size", str(args.chunk)]
        return common.kvc(POLICIES.get(name, name), *options, block=args.block, memory=args.memory)
    memory = resolve_config(SimpleNamespace(kvc_memory=args.memory)).memory
    tokens = memory // (token_bytes(model) // (2 if STOCK[name] else 1)) // args.block * args.block
    pages = ["--page-size", str(args.block), "--max-total-tokens", str(tokens)]
    return common.stock(*STOCK[name], *pages, *options)


def measure(name: str, cells: dict[str, str | None], model: Path, args: argparse.Namespace) -> dict[str, dict]:
    """Rows of one server. `cells`: cell -> quality of its request, None for the server's own."""
    rows, rng = {}, random.Random(SEED)
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with common.Server(server_options(name, model, args), model=model, env=env) as server:
        info = server.client.server_info()
        for cell, quality in cells.items():
            if name in STOCK:
                # A prompt that leaves no page free waits forever, and the answer takes another page.
                limit = info["max_total_num_tokens"] - 2 * args.block - ANSWER
            else:
                limit = info["internal_states"][0]["kvc"]["longest_prompt"][quality or "default"] - ANSWER
            prompt = [rng.randrange(1000, 40000) for _ in range(limit)]
            sampling = {"custom_params": {"kvc": quality}} if quality else {}
            began = time.monotonic()
            answer = server.client.generate(prompt, ANSWER, sampling=sampling)
            assert len(answer.ids) == ANSWER and answer.prompt_tokens == limit, f"not served: {answer}"
            rows[cell] = {"tokens": limit, "seconds": round(time.monotonic() - began, 1)}
            if name not in STOCK:  # stock may truncate a longer prompt
                check_refused(server, [*prompt, *prompt[: 2 * ANSWER]], sampling)
            print(f"{cell:16}" + ", ".join(f"{k} {v}" for k, v in rows[cell].items()), flush=True)
            server.client.flush()
        assert not server.errors(), server.errors()
    return rows


def check_refused(server: common.Server, prompt: list[int], sampling: dict) -> None:
    try:
        server.client.generate(prompt, ANSWER, sampling=sampling)
    except RequestRefused:
        return
    raise AssertionError(f"the server took a prompt of {len(prompt)} tokens, which exceeds its limit")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--memory", default="16MiB")
    p.add_argument("--chunk", type=int, default=256)
    p.add_argument("--block", type=int, default=128)
    p.add_argument("--context", type=int, default=1 << 17, help="context length in tokens, longer than all prompts")
    p.add_argument("--model", choices=tuple(fetch.MODELS), help="default: a tiny model with random weights")
    p.add_argument("--cells", default=",".join(CELLS))
    p.add_argument("--name", default=NAME)
    args = p.parse_args()
    cells = list(dict.fromkeys(["stock", *args.cells.split(",")]))
    with tempfile.TemporaryDirectory() as folder:
        model = fetch.MODELS[args.model]() if args.model else tiny_model(Path(folder))
        numbers: dict[str, dict] = {}
        for name, of_server in by_server(cells).items():
            numbers |= measure(name, of_server, model, args)
    stock_tokens, scores = numbers["stock"]["tokens"], {}
    for cell in numbers.keys() - {"stock"}:
        unit = f"x stock bf16's {stock_tokens} tokens in {args.memory}, chunks of {args.chunk}"
        ratio = numbers[cell]["tokens"] / stock_tokens
        scores[f"papers.longest.{cell}"] = (ratio, unit, "stock bf16 on the same device")
    common.write_result(args.name, {"memory": args.memory, "chunk": args.chunk, "cells": numbers}, scores=scores)


if __name__ == "__main__":
    main()

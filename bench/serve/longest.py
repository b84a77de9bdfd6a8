"""Longest prompt that is served in equal KV memory.

    python -m bench.serve.longest [--memory 16MiB] [--chunk 256]                       # a tiny model
    python -m bench.serve.longest --memory 1GB --chunk 1024 --model qwen-1.5b --context 1000000 \
        --cells stock,k4v4,oneshot-8x,oneshot-16x --name serve/longest_gpu

Servers with k4v4 and with stock bf16 get the same bytes. Each states its limit. A prompt of that length must be served,
and a longer one refused. The model's context is longer than any limit; answers are not checked.
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
CELLS = ("stock", "k4v4", "oneshot-8x")


def token_bytes(model: Path) -> int:
    """Bytes of keys and values of a token in bf16."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 4 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim


def measure(cells: list[str], model: Path, a: argparse.Namespace) -> dict[str, dict]:
    """Of one server: stock alone, or what requests ask ours for."""
    options = ["--context-length", str(a.context), "--max-running-requests", "2"]
    options += common.ON_GPU.split() if common.has_gpu() else []
    if cells == ["stock"]:
        memory = resolve_config(SimpleNamespace(kvc_memory=a.memory)).memory
        tokens = memory // token_bytes(model) // a.block * a.block
        args = common.stock("--page-size", str(a.block), "--max-total-tokens", str(tokens), *options)
    else:
        args = common.kvc("k4v4", "--chunked-prefill-size", str(a.chunk), *options, block=a.block, memory=a.memory)
    rows, draw = {}, random.Random(SEED)
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with common.Server(args, model=model, env=env) as server:
        info = server.client.server_info()
        for cell in cells:
            level = cell.replace("oneshot-", "one-shot:") if cell.startswith("oneshot") else None
            # Stock states more, but a prompt that leaves no page free waits forever, and an answer takes another page.
            told = info["max_total_num_tokens"] - 2 * a.block - ANSWER
            if cell != "stock":
                told = info["internal_states"][0]["kvc"]["longest_prompt"][level or "default"] - ANSWER
            prompt = [draw.randrange(1000, 40000) for _ in range(told)]
            sampling = {"custom_params": {"kvc": level}} if level else {}
            began = time.monotonic()
            answer = server.client.generate(prompt, ANSWER, sampling=sampling)
            assert len(answer.ids) == ANSWER and answer.prompt_tokens == told, f"not served: {answer}"
            rows[cell] = {"tokens": told, "seconds": round(time.monotonic() - began, 1)}
            if cell != "stock":  # which cuts or refuses by its own rules
                refuse(server, [*prompt, *prompt[: 2 * ANSWER]], sampling)
            print(f"{cell:12}" + ", ".join(f"{k} {v}" for k, v in rows[cell].items()), flush=True)
            server.client.flush()
        assert not server.errors(), server.errors()
    return rows


def refuse(server: common.Server, prompt: list[int], sampling: dict) -> None:
    try:
        server.client.generate(prompt, ANSWER, sampling=sampling)
    except RequestRefused:
        return
    raise AssertionError(f"a prompt of {len(prompt)} tokens was served, which is longer than the limit")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--memory", default="16MiB")
    p.add_argument("--chunk", type=int, default=256)
    p.add_argument("--block", type=int, default=128)
    p.add_argument("--context", type=int, default=1 << 17, help="tokens, more than any of the prompts has")
    p.add_argument("--model", choices=tuple(fetch.MODELS), help="instead of a tiny one with random weights")
    p.add_argument("--cells", default=",".join(CELLS))
    p.add_argument("--name", default=NAME)
    a = p.parse_args()
    cells = a.cells.split(",")
    with tempfile.TemporaryDirectory() as folder:
        model = fetch.MODELS[a.model]() if a.model else tiny_model(Path(folder))
        numbers = measure(["stock"], model, a) | measure([c for c in cells if c != "stock"], model, a)
    plain, scores = numbers["stock"]["tokens"], {}
    for cell in numbers.keys() - {"stock"}:
        unit = f"x stock bf16's {plain} tokens in {a.memory}, chunks of {a.chunk}"
        scores[f"papers.longest.{cell}"] = (numbers[cell]["tokens"] / plain, unit, "stock bf16 on the same device")
    common.write_result(a.name, {"memory": a.memory, "chunk": a.chunk, "cells": numbers}, scores=scores)


if __name__ == "__main__":
    main()

"""Quality of NVIDIA's kvpress on the questions of `bench.quality.run`, without a server.

    python bench/quality/kvpress_run.py --model-path DIR --model qwen-0.5b --essays FILE --out FILE
        [--device cuda|cpu] [--length 2048] [--contexts 13] [--presses NAME,..] [--keep 0.5,0.25,0.125]
        [--scope sequence|block|chunk] [--block 128] [--parallel 6] [--seconds 200] [--protocol unseen|seen]

Protocol `unseen`: a context is compressed once, and all of its questions use this cache. Protocol `seen`: a press sees
each question together with its context. It keeps as many tokens of the prompt as a `one-shot` server, which keeps the
share `--keep` of the full blocks and all tokens after them. As on the server, the first token of an answer is computed
from the full prompt.

Answers are greedy and compared exactly. The press `full` compresses nothing; it checks this harness and is the
reference for changed answers. `--scope` is the part of the text that a press sees. `sequence`, the entire text, is
kvpress without changes; `kvpress_presses.Blocks` explains the other scopes.

The script runs in a separate environment (`pip install kvpress==0.5.5 "transformers<5.3"`) without SGLang.
`bench.quality.fetch` creates the model's folder and the essays.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import queue
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # started as a script
    sys.path.append(str(ROOT))

from bench.quality.tasks import Context, Maker, right  # noqa: E402
from bench.revision import commit  # noqa: E402

SEEN, UNSEEN = PROTOCOLS = ("seen", "unseen")
DEFAULTS = {
    UNSEEN: "ada-expected,expected-eps,expected,keydiff,snapkv,h2o,pyramidkv,streaming-llm,random",
    SEEN: "snapkv,snapkv-w8,ada-snapkv,ada-snapkv-w8,critical-ada-snapkv,pyramidkv,expected,ada-expected",
}
KEEP = {UNSEEN: "0.5,0.25,0.125", SEEN: "0.4362,0.2012,0.1003,0.0501"}  # seen: of k4v4 at one-shot 8x, 16x, 32x, 64x
NAMES = {*",".join(DEFAULTS.values()).split(","), "knorm", "full"}
SETTINGS = ("model", "length", "contexts", "scope", "block", "answer_tokens", "protocol")
GRACE = 20  # seconds after the deadline for contexts that are being processed


class Runner:
    """A model that answers questions about compressed contexts."""

    def __init__(self, path: str, device: str):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        # Importing the presses also patches the attention functions, which AdaKV needs.
        from bench.quality import kvpress_presses

        disable_progress_bar()
        self.torch, self.presses, self.device = torch, kvpress_presses, device
        self.tok = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model.to(device).eval()
        if not hasattr(self.model.config, "head_dim"):  # CriticalKV needs it, but Qwen2's configuration lacks it
            self.model.config.head_dim = self.model.model.layers[0].self_attn.head_dim
        # fp32 as on the server. With bf16 logits, many answers would depend on the order of equal logits.
        self.head = self.model.lm_head.weight.float()
        self.layers = [layer.self_attn for layer in self.model.model.layers]
        for layer in self.layers:
            layer.register_forward_pre_hook(fit_mask, with_kwargs=True)

    def measure(self, cell: dict, contexts: dict[str, list[Context]], tokens: int, deadline: float) -> dict:
        """Row of a cell: which answers are right, for as many contexts as time allows."""
        press = self.presses.build(cell["press"], cell["keep"], cell["scope"], cell["block"])
        self.model.set_attn_implementation("eager" if cell["press"] in self.presses.EAGER else "sdpa")
        began, shares = time.monotonic(), []
        answers: dict[str, list[list[bool]]] = {task: [] for task in contexts}
        for number in range(len(next(iter(contexts.values())))):
            if time.time() > deadline:
                break
            for task, task_contexts in contexts.items():
                self.torch.manual_seed(number)  # the press `random` draws other tokens for each layer and context
                ask = self.ask_seen if cell["protocol"] == SEEN else self.ask
                marks, share = ask(task_contexts[number], press, tokens, cell)
                answers[task].append(marks)
                shares.append(share)
        row = {**cell, "kept": sum(shares) / len(shares) if shares else None, "contexts": len(shares) // len(contexts)}
        for task, by_context in answers.items():
            flat = [mark for marks in by_context for mark in marks]
            em = sum(flat) / len(flat) if flat else None
            row[task] = {"right": sum(flat), "of": len(flat), "em": em, "answers": by_context}
        return {**row, "seconds": round(time.monotonic() - began, 2)}

    def ask(self, context: Context, press, tokens: int, cell: dict) -> tuple[list[bool], float]:
        """Whether each answer about one compressed context is right, and the kept share of keys and values."""
        with self.torch.inference_mode():
            _, cache, share = self.compressed(context.ids, press)
            sizes = [layer.keys.shape[2] for layer in cache.layers]
            out = []
            for question in context.questions:
                first = self.forward(question.ask, cache, len(context.ids))
                out.append(self.answer(question, first, cache, len(context.ids) + len(question.ask), tokens))
                for layer, size in zip(cache.layers, sizes):
                    layer.keys, layer.values = layer.keys[:, :, :size], layer.values[:, :, :size]
        return out, share

    def ask_seen(self, context: Context, press, tokens: int, cell: dict) -> tuple[list[bool], float]:
        """Like `ask`, but each question is compressed together with its context."""
        out, shares = [], []
        with self.torch.inference_mode():
            for question in context.questions:
                ids = (*context.ids, *question.ask)
                if press:
                    press.compression_ratio = 1 - kept_of_prompt(len(ids), cell["keep"], cell["block"])
                first, cache, share = self.compressed(ids, press)
                out.append(self.answer(question, first, cache, len(ids), tokens))
                shares.append(share)
        return out, sum(shares) / len(shares)

    def compressed(self, ids, press) -> tuple[int, Any, float]:
        """Most likely next token, compressed cache, and kept share."""
        from transformers import DynamicCache

        for layer in self.layers:
            layer.masked_key_indices = None
        cache = DynamicCache()
        with press(self.model) if press else contextlib.nullcontext():
            first = self.forward(ids, cache, 0)
        sizes = [layer.keys.shape[2] for layer in cache.layers]
        heads = cache.layers[0].keys.shape[1]
        hidden = sum(len(x.masked_key_indices[2]) for x in self.layers if x.masked_key_indices is not None)
        return first, cache, (heads * sum(sizes) - hidden) / (heads * len(sizes) * len(ids))

    def answer(self, question, first: int, cache, position: int, tokens: int) -> bool:
        """Whether the answer that starts with token `first` is right. Decoding uses the positions of the uncompressed
        text and ends as soon as the result is certain."""
        ids = [first]
        while True:
            text = self.tok.decode(ids, skip_special_tokens=True)
            if right(question.answer, text) or len(ids) == tokens or not could_be_right(question.answer, text):
                return right(question.answer, text)
            ids.append(self.forward(ids[-1:], cache, position))
            position += 1

    def forward(self, ids, cache, position: int) -> int:
        """Append `ids` to the cache and return the most likely next token."""
        ids = self.torch.tensor([ids], device=self.device)
        at = self.torch.arange(position, position + ids.shape[1], device=self.device)[None]
        states = self.model.model(input_ids=ids, position_ids=at, past_key_values=cache).last_hidden_state
        return int((self.head @ states[0, -1].float()).argmax())


def fit_mask(module, args, kwargs):
    """Hook that cuts the attention mask to the length of the layer's cache.

    transformers makes one mask for the first layer's length, but other layers of a pyramid hold fewer tokens. All past
    tokens are visible, so the last columns of the mask are right for each layer.
    """
    mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    if mask is None or cache is None:
        return None
    length = cache.get_seq_length(module.layer_idx) + kwargs["hidden_states"].shape[1]
    return args, {**kwargs, "attention_mask": mask[..., -length:]}


def kept_of_prompt(tokens: int, keep: float, block: int) -> float:
    """Share of a prompt that a server keeps: the share `keep` of the full blocks, and all tokens after them."""
    full = tokens // block * block
    return (keep * full + tokens - full) / tokens


def could_be_right(answer: str, text: str) -> bool:
    return answer.startswith(text.strip().lstrip('"'))


def work(args, contexts, todo, results, deadline: float) -> None:
    """Main function of a process: measure cells until none are left or time runs out."""
    try:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.parallel))
        runner = Runner(args.model_path, args.device)
        results.put((None, {"stand_ins": runner.presses.STAND_INS}))
    except Exception:
        results.put((None, {"error": traceback.format_exc()}))
        return
    while (item := todo.get()) is not None:
        number, cell = item
        if time.time() > deadline:
            results.put((number, {**cell, "error": "no time left"}))
            continue
        try:
            row = runner.measure(cell, contexts, args.answer_tokens, deadline)
        except Exception as e:
            traceback.print_exc()
            row = {**cell, "error": f"{type(e).__name__}: {e}"}
            if args.device == "cuda":
                torch.cuda.empty_cache()
        results.put((number, row))


def count_flips(row: dict, full: dict, tasks) -> None:
    """Add the numbers of answers that are right only with the full cache, and only with the press."""
    for task in tasks:
        pairs = [(a, b) for x, y in zip(full[task]["answers"], row[task]["answers"]) for a, b in zip(x, y)]
        row[task]["right_to_wrong"] = sum(a and not b for a, b in pairs)
        row[task]["wrong_to_right"] = sum(b and not a for a, b in pairs)


def device_name(device: str) -> str:
    if device != "cuda":
        return f"CPU, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    import torch

    return torch.cuda.get_device_name()


def describe(args, contexts: dict[str, list[Context]]) -> dict:
    settings = {k: getattr(args, k) for k in SETTINGS}
    settings["contexts_digest"] = hashlib.sha256(repr(contexts).encode()).hexdigest()[:16]
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "torch", "transformers", "tokenizers")}
    return {
        "name": "quality/kvpress",
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "device": device_name(args.device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "settings": settings,
    }


def collect(args, cells: list[dict], contexts: dict[str, list[Context]], record: dict, deadline: float) -> dict:
    """Start the processes and write the file after every cell. Cells without a result are recorded as errors."""
    context = multiprocessing.get_context("spawn")
    todo, results = context.Queue(), context.Queue()
    for item in [*enumerate(cells), *[None] * args.parallel]:
        todo.put(item)
    common = (args, contexts, todo, results, deadline)
    workers = [context.Process(target=work, args=common, daemon=True) for _ in range(args.parallel)]
    for worker in workers:
        worker.start()
    rows: dict[int, dict] = {}
    while len(rows) < len(cells) and time.time() < deadline + GRACE:
        alive = any(worker.is_alive() for worker in workers)
        try:
            number, row = results.get(timeout=1)
        except queue.Empty:
            if alive:
                continue
            break
        if number is None and "error" in row:
            record.setdefault("failed_processes", []).append(row["error"])
        elif number is None:
            record.update(row)
        else:
            rows[number] = row
            show(row, contexts)
        write(args.out, record, cells, rows, contexts)
    for worker in workers:
        if len(rows) == len(cells):
            worker.join(GRACE)
        worker.terminate()
    missing = {n: {**cell, "error": "no result"} for n, cell in enumerate(cells) if n not in rows}
    write(args.out, record, cells, rows | missing, contexts)
    return rows


def write(out: Path, record: dict, cells: list[dict], rows: dict[int, dict], contexts) -> None:
    full = next((r for r in rows.values() if r["press"] == "full" and "error" not in r), None)
    ordered = [rows[n] for n in range(len(cells)) if n in rows]
    for row in ordered:
        if full and row is not full and "error" not in row:
            count_flips(row, full, contexts)
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps({**record, "rows": ordered}, indent=1) + "\n")
    temporary.rename(out)


def show(row: dict, tasks) -> None:
    name = f"{row['press']:14} keep {row['keep']:<6}"
    if "error" in row:
        print(name, row["error"], flush=True)
    elif row["kept"] is not None:
        scores = "  ".join(f"{t} {row[t]['right']}/{row[t]['of']} {row[t]['em']:.3f}" for t in tasks)
        print(name, f"kept {row['kept']:.3f}  {scores}  {row['seconds']} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--model", required=True, help="name of the model in the results")
    parser.add_argument("--essays", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--contexts", type=int, default=13)
    parser.add_argument("--presses", help=f"separated by commas: {', '.join(sorted(NAMES))}; `full` always runs")
    parser.add_argument("--keep", help=f"kept shares; default: {KEEP[UNSEEN]}, in protocol seen {KEEP[SEEN]}")
    parser.add_argument("--protocol", default=UNSEEN, choices=PROTOCOLS)
    parser.add_argument("--scope", default="sequence", choices=("sequence", "block", "chunk"))
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=7)
    parser.add_argument("--parallel", type=int, default=6, help="processes that share the device")
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    presses = (args.presses or DEFAULTS[args.protocol]).split(",")
    if args.protocol == SEEN and args.scope != "sequence":
        parser.error("protocol seen needs scope sequence, because shared blocks cannot depend on a question")
    if unknown := set(presses) - NAMES:
        parser.error(f"no such presses: {', '.join(sorted(unknown))}")

    from transformers import AutoTokenizer

    maker = Maker(AutoTokenizer.from_pretrained(args.model_path), args.essays.read_text())
    makers = {"niah": maker.needles, "kv": maker.dictionary}
    contexts = {task: [make(i, args.length) for i in range(args.contexts)] for task, make in makers.items()}
    keep = args.keep or KEEP[args.protocol]
    names = [("full", 1.0)] + [(p, float(k)) for k in keep.split(",") for p in presses if p != "full"]
    shared = {"scope": args.scope, "block": args.block, "protocol": args.protocol}
    cells = [{"press": p, "keep": k, **shared} for p, k in names]
    args.parallel = min(args.parallel, len(cells))
    rows = collect(args, cells, contexts, describe(args, contexts), deadline)
    return int(any("error" in row for row in rows.values()) or len(rows) < len(cells))


if __name__ == "__main__":
    sys.exit(main())

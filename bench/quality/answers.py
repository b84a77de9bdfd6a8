"""Effect of a cache on long answers: a fixed text is decoded token by token with and without compression.

    python -m bench.quality.answers --cells "k4v4;kv-compress+high=k4v4+budget=8x" [--model smollm2] [--new 2048]

Needs no server. Pages, policies, attention and the rules for packing blocks are those of the server; the model runs in
transformers. Each cell prefills the prompt and decodes the text that follows. Its next-token distribution is compared
with that of the uncompressed model: KL(uncompressed || cell), and the share of equal most likely tokens. `ratio` is the
16-bit size of all blocks of the sequences over their actual size (packed and open blocks with all metadata), averaged
over the answer. Compare cells at equal ratios.
"""

from __future__ import annotations

import argparse
import statistics
from types import SimpleNamespace

import numpy as np
import torch

from bench import common, prompts
from bench.quality import fetch
from bench.quality.tasks import Maker
from kvc_kernels import ops
from kvc_kernels.layout import RING_ENTRY_BYTES
from sglang_kvc.cache.build import build_runtime
from sglang_kvc.cache.one_shot import WINDOW
from sglang_kvc.cache.packing import Phase, tokens_decoded, tokens_written
from sglang_kvc.calibration.measure.capture import attending
from sglang_kvc.calibration.model_fingerprint import identity_of
from sglang_kvc.engine.attention import Attention, Snapshot
from sglang_kvc.options.resolve import resolve_config

EVERY = 64  # tokens between two measurements of memory


class Replay:
    """`model` with the cache of `cell`. It decodes `texts`, int64 `[B, prompt + new]`, in one batch."""

    def __init__(self, model, cell: str, block: int, texts: torch.Tensor):
        facts, (batch, tokens) = identity_of(model.config), texts.shape
        settings = {f"kvc_{name}": value for name, value in common.kvc_settings(cell).items()}
        config = resolve_config(SimpleNamespace(kvc_block_size=block, **settings))
        geometry = {"layers": facts.layers, "heads": facts.kv_heads, "head_dim": facts.head_dim}
        self.dense_bytes = 4 * facts.layers * facts.kv_heads * facts.head_dim  # per token
        self.runtime = runtime = build_runtime(
            config, num_bytes=3 * batch * (tokens + 2 * block) * self.dense_bytes, **geometry, dtype=model.dtype,
            device=model.device,
        )  # fmt: skip
        self.model, self.texts, self.block, self.ratios = model, texts, block, list[float]()
        policy, blocks = runtime.policy, -(-tokens // block)
        self.attention = Attention(
            runtime.store, policy.score_sampling, policy.fake_quant_format(policy.format_id_of(None)),
            query_heads=model.config.num_attention_heads, max_batch=batch, max_blocks=blocks,
        )  # fmt: skip
        self.seqs = [runtime.new_sequence(format_id=policy.format_id_of(None)) for _ in range(batch)]
        self.table = torch.zeros((batch, blocks * block), dtype=torch.int32, device=model.device)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, run) -> torch.Tensor:
        """fp32 logits `[n, V]` of tokens `ids` at `positions`, both `[n]`."""

        def attend(layer, q, k, v, scale):
            q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
            return run(layer, q, k, v, scale=scale, logit_cap=0.0).transpose(0, 1)

        with attending(self.model, attend):
            return self.model(ids[None], position_ids=positions[None], use_cache=False).logits[0].float()

    def _bind(self, i: int) -> None:
        """Write the slots of sequence `i`'s last block to its row of the table."""
        blocks, p = self.seqs[i].blocks, self.block
        at = torch.arange(p, dtype=torch.int32, device=self.table.device)
        self.table[i, (len(blocks) - 1) * p : len(blocks) * p] = blocks[-1] * p + at

    def prefill(self, i: int, prompt: int) -> torch.Tensor:
        """Log-probabilities `[V]` after the prompt of sequence `i`. A one-shot prompt may not be decoded after it."""
        seq, runtime, device = self.seqs[i], self.runtime, self.model.device
        seq.prompt = seq.whole_prompt = prompt
        assert runtime.grow([seq], [prompt]), "the prompt does not fit"
        runtime.step += 1
        runtime.flush()
        row, at = torch.tensor([seq.blocks], device=device), torch.arange(prompt, device=device)
        self.table[i, : row.numel() * self.block] = (
            row.T * self.block + torch.arange(self.block, device=device)
        ).flatten()
        lens, last_queries = torch.tensor([prompt], device=device), []
        if seq.one_shot is not None:
            query_heads = self.model.config.num_attention_heads
            seq.one_shot.queries = ops.LastQueries(runtime.store, query_heads, WINDOW)
            last_queries.append((slice(prompt), seq.one_shot.queries))
        snap = Snapshot(
            row, lens, row[0, at // self.block], at % self.block, [prompt], [0], [prompt],
            runtime.fake_quant_format([seq]), last_queries=last_queries,
        )  # fmt: skip
        self.attention.plan_extend(snap)
        if runtime.layout.has_scores:
            self.attention.note(snap, lens)
        logits = self._forward(self.texts[i, :prompt], at, self.attention.extend)
        tokens_written(runtime, seq, prompt, Phase.PREFILL)
        return logits[-1].log_softmax(-1)

    def decode(self, length: int) -> torch.Tensor:
        """Log-probabilities `[B, V]` after the token at position `length` of each sequence."""
        runtime, device, lengths = self.runtime, self.model.device, np.full(len(self.seqs), length)
        tokens_decoded(runtime, self.seqs, lengths)
        assert runtime.grow_by_one(self.seqs, lengths + 1) is not None, "the answers do not fit"
        if length % self.block == 0:
            for i in range(len(self.seqs)):
                self._bind(i)
        runtime.step += 1
        runtime.flush()
        lens = torch.from_numpy(lengths + 1).to(device)
        rows = torch.arange(len(self.seqs), device=device)
        snap = self.attention.plan_decode(self.table, rows, lens, (lengths + 1).tolist())
        if runtime.layout.has_scores:
            self.attention.note(snap, None)
        logits = self._forward(self.texts[:, length], lens - 1, self.attention.decode)
        if length % EVERY == 0:
            if runtime.store.on_gpu:
                torch.cuda.synchronize()
            runtime.harvest(runtime.step)
            self.ratios.append(self._ratio())
        return logits.log_softmax(-1)

    def _ratio(self) -> float:
        layout, used = self.runtime.layout, self.runtime.blocks.used_count
        size = self.runtime.ledger.total * (layout.page_bytes + RING_ENTRY_BYTES) + used * layout.block_meta_bytes
        return used * self.block * self.dense_bytes / size


def uncompressed(model, text: torch.Tensor, first: int) -> torch.Tensor:
    """Log-probabilities, fp16 `[n, V]`, after the tokens of `text` from position `first`."""
    hidden = model.model(text[None], use_cache=False).last_hidden_state[0, first:]
    return torch.cat([model.lm_head(x).float().log_softmax(-1).half() for x in hidden.split(256)])


def measure(model, cell: str, texts: torch.Tensor, reference: list[torch.Tensor], prompt: int, block: int) -> dict:
    """KL and agreement of one cell. `reference[B]`: uncompressed log-probabilities from the prompt's last token."""
    replay, divergences, equal = Replay(model, cell, block, texts), [], []
    new = texts.shape[1] - prompt
    for i in range(len(texts)):
        replay.prefill(i, prompt)
    for step in range(new):
        q = replay.decode(prompt + step)
        p = torch.stack([logprobs[step + 1] for logprobs in reference]).float()
        divergences.append((p.exp() * (p - q)).sum(-1).cpu())
        equal.append((p.argmax(-1) == q.argmax(-1)).float().cpu())
    kl, agreement = torch.stack(divergences, 1), torch.stack(equal, 1)  # [B, new]
    by_text = kl.mean(1).tolist()
    error = statistics.stdev(by_text) / len(by_text) ** 0.5 if len(by_text) > 1 else float("nan")
    return {
        "kl": kl.mean().item(),
        "standard_error": error,
        "quarters": [part.mean().item() for part in kl.chunk(4, 1)],
        "agreement": agreement.mean().item(),
        "ratio": statistics.fmean(replay.ratios),
        "ratio_end": replay.ratios[-1],
        "compactions": replay.runtime.counters.compactions,
    }


@torch.inference_mode()
def main() -> None:
    from transformers import AutoModelForCausalLM

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=fetch.MODELS, default="smollm2")
    p.add_argument("--cells", required=True, help="cells, separated by ';'; settings by '+'")
    p.add_argument("--texts", type=int, default=4)
    p.add_argument("--prompt", type=int, default=256)
    p.add_argument("--new", type=int, default=2048)
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--name", default="quality/answers")
    args = p.parse_args()
    folder, device = fetch.MODELS[args.model](), "cuda" if torch.cuda.is_available() else "cpu"
    maker = Maker(prompts.tokenizer(folder), fetch.essays().read_text())
    length = args.prompt + args.new
    texts = torch.tensor([maker.passage(i, length)[:length] for i in range(args.texts)], device=device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    reference = [uncompressed(model, text, args.prompt - 1) for text in texts]
    numbers, cells = dict[str, dict](), args.cells.split(";")
    for cell in cells:
        n = numbers[cell] = measure(model, cell, texts, reference, args.prompt, args.block)
        quarters = ", ".join(f"{q:.4f}" for q in n["quarters"])
        print(
            f"{cell:70} KL {n['kl']:.4f} +- {n['standard_error']:.4f} (quarters {quarters}), agree "
            f"{100 * n['agreement']:.1f} %, {n['ratio']:.2f}x, at the end {n['ratio_end']:.2f}x",
            flush=True,
        )  # fmt: skip
        common.write_result(args.name, {"args": vars(args), "cells": numbers}, quiet=len(numbers) < len(cells))


if __name__ == "__main__":
    main()

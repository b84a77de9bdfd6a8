"""Effect of a window that is one token short during generation, for the model of `bench.serve.windows`.

    python -m bench.serve.windows_reference [--head-dim 256] [--window 100] [--tokenizer FOLDER]

A layer's window size in SGLang excludes the query's own token. The Triton backend of stock SGLang 0.5.17 passes as many
tokens to its decode kernel, but including the query's own (`update_sliding_window_buffer`; reported in
sgl-project/sglang#32087). A correct server therefore drifts from it by `short`. `rounded` is the drift from rounding
probabilities to bf16, as attention kernels do. Both are mean differences in nats from attention in fp32, over the
generated tokens of the same prompts. Weights are bf16, and transformers runs the model.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch

from bench import common
from bench.tiny import tiny_windowed

from .windows import ANSWER, LENGTHS, prompt


class Attention:
    """Attention over an entire sequence, `[B, H, N, D]`. Its first `given` tokens are the prompt."""

    def __init__(self):
        self.short, self.rounded, self.given = False, False, 0

    def __call__(self, module, q, k, v, mask, scaling, **_):
        group, n = q.shape[1] // k.shape[1], q.shape[2]
        k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
        distance = torch.arange(n)[:, None] - torch.arange(n)  # `[query, key]`
        visible = distance >= 0
        if window := getattr(module, "sliding_window", None):
            visible &= distance < window
            if self.short:
                visible[self.given :] &= distance[self.given :] < window - 1
        logits = (q.float() @ k.mT * scaling).masked_fill(~visible, -math.inf)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        sums = weights.sum(-1, keepdim=True)
        if self.rounded:
            weights = weights.to(q.dtype).float()
        return (weights @ v / sums).transpose(1, 2).to(q.dtype), None


class Reference:
    """Model in `folder` with this module's `Attention`."""

    def __init__(self, folder: Path):
        from transformers import AttentionInterface, AutoModelForCausalLM

        self.attention = Attention()
        AttentionInterface.register("kvc_reference", self.attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="kvc_reference"
        ).eval()

    def logits(self, ids: list[int], last: int, **fields: bool | int) -> torch.Tensor:
        """fp32 logits `[last, V]` of the last positions. `fields` of the attention override the defaults."""
        vars(self.attention).update({"short": False, "rounded": False, "given": len(ids)} | fields)
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -last:]
            return hidden.float() @ self.model.lm_head.weight.float().T

    def drift(self, ids: list[int], tokens: int) -> dict[str, float]:
        """Mean difference of the log-probabilities of a greedy answer of `tokens` tokens."""
        given = len(ids)
        for _ in range(tokens):
            ids = [*ids, int(self.logits(ids, 1).argmax())]
        answer = torch.tensor(ids[given:])[:, None]

        def logprobs(**fields):
            logits = self.logits(ids, tokens + 1, given=given, **fields)[:-1]
            return logits.log_softmax(-1).gather(1, answer)[:, 0]

        exact = logprobs()
        return {field: float((logprobs(**{field: True}) - exact).abs().mean()) for field in ("short", "rounded")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=256)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--tokenizer", type=Path, help="default: the demo model's")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvc-windowed-"))
    reference = Reference(tiny_windowed(folder, args.window, head_dim=args.head_dim, like=args.tokenizer))
    rows = {n: reference.drift(prompt(n), ANSWER) for n in LENGTHS}
    for n, row in rows.items():
        print(f"{n:5}", *(f"{k} {v:.4f}" for k, v in row.items()), flush=True)
    common.write_result("serve/windows_reference", {"window": args.window, "head_dim": args.head_dim, "nats": rows})


if __name__ == "__main__":
    main()

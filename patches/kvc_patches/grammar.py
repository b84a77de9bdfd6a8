"""`constrained.xgrammar_backend`: constrained decoding without a GPU.

SGLang pins the token bitmask and has only device kernels. The first JSON or regex request would therefore end a server
on the CPU, even without this plug-in. xgrammar has a CPU kernel.
"""

from __future__ import annotations

from .registry import hook

XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"


def around_allocate_token_bitmask(orig, vocab_size, batch_size):
    import torch

    if torch.accelerator.is_available():
        return orig(vocab_size, batch_size)
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


def around_apply_vocab_mask(orig, self, logits, vocab_mask):
    if logits.device.type != "cpu":
        return orig(self, logits, vocab_mask)
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def register() -> None:
    hook(f"{XGRAMMAR}._allocate_token_bitmask", "around", "vocab_size batch_size", around_allocate_token_bitmask)
    hook(f"{XGRAMMAR}.XGrammarGrammar.apply_vocab_mask", "around", "self logits vocab_mask", around_apply_vocab_mask)

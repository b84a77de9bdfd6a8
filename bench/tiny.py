"""Tiny models with random weights and the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench import common


def tiny_model(folder: Path, kv_heads: int = 2) -> Path:
    """Write the model to `folder`: 3 layers, 4 query heads and up to 2 KV heads of 64.

    The first KV head attends to few tokens, the other one to all tokens equally, so that policies based on attention
    keep different numbers of tokens.
    """
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    vocabulary = AutoConfig.from_pretrained(common.demo_model()).vocab_size
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=64, max_position_embeddings=32768, tie_word_embeddings=True,
        initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for head, factor in zip(layer.self_attn.k_proj.weight.split(64), (3, 0.1)):
                head.mul_(factor)
    return _save(model, folder)


def tiny_qwen3(folder: Path) -> Path:
    """Write a Qwen 3 to `folder`: 3 layers, 4 query heads and 2 KV heads of 64. SGLang serves it with DP attention."""
    import torch
    from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=AutoConfig.from_pretrained(common.demo_model()).vocab_size, hidden_size=256,
        intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=32768, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return _save(Qwen3ForCausalLM(config), folder)


def tiny_windowed(folder: Path, window: int = 100, *, head_dim: int = 64, like: Path | None = None) -> Path:
    """Write a Gemma 3 to `folder`: 4 layers, all but the third with a window of `window` tokens. `like`: model with the
    vocabulary and tokenizer; default: the demo model."""
    import torch
    from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(1)
    kinds = ["sliding_attention"] * 4
    kinds[2] = "full_attention"
    config = Gemma3TextConfig(
        vocab_size=AutoConfig.from_pretrained(like or common.demo_model()).vocab_size, hidden_size=256,
        intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        query_pre_attn_scalar=head_dim, max_position_embeddings=32768, sliding_window=window, layer_types=kinds,
        initializer_range=0.1,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.add_(1.0)  # sharpens attention
    return _save(model, folder, like)


def tiny_experts(folder: Path) -> Path:
    """Write a Qwen3 MoE to `folder`: 3 layers of 8 experts, 2 of which are active per token."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=AutoConfig.from_pretrained(common.demo_model()).vocab_size, hidden_size=256,
        moe_intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=32768, tie_word_embeddings=True,
        initializer_range=0.1,
    )  # fmt: skip
    return _save(Qwen3MoeForCausalLM(config), folder)


def _save(model, folder: Path, like: Path | None = None) -> Path:
    import torch

    demo = like or common.demo_model()
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    return folder

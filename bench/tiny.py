"""A model with random weights whose heads two ranks can share, with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench import common


def tiny_model(folder: Path) -> Path:
    """Writes it to `folder`: 3 layers, 4 query and 2 KV heads of 64.

    The first KV head attends to few tokens, the other to all alike, so that a policy which looks at attention keeps
    other numbers of them.
    """
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    demo = common.demo_model()
    vocabulary = AutoConfig.from_pretrained(demo).vocab_size
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=32768, tie_word_embeddings=True,
        initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            few, all_alike = layer.self_attn.k_proj.weight.split(64)
            few.mul_(3)
            all_alike.mul_(0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, folder / name)
    return folder

"""Tiny random models with a tokenizer-free interface, and one calibration of one of them."""

from __future__ import annotations

import pytest
import torch

LAYERS, HEADS, KV_HEADS, DIM, VOCAB, BLOCK, TOKENS = 2, 4, 2, 32, 97, 64, 400


def make_model(kind: str = "qwen2", seed: int = 0, **changes):
    """A random fp32 model with larger weights than a freshly initialized one, so that attention matters."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    settings = dict(
        hidden_size=HEADS * DIM,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        vocab_size=VOCAB,
        max_position_embeddings=1024,
        initializer_range=0.12,
        architectures=[model_class.__name__],
    )
    torch.manual_seed(seed)
    return model_class(config_class(**{**settings, **changes})).eval()


def make_ids(tokens: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    return make_ids()


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture(scope="session")
def measured(model, ids):
    from sglang_kvc.calibration.measure.passes import calibrate

    return calibrate(model, ids, block=BLOCK)

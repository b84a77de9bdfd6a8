"""The reference of the window benchmark: the model's own attention, and a window that is one token short."""

import pytest
import torch

from bench import common
from bench.serve.windows import prompt
from bench.serve.windows_reference import Reference
from bench.tiny import tiny_windowed

WINDOW, ANSWER = 20, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if common.demo_model() is None:
        pytest.skip("needs the demo model's tokenizer: python -m sglang_kvc.demo.model")
    return tiny_windowed(tmp_path_factory.mktemp("windowed"), WINDOW, head_dim=32)


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


def test_attention_matches_transformers(folder, reference):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    ids = prompt(50)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0, -8:].float().log_softmax(-1)
    got = reference.logits(ids, 8).log_softmax(-1)
    short = reference.logits(ids, 8, short=True, given=20).log_softmax(-1)
    assert (got - want).abs().mean() < 0.25 * (short - want).abs().mean()


def test_window_over_all_tokens_is_never_short(reference):
    assert reference.drift(prompt(WINDOW - ANSWER - 1), ANSWER)["short"] == 0


def test_short_window_shifts_logprobs_more_than_rounding(reference):
    gaps = reference.drift(prompt(60), ANSWER)
    assert gaps["short"] > gaps["rounded"] > 0

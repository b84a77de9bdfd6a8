"""Shares of the variance of kept tokens: counts with known shares, and the cache of a tiny model."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from bench.quality import spread
from kvc_kernels import ops
from kvc_kernels.ops import LastQueries
from sglang_kvc.cache.one_shot import WINDOW, Budget
from sglang_kvc.calibration.measure.capture import run


def test_variance_is_shared_out_among_layers_heads_and_positions():
    """Independent effects of variance 100, 25 and 400 tokens, and of 100 that belong to no single one."""
    sign = torch.tensor([1, -1])
    block, layer, head = sign.repeat(2)[:, None, None], sign[:, None], sign
    counts = 50 + 10 * layer + 5 * head + 20 * block + 10 * block * layer * head
    row = spread.summary(counts, 100, 5)
    assert row["kept"] == pytest.approx(0.5) and row["floor"] == 0.05 and row["at_floor"] == 2 / 16
    assert row["variance"] == pytest.approx({"layers": 0.16, "heads": 0.04, "positions": 0.64})
    assert row["chance"] == pytest.approx({"layers": 1 / 15, "heads": 2 / 15, "positions": 3 / 15})
    assert row["by_layer"] == pytest.approx([0.4, 0.6]) and row["by_head"] == pytest.approx([0.35, 0.65])
    assert row["by_block"] == pytest.approx([0.3, 0.7])
    assert spread.summary(counts[:3], 100, 5)["ends"] == pytest.approx(140 / 170)


def test_chance_is_the_mean_share_of_counts_in_random_order():
    gen = torch.Generator().manual_seed(0)
    counts = torch.tensor([0, 0, 1, 2, 3, 9, 27] * 12)
    rows = [spread.summary(counts[torch.randperm(84, generator=gen)].view(7, 4, 3), 32, 0) for _ in range(2000)]
    average = spread.mean(rows)
    assert average["variance"] == pytest.approx(average["chance"], rel=0.05)


def test_ranked_tokens_count_for_the_blocks_that_they_come_from():
    best = torch.tensor([[[9, 8, 0, 5, 1, 2], [3, 11, 4, 6, 7, 8]]])
    counts = spread.tokens_by_block(best, torch.tensor([[2, 1]]), 2, blocks=3, p=4)
    assert counts[:, 0].T.tolist() == [[1, 1, 2], [1, 0, 1]]


def test_means_are_taken_number_by_number():
    assert spread.mean([{"a": 1, "b": [2, 5]}, {"a": 2, "b": [4, 9]}]) == {"a": 1.5, "b": [3, 7]}


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().eval()


PROMPT = torch.randint(64, (600,), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_every_block_gets_the_same_pages_under_kv_compress(model):
    row = spread.packed(model, PROMPT, 128, None)
    assert row["by_block"] == pytest.approx([row["kept"]] * 2) and row["variance"]["positions"] < 1e-9
    assert 0.2 < row["kept"] < 0.5 and row["at_floor"] > 0 and row["by_layer"][0] >= row["floor"] > 0


@torch.inference_mode()
def test_one_shot_prompt_is_ranked_by_its_last_queries(model):
    seen, stored = [], []

    def attend(layer, q, k, v, scale):
        seen.append(q)
        return torch.zeros_like(q)

    run(model, PROMPT, attend, torch.tensor([599]))
    with mock.patch.object(ops, "LastQueries", side_effect=lambda *a: stored.append(LastQueries(*a)) or stored[0]):
        row = spread.packed(model, PROMPT, 128, Budget(tokens=192))
    assert torch.equal(stored[0].rows[0], seen[0][:, -WINDOW:].transpose(0, 1))  # later layers read the attention
    assert row["kept"] == pytest.approx(192 / 512) and row["floor"] == 0
    assert 0 < row["by_block"][0] < row["by_block"][1]

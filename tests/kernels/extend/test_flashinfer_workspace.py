"""The workspace is as large as FlashInfer's own rules require on various GPUs, computed without them."""

import tracemalloc

import pytest
import torch

from kvc_kernels.extend.dense_flashinfer import WORKSPACE_BYTES, StagedPrefill, workspace_bytes
from kvc_kernels.extend.staged import Groups

P = 128
CARDS = {"A100": 108, "RTX 4090": 128, "L40S": 142, "B200": 148, "RTX PRO 6000": 188, "L4": 58}
MODELS = [(32, 8, 128), (28, 4, 128), (64, 8, 128), (32, 4, 128), (8, 1, 128), (32, 2, 128), (16, 1, 128), (16, 8, 256)]


def partial_bytes(
    sms: int, query_heads: int, heads: int, head_dim: int, new: list[int], seen: list[int], page: int
) -> int:
    """Bytes of partial results when FlashInfer 0.6.15 plans runs of `new` tokens over `seen` units of `page` tokens."""
    group, max_programs = query_heads // heads, 2 * sms // heads
    rows = [n * group for n in new]
    mean = sum(rows) // len(rows)
    tile = (128 if head_dim < 256 else 64) if mean > 64 else 64 if mean > 16 else 16

    def programs(chunk: int) -> int:
        return sum(-(-r // tile) * -(-max(s, 1) // chunk) for r, s in zip(rows, seen))

    low, high = max(128 // page, 1), max([1, *seen])
    uncut = high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if programs(middle) > max_programs else (low, middle)
    return query_heads * programs(low) * tile * (head_dim + 1) * 4 if low < uncut else 0


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_workspace_fits_every_prompt(card, model):
    query_heads, heads, head_dim = model
    have = workspace_bytes(CARDS[card], query_heads // heads, head_dim)
    for tokens in (*range(1, 4096, 61), 5000, 8192):
        assert partial_bytes(CARDS[card], *model, [tokens], [tokens], 1) <= have
        groups = Groups.cut([0], [tokens], None, P)
        lists = [len(slots) for slots in groups.lists()[0]]
        assert partial_bytes(CARDS[card], *model, groups.tokens, lists, P) <= have


def test_minimum_workspace_is_too_small():
    """The planner itself reported 159383552 bytes of values for one prompt of 300 tokens on an A100."""
    assert partial_bytes(108, 32, 2, 128, [300], [300], 1) * 128 // 129 == 159383552 > WORKSPACE_BYTES
    groups = Groups.cut([0], [384], None, P)  # Qwen3-32B on a B200
    assert partial_bytes(148, 64, 8, 128, groups.tokens, [len(x) for x in groups.lists()[0]], P) > WORKSPACE_BYTES


def test_item_lists_of_long_prompt_stay_compact():
    """The lists grow with the square of the length of a prompt that is prefilled at once: 4 bytes per entry, and 4 for
    the plan's copy."""
    groups = Groups.cut([0], [1024 * P], None, P)
    tracemalloc.start()
    slots, last, _ = groups.lists()
    prefill = object.__new__(StagedPrefill)
    prefill.device = torch.device("cpu")
    prefill.plan(groups.tokens, slots, last)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    entries = sum(map(len, slots))
    assert entries == 1024 * 1025 // 2
    assert peak_bytes < 9 * entries + (2 << 20)
    last_slots = [1023 + i for i in range(1024)]
    assert prefill.lists[2].tolist() == [x for i in range(1024) for x in (*range(i), last_slots[i])]

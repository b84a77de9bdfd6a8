"""Memory that prompts, running requests and evictions need, from records alone, without a scheduler or SGLang."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout
from sglang_kvc.cache.blocks import Blocks
from sglang_kvc.cache.capacity import MEAN_BLOCKS, Capacity
from sglang_kvc.cache.ledger import Ledger
from sglang_kvc.cache.sequence import Sequence
from sglang_kvc.cache.sizing import Sizing
from sglang_kvc.options.config import KvcConfig
from sglang_kvc.policies import make_policy

P, BLOCKS, WINDOW, CHUNK = 64, 12, 2 * 64, 3 * 64
LAYOUT = PoolLayout(2, 2, 32, P, page_bytes=1152)
PACKED = LAYOUT.block_pages(FORMATS["k4v4"]) / LAYOUT.block_pages_bf16


@pytest.fixture
def capacity() -> Capacity:
    """Memory for twelve uncompressed blocks, all free."""
    pages = BLOCKS * LAYOUT.block_pages_bf16
    block_formats = (
        BlockFormat(BF16, pages=LAYOUT.block_pages_bf16),
        BlockFormat(FORMATS["k4v4"], pages=LAYOUT.block_pages(FORMATS["k4v4"])),
    )
    policy = make_policy(KvcConfig(block_size=P, high="k4v4"))
    sizing = Sizing(0, pages + 1, 2 * BLOCKS, 0, BLOCKS * P, staged_tokens=4 * P)
    return Capacity(Ledger(2 * BLOCKS, pages), Blocks(2 * BLOCKS), LAYOUT, sizing, block_formats, policy, WINDOW)


def take(capacity: Capacity, n: int) -> np.ndarray:
    ids = np.array(capacity.blocks.take(n, [i * P for i in range(n)]))
    capacity.ledger.set(ids, LAYOUT.block_pages_bf16)
    return ids


def test_room_is_free_plus_unlocked_memory(capacity):
    ids = take(capacity, 5)
    assert capacity.available_tokens() == capacity.reachable_tokens() == 7 * P
    capacity.ledger.set_idle(ids[:2], True)
    assert (capacity.available_tokens(), capacity.evictable_tokens()) == (7 * P, 2 * P)
    assert capacity.available_tokens(pages=LAYOUT.block_pages_bf16, blocks=1) == 8 * P


def test_growth_keeps_block_and_window_uncompressed(capacity):
    assert capacity.growth_tokens(3 * P, 1, open_tokens=0) == 3 * P
    assert capacity.growth_tokens(10 * P, 1, open_tokens=0) == (3 + 7 * PACKED) * P
    assert capacity.growth_tokens(10 * P, 1, open_tokens=9 * P) == (1 + 9 * PACKED) * P
    assert capacity.growth_tokens(10 * P, 0, open_tokens=0) == 10 * P


def test_first_answers_are_charged_for_half_of_their_tokens_in_each_tier(capacity):
    """Prompts are charged the maximum."""
    high, low = FORMATS["k8v4"], FORMATS["k4v2"]
    pages = LAYOUT.layers * LAYOUT.heads * (LAYOUT.pages_for(high, P) + 1)
    capacity.block_formats = (*capacity.block_formats, BlockFormat(high, low, pages=pages, exact=False))
    half = (LAYOUT.block_pages(high) + LAYOUT.block_pages(low)) / 2 / LAYOUT.block_pages_bf16
    assert capacity.expected_tokens(P, 2) == half * P
    most = capacity.packed_tokens(4 * P, 2)
    assert most > 4 * P * half
    assert capacity.growth_tokens(10 * P, 2, open_tokens=9 * P, prompt=4 * P) == pytest.approx(P + most + 5 * half * P)
    capacity.observe_pages(2, np.full(4 * MEAN_BLOCKS, pages))
    assert capacity.expected_tokens(4 * P, 2) == most
    budget = BlockFormat(high, low, pages=LAYOUT.layers * LAYOUT.heads, exact=False)  # a page of each head
    capacity.block_formats = (*capacity.block_formats, budget)
    assert capacity.expected_tokens(P, 3) == capacity.packed_tokens(P, 3)


def test_answers_are_charged_the_mean_size_of_earlier_blocks(capacity):
    """A fixed size holds until blocks are smaller, and for prompts always."""
    assert capacity.expected_tokens(10 * P, 1) == capacity.packed_tokens(10 * P, 1) == 10 * P * PACKED
    capacity.observe_pages(1, np.full(MEAN_BLOCKS // 2, 6))
    mean = (LAYOUT.block_pages(FORMATS["k4v4"]) + 6) / 2 / LAYOUT.block_pages_bf16
    assert mean < PACKED and capacity.expected_tokens(10 * P, 1) == 10 * P * mean
    assert capacity.growth_tokens(10 * P, 1, open_tokens=9 * P) == (1 + 9 * mean) * P
    assert capacity.growth_tokens(10 * P, 1, open_tokens=9 * P, prompt=4 * P) == (1 + 4 * PACKED + 5 * mean) * P
    assert capacity.growth_tokens(10 * P, 0, open_tokens=0) == 10 * P
    answer = capacity.prompt_tokens(20 * P, 10 * P, 1, CHUNK) - capacity.prompt_tokens(20 * P, 0, 1, CHUNK)
    assert answer == (PACKED + 9 * mean) * P  # the open block is the answer's instead of the prompt's
    before = capacity.longest_request(1, CHUNK)
    capacity.observe_pages(1, np.full(4 * MEAN_BLOCKS, 4))
    assert capacity.expected_tokens(P, 1) == P * 4 / LAYOUT.block_pages_bf16
    assert capacity.longest_request(1, CHUNK) == before


def test_running_request_is_asked_for_uncompressed_tokens(capacity):
    seq = Sequence.admit(capacity.blocks, P, WINDOW, take(capacity, 3), 3 * P)
    assert seq.open_tokens() == 2 * P
    assert capacity.running_tokens(seq, 10 * P, 1) == capacity.growth_tokens(10 * P, 1, 2 * P)
    assert capacity.running_tokens(None, 10 * P, 1) == capacity.growth_tokens(10 * P, 1, WINDOW)
    assert capacity.new_block_tokens([seq, seq], [3 * P, 3 * P + 1]) == P


def test_prompt_needs_two_chunks_and_window_uncompressed(capacity):
    unpacked = 2 * CHUNK + WINDOW
    assert capacity.prompt_tokens(20 * P, 0, 1, CHUNK) == unpacked + P + (19 * P - unpacked) * PACKED
    assert capacity.prompt_tokens(20 * P, 0, 1, None) == 20 * P
    assert capacity.prompt_ever_fits(14 * P, 1, CHUNK) and not capacity.prompt_ever_fits(14 * P, 1, None)


def test_chunk_draws_on_reserve_beyond_blocks_of_running_requests(capacity):
    assert capacity.chunk_credit(3 * P, shortage=P, running=9) == P
    assert capacity.chunk_credit(3 * P, shortage=-P, running=9) == 0
    assert capacity.chunk_credit(3 * P, shortage=P, running=10) == 0
    assert capacity.chunk_credit(13 * P, shortage=P, running=1) is None


def test_prompts_stage_up_to_limit_and_lone_prompt_any_amount(capacity):
    ids = take(capacity, 3)
    assert capacity.staged_tokens(ids, 1) == 3 * P and capacity.staged_tokens(ids, 0) == 0
    assert capacity.may_stage(9 * P, []) and capacity.may_stage(0, [9 * P])
    assert capacity.may_stage(P, [3 * P]) and not capacity.may_stage(P + 1, [3 * P])


def test_eviction_goal_follows_exact_need(capacity):
    take(capacity, 11)
    assert capacity.eviction_goal(5 * P) == 6 * P
    with capacity.exact_need(2 * P):
        assert capacity.eviction_goal(5 * P) == 2 * P
    assert capacity.eviction_goal(5 * P) == 6 * P


def test_freed_block_makes_room_after_refusal(capacity):
    ids = take(capacity, 3)
    capacity.remember_refusal(0.5)
    assert not capacity.has_room_again(0.5)
    capacity.blocks.give_back(ids[:1])
    capacity.ledger.drop(ids[:1])
    assert capacity.has_room_again(0.5)


def test_lower_reserve_for_answers_makes_room_after_refusal(capacity):
    capacity.remember_refusal(0.2)
    assert not capacity.has_room_again(0.185) and not capacity.has_room_again(1.0)
    assert capacity.has_room_again(0.18)


def test_longest_request_is_largest_that_empty_server_admits(capacity):
    """This holds however its tokens are divided between prompt and answer."""

    def admits(tokens: int, format_id: int, chunk: int | None) -> bool:
        needs = (capacity.prompt_tokens(new, tokens - new, format_id, chunk) for new in range(1, tokens + 1))
        return max(needs) + P < capacity.sizing.capacity_tokens

    assert capacity.longest_request(0, CHUNK) == capacity.longest_request(1, None) == 11 * P - 2
    assert capacity.longest_request(1, CHUNK) > BLOCKS * P
    assert capacity.longest_request(1, P) == (2 * BLOCKS - 3) * P  # the number of blocks limits the length
    for format_id, chunk in ((0, CHUNK), (1, CHUNK)):
        longest = capacity.longest_request(format_id, chunk)
        assert admits(longest, format_id, chunk) and not admits(longest + int(P / PACKED) + P, format_id, chunk)
    # With chunks as large as all memory the limit is that of an uncompressed request.
    assert capacity.longest_request(1, 6 * P) == 11 * P - 2


def test_cache_imports_neither_sglang_nor_triton():
    code = (
        "import sys, pkgutil, importlib, sglang_kvc.cache as cache\n"
        "for m in pkgutil.iter_modules(cache.__path__): importlib.import_module(f'sglang_kvc.cache.{m.name}')\n"
        "assert not {m.split('.')[0] for m in sys.modules} & {'sglang', 'triton'}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]

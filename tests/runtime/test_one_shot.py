"""One-shot prompts without a model: budget sizes, kept tokens, records and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import RING_ENTRY_BYTES, PoolLayout, page_bytes_for
from kvc_kernels.store import SCRATCH_BLOCK
from sglang_kvc.cache import one_shot
from sglang_kvc.cache.one_shot import MOST_TAIL, SINKS, WINDOW, Budget, chat_tail
from sglang_kvc.cache.packing import Phase, tokens_decoded, tokens_written
from sglang_kvc.stats.collect import measure
from tests.support.no_sync import NoSync

from .model import D, H, L, P, make_runtime
from .one_shot_reference import slow_kept


@pytest.mark.parametrize(
    ("prompt", "tail"),
    [
        ([5, 6, 7, 90, 1, 91, 2, 1], 5),  # <|im_end|> \n <|im_start|> assistant \n
        ([90, 1, 91, 2, 1, 5, 6, 90, 1, 91, 2, 1], 5),  # the last message only
        ([90, 1, 91, 2, 1, *range(10, 10 + MOST_TAIL)], 0),  # the answer is already begun
        ([5, 6, 7], 0),
    ],
)
def test_chat_template_after_question_is_tail(prompt, tail):
    assert chat_tail(prompt, {90, 99}) == tail and chat_tail(prompt, ()) == 0


def test_chat_tail_is_kept():
    runtime = make_runtime(high="k4v4", window=0)
    fmt, budget = runtime.store.block_formats[1].high, Budget.parse("one-shot:64x")
    tokens = 4 * P + 3
    without, with_tail = (budget.plan(runtime.layout, fmt, 4, tokens, tail) for tail in (0, 5))
    assert (without.last, with_tail.last) == (WINDOW - 3, WINDOW + 5 - 3)



@pytest.mark.parametrize("text", ["one-shot:16x", "one-shot:1x", "one-shot:2.5x", "one-shot:64x", "one-shot:1024"])
def test_budgets_are_parsed_from_text(text):
    assert str(Budget.parse(text)) == text and Budget.parse(f" {text.upper()} ") == Budget.parse(text)


@pytest.mark.parametrize(
    "text, why",
    [
        ("one-shot", "not a budget"), ("one-shot:", "not a budget"), ("one-shot:x", "not a budget"),
        ("one-shot:-4x", "not a budget"),
        ("one-shot:nanx", "not a budget"), ("one-shot:1e3", "not a budget"), ("one-shot:16x,", "not a budget"),
        ("one-shot:0.99x", "out of range"), ("one-shot:64.1x", "out of range"), ("one-shot:0", "too small"),
        ("one-shot:" + "9" * 10**6, "not a budget"),
    ],
)  # fmt: skip
def test_invalid_budget_is_rejected_with_one_sentence(text, why):
    with pytest.raises(ValueError, match=why) as e:
        Budget.parse(text)
    assert "one-shot:16x" in str(e.value) and len(str(e.value)) < 300


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_prompt_sizes_stay_within_budget(data):
    """A prompt's pages and tables take at most what its ratio allows, unless every head is at its floor."""
    fmt = FORMATS[data.draw(st.sampled_from(["k8v8", "k8v4", "k4v4", "k4v2"]))]
    head_dim, t = data.draw(st.sampled_from([64, 128, 256])), data.draw(st.sampled_from([32, 64]))
    layers, heads = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 8))
    p = data.draw(st.sampled_from([64, 128]))
    page_bytes = page_bytes_for(fmt, t, head_dim=head_dim, has_scores=False)
    layout = PoolLayout(layers, heads, head_dim, p, page_bytes)
    full, tail = data.draw(st.integers(1, 900)), data.draw(st.integers(0, p - 1))
    ratio = data.draw(st.floats(1, 64))
    plan = Budget(ratio=ratio).plan(layout, fmt, full, full * p + tail)
    packed_pages, rows = full * layout.block_pages(fmt), layers * heads
    if plan is None:
        assert full * p * 4 * rows * head_dim / ratio >= packed_pages * page_bytes or full * p // t == 1
        return
    assert 1 <= plan.kept_blocks <= full and plan.last == max(0, WINDOW - tail)
    assert plan.floor * rows <= plan.pages <= plan.kept_blocks * layout.block_pages(fmt) and plan.pages < packed_pages
    assert plan.floor * t >= SINKS + plan.last
    num_bytes = plan.pages * (page_bytes + RING_ENTRY_BYTES) + plan.kept_blocks * layout.block_meta_bytes
    if plan.pages > plan.floor * rows:
        allowed = 4 * rows * head_dim * full * p / ratio
        assert num_bytes <= allowed
        # At most one page is left over, and no head gets far less than its fair share.
        assert plan.pages == packed_pages or num_bytes + page_bytes + RING_ENTRY_BYTES > allowed
        average = plan.pages / rows
        assert plan.kept_blocks == full or plan.kept_blocks * (p // t) >= one_shot.HEAD_LIMIT * average
    tokens = data.draw(st.integers(1, 2 * full * p))
    plan = Budget(tokens=tokens).plan(layout, fmt, full, full * p + tail)
    if plan is None:
        assert tokens >= full * p or full * p // t == 1
    elif plan.pages > plan.floor * rows:
        assert tokens * rows - t < plan.pages * t <= tokens * rows


def prompt(runtime, tokens: int, budget: str, seed: int = 0, decodes: bool = False):
    """A prefilled one-shot prompt whose packing is queued: its sequence, K, V `[L, tokens, H, D]`, queries `[L, w, Hq,
    D]`. With `decodes`, its first decode step queues the packing before the result of the prefill is processed."""
    gen = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(L, tokens, H, D, generator=gen).bfloat16() for _ in range(2))
    q = torch.randn(L, WINDOW, 2 * H, D, generator=gen).bfloat16()
    seq = runtime.new_one_shot(Budget.parse(budget), tokens)
    seq.prompt, seq.one_shot.row = tokens, 3
    assert runtime.grow([seq], [tokens])
    runtime.flush()
    at = torch.arange(tokens)
    blocks = torch.tensor(seq.blocks)
    seq.one_shot.queries = ops.LastQueries(runtime.store, 2 * H, WINDOW)
    for layer in range(L):
        ops.append(runtime.store, layer, blocks[at // P], at % P, k[layer], v[layer])
        seq.one_shot.queries.add(layer, q[layer], scale=0.3, logit_cap=0.0)
    tokens_written(runtime, seq, tokens // P // 2 * P, Phase.CHUNK)
    assert len(runtime.log) == 0, "a chunk was packed"
    if decodes:
        tokens_decoded(runtime, [seq], np.array([tokens]))
        assert len(runtime.log)
    tokens_written(runtime, seq, tokens, Phase.PREFILL)
    return seq, k, v, q


@pytest.fixture
def runtime():
    runtime = make_runtime(window=0, high="k4v4", blocks=16)
    runtime.page_ops.gaps = ops.RowGaps(8, torch.device("cpu"))
    return runtime


@pytest.mark.parametrize("tail", [0, 3, 40])
@pytest.mark.parametrize("budget", ["one-shot:6x", "one-shot:70", "one-shot:20x"])
def test_kept_tokens_match_slow_reference(runtime, budget, tail):
    """Covers scores, pooling, sinks, competition and packing together. Pooled scores tie, so rounding may change a few
    tokens of pages of equal worth."""
    full = 10
    seq, k, v, q = prompt(runtime, full * P + tail, budget)
    t = runtime.layout.page(FORMATS["k4v4"]).tokens
    plan = Budget.parse(budget).plan(runtime.layout, FORMATS["k4v4"], full, full * P + tail)
    runtime.flush()
    ops.check_invariants(runtime.store)
    blocks = torch.tensor(seq.blocks[: plan.kept_blocks])
    want = slow_kept(k.double().transpose(1, 2).numpy(), q.double().numpy(), plan.pages, plan.kept_blocks * P // t, t)
    assert int(ops.block_head_pages(runtime.store, blocks).sum()) == plan.pages
    for layer in range(L):
        keys, values, tier = ops.load_dense(runtime.store, layer, blocks, 1)
        for head in range(H):
            stored = tier[:, head].flatten() == 2
            place = torch.cdist(keys[:, head].flatten(0, 1)[stored], k[layer, :, head].float()).argmin(-1).tolist()
            assert place == sorted(set(place))
            expected = want[layer, head]
            assert len(place) == len(expected)
            assert len(set(place) ^ set(expected)) <= 2
            off = (values[:, head].flatten(0, 1)[stored] - v[layer, place, head].float()).abs().max()
            assert off < 0.5


def test_packing_never_makes_host_wait(runtime):
    prompt(runtime, 10 * P + 5, "one-shot:20x")
    rows, at = torch.arange(24).view(2, 12), torch.tensor([3, 1])
    with NoSync():
        runtime.flush()
        assert runtime.page_ops.gaps.close_up(rows, at) is not None
    assert rows[1].tolist() == list(range(12, 24)) != rows[0].tolist()


def test_records_follow_one_shot_request(runtime):
    """Charges, free blocks and the gap from the first token to the last."""
    blocks, ledger, pages = runtime.blocks, runtime.ledger, runtime.ledger.limit
    at_start = blocks.free_count
    seq, *_ = prompt(runtime, 10 * P + 5, "one-shot:20x")
    plan = Budget(ratio=20).plan(runtime.layout, FORMATS["k4v4"], 10, 10 * P + 5)
    kept = plan.kept_blocks
    assert 0 < kept < 10 and seq.gap == 10 - kept == runtime.gap_blocks
    assert seq.blocks[kept:10] == [SCRATCH_BLOCK] * seq.gap and len(seq.blocks) == 11
    assert at_start - blocks.free_count == kept + 1 == len(seq.owned())
    assert pages - ledger.free == plan.pages + runtime.layout.block_pages_bf16
    stats = measure(runtime, detail=False)
    assert stats.packed_tokens == 10 * P and stats.tokens == 10 * P + 5 and stats.ratio_body >= 20
    assert not runtime.page_ops.gaps.rows
    runtime.flush()
    assert runtime.page_ops.gaps.rows == {3}
    stats = measure(runtime, detail=True)
    assert sum(stats.tokens_by_tier.values()) == stats.tokens * L * H and stats.occupancy == 1.0
    assert stats.tokens_by_tier["high"] == plan.pages * runtime.layout.page(FORMATS["k4v4"]).tokens
    # Blocks of the answer are packed as usual.
    for n in range(10 * P + 6, 12 * P + 2):
        tokens_decoded(runtime, [seq], np.array([n - 1]))
        assert runtime.grow_by_one([seq], np.array([n])) is not None
        runtime.flush()
    assert blocks.format_id[seq.blocks[10:]].tolist() == [1, 1, 0]
    seq.release()
    runtime.free_sequence(seq)
    runtime.flush()
    assert blocks.free_count == at_start and ledger.free == pages and not runtime.gap_blocks
    assert not runtime.page_ops.gaps.rows and not blocks.ref_count.any() and not blocks.window_count.any()
    ops.check_invariants(runtime.store)


@pytest.mark.parametrize("decodes", [False, True])
def test_budget_that_keeps_all_packs_as_usual(runtime, decodes):
    seq, *_ = prompt(runtime, 3 * P + 5, "one-shot:3x", decodes=decodes)
    runtime.flush()
    assert seq.gap == 0 and runtime.blocks.format_id[seq.blocks].tolist() == [1, 1, 1, 0]
    assert runtime.store.counts[seq.blocks[:3], ..., 0].unique().tolist() == [P]


def test_short_prompt_is_packed_like_answer(runtime):
    seq = runtime.new_one_shot(Budget.parse("one-shot:64x"), 9)
    seq.prompt = 9
    assert runtime.grow([seq], [9])
    for n in range(10, P + 3):
        tokens_decoded(runtime, [seq], np.array([n - 1]))
        runtime.grow_by_one([seq], np.array([n]))
        runtime.flush()
    assert runtime.blocks.format_id[seq.blocks].tolist() == [1, 0] and seq.gap == 0


def test_prompt_without_observed_queries_raises(runtime):
    seq = runtime.new_one_shot(Budget.parse("one-shot:64x"), 4 * P)
    seq.prompt = 4 * P
    assert runtime.grow([seq], [4 * P])
    with pytest.raises(RuntimeError, match="last queries"):
        tokens_written(runtime, seq, 4 * P, Phase.PREFILL)


def test_admission_counts_whole_uncompressed_prompt(runtime):
    """Chunks of other prompts are packed one by one; a one-shot prompt is uncompressed until it is complete. Its answer
    then grows into the memory that packing frees."""
    capacity, budget = runtime.capacity, Budget(ratio=8)
    new, chunk = 8 * P, P
    packed_tokens = capacity.prompt_tokens(new, 4 * P, 1, chunk)
    assert packed_tokens < 6 * P < new
    for answer in (0, 1, P, 4 * P):
        assert capacity.prompt_tokens(new, answer, 1, chunk, budget) == new + min(answer, P)
    kept = capacity.tokens_of_pages(budget.plan(runtime.layout, FORMATS["k4v4"], 8, new).pages)
    long = capacity.prompt_tokens(new, 40 * P, 1, chunk, budget)
    assert long == kept + P + capacity.packed_tokens(39 * P, 1) > new + P
    # After a retraction, two blocks of the answer are part of the prefill but not of the prompt.
    again = capacity.prompt_tokens(new + 2 * P, 38 * P, 1, chunk, budget, written=2 * P)
    assert again == long
    limit = runtime.sizing.capacity_tokens
    assert capacity.prompt_ever_fits(limit - 1, 1, chunk) and not capacity.prompt_ever_fits(limit - 1, 1, None, budget)
    # A chunk may not draw on the reserve for answers, because it is not packed soon.
    assert capacity.chunk_credit(P, 50, 1) == 50 and capacity.chunk_credit(P, 50, 1, stays_uncompressed=True) == 0


@pytest.mark.parametrize(
    "windowed, page, session, why",
    [
        (False, None, False, None), (True, None, False, "sliding windows"), (False, None, True, "session"),
        (False, 1728, False, "do not divide"),
    ],
)  # fmt: skip
def test_unsupported_one_shot_requests_are_rejected(runtime, windowed, page, session, why):
    runtime.windowed = windowed
    if page:
        runtime.layout = PoolLayout(L, H, D, P, page)
        assert P % runtime.layout.page(FORMATS["k4v4"]).tokens
    if why is None:
        one_shot.check_served(runtime, in_session=session)
        return
    with pytest.raises(ValueError, match=why) as e:
        one_shot.check_served(runtime, in_session=session)
    assert str(e.value).startswith("A one-shot prompt cannot") and str(e.value).count(". ") == 0

"""One-shot prompts without a model: budget sizes, kept tokens against a slow reference, records and statistics."""

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
from sglang_kvc.cache import one_shot, thinning
from sglang_kvc.cache.one_shot import POOL, REACH, SHARE, SINKS, WINDOW, Budget
from sglang_kvc.cache.packing import Phase, tokens_decoded, tokens_written
from sglang_kvc.stats.collect import measure
from tests.support.no_sync import NoSync

from .model import D, H, L, P, make_runtime, pages_held


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


def slow_scores(k: np.ndarray, q: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Pooled scores of tokens with keys `k[S, D]` for the queries `q[w, 2, D]` of a head; `seen[w, S]`."""
    scores = np.zeros(len(k))
    for queries, mask in zip(q, seen):
        for query in queries:
            e = np.exp(k @ query * 0.3) * mask
            scores += (e / e.sum()) ** 2
    scores[:SINKS] = 0
    near = [scores[max(0, i - POOL // 2) : i + POOL // 2 + 1].max() for i in range(len(scores))]
    return np.array([max(x, SHARE * max(near[max(0, i - REACH) : i + 1])) for i, x in enumerate(near)])


def slow_kept(
    k: np.ndarray,
    q: np.ndarray,
    pages: int,
    max_pages: int,
    t: int,
    present: dict[tuple[int, int], list[int]] | None = None,
) -> dict[tuple[int, int], list[int]]:
    """The tokens that each head keeps of the full blocks of a prompt with stored keys `k[L, H, S, D]`. After an
    earlier selection, `present` lists the tokens that each head still stores."""
    tokens, entries = 1 + max(present[0, 0]) if present else k.shape[2], []
    full = tokens // P * P
    for layer in range(L):
        for head in range(H):
            positions = np.array(present[layer, head] if present else range(tokens))
            seen = positions <= (tokens - WINDOW + np.arange(WINDOW))[:, None]
            pooled = slow_scores(k[layer, head], q[layer, :, 2 * head : 2 * head + 2], seen)[positions < full]
            positions = positions[positions < full]
            pooled[(positions < SINKS) | (positions >= tokens - WINDOW)] = np.inf
            order = sorted(range(len(positions)), key=lambda i: (-pooled[i], i))
            for j in range(min(max_pages, len(order) // t)):
                page = order[j * t : (j + 1) * t]
                entries.append((j > 0, -pooled[page[0]], (layer, head), j, positions[page].tolist()))
    kept = {(layer, head): [] for layer in range(L) for head in range(H)}
    for _, _, head, _, page in sorted(entries)[:pages]:
        kept[head] += page
    return kept


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


@pytest.fixture
def tight(monkeypatch):
    """A runtime with room for ten uncompressed blocks, and segments of four."""
    monkeypatch.setattr(thinning, "SEGMENT", 4)
    runtime = make_runtime(window=0, high="k4v4", blocks=7)
    assert runtime.sizing.capacity_tokens == 10 * P
    runtime.page_ops.gaps = ops.RowGaps(8, torch.device("cpu"))
    return runtime


def arrive(runtime, tokens: int, chunk: int, budget: str):
    """Prefill a prompt in chunks, each written after the operations queued by the previous one have run. A probe's rows
    differ from those of the tokens whose positions it takes.

    Returns the sequence, K, V `[L, tokens, H, D]`, and for each chunk its end, its probe's tokens, the keys
    `[L, H, S, D]` that are stored then, and its last queries `[L, w, Hq, D]`."""
    gen = torch.Generator().manual_seed(tokens)
    k, v = (torch.randn(L, tokens, H, D, generator=gen).bfloat16() for _ in range(2))
    seq = runtime.new_one_shot(Budget.parse(budget), tokens, chunk=chunk)
    seq.one_shot.row = 3
    seq.one_shot.queries = ops.LastQueries(runtime.store, 2 * H, WINDOW)
    first, chunks = 0, []
    while first < tokens:
        end = min(first + chunk, tokens)
        probe, seq.prompt = seq.probe_tokens(first, end, tokens), end
        assert runtime.grow([seq], [end]), "an admitted prompt found no memory"
        with NoSync():
            runtime.flush()
        check(runtime, seq)
        at = torch.arange(first, end)
        blocks = torch.tensor(seq.blocks)[at // P]
        q = torch.randn(L, WINDOW, 2 * H, D, generator=gen).bfloat16()
        probe_rows = torch.randn(L, probe, H, D, generator=gen).bfloat16()
        for layer in range(L):
            keys, values = (torch.cat((x[layer, first : end - probe], probe_rows[layer])) for x in (k, v))
            ops.append(runtime.store, layer, blocks, at % P, keys, values)
            seq.one_shot.queries.add(layer, q[layer], scale=0.3, logit_cap=0.0)
        chunks.append((end, probe, stored_keys(runtime.store, seq, end), q.double().numpy()))
        tokens_written(runtime, seq, end - probe, Phase.CHUNK if end < tokens else Phase.PREFILL)
        if probe:
            runtime.cut(seq, end - probe)
        first = end - probe
    return seq, k, v, chunks


def stored_keys(store, seq, length: int) -> np.ndarray:
    """Keys `[L, H, S, D]` of the stored tokens among the first `length`; every head stores the same number."""
    first = seq.one_shot.first if seq.gap else len(seq.blocks)
    ids = torch.tensor([*seq.blocks[:first], *seq.blocks[first + seq.gap :]])
    keys = torch.stack([ops.load_dense(store, layer, ids)[0] for layer in range(L)])  # [L, n, H, P, D]
    return keys.transpose(1, 2).flatten(2, 3)[:, :, : length - seq.gap * P].double().numpy()


def check(runtime, seq) -> None:
    """After a flush, check that pages, charges, owners and the gap agree."""
    ops.check_invariants(runtime.store)
    pages, owned = pages_held(runtime.store), seq.owned()
    assert SCRATCH_BLOCK not in owned and len(set(owned)) == len(owned) == runtime.blocks.used_count
    assert pages.sum() == pages[owned].sum() == runtime.ledger.total == runtime.ledger.charge[owned].sum()
    assert runtime.gap_blocks == seq.missing == len(seq.blocks) - len(owned)
    row = torch.arange(len(seq.blocks)).int()[None]
    out = int(runtime.page_ops.gaps.close_up(row, torch.tensor([3])))
    assert out == seq.gap
    first = seq.one_shot.first if out else len(seq.blocks)
    left = [*seq.blocks[:first], *seq.blocks[first + out :]]
    assert [seq.blocks[i] for i in row[0, : len(seq.blocks) - out]] == left and SCRATCH_BLOCK not in left


def slow_thinned(tokens: int, seq, chunks) -> dict[tuple[int, int], list[int]]:
    """Tokens that each head has before the last competition."""
    size, stays = thinning.SEGMENT, seq.one_shot.segment_blocks
    kept_by_head = {(layer, head): [] for layer in range(L) for head in range(H)}
    done = 0
    for end, probe, k, q in chunks[:-1]:
        now = min(end - probe, tokens - WINDOW) // P // size * size * P
        if now == done:
            continue
        for (layer, head), kept in kept_by_head.items():
            if stays == size:
                kept += range(done, now)
                continue
            keys = k[layer, head]
            assert len(keys) == len(kept) + end - done
            seen = np.arange(len(keys)) <= (len(keys) - WINDOW + np.arange(WINDOW))[:, None]
            score = slow_scores(keys, q[layer, :, 2 * head : 2 * head + 2], seen)[len(kept) :][: now - done]
            score[: SINKS if done == 0 else 0] = np.inf
            kept += sorted((done + np.argsort(-score, kind="stable")[: (now - done) // size * stays]).tolist())
        done = now
    return {head: [*kept, *range(done, tokens)] for head, kept in kept_by_head.items()}


@pytest.mark.parametrize(
    "blocks, chunk, tail, stays, budget",
    [
        (16, 1, 9, 4, "one-shot:8x"), (20, 1, 9, 3, "one-shot:8x"), (27, 1, 9, 2, "one-shot:16x"),
        (20, 2, 0, 2, "one-shot:70"), (21, 2, 3, 2, "one-shot:8x"), (36, 2, 3, 1, "one-shot:30x"),
        (40, 1, 0, 1, "one-shot:64x"), (15, 1, 40, 4, "one-shot:3x"), (16, 1, 0, 4, "one-shot:4.3x"),
    ],
)  # fmt: skip
def test_prompt_that_does_not_fit_is_thinned(tight, blocks, chunk, tail, stays, budget):
    """Memory holds a fraction of the uncompressed prompt, and the kept tokens are those of a slow reference."""
    runtime, tokens = tight, blocks * P + tail
    seq, k, v, chunks = arrive(runtime, tokens, chunk * P, budget)
    prompt, fmt = seq.one_shot, FORMATS["k4v4"]
    assert prompt.segment_blocks == stays and any(probe for _, probe, *_ in chunks) == (stays < 4)
    with NoSync():
        runtime.flush()
    check(runtime, seq)
    t = runtime.layout.page(fmt).tokens
    plan = Budget.parse(budget).plan(runtime.layout, fmt, blocks, tokens)
    kept = seq.blocks[: prompt.first] if plan else seq.blocks[:blocks]
    pages = int(ops.block_head_pages(runtime.store, torch.tensor(kept)).sum())
    if plan is None:
        assert not seq.gap and pages == blocks * runtime.store.block_formats[1].pages
        return
    assert pages == plan.pages and len(kept) == min(plan.kept_blocks, prompt.reserved)
    present = slow_thinned(tokens, seq, chunks)
    want = slow_kept(*chunks[-1][2:], plan.pages, len(kept) * P // t, t, present)
    for layer in range(L):
        keys, values, tier = ops.load_dense(runtime.store, layer, torch.tensor(kept), 1)
        for head in range(H):
            stored = tier[:, head].flatten() == 2
            place = torch.cdist(keys[:, head].flatten(0, 1)[stored], k[layer, :, head].float()).argmin(-1).tolist()
            assert place == sorted(set(place)) and len(place) == len(want[layer, head])
            # Pooled scores tie, so rounding may change a few tokens of pages of equal worth.
            assert len(set(place) - set(present[layer, head])) <= 2
            assert len(set(place) ^ set(want[layer, head])) <= 4
            off = (values[:, head].flatten(0, 1)[stored] - v[layer, place, head].float()).abs().max()
            assert off < 0.5
    seq.release()
    runtime.free_sequence(seq)
    runtime.flush()
    assert runtime.blocks.used_count == runtime.ledger.total == runtime.gap_blocks == 0
    assert not runtime.page_ops.gaps.rows


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
    limit = runtime.sizing.capacity_tokens
    assert capacity.prompt_ever_fits(limit - 1, 1, chunk) and not capacity.prompt_ever_fits(limit - 1, 1, None, budget)
    # A chunk may not draw on the reserve for answers, because it is not packed soon.
    assert capacity.chunk_credit(P, 50, 1) == 50 and capacity.chunk_credit(P, 50, 1, packs_at_end=True) == 0


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


def test_prompt_logprobs_are_rejected_where_chunks_have_probes(tight):
    """The request is refused exactly where its chunks have probes."""
    sizes, budget = tight.capacity.one_shot, Budget(ratio=16)
    for tokens, stays in ((8 * P - 10, 0), (16 * P, 4), (27 * P, 2)):
        assert sizes.segment_blocks(budget, tokens, 1, P) == stays
        if 0 < stays < 4:
            with pytest.raises(ValueError, match=f"up to {sizes.room - P} tokens") as e:
                sizes.check_read(budget, tokens, 1, P)
            assert str(e.value).count(". ") == 0
        else:
            sizes.check_read(budget, tokens, 1, P)


def test_every_prompt_within_budget_limit_fits(tight):
    """Every prompt up to the limit fits, every longer one does not, and shorter chunks never lower the limit."""
    sizes = tight.capacity.one_shot
    for text in ("one-shot:1x", "one-shot:5x", "one-shot:16x", "one-shot:64x", "one-shot:100", "one-shot:9999"):
        budget, before = Budget.parse(text), 0
        for chunk in (6 * P, 2 * P, P):
            longest = sizes.longest(budget, 1, chunk)
            fits = [sizes.segment_blocks(budget, n, 1, chunk) is not None for n in range(1, longest + 5)]
            assert fits == [True] * longest + [False] * 4 and longest >= before
            capacity = tight.sizing.capacity_tokens
            assert all(sizes.need(budget, n, 1, 1, chunk) + P < capacity for n in range(1, longest))
            assert sizes.need(budget, longest + 1, 1, 1, chunk) > capacity
            before = longest
    assert sizes.longest(Budget(ratio=16), 1, None) < tight.sizing.capacity_tokens

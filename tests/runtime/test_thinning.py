"""One-shot prompts that do not fit uncompressed: tokens that compete while chunks arrive, against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from kvc_kernels.store import SCRATCH_BLOCK
from sglang_kvc.cache import thinning
from sglang_kvc.cache.one_shot import SINKS, WINDOW, Budget
from sglang_kvc.cache.packing import Phase, tokens_written
from tests.support.no_sync import NoSync

from .model import D, H, L, P, make_runtime, pages_held
from .one_shot_reference import slow_kept, slow_scores


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


def test_prompt_logprobs_are_rejected_where_chunks_have_probes(tight):
    """The request is refused exactly where its chunks have probes."""
    sizes, budget = tight.capacity.one_shot, Budget(ratio=16)
    longest = max(n for n in range(27 * P) if sizes.segment_blocks(budget, n, 1, P) in (0, 4))
    for tokens, stays in ((8 * P - 10, 0), (16 * P, 4), (27 * P, 2)):
        assert sizes.segment_blocks(budget, tokens, 1, P) == stays
        if 0 < stays < 4:
            with pytest.raises(ValueError, match=f"up to {longest} tokens") as e:
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


def test_packing_of_prompts_counts_as_compaction_time():
    runtime = make_runtime(window=0, high="k4v4", blocks=40)
    runtime.page_ops.gaps = ops.RowGaps(8, torch.device("cpu"))
    arrive(runtime, 12 * P + 3, 12 * P + 3, "one-shot:16x")
    runtime.settle()
    assert runtime.counters.compactions and runtime.counters.compaction_ms > 0

"""Planning of whole answers: its times, the kept tokens (against a slow reference in numpy), its records, and that its
bytes depend on the sequence alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common.bits import segment
from kvc_kernels.formats import BF16
from kvc_kernels.ops import ScoreSampling
from kvc_kernels.scores.reference import STRIDES
from sglang_kvc.cache.blocks import State
from sglang_kvc.cache.op_queue import Compact
from sglang_kvc.cache.packing import tokens_decoded
from sglang_kvc.cache.replanning import COMPETE_EVERY
from sglang_kvc.options.request_quality import LOSSLESS
from sglang_kvc.policies.base import EVIDENCE, with_evidence

from .model import H, L, P, Request, ToyServer, make_runtime, pages_held
from .test_replan import LEANKV, Batch

LAG = 2 * P
KEEP = 0.4
ANSWERS = {"policy": "prune", "high": "k8v4", "scorer": "h2o", "keep": KEEP, "sinks": 0, "window": 0, "lag": LAG}
WHOLE, ANSWER = 2, 3  # format ids


def page_tokens(runtime) -> int:
    return runtime.layout.page(runtime.store.block_formats[WHOLE].high).tokens


# ---- when


@pytest.mark.parametrize("policy_stride", STRIDES)
@pytest.mark.parametrize("lag", [EVIDENCE * n for n in (1, 2, 3, 8, 13, 32, 100)])
def test_enough_queries_are_sampled_before_block_is_planned(lag, policy_stride):
    stride = with_evidence(ScoreSampling(decode_stride=policy_stride), lag).decode_stride
    assert stride <= policy_stride and sum((i + 1) % stride == 0 for i in range(P, P + lag)) >= EVIDENCE
    # No more steps are sampled than necessary, because each costs time.
    assert stride == policy_stride or 2 * stride not in STRIDES or lag // (2 * stride) < EVIDENCE


@pytest.mark.parametrize("prompt", [1, 3 * P + 5, 4 * P])
@pytest.mark.parametrize("window", [0, 32, P])
def test_answer_is_planned_every_few_blocks(prompt, window):
    batch = Batch([prompt], **{**ANSWERS, "window": window})
    seq, first = batch.reqs[0].kvc, prompt // P
    packed_pages = batch.runtime.store.block_formats[WHOLE].pages
    block_pages, packed, plans = KEEP * packed_pages, [], []
    for length in range(prompt, prompt + 30 * P):
        for op in batch.step():
            places = [seq.blocks.index(b) for b in op.blocks.tolist()]
            if op.to_format == ANSWER:
                ((n, pages),) = op.groups.tolist()
                plans.append(length)
                assert places == list(range(first, first + n)) and n % COMPETE_EVERY == 0
                assert (first + n) * P + LAG == length, "a block is planned too early, or late"
                young = (length - window) // P - first - n
                assert pages == int(max(block_pages * (n + young) - young * packed_pages, 0.75 * block_pages * n))
            elif op.to_format == WHOLE:
                packed += places
                assert op.from_format == 0 and (places[0] + 1) * P + window == length
            else:
                assert max(places) < first, "a block of the answer is planned alone"
    assert packed == list(range(first, (length - window) // P))
    assert len(plans) == ((length - LAG) // P - first) // COMPETE_EVERY > 2


def test_many_answers_are_planned_in_one_operation():
    batch = Batch([2 * P + 3] * 5, **ANSWERS)
    planned = [op for _ in range(9 * P) for op in batch.step() if op.to_format == ANSWER]
    assert len(planned) == 1 and planned[0].groups[:, 0].tolist() == [COMPETE_EVERY] * 5
    assert len(planned[0].blocks) == 5 * COMPETE_EVERY


def test_two_tier_block_stays_whole_until_lag_has_passed():
    """LeanKV plans a prompt at once except for the blocks within the lag, and plans later blocks when the lag has
    passed them."""
    prompt, window = 5 * P + 7, 32
    batch = Batch([prompt], **LEANKV, window=window, lag=LAG)
    seq, records = batch.reqs[0].kvc, batch.runtime.blocks
    batch.runtime.blocks.state[seq.blocks] = State.OPEN
    records.format_id[seq.blocks] = 0
    seq.window_start = 0
    records.window_count[seq.blocks] = 1
    seq._start_window(0)
    seen = {}
    for length in range(prompt, prompt + 9 * P):
        for op in batch.step():
            for block in op.blocks.tolist():
                seen.setdefault(seq.blocks.index(block), []).append((length, op.from_format, op.to_format))
    planned = (prompt - LAG) // P
    for place, events in seen.items():
        end = (place + 1) * P
        if place < planned:
            assert events[0] == (prompt, 0, 1)
            continue
        assert events[0] == (max(prompt, end + window), 0, WHOLE)
        if end + LAG <= length:
            assert events[1] == (end + LAG, WHOLE, 1)
        assert all(a == b == 1 for _, a, b in events[2:])
    assert any(len(events) > 2 for events in seen.values())


# ---- kept tokens


class Attended(ToyServer):
    """Each token's scores are a function of its history; every `P` steps the scores of all stored tokens change."""

    def _forward(self, req: Request, done: int, slots: torch.Tensor) -> None:
        super()._forward(req, done, slots)
        store, seq = self.runtime.store, req.kvc
        lens = torch.tensor([done + len(slots)])
        new = None if req.output_ids else torch.tensor([len(slots)])
        ops.count_queries(store, torch.tensor([seq.blocks]), lens, new, self.runtime.policy.score_sampling)
        if (done + len(slots)) % P == 1 or new is not None:
            for place, block in enumerate(seq.blocks):
                self._write_scores(block, self.scores(req, place, done // P))

    @staticmethod
    def scores(req: Request, place: int, era: int) -> np.ndarray:
        """Scores of the block at `place`, fp32 `[L, H, P]`."""
        seed = [len(req.origin_input_ids), int(req.origin_input_ids[0]), place, era]
        return np.random.default_rng(seed).exponential(1.0, (L, H, P)).astype(np.float32)

    def _write_scores(self, block: int, scores: np.ndarray) -> None:
        store = self.runtime.store
        block_format = store.block_formats[max(int(store.format_id[block]), 0)]
        page = store.layout.page(block_format.high)
        words = segment(page, store.pages, "scores", torch.float32)
        for layer in range(L):
            for head in range(H):
                n = P if block_format.high is BF16 else int(store.counts[block, layer, head, 0])
                for i in range(n):
                    at = int(store.table[block, layer, head, i // page.tokens])
                    place = i
                    if block_format.high is not BF16:
                        place = segment(page, store.pages, "positions", torch.int16)[at, i % page.tokens]
                    words[at, i % page.tokens] = float(scores[layer, head, int(place)])


def slow_kept(kept: np.ndarray, scores: np.ndarray, queries: list[int], pages: int, t: int) -> np.ndarray:
    """The tokens, bool `[m, L, H, P]`, that m blocks keep of their stored tokens, chosen page by page. `queries[m]`:
    queries after each block. Every query after a token counts."""
    entries = []
    for block, layer, head in np.ndindex(kept.shape[:3]):
        met = (queries[block] + np.arange(P)[::-1]).astype(np.float32)
        worth = np.where(kept[block, layer, head], scores[block, layer, head] / met, -np.inf)
        order = sorted(range(P), key=lambda i: (-worth[i], i))
        for j in range(0, P, t):
            entries.append((-worth[order[j]], layer, block, head, j, order[j : j + t]))
    out = np.zeros_like(kept)
    for _, layer, block, head, _, tokens in sorted(entries)[:pages]:
        out[block, layer, head, tokens] = True
    return out & kept


@pytest.mark.slow
@pytest.mark.parametrize("share", ["global", "ada:floor=0"])
def test_answer_keeps_tokens_of_slow_reference(share):
    """The reference knows only the scores. The ledger charges exactly what the pages hold."""
    server = Attended(blocks=30, **{**ANSWERS, "share": share})
    runtime, prompt = server.runtime, 2 * P + 5
    req = server.admit(list(range(1, prompt + 1)))
    runtime.flush()
    before = ops.block_digest(runtime.store, req.kvc.blocks[0], scores=False)
    t, packed_pages, kept, plans = page_tokens(runtime), runtime.store.block_formats[WHOLE].pages, None, 0
    for step in range(11 * P):
        length = prompt + step
        due = (length - LAG) % P == 0 and (length - LAG) // P > 2 and ((length - LAG) // P - 2) % COMPETE_EVERY == 0
        if due:
            n = (length - LAG) // P - 2
            blocks = req.kvc.blocks[2 : 2 + n]
            queries = [length - (2 + i + 1) * P for i in range(n)]
            assert min(queries) == LAG and runtime.store.query_counts[blocks].tolist() == queries
            scores = np.stack([server.scores(req, 2 + i, (length - 1) // P) for i in range(n)])
            old = np.ones((n, L, H, P), dtype=bool)
            if kept is not None:
                old[: len(kept)] = kept
            young = length // P - 2 - n
            pages = int(max(KEEP * packed_pages * (n + young) - young * packed_pages, 0.75 * KEEP * packed_pages * n))
            if share == "global":
                kept = slow_kept(old, scores, queries, pages, t)
            else:  # layers have equal pages
                parts = [pages // L + (i < pages % L) for i in range(L)]
                kept = np.concatenate(
                    [slow_kept(old[:, i : i + 1], scores[:, i : i + 1], queries, parts[i], t) for i in range(L)], 1
                )
        assert server.decode(req, 9000 + step)
        if due:
            plans += 1
            stored = ops.block_tiers(runtime.store, torch.tensor(blocks)).numpy() == 2
            assert (stored == kept).all(), f"plan {plans} keeps other tokens"
            pages_used, charge = pages_held(runtime.store)[blocks], runtime.ledger.charge[blocks]
            assert (pages_used == charge).all() and pages_used.sum() <= pages
            assert pages_used.sum() == pages or plans > 1  # a page that has already lost some of its tokens
            server.check()
    assert plans == 2 and (kept[:4].sum((0, 3)) != kept[4:].sum((0, 3))).any()
    assert ops.block_digest(runtime.store, req.kvc.blocks[0], scores=False) == before, "a block of the tree was planned"


def test_sinks_of_short_prompt_are_kept():
    server = Attended(blocks=30, **{**ANSWERS, "keep": 0.2, "sinks": 5})
    req = server.admit([3, 1, 4])
    for step in range((COMPETE_EVERY + 2) * P):
        assert server.decode(req, 9000 + step)
    kept = ops.block_tiers(server.runtime.store, torch.tensor(req.kvc.blocks[:1])) == 2
    assert int(server.runtime.store.format_id[req.kvc.blocks[0]]) == ANSWER
    assert kept[..., :5].all() and not kept.all()


def digests(prompts: list[int], new: int) -> list[list[str]]:
    """Digests of all full blocks of requests with these prompts that decode `new` tokens concurrently."""
    server = Attended(blocks=60, **ANSWERS)
    reqs = [server.admit([100 * n + j for j in range(n)]) for n in prompts]
    for step in range(new):
        for req in reqs:
            assert server.decode(req, 7000 + step)
    server.check()
    full = [r.kvc.blocks[: (len(r.origin_input_ids) + new) // P] for r in reqs]
    return [[ops.block_digest(server.runtime.store, b, scores=False) for b in blocks] for blocks in full]


@pytest.mark.slow
def test_concurrent_requests_do_not_change_packed_bytes():
    new = (COMPETE_EVERY + 3) * P
    assert digests([P + 3, P // 2, 2 * P], new)[0] == digests([P + 3], new)[0]


# ---- start and end of a request


@pytest.mark.parametrize("finished", [True, False])
def test_finished_answer_leaves_planned_blocks_to_tree(finished):
    """Planned blocks do not change, and whole ones are planned alone; the next prompt hits them and plans none of
    them again."""
    server = ToyServer(blocks=40, **ANSWERS)
    runtime, prompt, new = server.runtime, list(range(P)), (COMPETE_EVERY + 3) * P + 9
    req = server.admit(prompt)
    for step in range(new):
        assert server.decode(req, 5000 + step)
    blocks = list(req.kvc.blocks)
    assert runtime.blocks.format_id[blocks].tolist() == [1] + [ANSWER] * COMPETE_EVERY + [WHOLE] * 3 + [0]
    if not finished:
        req.refresh_fill_ids = lambda: None
        req.kv.kv_committed_len = P + new
        server.tree.keep_retracted(req)
    server.finish(req, insert=finished)
    server.check()
    kept = blocks[:-1]
    assert runtime.blocks.format_id[kept].tolist() == [1] + [ANSWER] * COMPETE_EVERY + [1] * 3
    assert (pages_held(runtime.store)[kept] == runtime.ledger.charge[kept]).all()
    quota = runtime.store.block_formats[1].pages
    assert (runtime.ledger.charge[kept[-3:]] == quota).all() and runtime.blocks.state[blocks[-1]] == State.FREE
    again = server.admit([*prompt, *range(5000, 5000 + new - 9)])
    assert again.kvc.blocks[: len(kept) - 1] == kept[:-1]
    before = [ops.block_digest(runtime.store, b, scores=False) for b in kept[:-1]]
    for step in range(2 * P):
        assert server.decode(again, 100 + step)
    assert [ops.block_digest(runtime.store, b, scores=False) for b in kept[:-1]] == before
    server.finish(again)
    server.check()


def test_lossless_request_is_never_compacted():
    server = ToyServer(blocks=40, **ANSWERS)
    req = server.admit([1, 2, 3], level=LOSSLESS)
    for step in range((COMPETE_EVERY + 3) * P):
        assert server.decode(req, step)
    assert not server.runtime.blocks.format_id[req.kvc.blocks].any() and not server.runtime.counters.compactions


def test_growth_includes_blocks_not_yet_planned():
    runtime = make_runtime(blocks=20, **ANSWERS)
    capacity, formats = runtime.capacity, runtime.store.block_formats
    dense, young = runtime.layout.block_pages_bf16, LAG + COMPETE_EVERY * P
    planned, packed = formats[1].pages / dense, formats[WHOLE].pages / dense
    assert capacity.growth_tokens(P, 1, 0) == P
    assert capacity.growth_tokens(P + 100, 1, 0) == pytest.approx(P + 100 * packed)
    assert capacity.growth_tokens(P + young + 1000, 1, 0) == pytest.approx(P + young * packed + 1000 * planned)
    assert capacity.growth_tokens(5000, 0, 0) == 5000


def test_answers_planned_together_do_not_compete():
    """Two answers that are planned by the same launches keep the same tokens as when each is planned alone."""
    server, alone = (Attended(blocks=60, **ANSWERS) for _ in range(2))
    server.runtime.page_ops.reserve_pages = 2 * COMPETE_EVERY * server.runtime.store.block_formats[ANSWER].pages
    reqs = [server.admit([100 * n + j for j in range(P + 3)]) for n in (1, 2)]
    only = alone.admit([200 + j for j in range(P + 3)])
    moves = []
    queue = server.runtime.log.push
    server.runtime.log.push = lambda op: (moves.append(op) if isinstance(op, Compact) else None, queue(op))
    for step in range((COMPETE_EVERY + 2) * P):
        batch = SimpleNamespace(lengths=np.array([P + 3 + step] * 2), seqs=[r.kvc for r in reqs])
        tokens_decoded(server.runtime, batch.seqs, batch.lengths)  # plans both answers in one operation
        for req in reqs:
            assert server.decode(req, 7000 + step)
        assert alone.decode(only, 7000 + step)
    assert any(len(op.groups) for op in moves)
    tiers = [
        ops.block_tiers(s.runtime.store, torch.tensor(r.kvc.blocks[1 : 1 + COMPETE_EVERY]))
        for s, r in ((server, reqs[1]), (alone, only))
    ]
    assert (tiers[0] == 0).any() and torch.equal(*tiers)

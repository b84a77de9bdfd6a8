"""Prompts of policies of `sequence` scope, in chunks: packed with all their tokens, and planned when complete."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.common.bits import segment
from kvc_kernels.formats import BF16
from sglang_kvc.adapter.request_limits import longest_request
from sglang_kvc.cache.blocks import State

from .model import H, L, P, Request, ToyServer, make_runtime, pages_held, row
from .overlap import Overlap, configured

LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2", "alpha_low": 0.3, "window": 0}
POLICIES = [
    LEANKV,
    {**LEANKV, "window": P},
    {**LEANKV, "lag": 2 * P},
    {"policy": "prune", "high": "k4v4", "scorer": "h2o", "keep": 0.4, "window": 0},
    {"policy": "prune", "high": "k4v4", "low": "k2v2", "scorer": "h2o", "keep": 0.4, "window": 0},
    {"policy": "prune", "high": "k4v4", "scorer": "kv-compress", "keep": 0.4, "window": 0, "lag": P},
    {"policy": "prune", "high": "k4v4", "scorer": "snapkv", "keep": 0.4, "window": 0},
    {**LEANKV, "observe": ops.ScoreSampling(64), "window": P},
    {"policy": "prune", "high": "k2v2", "scorer": "h2o", "share": "pyramid", "keep": 0.5, "window": 0},
]
PROMPT = list(range(1, 9 * P + 6))
CHUNK = 2 * P


class WithScores(ToyServer):
    """Attention is fixed: a token's score and the number of queries after a block depend on the prompt alone."""

    def _forward(self, req: Request, done: int, slots: torch.Tensor) -> None:
        super()._forward(req, done, slots)
        store, page = self.runtime.store, self.runtime.layout.page(BF16)
        scores, tokens = segment(page, store.pages, "scores", torch.float32), list(req.origin_input_ids)
        for i, slot in enumerate(slots.tolist()):
            history = np.random.default_rng(tokens[: done + i + 1])
            place = store.table[slot // P, :, :, slot % P // page.tokens].long()
            scores[place, slot % P % page.tokens] = torch.from_numpy(
                history.exponential(len(tokens) / (done + i + 1) / 2, (L, H)).astype(np.float32)
            )
        for i, block in enumerate(req.kvc.blocks):
            store.query_counts[block] = max(0, len(tokens) - (i + 1) * P)


def serve(chunk: int | None, **options) -> tuple[WithScores, Request]:
    server = WithScores(blocks=40, **options)
    req = server.admit(PROMPT, chunk)
    server.runtime.settle()
    return server, req


@pytest.mark.parametrize("options", POLICIES)
def test_plan_equals_that_of_an_uncompressed_prompt(options):
    """The scores and the query counts move with the tokens, so every block keeps the same tokens in the same tiers."""
    (chunked, req), (whole, other) = serve(CHUNK, **options), serve(None, **options)
    formats = [s.runtime.blocks.format_id[r.kvc.blocks].tolist() for s, r in ((chunked, req), (whole, other))]
    assert formats[0] == formats[1] and 1 in formats[0]
    lower = 0
    for mine, its in zip(req.kvc.blocks[:9], other.kvc.blocks):
        tiers = [ops.block_tiers(s.runtime.store, torch.tensor([b])) for s, b in ((chunked, mine), (whole, its))]
        assert torch.equal(*tiers)
        lower += int((tiers[0] < 2).any())
    assert lower >= 5
    assert (chunked.runtime.ledger.charge[req.kvc.blocks] == whole.runtime.ledger.charge[other.kvc.blocks]).all()
    chunked.check()


@pytest.mark.parametrize("options", POLICIES)
def test_complete_chunks_take_packed_pages_of_known_size(options):
    """After every chunk the ledger charges exactly what the device holds."""
    server = WithScores(blocks=40, **options)
    runtime, steps = server.runtime, []
    checkpoint = server.tree.checkpoint

    def look(req, up_to):
        checkpoint(req, up_to=up_to)
        runtime.flush()
        blocks = req.kvc.blocks[: up_to // P]
        assert (pages_held(runtime.store)[blocks] <= runtime.ledger.charge[blocks]).all()
        if up_to < len(PROMPT):
            held = max(0, up_to - runtime.config.window) // P
            unplanned = runtime.policy.unplanned_format
            assert runtime.blocks.format_id[blocks].tolist() == [unplanned] * held + [0] * (len(blocks) - held)
            whole = runtime.store.block_formats[unplanned].pages
            assert pages_held(runtime.store)[blocks[:held]].tolist() == [whole] * held
            assert runtime.ledger.charge[blocks[:held]].tolist() == [whole] * held
            assert req.kvc.open_tokens() == (len(req.kvc.blocks) - held) * P
            steps.append(held)

    server.tree.checkpoint = look
    server.admit(PROMPT, CHUNK)
    assert len(steps) == len(PROMPT) // CHUNK and steps[-1] > 4


@pytest.mark.parametrize("high", ["k8v4", "k2v2"])
def test_queries_of_later_chunks_see_keys_of_four_bits_or_more(high):
    server = WithScores(blocks=40, policy="prune", high=high, scorer="h2o", keep=0.5, window=0)
    checkpoint, errors = server.tree.checkpoint, []

    def look(req, up_to):
        checkpoint(req, up_to=up_to)
        server.runtime.flush()
        if up_to == 6 * P:
            stored = ops.load_dense(server.runtime.store, 0, torch.tensor(req.kvc.blocks[:6]))[0].transpose(1, 2)
            keys = np.stack([row(PROMPT[: i + 1]) for i in range(6 * P)])
            errors.append(np.abs(stored.flatten(0, 1).numpy() - keys).max())

    server.tree.checkpoint = look
    server.admit(PROMPT, CHUNK)
    assert errors and max(errors) <= 0.1 + 7.5 / 15  # half a step of 4 bits over a range of 15, and rounding


def test_blocks_do_not_depend_on_other_requests():
    def digests(server, req):
        return [ops.block_digest(server.runtime.store, b) for b in req.kvc.blocks[:9]]

    alone = digests(*serve(CHUNK, **LEANKV))
    server = WithScores(blocks=60, **LEANKV)
    first = server.admit([7000 + i for i in range(5 * P)], P)
    checkpoint = server.tree.checkpoint

    def between(req, up_to):
        checkpoint(req, up_to=up_to)
        assert server.decode(first, up_to)

    server.tree.checkpoint = between
    req = server.admit(PROMPT, CHUNK)
    server.runtime.settle()
    assert digests(server, req) == alone


@pytest.mark.parametrize("options", POLICIES)
@pytest.mark.parametrize("shared", [False, True])
def test_blocks_of_an_aborted_prompt_are_planned(options, shared):
    """By then no prompt holds them any more; a request that uses them sees them planned, with a lag at its end. If only
    a prompt's last queries count, none has read the blocks of an aborted prompt. A plan without scores would keep
    arbitrary tokens, or none, so the blocks keep all tokens until a complete prompt has read them."""
    server = WithScores(blocks=60, **options)
    runtime, checkpoint, other = server.runtime, server.tree.checkpoint, []

    def stop(req, up_to):
        checkpoint(req, up_to=up_to)
        if up_to == 6 * P:
            server.tree.checkpoint = checkpoint
            if shared:
                other.append(server.admit([*PROMPT[: 6 * P], 3, 4]))
                assert other[0].kvc.blocks[:6] == req.kvc.blocks[:6]
                held = runtime.blocks.format_id[req.kvc.blocks[: 6 - runtime.config.window // P]]
                assert (held == runtime.policy.unplanned_format).all()
            raise InterruptedError

    server.tree.checkpoint = stop
    with pytest.raises(InterruptedError):
        server.admit(PROMPT, CHUNK)
    req = server.running[0]
    blocks = req.kvc.blocks[: 5 if runtime.config.window else 6]
    req.origin_input_ids = req.origin_input_ids[: 6 * P]
    server.finish(req, insert=False)
    if shared and runtime.config.lag:
        server.finish(other.pop())
    server.check()
    packed = runtime.blocks.format_id[blocks].tolist()
    assert (runtime.blocks.state[blocks] == State.PACKED).all()
    if runtime.policy.score_sampling.window is None or shared:
        assert packed == [1] * len(blocks)
        return
    assert packed == [runtime.policy.unplanned_format] * len(blocks)
    held = server.admit(PROMPT, CHUNK)
    assert held.kvc.blocks[: len(blocks)] == blocks
    server.finish(held)
    server.check()
    assert runtime.blocks.format_id[blocks].tolist() == [1] * len(blocks)


@pytest.mark.parametrize(
    ("options", "mixed"),
    [(LEANKV, False), (LEANKV, True), (POLICIES[3], False), (POLICIES[5], True), (POLICIES[8], False)],
)
def test_prompt_that_fits_only_packed_is_served(options, mixed):
    """Of the greatest length, beside running requests, with SGLang's scheduler; every forward checks what it reads."""
    runtime = make_runtime(blocks=9, **options)
    with configured(runtime, P, retract_every=10**6, mixed=mixed):
        server = Overlap(runtime, P, disable=False, context=4096)
        longest = longest_request(runtime, 1)
        assert longest > runtime.sizing.capacity_tokens
        server.submit([5, 6, 7], list(range(900, 900 + 3 * P)), None, "tenant")
        server.submit(list(range(1, longest - 3)), [11, 12], None, "tenant")
        server.submit([8, 9], list(range(900, 900 + P)), None, "tenant")
        turns = 0
        while server.busy:
            server.turn()
            turns += 1
            assert turns < 2000, "a request waits for ever"
        server.turn()
    assert [len(r.output_ids) for r in server.requests.values()] == [3 * P, 2, P]
    assert server.seen["planned late"] >= (longest - 3) // P - 3

"""Policies that count only the last queries of a prompt: with real attention, chunks do not change what blocks keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.engine.attention import Attention, Snapshot

from .audit import _nodes
from .model import CONTEXT, H, L, P, Request, ToyServer, row
from .test_stored_prompts import EVERYTHING, finish_writes, run, tokens
from .test_stored_prompts import serve as live

PRUNE = {"policy": "prune", "high": "k8v4", "keep": 0.4, "sinks": 0, "window": 0}
LEANKV = {"policy": "leankv", "high": "k8v4", "low": "k4v2", "alpha_low": 0.3, "window": 0}
SUMS = [{**PRUNE, "scorer": scorer} for scorer in ("snapkv", "kv-compress", "defensivekv", "kv-compress:stride=8")]
MAXIMA = [{**LEANKV, "observe": ops.ScoreSampling(64)}, {**LEANKV, "observe": ops.ScoreSampling(32), "lag": P}]
MORE = P + 6


class Attending(ToyServer):
    """Queries and keys are functions of a token's history, and the engine collects their attention."""

    def __init__(self, **options):
        super().__init__(**options)
        sizes = {"query_heads": H, "max_batch": 1, "max_blocks": CONTEXT // P}
        self.attention = Attention(self.runtime.store, self.runtime.policy.score_sampling, **sizes)

    def _forward(self, req: Request, done: int, slots: torch.Tensor) -> None:
        self.runtime.step += 1
        self.runtime.flush()
        tokens, seq, end = list(req.full_untruncated_fill_ids), req.kvc, done + len(slots)
        q, k = (
            torch.from_numpy(np.stack([row([*tokens[: i + 1], *tag]) for i in range(done, end)])).bfloat16()
            for tag in ((-1,), ())
        )
        at = torch.arange(done, end)
        blocks = torch.tensor([seq.blocks], dtype=torch.int32)
        snap = Snapshot(
            blocks, torch.tensor([end]), blocks[0, at // P].long(), at % P, [end], [done], [len(at)],
            prompt_lens_cpu=[seq.whole_prompt],
        )  # fmt: skip
        self.attention.plan_extend(snap)
        self.attention.note(snap, torch.tensor([len(at)]))
        for layer in range(L):
            self.attention.extend(layer, q + layer, k, k, scale=0.02, logit_cap=0.0)
        self.runtime.processed += 1
        self.runtime.harvest(self.runtime.processed)


def serve(options: dict, tokens: int, chunk: int | None) -> torch.Tensor:
    """Tiers of the full blocks of a prompt, `[n, L, H, P]`, and their query counts."""
    server = Attending(blocks=40, **options)
    blocks = torch.tensor(server.admit(list(range(1, tokens + 1)), chunk).kvc.blocks[: tokens // P])
    server.runtime.settle()
    store = server.runtime.store
    server.check()
    return ops.block_tiers(store, blocks), store.query_counts[blocks]


@pytest.mark.parametrize(
    ("options", "tokens"),
    # Before the last chunk come 6 blocks. A sum or a maximum over queries may also begin in an earlier chunk.
    [(options, 6 * P + MORE) for options in (*SUMS, *MAXIMA)] + [(options, 6 * P + 5) for options in SUMS],
)
def test_prompt_in_chunks_keeps_tokens_of_prompt_in_one(options, tokens):
    """Up to rounding: queries of later chunks read keys in 8 bits."""
    (want, counts), (got, chunked_counts) = serve(options, tokens, None), serve(options, tokens, 2 * P)
    assert torch.equal(counts, chunked_counts) and counts[:5].min() > 0
    assert (want != got).float().mean() < 0.02
    assert 0.2 < (want < 2).float().mean() < 0.9


@pytest.mark.parametrize("options", [SUMS[0], MAXIMA[0]])
def test_prompt_plans_unread_blocks_of_aborted_prompt(options):
    """It keeps the tokens that it would keep if it had filled the blocks itself: the aborted prompt leaves no
    scores."""
    tokens = 6 * P + MORE
    want, _ = serve(options, tokens, None)
    server = Attending(blocks=40, **options)
    checkpoint = server.tree.checkpoint

    def stop(req, up_to):
        checkpoint(req, up_to=up_to)
        if up_to == 4 * P:
            server.tree.checkpoint = checkpoint
            raise InterruptedError

    server.tree.checkpoint = stop
    with pytest.raises(InterruptedError):
        server.admit([*range(1, 4 * P + 1), *[7] * 200], 2 * P)
    aborted = server.running[0]
    aborted.origin_input_ids = aborted.origin_input_ids[: 4 * P]
    server.finish(aborted, insert=False)
    runtime = server.runtime
    left = np.flatnonzero(runtime.blocks.format_id == runtime.policy.unplanned_format).tolist()
    assert len(left) == 4 and not runtime.store.query_counts[left].any()
    req = server.admit(list(range(1, tokens + 1)))
    assert sorted(req.kvc.blocks[:4]) == left
    runtime.settle()
    got = ops.block_tiers(runtime.store, torch.tensor(req.kvc.blocks[: tokens // P]))
    assert (want != got).float().mean() < 0.02
    server.check()


def test_stored_blocks_of_aborted_prompt_are_planned():
    """Host memory gets no copy of unread blocks, which would stay in their format after the next prompt has planned
    them."""
    prompt = [*tokens(1, 6), 1, 2, 3]
    options = {**PRUNE, "scorer": "snapkv", "chunk": 2 * P, "host": 2_000_000, "trust": "all"}
    with live(**{name: value for name, value in options.items() if name != "window"}) as server:
        runtime, tree = server.runtime, server.tree_cache
        server.submit(prompt, [5], None, None)
        ((rid, req),) = server.requests.items()
        run(server, until=lambda: getattr(req, "kvc", None) is not None and req.kvc.shared >= 2)
        server.abort(rid)
        run(server)
        assert runtime.blocks.unread.any()
        tree.evict(EVERYTHING)
        runtime.settle()
        assert not runtime.host_tier.stored
        server.submit(prompt, [5], None, None)
        run(server)
        tree.evict(EVERYTHING)
        runtime.settle()
        values = (node.component_data[tree.component.component_type].host_value for node in _nodes(tree))
        stored = np.concatenate([tree.component.blocks_at(value) for value in values if value is not None])
        assert len(stored) >= 6 and (runtime.host_tier.format_id[stored] == 1).all()


def test_blocks_know_the_prompt_that_wrote_them(tmp_path):
    """Also after they were in host memory and in files. Blocks of its answer, and of policies without attention scores,
    name no prompt."""
    prompt, answer = [*tokens(1, 6), 1, 2, 3], tokens(2, 2)
    scored = {**{name: value for name, value in PRUNE.items() if name != "window"}, "scorer": "snapkv", "trust": "all"}

    def prompts(server) -> list[int]:
        (deepest,) = (node for node in _nodes(server.tree_cache) if not node.children)
        return server.runtime.blocks.prompt[server.tree_cache.path_blocks(deepest.id)].tolist()

    with live(tmp_path, chunk=2 * P, **scored) as server:
        for _ in range(2):  # computed, and loaded from host memory
            server.submit(prompt, answer, None, None)
            run(server)
            assert prompts(server) == [len(prompt)] * 7 + [0]
            finish_writes(server)
            server.tree_cache.evict(EVERYTHING)
    with live(tmp_path, chunk=2 * P, **scored) as server:
        server.submit(prompt, [5], None, None)
        run(server)
        assert server.tree_cache.disk.store.bytes_read and prompts(server)[:6] == [len(prompt)] * 6
    with live() as server:
        server.submit(prompt, answer, None, None)
        run(server)
        assert not server.runtime.blocks.prompt.any()

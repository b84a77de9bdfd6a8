"""Decode and mixed forwards over rows with a gap, as the backend plans them, against attention over the remaining
blocks; and the query rows kept for a one-shot prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.adapter.attention_backend import KvcAttnBackend
from sglang_kvc.cache.one_shot import WINDOW
from sglang_kvc.engine.attention import Attention
from tests.support.pages import packed_prompt
from tests.support.random_store import reference_decode

P, STALE = 64, 8  # a block id that rows of `req_to_token` still name in their gap


@pytest.fixture
def packed():
    """The store of `packed_prompt`, and rows 3 and 1 of `req_to_token` for its requests. The first request has a gap of
    two blocks before its open block."""
    store, rows, lens = packed_prompt(head_dim=32, block_tokens=P)
    gaps = ops.RowGaps(5, torch.device("cpu"))
    gaps.open(3, 3, 2)
    block_table = torch.zeros((5, 6), dtype=torch.int64)
    block_table[3], block_table[1, :2] = torch.tensor([4, 2, 7, STALE, STALE, 5]), rows[1, :2]
    slots = (block_table[..., None] * P + torch.arange(P)).flatten(1)
    return store, rows, lens, gaps, slots.int()


def attention(store) -> Attention:
    return Attention(store, None, query_heads=4, max_batch=4, max_blocks=6)


def test_decode_skips_gaps(packed):
    store, rows, lens, gaps, slots = packed
    true = torch.tensor([int(lens[0]) + 2 * P, int(lens[1])])
    planned = attention(store)
    snap = planned.plan_decode(slots, torch.tensor([3, 1]), true, true.tolist(), gaps)
    assert snap.write_blocks.tolist() == [5, 6] and snap.write_offsets.tolist() == ((true - 1) % P).tolist()
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 32, generator=gen).to(store.dtype) for n in (4, 2, 2))
    for layer in range(2):
        out = planned.decode(layer, q, k, v, scale=0.1, logit_cap=0.0)
        want = reference_decode(store, layer, q, rows, lens, scale=0.1)
        assert ((out.double() - want).norm() / want.norm()) < 5e-3


def backend_of(store, gaps, slots, seqs):
    runtime = SimpleNamespace(
        store=store, page_ops=SimpleNamespace(gaps=gaps), sequences_of=lambda rids: seqs,
        fake_quant_format=lambda seqs: [None] * len(seqs),
    )  # fmt: skip
    backend = KvcAttnBackend.__new__(KvcAttnBackend)
    backend.runtime, backend.block_tokens, backend.query_heads = runtime, P, 4
    backend.req_to_token_pool = SimpleNamespace(req_to_token=slots)
    return backend


def test_mixed_decode_step_skips_gaps(packed):
    store, rows, lens, gaps, slots = packed
    true = torch.tensor([int(lens[1]), int(lens[0]) + 2 * P])
    one_shot = SimpleNamespace(one_shot=SimpleNamespace(queries=None), decoding=True, gap=2, whole_prompt=7)
    default = SimpleNamespace(one_shot=None, decoding=False, gap=0, whole_prompt=500, open_blocks=lambda n: [])
    batch = SimpleNamespace(
        seq_lens_cpu=true, seq_lens=true, req_pool_indices=torch.tensor([1, 3]), extend_seq_lens_cpu=[4, 1],
        out_cache_loc=torch.cat((6 * P + torch.arange(int(true[0]) - 4, int(true[0])) % P, 5 * P + true[1:] % P - 1)),
        rids=["a", "b"],
    )  # fmt: skip
    snap = backend_of(store, gaps, slots, [default, one_shot])._extend_snapshot(batch)
    assert not snap.whole and snap.last_queries == [] and snap.prompt_lens_cpu == [500, 7 - 2 * P]
    assert snap.seq_lens.tolist() == snap.seq_lens_cpu == [int(lens[1]), int(lens[0])]
    planned = attention(store)
    planned.plan_extend(snap)
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, n, 32, generator=gen).to(store.dtype) for n in (4, 2, 2))
    for layer in range(2):
        out = planned.extend(layer, q, k, v, scale=0.1, logit_cap=0.0)
        want = reference_decode(store, layer, q[3:], rows.flip(0), lens.flip(0), scale=0.1)  # the last tokens
        assert ((out[3:].double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("tail", [0, 3, 10])
def test_last_queries_are_kept_across_chunks(packed, tail):
    """Three requests: one that prefills its prompt in chunks, one of another kind, and one that decodes. The last
    `tail` tokens of the prompt do not count."""
    store, _, _, gaps, slots = packed
    prompt = SimpleNamespace(queries=None, tokens=26, tail=tail)
    chunked = SimpleNamespace(one_shot=prompt, decoding=False, length=0, probe_tokens=lambda first, end, tokens: 0)
    others = [SimpleNamespace(one_shot=None, decoding=False), SimpleNamespace(one_shot=prompt, decoding=True), None]
    backend = backend_of(store, gaps, slots, None)
    seen, gen = [], torch.Generator().manual_seed(0)
    for chunk in (20, 5, 1):
        q = torch.randn(3 + chunk + 2, 4, 32, generator=gen).to(store.dtype)
        chunked.length += chunk
        stored = backend._last_queries([others[0], chunked, others[1], others[2]], [3, chunk, 1, 1])
        assert len(stored) <= 1
        for rows, queries in stored:
            queries.add(1, q[rows], scale=0.5, logit_cap=0.0)
        seen += list(q[3 : 3 + chunk])
    wanted = torch.stack(seen[: 26 - tail][-WINDOW:])
    assert torch.equal(prompt.queries.rows[1], wanted) and not prompt.queries.rows[0].any()
    assert prompt.queries.scaling[1] == (0.5, 0.0)


def test_probe_ends_with_chat_tail(packed):
    """The last rows of a chunk that ends with a probe are those of the prompt's last tokens."""
    store, _, _, gaps, slots = packed
    prompt = SimpleNamespace(queries=None, tokens=500, tail=5)
    seq = SimpleNamespace(one_shot=prompt, decoding=False, length=40, probe_tokens=lambda first, end, tokens: 16)
    ((rows, queries),) = backend_of(store, gaps, slots, None)._last_queries([seq], [30])
    assert rows == slice(30 - 5 - WINDOW, 30 - 5) and queries.tail == 5

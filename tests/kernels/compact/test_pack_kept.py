"""A prompt packed into its first blocks: the stored tokens, their headers, and the accounting of all pages."""

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.compact import pack_kept as module
from kvc_kernels.formats import FORMATS
from tests.support.pages import block_formats_of, fill, make_store, random_kv
from tests.support.random_store import dense_head, reference_decode

P, L, H, D = 64, 2, 2, 32
BLOCKS = [5, 2, 7, 3, 6]  # the last block is part-filled
FULL, TAIL = 4, 9


def case(spec="k4v4", seed=0, kept=2, pages=None):
    """(store before, best, pages, K, V) of a prompt of four full blocks and a tail."""
    fmt = FORMATS[spec]
    store = make_store(
        block_formats_of(spec), layers=L, heads=H, head_dim=D, block_tokens=P, blocks=7, page_bytes=1152
    )
    t = store.layout.page(fmt).tokens
    assert P % t == 0 and t < P
    k, v = random_kv(store, FULL * P + TAIL, seed)
    fill(store, torch.tensor(BLOCKS), k, v)
    gen = torch.Generator().manual_seed(seed)
    order = torch.rand(L, H, FULL * P, generator=gen).sort(-1).indices
    max_pages = kept * P // t
    if pages is None:
        pages = torch.randint(0, max_pages + 1, (L, H), generator=gen)
        pages[0, 0], pages[1, 0] = 0, max_pages
    return store, order[..., : kept * P].int(), pages, k, v


@pytest.mark.parametrize("spec", ["k4v4", "k8v4", "k4v2"])
@pytest.mark.parametrize("limit", [1 << 30, 1])  # all heads at once, one at a time
def test_every_head_stores_its_best_tokens(monkeypatch, spec, limit):
    monkeypatch.setitem(module.TEMP_BYTES, "cpu", limit)
    store, best, pages, k, v = case(spec)
    fmt, t = FORMATS[spec], store.layout.page(FORMATS[spec]).tokens
    ops.pack_kept(store, torch.tensor(BLOCKS[:FULL]), 2, 1, best, pages)
    ops.check_invariants(store)
    for layer in range(L):
        for head in range(H):
            kept = sorted(best[layer, head, : int(pages[layer, head]) * t].tolist())
            for i, block in enumerate(BLOCKS[:2]):
                tokens = kept[i * P : (i + 1) * P]
                assert store.counts[block, layer, head].tolist() == [len(tokens), 0]
                rows, values = dense_head(store, block, layer, head, 0)
                assert len(rows) == len(tokens)
                if not tokens:
                    continue
                want = k[layer, tokens, head].double().numpy()
                lo, hi = want.min(0), want.max(0)  # the header covers the tokens of this block alone
                scale, zero = store.headers[block, layer, head].double().numpy()
                np.testing.assert_allclose(zero, lo, rtol=2e-3, atol=1e-4)
                np.testing.assert_allclose(scale * 255, hi - lo, rtol=2e-3, atol=1e-4)
                step = (hi - lo) / (2**fmt.key_bits - 1)
                assert (abs(rows.numpy() - want) <= 0.52 * step + 0.02).all()
                assert len(values) == len(tokens)
                want_values = v[layer, tokens, head].double().numpy()
                span = (want_values.max(1) - want_values.min(1)) / (2**fmt.value_bits - 1)
                assert (abs(values.numpy() - want_values) <= 0.52 * span[:, None] + 0.02).all()


@pytest.mark.parametrize("spec", ["k4v4", "k8v4", "k4v2"])
@pytest.mark.parametrize("packed", [0, 1, 3, 4])
def test_packing_packed_blocks_equals_packing_their_rows(spec, packed):
    """The result has the tokens and headers that packing the present rows, read one token at a time, gives. It lies in
    blocks that had no pages, or in some of the sources."""
    store, best, pages, *_ = case(spec)
    t = store.layout.page(FORMATS[spec]).tokens
    blocks, targets = torch.tensor(BLOCKS[:FULL]), torch.tensor([1, BLOCKS[3]])
    if packed:
        ops.compact(store, blocks[:packed], 1, None, from_format=0)
    rows = torch.stack([torch.stack(ops.load_dense(store, layer, blocks)[:2]) for layer in range(L)])
    rows = rows.movedim(2, 3).flatten(3, 4)  # [L, K or V, H, S, D]
    source_pages = int(ops.block_head_pages(store, blocks).sum())
    head, tail = store.cursor.tolist()
    ops.pack_kept(store, blocks, 2, 1, best, pages, packed=packed, into=targets)
    ops.check_invariants(store)
    assert store.format_id[BLOCKS].tolist() == [-1, -1, -1, 1, 0] and int(store.format_id[1]) == 1
    assert (store.cursor - torch.tensor([head, tail])).tolist() == [int(pages.sum()), source_pages]
    for layer in range(L):
        for head in range(H):
            kept = sorted(best[layer, head, : int(pages[layer, head]) * t].tolist())
            for i, block in enumerate(targets.tolist()):
                tokens = kept[i * P : (i + 1) * P]
                keys, values = dense_head(store, block, layer, head, 0)
                assert len(keys) == len(tokens) == int(store.counts[block, layer, head, 0])
                if not tokens:
                    continue
                k, v = rows[layer, :, head, tokens].double()
                step = (k.amax(0) - k.amin(0)) / (2 ** FORMATS[spec].key_bits - 1)
                assert ((keys - k).abs() <= 0.52 * step + 0.02).all()
                # Each value has its own scale, so values that already had it do not change.
                already_packed = torch.tensor(tokens) < packed * P
                torch.testing.assert_close(values[already_packed], v[already_packed], rtol=0, atol=5e-3)


def test_pages_are_returned_and_counted():
    store, best, pages, *_ = case()
    head, tail = store.cursor.tolist()
    ops.pack_kept(store, torch.tensor(BLOCKS[:FULL]), 2, 1, best, pages)
    assert store.format_id[BLOCKS].tolist() == [1, 1, -1, -1, 0]
    blocks = torch.tensor(BLOCKS)
    assert int(ops.block_head_pages(store, blocks[:FULL]).sum()) == int(pages.sum())
    assert store.cursor[0] - head == int(pages.sum())
    assert store.cursor[1] - tail == FULL * store.layout.block_pages_bf16
    assert not store.table[blocks[2:FULL]].any()


def test_packing_needs_no_free_pages():
    store, best, _, *_ = case()
    t = store.layout.page(FORMATS["k4v4"]).tokens
    free = int(store.cursor[1] - store.cursor[0])
    store.cursor[1] -= free  # nothing is free
    ops.pack_kept(store, torch.tensor(BLOCKS[:FULL]), 2, 1, best, torch.full((L, H), 2 * P // t))
    assert store.cursor[0] <= store.cursor[1]
    page_ids = store.table[BLOCKS[:2]][..., : P // t].flatten().tolist()
    assert len(set(page_ids)) == len(page_ids) == L * H * 2 * P // t and 0 not in page_ids


def test_packed_bytes_depend_only_on_tokens():
    """They depend neither on page ids nor on how many heads are packed at a time."""
    digests = []
    for churn in range(3):
        store, best, pages, *_ = case(seed=4)
        spare = torch.tensor([1, 4])
        for _ in range(churn):
            ops.take_bf16(store, spare)
            ops.release(store, spare.flip(0))
        ops.pack_kept(store, torch.tensor(BLOCKS[:FULL]), 2, 1, best, pages)
        digests.append([ops.block_digest(store, b) for b in BLOCKS[:2]])
    assert digests[0] == digests[1] == digests[2] and digests[0][0] != digests[0][1]


def test_attention_reads_packed_prompt():
    """The decode and prefill references read the stored tokens: a head without tokens, blocks that are empty for some
    heads, and the open block at the end."""
    store, best, pages, *_ = case()
    ops.pack_kept(store, torch.tensor(BLOCKS[:FULL]), 2, 1, best, pages)
    rows, lens = torch.tensor([[5, 2, 6]]), torch.tensor([2 * P + TAIL])
    q = torch.randn(1, 2 * H, D, generator=torch.Generator().manual_seed(1)).to(store.dtype)
    for layer in range(L):
        want = reference_decode(store, layer, q, rows, lens, scale=0.2)
        got = ops.decode_attention(store, layer, q, rows, lens, scale=0.2)
        assert ((got.double() - want).norm() / want.norm()) < 5e-3
        # The last token of the open block is a prefill of one token.
        got = ops.extend_attention(store, layer, q, rows, [2 * P + TAIL - 1], [1], scale=0.2)
        assert ((got.double() - want).norm() / want.norm()) < 1e-2

"""Kernels of other projects: their inputs match those of the float64 reference."""

import itertools
import struct

import pytest
import torch

from bench.rivals import decode, diffkv, oscar, reference

FILE = """
template <typename T> void sparse_paged_attention_launcher(int group) {
  switch (group) {
@  }
}
#define CALL_LAUNCHER(T) everything
void all_of_them() {}
"""
CASE = """        case %d:
          LAUNCH_SPARSE_PAGED_ATTENTION(128, %d);
          break;
"""
FILE = FILE.replace("@", "".join(CASE % (g, g) for g in (1, 2, 4, 5, 7, 8)))


def test_diffkv_source_is_cut_to_one_case():
    text = diffkv.source(FILE, (8, 4), (4, 2), 4)
    assert text.count("LAUNCH_SPARSE_PAGED_ATTENTION") == 1 and "(128, 4)" in text and "all_of_them" not in text
    assert "<__nv_bfloat16, 8, 4, 4, 2, 1, 1, 1, 1, 32, 60, 8>" in text
    with pytest.raises(SystemExit, match="6cf5d20"):
        diffkv.source("something else", (8, 4), (4, 2), 4)
    with pytest.raises(SystemExit, match="GQA"):
        diffkv.source(FILE.replace("(128, 5)", "(128, 6)"), (8, 4), (4, 2), 4)


@pytest.mark.parametrize("bits", diffkv.PAGE_TOKENS)
def test_diffkv_pages_match_byte_reader(bits):
    """The reader takes single bytes and follows the kernel's loops."""
    torch.manual_seed(0)
    page = diffkv.Page(*bits)
    size = page.size + 8
    raw = page.random(2, size, "cpu")[1]
    keys, values = page.unpack(raw)
    data = raw.numpy().tobytes()
    words = struct.unpack(f"<{size}H", data)

    def half(at):
        return struct.unpack_from("<e", data, 2 * at)[0]

    t, dim = page.tokens, 128
    per, byte = 16 // bits[0], 0
    for token in (0, 1, t // 2, t - 1):
        scale, zero = half(page.key_meta + 2 * token), half(page.key_meta + 2 * token + 1)
        for thread, vector in itertools.product(range(4), range(dim // 4 // per // 4)):
            for j, e in itertools.product(range(4), range(per)):
                word = words[(vector * t * 4 + token * 4 + thread) * 4 + j]
                code = (word >> (bits[0] * e)) & ((1 << bits[0]) - 1)
                byte = thread * 32 + (vector * 4 + j) * per + e
                assert keys[token, byte] == pytest.approx(code * scale + zero)
        per_value = 16 // bits[1]
        scale, zero = half(page.value_meta + 2 * token), half(page.value_meta + 2 * token + 1)
        for thread, pack, e in itertools.product(range(8), range(16 // per_value), range(per_value)):
            word = words[page.values + pack * page.padded * 8 + (token // 2 * 8 + thread) * 2 + token % 2]
            code = (word >> (bits[1] * e)) & ((1 << bits[1]) - 1)
            assert values[token, thread * 16 + pack * per_value + e] == pytest.approx(code * scale + zero)
    # Parts of a page do not overlap, and each begins at a vector-aligned offset.
    parts = [0, page.key_meta, page.values, page.value_meta, page.scores, page.size]
    assert parts == sorted(parts) and all(at % 16 == 0 for at in parts)
    assert page.values - page.key_meta >= 2 * t and page.scores - page.value_meta >= 2 * t
    assert keys.abs().max() < 4 and raw[page.scores : page.size].abs().max() == 0


class Plain:
    """Stands in for a compiled kernel: walks its tables, high pages from the left and low pages from the right."""

    def run(self, *args):
        slots, _, out, _, _, part_o, _, q, pages, layer, heads, scale, tables, lens, longest = args
        assert int(lens.sum(-1).max()) == longest and part_o.shape[2] == 1 and scale == 128**-0.5
        for r, h in itertools.product(range(len(q)), range(heads)):
            sides, row = [], tables[slots[r], layer, h].tolist()
            for n, page, step in zip(lens[r, layer, h].tolist(), (diffkv.Page(8, 4), diffkv.Page(4, 2)), (1, -1)):
                ids = row[::step][: -(-n // page.tokens)]
                both = [page.unpack(pages[i]) for i in ids]
                sides.append([torch.cat(x)[:n] for x in zip(*both)])
            keys, values = (torch.cat(x) for x in zip(*sides))
            queries = q[r].double().view(heads, -1, 128)[h]
            out[r].view(heads, -1, 128)[h] = (queries @ keys.T * scale).softmax(-1) @ values


def test_diffkv_case_matches_float64():
    torch.manual_seed(1)
    counts = decode.ragged(3, 2, 4, 300)
    assert counts.shape == (3, 2, 4, 2) and len(set(counts[..., 0].flatten().tolist())) > 5
    assert ((counts[..., 0] >= 69) & (counts[..., 0] <= 141)).all() and (counts.sum(-1) <= 300).all()
    kernel = Plain()
    case = kernel.case = diffkv.Case(kernel, diffkv.Page(8, 4), diffkv.Page(4, 2), counts, 2, "cpu")
    assert reference.error(case) < 0.01  # rounded to bf16
    for r, h in ((0, 0), (2, 3)):
        k, v = case.dense(0, r)[h]
        assert len(k) == len(v) == counts[r, 0, h].sum()
    # Every page has exactly one owner.
    used = []
    for (a, b), row in zip(case.pages.view(-1, 2).tolist(), case.tables.view(-1, case.tables.shape[-1]).tolist()):
        used += row[:a] + row[len(row) - b :]
    assert sorted(used) == list(range(len(case.store)))
    tokens = counts[:, 0].sum((0, 1)).tolist()
    assert case.bytes == tokens[0] * (128 + 64 + 8) + tokens[1] * (64 + 32 + 8)


class Sums:
    """Stands in for OSCAR's module: computes attention over its arguments."""

    def decode_attention_fwd_int2_unified(self, q, ek, ev, k, v, km, vm, out, e_at, e_ids, at, ids, part_o, *rest):
        assert part_o.shape[2] == rest[3] + rest[4] and rest[5] == 128**-0.5
        for r in range(len(q)):
            sides = []
            for exact, codes, meta in ((ek, k, km), (ev, v, vm)):
                rows = []
                for slot in ids[at[r] : at[r + 1]].tolist():
                    one = [
                        [(int(codes[slot, h, d % 32]) >> (2 * (d // 32)) & 3) for d in range(128)]
                        for h in range(codes.shape[1])
                    ]
                    rows.append((torch.tensor(one) - meta[slot, :, 1:].double()) * meta[slot, :, :1].double())
                rows += [exact[slot].double() for slot in e_ids[e_at[r] : e_at[r + 1]].tolist()]
                sides.append(torch.stack(rows))
            keys, values = sides
            queries = q[r].double().view(keys.shape[1], -1, 128)
            weights = torch.einsum("hgd,thd->hgt", queries, keys).mul(128**-0.5).softmax(-1)
            out[r] = torch.einsum("hgt,thd->hgd", weights, values).reshape(-1, 128)
        return out


def test_oscar_case_matches_float64():
    torch.manual_seed(2)
    case = oscar.Case(Sums(), 2, 330, 2, 2, 128, 1, "cpu")
    assert (case.exact, case.packed) == (320, 10) and reference.error(case) < 0.01
    assert case.bytes == 2 * 2 * 2 * (10 * (32 + 8) + 320 * 256)
    case.split(16)
    assert reference.error(case) < 0.01 and case.counts.tolist() == [16, 16]


def test_scores_take_worst_shape():
    rows = [
        dict(kernel=k, store=s, batch=b, tokens=1, ms=ms)
        for b, factor in ((64, 1.0), (16, 2.0))
        for k, s, ms in (
            ("ours", "k4v4", 1.0), ("ours", "k2v2", 0.5), ("oscar", "int2", 2.0 * factor),
            ("diffkv", "k4v4", 10.0 / factor),
        )
    ]  # fmt: skip
    scores = decode.scores(rows)
    assert scores["decode.vs_oscar.k4v4"][0] == 2.0 and scores["decode.vs_oscar.k2v2"][0] == 4.0
    assert scores["decode.vs_diffkv.k4v4"][0] == 5.0 and "decode.vs_diffkv.k2v2" not in scores

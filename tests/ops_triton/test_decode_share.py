"""Programs dealt to heads by load: the answers against float64, and the cuts themselves, under the interpreter."""

import itertools

import pytest
import torch

from kvc_kernels.ops.decode_attention_triton import Tuning
from kvc_kernels.ops.decode_share_triton import ShareDecodeAttention
from tests.decode_support import make_case, relative_error

BAR = 3e-3


def planned(case, columns, **kw):
    store, q, rows, lens = case
    op = ShareDecodeAttention(
        store, max_batch=len(lens) + 1, max_blocks=rows.shape[1] + 1, query_heads=q.shape[1],
        tuning=Tuning(tile=32), columns=columns, **kw,
    )  # fmt: skip
    op.plan(rows, lens)
    return op


@pytest.mark.parametrize("ladder", [("k8v4+k4v2",), ("k4v4", "k8v4+k4v2", "k2v2"), ()])
@pytest.mark.parametrize("columns", [1, 5, 30])
@pytest.mark.parametrize("exact", [False, True])
def test_answers(ladder, columns, exact):
    case = make_case(*ladder, heads=3, lens=(193, 70, 64), page_bytes=0 if ladder else 3072)
    store, q, rows, lens = case
    op = planned(case, columns, exact=exact)
    op._part_o.fill_(torch.nan)
    op._part_ml.fill_(torch.nan)
    out = op.run(1, q, scale=0.125)
    assert relative_error(out, store, 1, q, rows, lens, scale=0.125) < BAR


def cuts(op, layer):
    """Blocks of each program by the documented rule: those whose middle lies in its part of the head's cost."""
    plan, out = op._plan, {}
    h_count, nc = op.store.layout.heads, len(op._classes)
    sizes = plan.before[:, 1:] - plan.before[:, :-1]
    for h in range(h_count):
        first, working, width, wider = plan.shares[layer, :, h].tolist()
        at, borders = 0, [j * width + min(j, wider) for j in range(working + 1)]
        for b in range(sizes.shape[1]):
            for c in range(nc):
                w = int(plan.head_weights[layer, h, c])
                for k in range(int(sizes[c, b])):
                    j = next(j for j in range(working) if 2 * at + w < 2 * borders[j + 1])
                    out.setdefault((h, first + j), []).append((b, c, k))
                    at += w
        assert at == (borders[-1] if working else 0)
    return out


@pytest.mark.parametrize("columns", [1, 3, 40])
def test_every_working_program_has_blocks_and_heads_own_their_programs(columns):
    case = make_case("k8v4+k4v2", "k4v4", heads=3, lens=(64 * 9, 64 * 4 + 5, 64 * 7))
    op = planned(case, columns)
    for layer in range(2):
        dealt = cuts(op, layer)
        firsts, working = op._plan.shares[layer, :2].tolist()
        for h in range(3):
            end = firsts[h + 1] if h < 2 else columns * 3
            assert firsts[0] == 0 and firsts[h] + working[h] <= end
            assert sorted(p for g, p in dealt if g == h) == list(range(firsts[h], firsts[h] + working[h]))


def test_a_head_with_more_tiles_has_more_programs():
    case = make_case("k4v4", heads=2, lens=(64 * 12,))
    store = case[0]
    store.rung[1:] = 1
    store.counts[1:, :, 0, 0], store.counts[1:, :, 1, 0] = 8, 64
    op = planned(case, 10)
    first = op._plan.shares[0, 0].tolist()
    # 32 + 256 against 32 + 512 units a block: 18 programs in that proportion, and one each.
    assert first == [0, 1 + 18 * 288 // (288 + 544)]


@pytest.mark.parametrize("columns", [1, 4, 25])
def test_exact_cuts_even_out_tiles(columns):
    """By the counts themselves: every block is dealt once a head, and no program is behind by more than a block."""
    case = make_case("k8v4+k4v2", "k4v4", heads=3, lens=(64 * 19, 64 * 4 + 5, 64 * 7))
    op = planned(case, columns, exact=True)
    plan, store = op._plan, case[0]
    sizes = plan.sizes.tolist()
    line = [(c, e) for b in range(4) for c in range(len(sizes[b])) for e in plan.lists[b, c, : sizes[b][c]].tolist()]
    costs = [32 + plan.costs[0][0] * -(-(e & 0xFFFFFFFF) // 16) for c, e in line if c == 0]
    for layer in range(2):
        for h in range(3):
            first, working = plan.shares[layer, :2, h].tolist()
            counts = [0 if c == 0 else int(store.counts[e >> 32, layer, h, op._classes[c][3]]) for c, e in line]
            packed = [32 + 256 * -(-n // 32) for n in counts]
            zero = iter(costs)
            cost = [next(zero) if c == 0 else x for (c, _), x in zip(line, packed)]
            cuts = [*plan.cuts[layer, first : first + working].tolist(), len(line)]
            assert cuts[0] == 0 and cuts == sorted(cuts)
            sums = [sum(cost[a:b]) for a, b in itertools.pairwise(cuts)]
            assert min(sums) > 0 and max(sums) <= sum(cost) // working + 1 + max(cost)

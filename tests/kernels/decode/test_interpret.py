"""The Triton decode kernel under the interpreter against a float64 reading of the same pages."""

import pytest
import torch

from kvc_kernels.decode.attention import DecodeAttention, Tuning
from kvc_kernels.decode.planner import DecodePlan
from tests.support.decode import make_case, relative_error
from tests.support.pages import packed_prompt

BAR = 3e-3  # the output's bf16 rounding alone is 1.1e-3


def run(case, *, layer=1, tile=32, columns=5, **kw):
    store, q, rows, lens = case
    op = DecodeAttention(
        store, max_batch=len(lens) + 1, max_blocks=rows.shape[1] + 1, query_heads=q.shape[1],
        tuning=Tuning(tile=tile), columns=columns,
    )  # fmt: skip
    op.plan(rows, lens)
    out = torch.full_like(q, torch.nan)
    op.run(layer, q, scale=q.shape[-1] ** -0.5, out=out, **kw)
    return relative_error(out, store, layer, q, rows, lens, scale=q.shape[-1] ** -0.5, **kw)


@pytest.mark.parametrize("spec", ["k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v2", "k8v4+k4v2", "k4v4+k2v2"])
def test_formats(spec):
    assert run(make_case(spec)) < BAR


@pytest.mark.parametrize("group", [1, 3, 7, 12])
def test_groups(group):
    assert run(make_case("k4v4", group=group, lens=(70, 1))) < BAR


@pytest.mark.parametrize("head_dim, spec", [(128, "k4v2"), (128, "k8v4+k4v2"), (256, "k4v2"), (256, "k4v4")])
def test_head_dims(head_dim, spec):
    assert run(make_case(spec, head_dim=head_dim, lens=(128, 3), heads=1)) < BAR


@pytest.mark.parametrize("tokens", [192, 320])
def test_tile_counts_that_are_not_powers_of_two(tokens):
    assert run(make_case("k4v4", "k8v4", block_tokens=tokens, lens=(2 * tokens + 5, tokens), heads=1), tile=64) < BAR


def test_several_formats_and_scored_pages():
    assert run(make_case("k4v4", "k4v2", "k2v2", has_scores=True)) < BAR


def test_request_with_blocks_at_all_ladder_steps():
    assert run(make_case("k8v8", "k8v4", "k4v4", "k4v2", "k2v2", lens=(9 * 64 + 5, 200), page_bytes=3264)) < BAR


@pytest.mark.parametrize("tile, page", [(16, 2880), (32, 2880), (64, 2880), (64, 5760), (64, 1440)])
def test_tiles_and_pages_of_unrelated_sizes(tile, page):
    assert run(make_case("k4v4", page_bytes=page), tile=tile) < BAR


def test_logit_cap():
    assert run(make_case("k4v4", lens=(66, 64)), logit_cap=2.0) < BAR


def test_plain_blocks_only():
    assert run(make_case(page_bytes=3072, lens=(100, 64, 1))) < BAR


def test_float16_with_more_blocks_than_a_chunk():
    assert run(make_case("k4v4", lens=(40 * 16 + 3,), block_tokens=16, dtype=torch.float16), columns=1) < BAR


def test_head_without_tokens_gives_zero():
    store, q, rows, lens = make_case("k4v4", lens=(128,), group=2)
    store.format_id[rows[0].long()] = 1
    store.counts[rows[0].long(), :, 1] = 0
    op = DecodeAttention(store, max_batch=len(lens), max_blocks=rows.shape[1], query_heads=q.shape[1])
    op.plan(rows.int(), lens.int())
    out = op.run(0, q, scale=0.1)
    assert torch.equal(out[0, 2:], torch.zeros_like(out[0, 2:]))
    assert out.isfinite().all()


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 50])
def test_plan_assigns_every_block_once(columns):
    store, _, rows, _ = make_case("k8v4+k4v2", "k4v2", lens=(64 * 9, 64 * 4, 64 * 7, 64))
    p = store.layout.block_tokens
    gen = torch.Generator().manual_seed(columns)
    for _ in range(4):
        lens = torch.randint(0, p * rows.shape[1] + 1, (len(rows),), generator=gen).int()
        plan = DecodePlan(store, len(rows) + 1, rows.shape[1] + 1, columns=columns)
        plan.update(store, rows, lens)
        for b, row in enumerate(rows):
            want = [[] for _ in plan.classes]
            for j, block in enumerate(row[: -(-int(lens[b]) // p)].tolist()):
                for c in range(len(plan.classes)):
                    if int(plan.class_masks[int(store.format_id[block])]) >> c & 1:
                        want[c].append((block, min(p, int(lens[b]) - j * p)))
            got = [plan.lists[b, c, : plan.sizes[b, c]].tolist() for c in range(len(plan.classes))]
            assert [[(x >> 32, x & 0xFFFFFFFF) for x in xs] for xs in got] == want
            dealt = [[] for _ in plan.classes]
            for request, c, start, n in plan.items[plan.ranges[b] : plan.ranges[b + 1]].tolist():
                assert request == b and n > 0
                dealt[c] += range(start, start + n)
            assert dealt == [list(range(len(xs))) for xs in want]
        steps = plan.column_ranges.tolist()
        assert steps[0] == 0 and steps[-1] == plan.ranges[len(rows)] and steps == sorted(steps)


@pytest.mark.parametrize("head_dim, block", [(64, 64), (128, 128)])
def test_prompt_packed_into_few_blocks(head_dim, block):
    """Blocks are part-filled or empty for some or all heads, and the open block follows them."""
    store, rows, lens = packed_prompt(head_dim=head_dim, block_tokens=block)
    q = torch.randn(2, 4, head_dim, generator=torch.Generator().manual_seed(0)).to(store.dtype)
    for columns in (1, 7):
        assert run((store, q, rows, lens), columns=columns) < 2 * BAR  # keys have biases, which fp16 rounds

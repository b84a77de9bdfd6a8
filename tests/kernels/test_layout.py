"""The page size where every token of a block has one format."""

import pytest

from kvc_kernels.formats import FORMATS
from kvc_kernels.layout import PageLayout, choose_page_bytes

P = 128


def pages(names, head_dim, block_tokens=P, size=None):
    """The page layout in each of the formats, at the size chosen for all of them."""
    formats, options = [FORMATS[n] for n in names], {"has_scores": False}
    size = size or choose_page_bytes(formats, head_dim=head_dim, block_tokens=block_tokens, whole=True, **options)
    return [PageLayout(f, head_dim, size, **options) for f in formats]


def loss(page):
    """Bytes that a block takes over the bytes that its tokens need."""
    return -(-P // page.tokens) * page.page_bytes / (P * page.used_bytes / page.tokens)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("names", [("k4v4", "k8v4"), ("k8v4", "k4v4", "k2v2"), ("k2v2", "k8v8"), ("k4v2", "k4v4")])
def test_page_fits_first_format_exactly(names, head_dim):
    first, *others = pages(names, head_dim)
    assert first.tokens in (64, 32, 16) and first.used_bytes == first.page_bytes
    # The other formats lose the remainder, which is as small as any such page size allows.
    worst = []
    for tokens in (64, 32, 16):
        size = first.used_bytes * tokens // first.tokens
        assert PageLayout(first.format, head_dim, size, False).tokens == tokens
        candidates = pages(names, head_dim, size=size)[1:]
        worst.append(max(loss(p) for p in candidates) if all(p.tokens for p in candidates) else float("inf"))
    assert max(loss(p) for p in others) == pytest.approx(min(worst))


@pytest.mark.parametrize("block_tokens, tokens", [(64, 64), (128, 64), (96, 32), (48, 16)])
def test_single_format_gets_largest_tile_that_divides_block(block_tokens, tokens):
    (page,) = pages(["k4v4"], 128, block_tokens)
    assert page.tokens == tokens and page.used_bytes == page.page_bytes


def test_page_size_fits_at_least_one_tile_of_every_format():
    """16 tokens of 2 bits take fewer bytes than the smallest page of 8 bits."""
    names = ["k2v2", "k8v8"]
    (smallest,) = pages(names[:1], 64, 16)
    assert pages(names, 64, size=smallest.page_bytes)[1].tokens == 0
    assert all(page.tokens >= 16 for page in pages(names, 64))

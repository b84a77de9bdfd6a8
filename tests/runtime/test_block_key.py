"""`BlockKey` matches like SGLang's key."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_kvc.adapter.block_key import BlockKey

TOKENS = st.lists(st.integers(0, 1), max_size=24)
LIMIT = st.none() | st.integers(0, 24)


@given(TOKENS, LIMIT, TOKENS, TOKENS, LIMIT, st.integers(0, 30), st.sampled_from([1, 2, 4]), st.booleans())
def test_match_equals_that_of_sglang(mine, my_limit, before, after, limit, offset, page, contained):
    theirs = [*before, *(mine if contained else []), *after]

    def match(kind):
        keys = kind(array("q", mine), limit=my_limit), kind(array("q", theirs), limit=limit)
        try:
            return keys[0].match_at(keys[1], len(before) if contained else offset, page)
        except IndexError:
            return None

    assert match(BlockKey) == match(RadixKey)


def test_keys_of_other_namespaces_do_not_match():
    mine, theirs = BlockKey(array("q", [1]), "a"), BlockKey(array("q", [1]), "b")
    with pytest.raises(ValueError, match="extra_key"):
        mine.match_at(theirs, 0)

"""Repeated matches: a waiting prompt is matched in every scheduling pass, mostly with the same result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

from .tree_host import FULL

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from .radix_cache import KvcRadixCache


def match_again(tree: KvcRadixCache, params: MatchPrefixParams) -> MatchResult | None:
    """The result and the effects of matching `params.key` from the root, derived from the node at which the last match
    of the request ended. None: this needs a match from the root.

    The path to a node spells the same tokens as long as the node is in the tree, because a split gives the upper part a
    new node, and ids are never used again. Between two matches, a request's tokens are appended to or cut off at the
    end, so it still matches the whole path if it matches the last block. It matches more only if the last node has a
    child for the next block.
    """
    core, key, p = tree.tree_core, params.key, tree.page_size
    node = core._node_arena.get(getattr(params.req, "kvc_match_end", None))
    if node is None:
        return None
    path, most = tree._path(node), len(key) // p * p
    length = sum(len(n.key) for n in path)
    if not most or length > most or (path and not _same_block(key, length - p, node.key, len(node.key) - p, p)):
        return None
    if any(n.evicted and not n.backuped for n in path):
        return None
    if length < most and key.child_key_at(length, p) in node.children:
        return None
    on_device = [n for n in path if not n.evicted]
    values = [n.component_data[FULL].value for n in on_device]
    last, visited = on_device[-1] if on_device else core.root_node, node.id if path else None
    result = core._match_post_processor(params, values, node, last, len(values), length, None, visited, ())
    return tree._finalize_match_result(params, result)


def _same_block(key: RadixKey, at: int, other: RadixKey, other_at: int, p: int) -> bool:
    """Whether two blocks have the same tokens and belong to the same namespace."""
    return key.child_key_at(at, p) == other.child_key_at(other_at, p)

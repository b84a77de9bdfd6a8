"""`--kvc-eviction reuse`: an eviction order based on when sessions are expected to return. `kvc_uses` of a tree
node holds the sessions that used it last."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from ..cache.reuse import Sessions, Use, add_use, rank_of, uses_of
from ..options.request_quality import is_private
from .block_key import BlockKey
from .tree_host import FULL

if TYPE_CHECKING:
    from .radix_cache import KvcRadixCache


class ReuseOrder(EvictionStrategy):
    """SGLang's eviction strategy for `tree`, and the events that it learns from."""

    def __init__(self, tree: KvcRadixCache):
        self.tree, self.sessions = tree, Sessions(tree.page_size)
        self._waiting: dict[Use, Any] = {}  # the session of each waiting prompt -> its request

    def get_priority(self, node):
        return rank_of(node)

    @property
    def now(self) -> int:
        return self.tree.runtime.step

    def arrive(self, req, priority: float = 0.0) -> None:
        """`req` enters the queue: find its session."""
        path = self._match(req)
        cached, before = sum(len(n.key) for n in path), uses_of(path[-1])[-1:] if path else ()
        req.kvc_use = self.sessions.arrive(before[0] if before else None, len(req.origin_input_ids), cached, self.now)
        req.kvc_use.priority = priority
        self._mark(req.kvc_use, path)
        self._expect(req)

    def find_again(self, req) -> None:
        """More of the waiting prompt of `req` has entered the tree."""
        self._mark(req.kvc_use, self._match(req))

    def checkpoint(self, req) -> None:
        """The computed tokens of `req` are in the tree, up to `req.last_node`."""
        self._mark(req.kvc_use, self.tree._path(self.tree.tree_core.node_by_id(req.last_node)))

    def interrupt(self, req) -> None:
        """`req` is about to be retracted."""
        self.checkpoint(req)
        self.sessions.interrupt(req.kvc_use, self.now)
        self._expect(req)

    def _expect(self, req) -> None:
        """Let the next `wait` notice if `req` has left the queue before, because SGLang rejected or aborted it."""
        self._waiting[req.kvc_use] = req
        self.sessions.waiting.setdefault(req.kvc_use)

    def end(self, req) -> None:
        """`req` has finished, or was aborted while it ran."""
        if req.kvc_use.busy:
            hints, private = req.kvc_hints, req.session is not None and is_private(req.extra_key)
            closed = private and getattr(req.session, "kvc_closed", False)
            self.sessions.end(req.kvc_use, self.now, hints.done or closed, hints.ttl, hints.steps)
            if private:  # a streaming session remembers its last turn only
                vars(req.session).setdefault("kvc_private_uses", {})[id(req.kvc_use)] = req.kvc_use

    def close(self, session) -> None:
        """SGLang's `session` has timed out, or its client has closed it: no prompt can find its private blocks any
        more."""
        session.kvc_closed = True  # for a turn that has not ended
        for use in getattr(session, "kvc_private_uses", {}).values():
            if not use.busy:
                use.done = True
                self._rank_again(use)

    def wait(self, queue: Iterable) -> None:
        """Set the waiting prompts, and finish expired sessions. Blocks of prompts that have left the queue and of
        expired sessions are re-ranked, because the queues only detect higher ranks."""
        requests, self._waiting = self._waiting, {req.kvc_use: req for req in queue if hasattr(req, "kvc_use")}
        gone = self.sessions.wait(self._waiting)
        for use in gone:
            if use.busy and not requests[use].kv.holds_kv:  # SGLang does not release a request that never ran
                self.sessions.abandon(use)
        for use in (*gone, *self.sessions.expire(self._clock)):
            self._rank_again(use)

    def _clock(self) -> float:
        """Time in seconds, to the millisecond, on which all ranks agree: that of the rank with the earliest one."""
        return self.tree._agreed(int(1000 * time.monotonic())) / 1000

    def _rank_again(self, use: Use) -> None:
        core, node = self.tree.tree_core, use.leaf
        if node is None or node.component_data[FULL].lock_ref:
            return  # the request runs; the leaf is queued again when it is unlocked
        while node is not None and node is not core.root_node:
            for queue in (core.evictable_device_leaves, core.evictable_host_leaves, self.tree.component.demotions):
                if node in queue and use in uses_of(node):
                    queue.add(node)
            node = node.parent

    @staticmethod
    def _mark(use: Use, path: list) -> None:
        """Record that the session `use` uses the nodes of `path`."""
        for node in path:
            add_use(node, use)
        if path:
            use.leaf = path[-1]

    def _match(self, req) -> list:
        """Nodes of the tree that hold the first tokens of `req`."""
        tree = self.tree
        key = BlockKey(req.origin_input_ids + req.output_ids, req.extra_key, cache_salt=req.cache_salt)
        match = tree.tree_core.match_prefix(MatchPrefixParams(key=key))
        tree._apply_cache_actions(match.cache_actions)
        return tree._path(tree.tree_core.node_by_id(match.best_match_node))

"""The host tier in SGLang's radix tree: evicted nodes keep their blocks in host memory, and hits bring them back.

SGLang's tree supports nodes with a host value (its hierarchical cache). Here a host value is int64 `[len(key)]`, the
slots of the node's stored blocks, just as a device value holds the slots of its blocks. SGLang's own controller, which
copies K/V buffers, is never built.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .hit_sources import note_loaded
from .tree_metrics import TierMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..cache.host_tier import HostTier
    from ..cache.runtime import Runtime
    from ..cache.transfers import Loading
    from .tree_component import BlockComponent
    from .tree_reuse import ReuseOrder

logger = logging.getLogger("sglang_kvc")
FULL = ComponentType.FULL
PARTS = 4  # of host memory; an eviction makes room there for at most one part, or one block, at a time


class Hit(Enum):
    """Progress of the stored blocks that a waiting prompt hits."""

    LOADING = "loading"  # being copied, or soon; this prompt waits, others do not
    NO_ROOM = "no room"  # the blocks do not fit now
    NEVER = "never"  # the blocks do not fit, and nothing will make room; the prompt is computed


@dataclass(eq=False)
class _Load:
    """A load of the stored blocks `ids` for the prompt `req`. They lie on the path to the node `anchor` from token
    `start` on. `loading` is None until the turn in which it begins."""

    req: Any
    anchor: int
    start: int
    ids: np.ndarray
    lock: Any
    host_lock: Any
    loading: Loading | None = None
    began: float = 0.0  # with `--enable-metrics`


class HostPool:
    """The attributes of a host pool that SGLang's metrics read, in tokens of the smallest storage format."""

    def __init__(self, tier: HostTier, block_tokens: int):
        self.tier, self.block_tokens = tier, block_tokens

    @property
    def logical_size(self) -> int:
        return self.tier.memory.num_units * self.block_tokens

    def available_size(self) -> int:
        return self.tier.memory.free_units * self.block_tokens


class Controller(SimpleNamespace):
    """The attributes of a cache controller that SGLang reads. Blocks move through the operation queue instead."""

    write_policy = "write_back"
    enable_storage = False
    storage_backend: Any = None
    storage_backend_type: str | None = None
    layer_done_counter = None
    pp_prefetch_command_group = None
    pp_prefetch_decisions: ClassVar[dict] = {}

    def reset(self) -> None:
        """Do nothing: the runtime forgets its stored blocks."""

    def start_writing(self) -> None:
        """Do nothing: a save is launched by the next flush."""


class HostCache(UnifiedRadixCache):
    """The part of `KvcRadixCache` that serves `--kvc-host-memory`."""

    runtime: Runtime
    host_tier: HostTier | None = None
    transfers_ended = 0  # loads, reads and lookups that have ended or been canceled since start
    reuse: ReuseOrder | None = None  # with `--kvc-eviction reuse`
    tier_metrics: TierMetrics | None = None  # with `--enable-metrics`

    @property
    def component(self) -> BlockComponent:
        return self.components[FULL]

    def init_hicache(self, server_args, params) -> None:
        """Called by SGLang if the hierarchical cache is on. SGLang's own host pools are not built."""
        self.runtime.attach_host_tier()
        tier = self.host_tier = self.runtime.host_tier
        self.cache_controller = Controller(mem_pool_host=SimpleNamespace(clear=lambda: None))
        self.full_kv_pool_host = HostPool(tier, self.page_size)
        self.host_memory_mode = "cache"
        self.loads: list[_Load] = []
        self.tree_core.set_hicache_enabled()
        self.is_write_back = True
        if self.metrics_collector is not None:
            self.tier_metrics = TierMetrics(self.metrics_collector, tier, self.page_size)
        logger.info(
            "kvc: host memory of %.2f GiB holds %d blocks of the smallest storage format",
            tier.memory.data.nbytes / 2**30,
            tier.memory.num_units,
        )

    def _reset_full(self) -> None:
        super()._reset_full()
        self.loads = []
        self.transfers_ended += 1

    @property
    def loads_canceled(self) -> int:
        return self.runtime.counters.canceled_loads

    @property
    def transferring(self) -> bool:
        """Whether a load, a read or a lookup is under way."""
        return bool(self.loads)

    # ---- to the host: SGLang's eviction of a leaf without a host value asks for a backup first

    def _evict_device_leaf(self, node_id, tracker):
        if self.host_tier is not None:
            node = self.tree_core.node_by_id(node_id)
            if not node.backuped and self.runtime.blocks.unread[self.component.blocks_of(node)].any():
                # The next prompt that hits these blocks plans them, and a copy would keep their old format.
                self._drop_subtree_no_host(node_id, tracker)
                return None
            self._split_to_fit(node)
        return super()._evict_device_leaf(node_id, tracker)

    def _split_to_fit(self, leaf) -> None:
        """Split a leaf that is about to be evicted if it does not fit in free host memory, or in one part of it.

        Its last blocks, as many as fit, keep its id and are evicted. The first blocks become the next leaf. They stay
        on the device until more of its memory is needed, so that the last blocks can reach the disk before host memory
        drops them for the first ones."""
        if leaf.backuped:
            return
        memory, units = self.host_tier.memory, self.host_tier.units_of(self.component.blocks_of(leaf))[::-1].cumsum()
        if units[0] > memory.num_units:
            return
        most = max(memory.free_units, memory.num_units // PARTS, int(units[0]))
        self._make_host_room(min(int(units[-1]), most))
        fits = int(np.count_nonzero(units <= min(most, memory.free_units)))
        if 0 < fits < len(units):
            self._split(leaf, len(units) - fits)

    def _split(self, node, blocks: int) -> Any:
        """Move the first `blocks` blocks of `node` to a new parent, which is returned. This does not count as a use."""
        used = node.last_access_time
        parent, _ = self.tree_core._split_node(node.key, node, blocks * self.page_size)
        parent.last_access_time = node.last_access_time = used
        for part in (parent, node):
            self.component.queue_again(part)
        return parent

    def _execute_kv_backup(self, node_id, device_value, comp_xfers, sidecar_xfers):
        """Slots of the stored blocks. None if host memory has no room for them; the leaf is then dropped."""
        blocks = self.component.blocks_at(device_value)
        need = int(self.host_tier.units_of(blocks).sum())
        if need > self.host_tier.memory.num_units or not self._make_host_room(need):
            return None
        return self.component.slots_of(self.component.evicted.save(blocks))

    def _make_host_room(self, units: int) -> bool:
        """Drop stored leaves until `units` units of host memory are free; returns whether they are.

        SGLang counts blocks, which may have several units each, so a round asks for as many as have them on average."""
        tier, memory = self.host_tier, self.host_tier.memory
        while (missing := units - memory.free_units) > 0:
            used = memory.num_units - memory.free_units
            if not used or not self.evict_host(max(1, missing * tier.stored // used) * self.page_size):
                return False
        return True

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        """Acknowledge backups at once, because the queue runs a save before the release of its blocks."""
        for node_id in list(self.ongoing_write_through):
            self._finish_write_through_ack(node_id)

    def _stored_blocks(self, node) -> np.ndarray:
        """Ids of the node's blocks in host memory."""
        return self.component.blocks_at(node.component_data[self.component.component_type].host_value)

    def _drop_stored_below(self, node) -> bool:
        """Drop all nodes below a leaf of the device, which are only on the host. False if one is locked."""
        for child in list(node.children.values()):
            if not self._drop_stored_below(child) or child not in self.tree_core.evictable_host_leaves:
                return False
            self._drop_stored_leaf(child)
        return True

    def _drop_stored_leaf(self, node) -> None:
        """Drop a leaf whose blocks are only on the host, and free them."""
        device_frees: dict = {}
        host_frees: dict = defaultdict(list)
        actions: list = []
        self.tree_core._evict_host_leaf(node, defaultdict(int), device_frees, host_frees, cache_actions=actions)
        self._free_values(device_frees, host_frees)

    # ---- to the device

    def bring_back(self, req, *, room: Callable[[], float], others_run: bool) -> Hit:
        """Ask for or check the load of the stored blocks that `req` hits (`req.best_match_node`).

        The load begins with `begin_loads`.

        room: returns the tokens of memory that no running or admitted request may need. It is called when the path is
            locked.
        others_run: whether running requests will free memory when they end.
        """
        node_id = req.best_match_node
        nodes = [node for node in self._path(self.tree_core.node_by_id(node_id)) if node.evicted]
        if not nodes or any(node.load_back_pending_id is not None for node in nodes):
            return Hit.LOADING  # for this prompt or, in part, for another one; without nodes, the blocks have arrived
        ids = np.concatenate([self._stored_blocks(node) for node in nodes])
        host_lock, lock = self.inc_host_lock_ref(node_id).to_dec_params(), self.inc_lock_ref(node_id).to_dec_params()
        capacity, pages = self.runtime.capacity, self.host_tier.pages_of(ids)
        if capacity.tokens_of_pages(pages) > room() or not capacity.reaches(pages, len(ids)):
            self.dec_lock_ref(node_id, lock)
            self.dec_host_lock_ref(node_id, host_lock)
            return Hit.NO_ROOM if others_run or self.loads else Hit.NEVER
        for node in nodes:
            node.load_back_pending_id = node_id
        start = sum(len(n.key) for n in self._path(nodes[0].parent))
        self.loads.append(_Load(req, node_id, start, ids, lock, host_lock))
        return Hit.LOADING

    @property
    def _queued_loads(self) -> list[_Load]:
        """Loads that a pass asked for and that have not begun."""
        return [load for load in getattr(self, "loads", ()) if load.loading is None]

    @property
    def queued_load_tokens(self) -> float:
        """Tokens of memory that queued loads need."""
        capacity, tier = self.runtime.capacity, self.host_tier
        return sum(capacity.tokens_of_pages(tier.pages_of(load.ids)) for load in self._queued_loads)

    def begin_loads(self) -> None:
        """Begin queued loads. If the memory of one has been taken since, it is canceled."""
        for load in self._queued_loads:
            if self._make_room(load.ids):
                load.loading = self.host_tier.load(load.ids)
                if self.tier_metrics is not None:
                    load.began = time.perf_counter()
            else:
                self._cancel(load)

    def cancel_queued_loads(self) -> bool:
        """Unlock the blocks of queued loads, because running requests are short of memory. Returns whether there were
        any."""
        queued = self._queued_loads
        for load in queued:
            self._cancel(load)
        return bool(queued)

    def _cancel(self, load: _Load) -> None:
        """Remove a queued load. Its prompts ask again."""
        self.runtime.counters.canceled_loads += 1
        self.loads.remove(load)
        self._unlock(load)
        self._note_end()

    def _unlock(self, load: _Load) -> None:
        self.tree_core.finish_load_back(load.anchor)
        self.dec_lock_ref(load.anchor, load.lock)
        self.dec_host_lock_ref(load.anchor, load.host_lock)

    def _make_room(self, ids: np.ndarray) -> bool:
        """Evict unlocked blocks until the stored blocks `ids` fit on the device; returns whether they do."""
        capacity, pages = self.runtime.capacity, self.host_tier.pages_of(ids)
        if not capacity.reaches(pages, len(ids)):
            return False
        while missing := capacity.missing_tokens(pages, len(ids)):
            free = capacity.free_pages_and_ids  # tokens are rounded, so their number may stay the same
            self.evict_for_alloc(EvictParams(num_tokens=missing))
            if capacity.free_pages_and_ids == free:
                return False
        return True

    def _path(self, node) -> list:
        """Nodes from the root's child down to `node`."""
        path = []
        while node is not self.tree_core.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]

    def check_hicache_events(self) -> None:
        """Called by the scheduler in every turn, before a pass."""
        self.enter_arrived()
        self.begin_loads()
        if self.tier_metrics is not None:
            self.tier_metrics.report_saves()

    def enter_arrived(self) -> None:
        """Enter finished loads into the tree."""
        arrived = self._agreed(self.host_tier.arrived()) if self.loads else 0
        for _ in range(arrived):
            self.host_tier.take_arrived()
            load = self.loads.pop(0)
            self._enter(load)
            if self.tier_metrics is not None:
                self.tier_metrics.report_load(load.loading, load.began)
            self._note_end()

    def _note_end(self) -> None:
        """A transfer has ended: let the scheduler look at waiting prompts again."""
        self.transfers_ended += 1
        self.runtime.capacity.forget_refusal()

    def _agreed(self, arrived: int) -> int:
        """Minimum of `arrived` over the tensor-parallel ranks, so that all trees change in the same turn."""
        return self.agreed([arrived])[0]

    def agreed(self, values: list[int]) -> list[int]:
        """Minima of `values` over the tensor-parallel ranks, which all give equally many."""
        if self.tp_world_size == 1 or not values:
            return values
        minima = torch.tensor(values, dtype=torch.int64)
        self._all_reduce(minima, torch.distributed.ReduceOp.MIN)
        return minima.tolist()

    def _enter(self, load: _Load) -> None:
        """Give the loaded blocks to the nodes of the path. A node may have been split in the meantime. If another
        prompt has computed it again, the loaded copies of its blocks are freed."""
        assert load.loading is not None
        core, blocks = self.tree_core, load.loading.blocks
        at, evicted, restored, duplicates = 0, [], [], []
        for node in self._path(core.node_by_id(load.anchor)):
            end = at + len(node.key)
            if at >= load.start:
                part = blocks[(at - load.start) // self.page_size : (end - load.start) // self.page_size]
                if node.evicted:
                    evicted.append(node.id)
                    restored.append(part)
                else:
                    duplicates.append(part)
            at = end
        if duplicates:
            self.runtime.free(np.concatenate(duplicates))
        if restored:
            transfer = PoolTransfer(name=PoolName.KV, nodes_to_load=evicted)
            slots = self.component.slots_of(np.concatenate(restored))
            self._apply_cache_actions(core.commit_load_back(load.anchor, slots, transfer, {}))
            note_loaded(load.req, at - len(slots), at)  # the nodes before them were computed again
        self._unlock(load)

    @property
    def loading_slots(self) -> int:
        """Slots of blocks that are being loaded and that no node or request owns yet."""
        begun = (load.loading for load in getattr(self, "loads", ()) if load.loading is not None)
        return sum(len(loading.blocks) for loading in begun) * self.page_size

    # ---- methods that SGLang calls for its own loads

    @property
    def ongoing_load_back(self) -> dict:
        return {load.anchor: load for load in getattr(self, "loads", ())}

    @ongoing_load_back.setter
    def ongoing_load_back(self, value) -> None:
        """Always empty after a reset, as in SGLang."""

    def init_load_back(self, params):
        """Load nothing: `bring_back` did so before the prompt was admitted, or the prompt is computed."""
        return 0, params.req.last_node

    def ready_to_load_host_cache(self) -> int:
        return -1

    def is_load_back_event_done(self, consumer_index: int) -> bool:
        return True

    def has_free_load_back_slot(self) -> bool:
        return True

    def flush_pending_backups(self) -> None:
        """Do nothing: a save is launched by the next flush."""

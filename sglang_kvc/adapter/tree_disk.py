"""The disk tier in SGLang's radix tree: finished prefixes are written to a store and found again by their hashes.

The key of a block is SGLang's chained hash of its tokens, of all tokens before them and of the request's namespace.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.utils import get_storage_hash_str

from ..cache.block_store import BlockStore
from ..cache.blocks import State
from ..cache.disk_store import DiskStore
from ..cache.disk_tier import DiskTier, Fetch, Lookup
from ..cache.identity import identity
from ..cache.use_order import BLOCK_NS
from ..options.conflicts import ranks_per_host
from ..options.request_quality import is_private
from .backend_store import BackendStore, backend_settings
from .block_key import BlockKey
from .hit_sources import note_read
from .tree_component import written_at
from .tree_host import HostCache

logger = logging.getLogger("sglang_kvc")

READ_SECONDS = 2e-3
# Lookups of one prompt, and forwards for which it waits for room in host memory. Then it is computed as far as it has
# to be.
MOST_LOOKUPS, MOST_WAIT = 64, 1000


@dataclass
class _PrefixFetch:
    """A prompt's blocks after the node `anchor`, which are looked up in the store and then read from it. They begin at
    token `start`, and `key` holds their tokens. `cleared`: value of `runtime.cleared` when the lookup began.
    `host_lock` keeps the anchor in the tree; None: the anchor was dropped."""

    req: Any
    anchor: int
    start: int
    key: BlockKey
    hashes: list[str]
    fetch: Fetch | None
    host_lock: Any
    cleared: int
    lookup: Lookup | None = None


class DiskCache(HostCache):
    """The part of `KvcRadixCache` that serves `--kvc-disk` and `--hicache-storage-backend`."""

    disk: DiskTier | None = None
    must_name_store = False  # when the memory saver has restored the weights

    def init_hicache(self, server_args, params) -> None:
        super().init_hicache(server_args, params)
        config = self.runtime.config
        store: BlockStore | None = None
        if config.disk is not None:
            store = files = DiskStore(
                config.disk, identity(self.runtime), config.disk_size, ranks_per_host(server_args)
            )
            logger.info(
                "kvc: %s holds %d blocks in %.2f GiB and may hold %.2f GiB",
                files.folder, len(files), files.num_bytes / 2**30, files.limit / 2**30,
            )  # fmt: skip
        elif config.storage is not None:
            extra = backend_settings(server_args)
            store = remote = BackendStore.create(config.storage, extra, self.host_tier, identity(self.runtime))
            self.cache_controller.storage_backend = remote.backend
            self.cache_controller.storage_backend_type = config.storage
        if store is not None:
            self.disk = self.host_tier.disk = DiskTier(self.host_tier, store)
            if self.tier_metrics is not None:
                self.tier_metrics.attach_storage(config.storage or "kvc-disk")

    def _reset_full(self) -> None:
        for fetched in getattr(self, "fetches", ()):
            self.disk.abandon(fetched.fetch)
        super()._reset_full()
        self.may_have_room = True
        self.lookups: list[_PrefixFetch] = []
        self.fetches: list[_PrefixFetch] = []
        if self.disk is not None:
            self._name_store()  # the weights may have changed

    def _name_store(self) -> None:
        """Use the store of the present weights, or later if `--enable-memory-saver` has released them."""
        self.must_name_store = self.runtime.weights_released
        if not self.must_name_store:
            self.disk.store = self.disk.store.of(identity(self.runtime))

    @property
    def _uses_disk(self) -> bool:
        """Also False if the cache has blocks of weights other than the present ones."""
        return self.disk is not None and not self.runtime.weights_changed and not self.must_name_store

    def clear_storage_backend(self) -> bool:
        """Called for `/hicache/storage-backend/clear`: remove the records."""
        if self.disk is None:
            return False
        done = self.disk.clear()
        self.runtime.cleared += 1
        return done

    def attach_storage_backend(self, *args, **kwargs) -> tuple[bool, str]:
        return False, (
            "A storage backend cannot be attached to a running server with --kv-backend kvc, because prompts look up "
            "their blocks from the start; give --hicache-storage-backend when the server starts."
        )

    def detach_storage_backend(self) -> tuple[bool, str]:
        return False, (
            "A storage backend cannot be detached from a running server with --kv-backend kvc, because reads and "
            "writes may be under way; start the server without --hicache-storage-backend."
        )

    # ---- to the disk

    def _execute_kv_backup(self, node_id, device_value, comp_xfers, sidecar_xfers):
        slots = super()._execute_kv_backup(node_id, device_value, comp_xfers, sidecar_xfers)
        if self._uses_disk and slots is not None:
            self._write(self.tree_core.node_by_id(node_id), self.component.blocks_at(slots))
        return slots

    def _write(self, node, stored: np.ndarray) -> None:
        """Write the blocks of `node`, whose copies in host memory are `stored`."""
        if is_private(node.key.extra_key):
            return
        if self.disk.write_behind(stored, _keys(self._hashes(node)), self._blocks_before(node)):
            self._note_use(node)
        node.kvc_written = self.runtime.cleared

    def _write_again(self, node) -> bool:
        """Write a node that is in host memory and was written before the disk was cleared. False: it is not in host
        memory."""
        if node.backuped and written_at(node) != self.runtime.cleared:
            self._write(node, self._stored_blocks(node))
        return node.backuped

    def _evict_device_leaf(self, node_id, tracker):
        if self._uses_disk:
            self._write_again(self.tree_core.node_by_id(node_id))
        return super()._evict_device_leaf(node_id, tracker)

    def _blocks_before(self, node) -> int:
        return sum(len(n.key) for n in self._path(node.parent)) // self.page_size

    def _note_use(self, node, more: Sequence[str] = ()) -> None:
        """Note a use of the files on the path to `node`, and of those of the hashes `more` that continue it. Thus no
        prefix is removed before what continues it. Nodes whose use was noted within the last second are skipped."""
        if not self.disk.store.local:
            return
        hashes: list[str] = []
        before, now = 0, self.disk.use_time()
        for n in self._path(node):
            if n.hash_value is None:  # neither it nor a node below it is on the disk
                break
            if hashes or getattr(n, "kvc_use_noted", None) != now:
                hashes += n.hash_value
                n.kvc_use_noted = now
            else:
                before += len(n.key) // self.page_size
        self.disk.touch(_keys([*hashes, *more]), now - BLOCK_NS * before)

    def _hashes(self, node) -> list[str]:
        """One hash per block of `node`. Splitting the node splits them."""
        missing = []
        while node.hash_value is None and node is not self.tree_core.root_node:
            missing.append(node)
            node = node.parent
        for descendant in reversed(missing):
            previous = descendant.parent.hash_value[-1] if descendant.parent.hash_value else None
            descendant.hash_value = get_storage_hash_str(descendant.key, previous, page_size=self.page_size)
        return missing[0].hash_value if missing else node.hash_value or []

    def back_up(self, node_id: int) -> None:
        """Note a use of the path to `node_id`, and save its nodes whose blocks will not be packed again, so that they
        reach the disk.

        Nodes that went to the disk before are skipped even if host memory has dropped them. Their eviction from the
        device will save them. Ranks do not ask their disks, which may differ, because they must save the same nodes.

        One turn saves no more than host memory holds, since later saves would displace earlier ones before they are
        written. The next turn or the eviction saves the rest."""
        if not self._uses_disk:
            return
        self._note_use(self.tree_core.node_by_id(node_id))
        blocks, left = self.runtime.blocks, self.host_tier.memory.num_units
        for node in self._path(self.tree_core.node_by_id(node_id)):
            if node.evicted or node.write_through_pending_id is not None or self._write_again(node):
                continue
            if written_at(node) == self.runtime.cleared:
                continue
            ids = self.component.blocks_of(node)
            unplanned = blocks.format_id[ids] == (self.runtime.policy.unplanned_format or -1)
            waiting = ((blocks.state[ids] == State.OPEN) | unplanned) & (blocks.window_count[ids] > 0)
            if self.runtime.replanning.lags:
                waiting |= unplanned & (blocks.ref_count[ids] > 0)
            if (waiting | blocks.unread[ids]).any():
                continue
            units = self.host_tier.units_of(ids).cumsum()
            fits = int(np.count_nonzero(units <= left))
            if not fits:
                return
            if fits < len(ids):
                node = self._split(node, fits)
            left -= int(units[fits - 1])
            saved = self._execute_and_commit_kv_backup(BackupKV(node_ids=[node.id]), write_back=True)
            self.writing_check(write_back=True)
            if not saved or fits < len(ids):
                return  # a lookup would not reach blocks beyond the gap

    # ---- from the disk

    def fetch(self, req) -> bool:
        """Begin or check the fetch of records that continue the cached prefix of `req`; returns whether the prompt
        waits for them.

        There is one lookup per prompt, and another one after each retraction and whenever less of the prompt is in the
        tree than after the last lookup. If host memory had no room for all records, there is also one when the blocks
        before the remaining records are on the device. While another prompt reads the same records, this one waits, and
        then hits them. Each rank looks for its own records, and the ranks agree on the number that all have.
        """
        if not self._uses_disk or req.kvc_private:
            return False
        under_way = (*self.lookups, *self.fetches)
        if any(f.req is req for f in under_way):
            return True
        waits_for_room = getattr(req, "kvc_waits_since", None) is not None
        if waits_for_room and not self.may_have_room and (self.fetches or self.loads):
            return True
        node, p = self.tree_core.node_by_id(req.best_match_node), self.page_size
        begin, lookups = sum(len(n.key) for n in self._path(node)), getattr(req, "kvc_lookups", 0)
        if getattr(req, "kvc_fetched", False):
            continues = begin < req.kvc_found or (req.kvc_records_left and not node.evicted)
            if not continues or lookups >= MOST_LOOKUPS:
                return False
        req.kvc_fetched, req.kvc_found, req.kvc_records_left = True, begin, False
        self._note_use(node)
        end = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids)) // p * p
        if end <= begin:
            req.kvc_waits_since = None
            return False
        key = BlockKey(req.full_untruncated_fill_ids[begin:end], req.extra_key, cache_salt=req.cache_salt)
        hashes = self._hashes(node)
        before = hashes[-1] if hashes else None
        first = get_storage_hash_str(key[:p], before, page_size=p)
        if any(f.hashes[:1] == first for f in under_way):
            req.kvc_fetched = False
            return True
        hashes = get_storage_hash_str(key, before, page_size=p)
        lock = self.inc_host_lock_ref(node.id).to_dec_params()
        fetched = _PrefixFetch(req, node.id, begin, key, hashes, None, lock, self.runtime.cleared)
        if self.disk.store.local:
            return self._begin(fetched, self.disk.record_sizes(_keys(hashes)))
        fetched.lookup = self.disk.lookup(_keys(hashes))
        self.lookups.append(fetched)
        return True

    def _begin(self, fetched: _PrefixFetch, sizes: list[int]) -> bool:
        """Start reading the blocks, whose records have `sizes` bytes; returns whether the prompt waits for records.

        Every rank reserves room for the largest record of all ranks."""
        n, room = self._agreed(len(sizes)), []
        if n and fetched.host_lock is not None:
            room = self.runtime.reduce_max(torch.tensor(sizes[:n])).tolist()
        n, req = self._fitting(fetched, room), fetched.req
        waits = n < len(room) and self._waits_for_room(req)
        if not waits:
            req.kvc_waits_since = None
            # If no record fits, only a load of the anchor makes room.
            req.kvc_records_left = n < len(room) and (n > 0 or self.tree_core.node_by_id(fetched.anchor).evicted)
        if not n or waits:
            if fetched.host_lock is not None:
                self.dec_host_lock_ref(fetched.anchor, fetched.host_lock)
            return waits
        fetched.key, fetched.hashes = fetched.key[: n * self.page_size], fetched.hashes[:n]
        req.kvc_found += n * self.page_size
        req.kvc_lookups = getattr(req, "kvc_lookups", 0) + 1
        self._note_use(self.tree_core.node_by_id(fetched.anchor), fetched.hashes)
        fetched.fetch = self.disk.fetch(_keys(fetched.hashes), sizes[:n], room[:n])
        self.fetches.append(fetched)
        return True

    def _waits_for_room(self, req) -> bool:
        """Whether `req` waits for reads and loads of other prompts to end, because its records do not fit beside them.

        When one ends, prompts try again in turn, until one has to wait again."""
        if not (self.fetches or self.loads):
            return False
        if getattr(req, "kvc_waits_since", None) is None:
            req.kvc_waits_since = self.runtime.step
        if self.runtime.step - req.kvc_waits_since > MOST_WAIT:
            return False
        self.may_have_room = req.kvc_fetched = False
        return True

    def _fitting(self, fetched: _PrefixFetch, sizes: list[int]) -> int:
        """Number of records of these sizes, from the first on, that fit in host memory after dropping others.

        If the anchor is on the device, it stays in the tree without its copy in host memory, which is dropped, too."""
        if not sizes:
            return 0
        ends = self.host_tier.units_of_bytes(sizes).cumsum()
        on_device = not self.tree_core.node_by_id(fetched.anchor).evicted
        if on_device:
            self.dec_host_lock_ref(fetched.anchor, fetched.host_lock)
        self._make_host_room(int(ends[-1]))
        if on_device:
            fetched.host_lock = self.inc_host_lock_ref(fetched.anchor).to_dec_params()
        return int(np.count_nonzero(ends <= self.host_tier.memory.free_units))

    @property
    def transferring(self) -> bool:
        return bool(self.loads or self.fetches or self.lookups)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.disk is None:
            return
        if self.must_name_store:
            self._name_store()
        while self.lookups and self._agreed(int(self.lookups[0].lookup.finished)):
            first = self.lookups.pop(0)
            self._begin(first, first.lookup.sizes)
            self.transfers_ended += 1
        self.disk.poll()
        while self.fetches and self._agreed(int(self.disk.ended(self.fetches[0].fetch))):
            self._enter_fetched(self.fetches.pop(0))
            self._note_end()
        if self.tier_metrics is not None:
            self.tier_metrics.report_writes(self.disk.written_blocks)

    def _note_end(self) -> None:
        super()._note_end()
        self.may_have_room = True

    def wait_for_reads(self) -> None:
        """Wait up to `READ_SECONDS` for reads that a prompt waits for. The scheduler calls this when no forward is due:
        its loop would otherwise hold the interpreter's lock for most of the time, and delay the reading threads."""
        tasks: list[Future] = [fetched.lookup.answer for fetched in self.lookups[:1]]
        for fetched in self.fetches[:1]:
            tasks += fetched.fetch.reads
        wait(tasks, READ_SECONDS)

    def _enter_fetched(self, fetched: _PrefixFetch) -> None:
        """Insert the blocks that were read into the tree. The prompt then hits them in host memory. Reads that have not
        ended are given up."""
        if not fetched.fetch.finished:
            logger.warning("kvc: reads of %s hang, and prompts are computed", self.runtime.config.store_option)
            self.disk.abandon(fetched.fetch)
        ids, p, tier = fetched.fetch.ids, self.page_size, self.host_tier
        num_found = self._agreed(fetched.fetch.found) if fetched.host_lock is not None else 0
        if num_found:
            num_found = self._agree_on_records(fetched.hashes[:num_found], ids[:num_found])
        intact, unused = ids[:num_found], ids[num_found:]
        if num_found:
            if self.tier_metrics is not None:
                self.tier_metrics.report_reads(num_found)
            key = fetched.key[: num_found * p]
            result = self.tree_core.insert_host(
                fetched.anchor, key, self.component.slots_of(intact), fetched.hashes[:num_found]
            )
            self._apply_cache_actions(result.cache_actions)
            if result.inserted_host_node is not None:
                self.tree_core.node_by_id(result.inserted_host_node).kvc_written = fetched.cleared
            if self.reuse is not None:
                self.reuse.find_again(fetched.req)
            unused = np.concatenate((intact[: result.prefix_len // p], unused))  # already in the tree
            note_read(fetched.req, fetched.start + result.prefix_len, fetched.start + len(key))
        if len(unused):
            tier.free(unused)
        fetched.req.kvc_found -= (len(ids) - num_found) * p
        if fetched.host_lock is not None:
            self.dec_host_lock_ref(fetched.anchor, fetched.host_lock)

    def _agree_on_records(self, hashes: Sequence[str], ids: np.ndarray) -> int:
        """Give the stored blocks `ids`, which every rank has read, the most pages of all ranks. Returns the number of
        blocks, from the first on, that have one format on all ranks: a rank may have failed to write a block before it
        was demoted, and have written it afterwards. The record of any other block is removed."""
        tier = self.host_tier
        pages, formats = (torch.from_numpy(facts[ids].astype(np.int64)) for facts in (tier.pages, tier.format_id))
        pages, highest, lowest = self.runtime.reduce_max(torch.stack([pages, formats, -formats]))
        tier.pages[ids] = pages.numpy()
        differ = np.flatnonzero((highest != -lowest).numpy())
        for key in _keys([hashes[i] for i in differ]):
            self.disk.store.forget(key, "the ranks wrote it in different formats")
        return int(differ[0]) if len(differ) else len(ids)

    def _drop_subtree_no_host(self, node_id: int, tracker) -> bool:
        """Drop a node for which host memory has no room. Reads that continue it become useless and lose their lock,
        which would otherwise keep the node, so that the eviction would never end."""
        node = self.tree_core.node_by_id(node_id)
        for fetched in (*self.lookups, *self.fetches):
            lock = fetched.host_lock
            if lock is not None and node in self._path(self.tree_core.node_by_id(fetched.anchor)):
                fetched.host_lock = None
                self.dec_host_lock_ref(fetched.anchor, lock)
        return super()._drop_subtree_no_host(node_id, tracker)

    @property
    def ongoing_prefetch(self) -> dict:
        return {f.req.rid: f for f in (*getattr(self, "lookups", ()), *getattr(self, "fetches", ()))}

    @ongoing_prefetch.setter
    def ongoing_prefetch(self, value) -> None:
        """Always empty after a reset, as in SGLang."""


def _keys(hashes: list[str]) -> list[bytes]:
    return [bytes.fromhex(h) for h in hashes]

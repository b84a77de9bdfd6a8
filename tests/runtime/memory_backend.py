"""Storage backends in memory, as users write them for `--hicache-storage-backend dynamic`."""

from __future__ import annotations

import ctypes
import json
import random
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from .model import ONE_RANK

PLACES: dict[str, dict[str, bytes]] = {}  # records that outlive a server, by the setting `place`


class MemoryBackend(HiCacheStorage):
    """Keeps copies of tensors."""

    def __init__(self, storage_config, kwargs):
        config = storage_config.extra_config
        self.kept = PLACES.setdefault(f"{config['place']} {storage_config.tp_rank}", {})
        self.broken = False
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.broken:
            raise ConnectionError("nobody answers")

    def get(self, key, target_location=None, target_sizes=None):
        value = self.kept.get(key)
        return None if value is None else torch.frombuffer(bytearray(value), dtype=torch.uint8)

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        self._call()
        return [self.get(key) for key in keys]

    def set(self, key, value=None, target_location=None, target_sizes=None) -> bool:
        self.kept.setdefault(key, value.numpy().tobytes())
        return True

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None) -> bool:
        self._call()
        return all([self.set(key, value) for key, value in zip(keys, values)])

    def exists(self, key) -> bool:
        self._call()
        return key in self.kept

    def clear(self) -> None:
        self.kept.clear()


class AddressBackend(MemoryBackend):
    """Copies from and to the host pool's own memory (`"interface_v1": 1`), two pieces per page, as Mooncake does."""

    def _pieces(self, keys, indices):
        names = [f"{key}_{half}" for key in keys for half in "kv"]
        return zip(names, *self.mem_pool_host.get_page_buffer_meta(indices), strict=True)

    def batch_get_v1(self, keys, host_indices, extra_info=None) -> list[bool]:
        self._call()
        done = []
        for name, address, size in self._pieces(keys, host_indices):
            value = self.kept.get(name, b"")
            done.append(len(value) == size)
            if done[-1]:
                ctypes.memmove(address, value, size)
        return [k and v for k, v in zip(done[::2], done[1::2])]

    def batch_set_v1(self, keys, host_indices, extra_info=None) -> list[bool]:
        self._call()
        for name, address, size in self._pieces(keys, host_indices):
            self.kept.setdefault(name, ctypes.string_at(address, size))
        return [True] * len(keys)

    def exists(self, key) -> bool:
        self._call()
        return f"{key}_k" in self.kept and f"{key}_v" in self.kept

    def get(self, key, *args):
        raise NotImplementedError

    def set(self, key, *args) -> bool:
        raise NotImplementedError


class BadBackend(MemoryBackend):
    """Raises, refuses, and loses and damages values, at random."""

    draw: random.Random

    def _call(self) -> None:
        self.broken = self.draw.random() < 0.1
        super()._call()

    def set(self, key, value=None, target_location=None, target_sizes=None) -> bool:
        return self.draw.random() < 0.9 and super().set(key, value)

    def get(self, key, target_location=None, target_sizes=None):
        value = super().get(key)
        harm = self.draw.random()
        if value is not None and harm < 0.1:
            value[self.draw.randrange(len(value))] ^= 1 << self.draw.randrange(8)
        return value[: len(value) // 2] if value is not None and 0.1 < harm < 0.15 else value


def server_args(place: str) -> SimpleNamespace:
    """Arguments of a server that stores its blocks in `place`."""
    names = {"module_path": __name__, "class_name": "MemoryBackend", "backend_name": "memory", "place": place}
    return SimpleNamespace(
        **vars(ONE_RANK), hicache_storage_backend_extra_config=json.dumps(names), file_storage_path=None
    )

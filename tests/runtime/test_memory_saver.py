"""`--enable-memory-saver`: the memory of the page store is released and restored with arbitrary content."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

from kvc_patches import memory_saver
from tests.server.saver_on_cpu.saver_on_cpu import Saver

from .audit import check_tree
from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_overlap import Client

KV = "kv_cache"


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """SGLang synchronizes the accelerator that torch was built for, whether or not one is present."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


class Served:
    """A server whose page store lies in the region of a memory saver, and SGLang's manager of the memory."""

    def __init__(self, **options):
        self.saver = Saver()
        with self.saver.region(KV):
            self.runtime = make_runtime(**options)
        self.flushes = 0

    def start(self) -> None:
        self.server = Overlap(self.runtime, 2 * P, disable=False)
        self.client = Client(self.server, 1, (None,))
        self.manager = SimpleNamespace(
            memory_saver_adapter=self.saver, scheduler=None, offload_tags=set(), flush_cache=self.flush,
            is_fully_idle=lambda ignore_waiting: self.server.is_fully_idle(),
        )

    def flush(self) -> None:
        self.flushes += self.server.flush()

    def release(self, tags: list[str] | None = None) -> None:
        request = SimpleNamespace(tags=tags or [KV])
        memory_saver.before_release(self.manager, request)
        Manager.release_memory_occupation(self.manager, request)

    def resume(self, tags: list[str] | None = None) -> None:
        request = SimpleNamespace(tags=tags or [KV])
        result = Manager.resume_memory_occupation(self.manager, request)
        assert memory_saver.after_resume(result, self.manager, request) is result

    def live(self, turns: int) -> None:
        """Serve requests and check every row that is read."""
        for _ in range(turns):
            self.client.act()
            self.server.turn()
        while self.server.busy:
            self.server.turn()
        self.server.turn()  # idle: settles
        check_tree(self.server)


@pytest.mark.parametrize(
    "options",
    [{"high": "k4v4", "window": 0}, {"policy": "leankv", "high": "k8v4", "low": "k4v2", "window": 0}],
    ids=["k4v4", "leankv"],
)
def test_requests_are_served_before_and_after_release(options):
    served = Served(blocks=8, **options)
    with configured(served.runtime, 2 * P, retract_every=20):
        served.start()
        served.live(30)
        assert served.runtime.blocks.used_count and served.server.seen["packed"]
        served.release()
        assert served.flushes == 1 and not served.runtime.blocks.used_count
        assert all((memory == 0xFF).all() for memory in served.saver.bytes_of(KV))
        served.resume()
        before = served.server.seen["packed"]
        served.live(30)
        assert served.server.seen["packed"] > before


def test_page_store_equals_new_store_after_resume():
    served, fresh = Served(blocks=8), make_runtime(blocks=8)
    with configured(served.runtime, 2 * P, retract_every=20):
        served.start()
        served.live(10)
        served.release()
        served.resume()
    assert len(served.saver.bytes_of(KV)) >= len(fresh.store._tensors)
    fresh.store.ring[-1] = 0  # after all free pages: never read
    for resumed, expected in zip(served.runtime.store._tensors, fresh.store._tensors):
        assert torch.equal(resumed, expected)


def test_prompts_wait_while_memory_is_released():
    served = Served(blocks=8, high="k4v4", window=0)
    with configured(served.runtime, 2 * P, retract_every=1000):
        served.start()
        served.release()
        served.server.submit([5] * 3 * P, [6, 7], None, None)
        for _ in range(3):
            served.server.turn()
        assert served.server.seen["packed"] == 0 and len(served.server.waiting_queue) == 1
        served.resume()
        while served.server.busy:
            served.server.turn()
        (req,) = served.server.requests.values()
        assert len(req.output_ids) == 2
        served.server.turn()
        assert served.server.seen["packed"] == 3


def test_releasing_other_memory_keeps_cache():
    served = Served(blocks=8, high="k4v4", window=0)
    with configured(served.runtime, 2 * P, retract_every=1000):
        served.start()
        served.live(10)
        used = served.runtime.blocks.used_count
        served.release(["cuda_graph"])
        assert used and served.runtime.blocks.used_count == used and not served.runtime.released
        served.resume(["cuda_graph"])
        served.live(10)

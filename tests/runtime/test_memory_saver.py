"""`--enable-memory-saver`: the memory of the page store is released and restored with arbitrary content."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

from kvc_patches import memory_saver
from sglang_kvc.adapter.model_identity import weights_digest
from tests.server.saver_on_cpu.saver_on_cpu import Saver

from .audit import check_tree
from .model import P, make_runtime
from .overlap import Overlap, configured
from .test_disk_order import ask
from .test_overlap import Client
from .test_stored_prompts import loading, tokens

KV, WEIGHTS = "kv_cache", "weights"


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
        memory_saver.around_release(Manager.release_memory_occupation, self.manager, request)

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


def test_flush_does_not_read_released_weights(monkeypatch, tmp_path):
    """The folder of the disk tier is named after the weights, once these are there again."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    served = Served(blocks=40, high="k4v4", window=0, host_memory=400_000, disk=str(tmp_path), disk_size=1 << 20)
    with served.saver.region(WEIGHTS):
        weights = torch.zeros(64, 64)
    model = torch.nn.Module()
    content = torch.arange(4096.0).view(64, 64)
    weights.copy_(content)
    model.weight = torch.nn.Parameter(weights)
    away, reads = [], []

    def digest() -> bytes:
        reads.append(bool(away))
        return weights_digest(model)

    served.runtime.weights = digest
    with configured(served.runtime, 4 * P, retract_every=10**6):
        served.start()
        tree, manager = served.server.tree_cache, served.manager
        manager.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        manager._assert_weight_cache_inactive, manager.tp_cpu_group = lambda name: None, None
        prompt = tokens(1, 3)
        assert ask(served.server, prompt) == 0
        folder = tree.disk.store.folder
        served.release([WEIGHTS])
        away.append(True)
        served.release([KV])
        served.resume([WEIGHTS])
        away.clear()
        model.weight.data.copy_(content)  # as with `--enable-weights-cpu-backup`
        served.resume([KV])
        assert ask(served.server, prompt) == 3 and tree.disk.store.folder == folder
        tree.disk.close()
    assert reads and not any(reads)


def test_release_does_not_fail_because_of_a_load(monkeypatch):
    """SGLang asserts that the server is idle."""
    with loading(monkeypatch) as server:
        manager = SimpleNamespace(scheduler=server, memory_saver_adapter=SimpleNamespace(enabled=False))
        idle = memory_saver.around_release(lambda *_: server.is_fully_idle(), manager, SimpleNamespace(tags=[KV]))
        assert idle and not server.tree_cache.loads

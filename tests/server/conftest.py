"""Servers for the tests, started on first use; only one is alive at a time.

`KVC_TEST_BACKEND=default` runs the same tests against SGLang's own cache with pages of the same size: stock must meet
the same requirements.
"""

from __future__ import annotations

import os
import random
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import common
from bench.tiny import tiny_experts, tiny_model, tiny_qwen3, tiny_windowed
from tests.support.preloaded import Preloaded

BLOCK = 64
STOCK = os.environ.get("KVC_TEST_BACKEND", "kvc") == "default"
ROWS = 8  # requests that run at once
LEVEL = "k8v4"  # the level that the server "small" offers in addition to k4v4
LOSSLESS = {"custom_params": {"kvc": "lossless"}}
SERVERS = {
    "packed", "small", "exact", "graphs", "unshared", "ranks", "salted", "windowed", "mixed",
    "replicated", "hosted", "floor", "saver", "dp", "experts", "compiled", "thinned",
    "stored", "budgeted", "starved", "lagged",
}  # fmt: skip
RANDOM = ("small", "ranks", "salted", "hosted", "stored", "starved", "unshared", "floor", "mixed", "lagged")
RANDOM += () if common.has_gpu() else ("saver",)  # tests on a GPU weigh the pool
# Functions that write the models of servers; other servers have the demo model.
TINY = {
    **dict.fromkeys(RANDOM, tiny_model), "replicated": partial(tiny_model, kv_heads=1), "dp": tiny_qwen3,
    "experts": tiny_experts, "windowed": tiny_windowed,
}  # fmt: skip
TWO_RANKS = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or a CPU")
PRIORITIES = ("--enable-priority-scheduling", "--max-running-requests", str(ROWS))
# Differences between two runs of one prompt in batches of different shapes, in nats: between the candidates where
# answers diverge, and between the log-probabilities of one token. With bf16 blocks log-probabilities drift by up to
# 0.09 and answers never diverge on a CPU with AVX-512; without AVX-512 they drift by 0.12 and diverge at a gap of 0.09,
# as in stock.
TIE, DRIFT = (0.2, 0.4) if common.has_gpu() else (0.1, 0.15)


def rows_alike() -> bool:
    """True if a row of the demo model's bf16 products has the same bits in a small batch as in a large one."""
    if torch.cpu.get_capabilities().get("amx_bf16"):
        return False  # tiles of several rows
    draw, shapes = torch.Generator().manual_seed(0), ((576, 960), (576, 576), (576, 3072), (1536, 576))
    for size, out in shapes:
        x, w = (torch.randn(n, size, generator=draw).bfloat16() for n in (200, out))
        many = torch.nn.functional.linear(x, w)
        if not all(torch.equal(torch.nn.functional.linear(x[:n], w), many[:n]) for n in (5, 20, 64)):
            return False
    return True


# Mean difference in nats between the log-probabilities of a prompt and those of transformers: 0.04 without compression,
# 0.10 with k4v4.
EXACT = 0.06
FP32_HEAD = "--enable-fp32-lm-head"  # bf16 logits come in steps of 0.125 nat, too coarse to tell a tie

# The output layer converts its weights to fp32 in every step. By default, malloc returns such a large tensor to the
# system when it is freed, and its next pages fault one by one.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}

# Options about experts, indexers and SGLang's own FP8 cache, which the demo model and the compressed cache lack, and
# options that SGLang reads only together with another one.
WITHOUT_EFFECT = (
    "--enable-single-batch-overlap", "--enable-return-indexer-topk", "--quantization-param-path", "scales.json",
    "--enable-pd-role-switch", "--enable-prefill-cp", "--cp-strategy", "zigzag",
)  # fmt: skip


def _arguments(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Options and environment of each server that a test may use. `folder` is for files of the server."""
    chunk = ["--chunked-prefill-size", "128", FP32_HEAD]
    retract = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "12"}
    window = [] if STOCK else ["--kvc-window", str(BLOCK)]
    two = ["--tp-size", "2", "--max-running-requests", str(ROWS), *([] if STOCK else ["--kvc-host-memory", "8MiB"])]
    dp = ["--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-attention", "--max-running-requests", str(ROWS)]
    dp += ["--chunked-prefill-size", "256"]  # for both ranks together
    table = {
        "packed": ("k4v4", [*chunk, *PRIORITIES], "256MiB", {}),
        "small": (
            "k4v4", [
                *chunk, *PRIORITIES, "--kvc-levels", LEVEL, "--enable-streaming-session", "--context-length", "8192",
            ],
            "24MiB", {},
        ),
        "exact": ("bf16", chunk, "32MiB", retract),
        "thinned": ("k8v4", ["--chunked-prefill-size", str(BLOCK), FP32_HEAD], "24MiB", {}),
        "budgeted": ("k4v4", [*chunk, "--kvc-one-shot", "8x", "--enable-streaming-session"], "256MiB", {}),
        "mixed": ("k4v4", [*chunk, "--enable-mixed-chunk", *window], "8MiB", {}),
        "lagged": (
            f"kv-compress+budget=8x+high=k4v4+lag={2 * BLOCK}", [*chunk, "--enable-metrics"], "4MiB", retract
        ),
        "graphs": ("k4v4", chunk, "256MiB", _plugin("graphs_on_cpu")),
        "ranks": ("leankv+alpha_low=0.5", [*two, "--kvc-eviction", "reuse"], "2MiB", _ranks()),
        "replicated": ("k4v4", [*two, *chunk], "4MiB", {**_ranks(), **_plugin("replicas_on_cpu")}),
        "dp": ("k4v4", [*chunk, *dp], "4MiB", {**_ranks(), **_plugin("dp_on_cpu")}),
        "salted": ("leankv+alpha_low=1+alpha_high=1.5", [FP32_HEAD], "4MiB", {}),
        "hosted": (
            "k4v4", [
                *chunk, "--enable-metrics", "--kvc-host-memory", "64MiB", "--kvc-disk", str(folder / "disk"),
            ],
            "2MiB", {},
        ),
        "stored": (
            "k4v4", [
                *chunk, "--enable-metrics", "--kvc-host-memory", "64MiB", "--hicache-storage-backend", "file",
                "--file-storage-path", str(folder / "stored"),
            ],
            "2MiB", {},
        ),
        "starved": (
            "k4v4", [
                "--enable-priority-scheduling", "--max-running-requests", "3", FP32_HEAD, "--chunked-prefill-size",
                str(BLOCK), "--enable-streaming-session",
                "--kvc-floor", "k2v2", "--kvc-eviction", "reuse", "--kvc-running-share", "0.5",
                "--kvc-host-memory", "0.15MiB", "--kvc-disk", str(folder / "full"), "--kvc-disk-size", "0.5MiB",
            ],
            "2MiB", {},
        ),
        "saver": (
            "k4v4", [*chunk, "--enable-memory-saver"], "512MiB" if common.has_gpu() else "8MiB", _plugin("saver_on_cpu")
        ),
        "floor": ("k8v4", [*chunk, "--kvc-floor", "k4v4"], "3MiB", {}),
        "experts": ("k4v4", [*chunk, "--enable-return-routed-experts"], "2MiB", {}),
        "compiled": ("k4v4", [*chunk, "--enable-torch-compile", "--torch-compile-max-bs", "2"], "256MiB", {}),
        "windowed": ("k4v4", ["--chunked-prefill-size", "256", FP32_HEAD], "16MiB", _plugin("graphs_on_cpu")),
        "unshared": (
            "k4v4", ["--chunked-prefill-size", "1024", FP32_HEAD, "--disable-radix-cache", *WITHOUT_EFFECT], "3MiB", {}
        ),
    }
    fmt, extra, memory, env = table[name]
    extra = ["--sleep-on-idle", *extra]  # otherwise an idle server takes a core from concurrent tests
    if common.has_gpu():
        extra = [*common.ON_GPU.split(), "--cuda-graph-max-bs-decode", str(ROWS), *extra]
    if STOCK:
        tokens = "2048" if name in ("exact", "unshared") else "11264"
        return common.stock("--page-size", str(BLOCK), "--max-total-tokens", tokens, *extra), {
            **common.STRICT,
            **env,
        }
    options = common.kvc(fmt, *extra, block=BLOCK, memory=memory, shared=name != "salted")
    return options, {**common.STRICT, **env}


def _plugin(name: str) -> dict[str, str]:
    """The plug-in in the folder `name`, with the metadata by which SGLang finds it; not needed on a GPU."""
    if common.has_gpu():
        return {}
    folders = str(Path(__file__).parent / name), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def _ranks() -> dict[str, str]:
    """SGLang requires a core for each rank on a CPU, and tries NCCL where torch was built for CUDA."""
    if common.has_gpu():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[i % len(cores)]) for i in range(2))
    return {"SGLANG_CPU_OMP_THREADS_BIND": bound, "SGLANG_NCCL_SO_PATH": "/nonexistent"}


def write_byte_tokenizer(folder: Path) -> None:
    """Replace the tokenizer of the demo model by one of bytes. Loading the former takes long in each process of a
    server. Ids above those of bytes have no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "chat_template.jinja").unlink()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(folder)


class Servers:
    """`models` is a folder for models that are generated here."""

    def __init__(self, models: Path):
        self.models = models
        self.preloaded = None if STOCK or common.has_gpu() else Preloaded(common.environment(KEEP_MEMORY))
        self.name: str | None = None
        self.server: common.Server | None = None

    def get(self, name: str) -> common.Server:
        if name != self.name or not self.server.alive:  # a dead server is reported once, by the test that noticed it
            self.stop()
            args, env = _arguments(name, self.models)
            # SGLang reads SGLANG_TEST_* when it is imported.
            fresh = self.preloaded is None or any(name.startswith("SGLANG_TEST_") for name in env)
            popen = subprocess.Popen if fresh else self.preloaded.popen
            server = common.Server(args, env={**KEEP_MEMORY, **env}, model=self.model(name), popen=popen)
            server.start()
            self.name, self.server = name, server
        return self.server

    def model(self, name: str) -> Path | None:
        """Folder of the server's tiny model; None for the demo model."""
        if (write := TINY.get(name)) is None:
            return None
        folder = self.models / ("tiny" if write is tiny_model else name)
        if not folder.exists():
            write(folder)
            write_byte_tokenizer(folder)
        return folder

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.name = self.server = None

    def close(self) -> None:
        self.stop()
        if self.preloaded is not None:
            self.preloaded.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    if common.demo_model() is None:
        pytest.skip("the demo model is not there; make it with: python -m sglang_kvc.demo.model")
    pool = Servers(tmp_path_factory.mktemp("models"))
    yield pool
    pool.close()


def _healthy(servers: Servers, name: str):
    """The server, flushed; after the test it must be alive and its log clean."""
    server = servers.get(name)
    server.client.flush()
    before = len(server.errors())
    yield server
    assert server.alive, f"the server died:\n{server.tail()}"
    new = server.errors()[before:]
    assert not new, f"errors in the server's log: {new}\n{server.tail()}"
    server.client.flush()  # fails if a request still runs; the idle check in the server finds leaks


@pytest.fixture
def packed(servers):
    yield from _healthy(servers, "packed")


@pytest.fixture
def small(servers):
    yield from _healthy(servers, "small")


@pytest.fixture
def thinned(servers):
    yield from _healthy(servers, "thinned")


@pytest.fixture
def budgeted(servers):
    yield from _healthy(servers, "budgeted")


@pytest.fixture
def exact(servers):
    yield from _healthy(servers, "exact")


@pytest.fixture
def lagged(servers):
    yield from _healthy(servers, "lagged")


@pytest.fixture
def mixed(servers):
    yield from _healthy(servers, "mixed")


@pytest.fixture
def compiled(servers):
    yield from _healthy(servers, "compiled")


@pytest.fixture
def experts(servers):
    yield from _healthy(servers, "experts")


@pytest.fixture
def floor(servers):
    yield from _healthy(servers, "floor")


@pytest.fixture
def saver(servers):
    yield from _healthy(servers, "saver")


@pytest.fixture
def graphs(servers):
    yield from _healthy(servers, "graphs")


@pytest.fixture
def windowed(servers):
    yield from _healthy(servers, "windowed")


@pytest.fixture
def unshared(servers):
    yield from _healthy(servers, "unshared")


@pytest.fixture
def ranks(servers):
    yield from _healthy(servers, "ranks")


@pytest.fixture
def dp(servers):
    yield from _healthy(servers, "dp")


@pytest.fixture
def hosted(servers):
    yield from _healthy(servers, "hosted")


@pytest.fixture
def stored(servers):
    yield from _healthy(servers, "stored")


@pytest.fixture
def starved(servers):
    yield from _healthy(servers, "starved")


@pytest.fixture
def replicated(servers):
    yield from _healthy(servers, "replicated")


@pytest.fixture(scope="session")
def off_by():
    """`deviation` from the demo model."""
    return deviation(common.demo_model())


def deviation(folder: Path | str):
    """`off_by(answer, prompt)`: the mean difference in nats between a server's log-probabilities of the prompt's
    tokens, from the second block on, and those of transformers. Chunks after the first one read stored blocks."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.set_attn_implementation("eager")

    def compare(answer, prompt: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, BLOCK - 1 : -1].float()
        right = logits.log_softmax(-1).gather(1, torch.tensor(prompt[BLOCK:])[:, None])[:, 0]
        return float((torch.tensor(answer.input_logprobs[-len(right) :]) - right).abs().mean())

    return compare


@pytest.fixture
def salted(servers):
    yield from _healthy(servers, "salted")


@pytest.fixture
def rng(request) -> random.Random:
    return random.Random(request.node.name)


def tokens(rng: random.Random, n: int) -> list[int]:
    """n ordinary token ids; the range is so large that two draws share no prefix by chance."""
    return [rng.randrange(1000, 40000) for _ in range(n)]


def border(n: int) -> int:
    """The last block border up to which a cached sequence of n tokens can be matched."""
    return n // BLOCK * BLOCK


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in this hook, too
def pytest_collection_modifyitems(items):
    """Tests of one server follow each other. With `pytest -n` they go to one worker (needs `--dist loadgroup`)."""
    for item in items:
        if name := _server(item):
            item.add_marker(pytest.mark.xdist_group("server-" + name))
            item.add_marker(pytest.mark.server)
            item.add_marker(pytest.mark.model)
    items.sort(key=_server)


def _server(item) -> str:
    """The server that a test uses, or nothing."""
    return min(SERVERS & set(getattr(item, "fixturenames", ())), default="")

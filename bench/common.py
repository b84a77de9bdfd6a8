"""Helpers of all benchmarks: servers, the demo model, and result files.

    with Server(kvc("k4v4", block=64)) as server:
        answer = server.client.generate(ids, max_new_tokens=32)

A result file records the command, commit, device and date; `bench/scoreboard.py` collects the files.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import requests

from bench import ports
from bench.client import Client
from bench.guard import Guard
from bench.revision import RESULTS, ROOT, commit
from kvc_kernels.formats import FORMATS

START_TIMEOUT = 600  # a first start compiles; a shared machine is slow
START_ATTEMPTS = 3  # another process may take a port before the server listens on it
STOP_TIMEOUT = 10


class ServerError(RuntimeError):
    """The server did not start, or died; the message ends with the last lines of its log."""


class PortTakenError(ServerError):
    """Another process listens on a port of the server."""


def demo_model() -> Path | None:
    """Folder of the demo model; None if it does not exist (see `python -m sglang_kvc.demo.model`)."""
    from sglang_kvc.demo import model as demo

    return demo.model_dir() if demo.ready() else None


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def default_attention() -> str:
    """Default attention backend of stock SGLang: FlashAttention 3 on Hopper, else FlashInfer."""
    import torch

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return "fa3" if hopper else "flashinfer"


# ---- server options

# CUDA graphs for a few concurrent requests, without parts of SGLang that some CUDA machines lack.
ON_GPU = "--sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.85 --cuda-graph-max-bs-decode 8"


def stock(*extra: str) -> list[str]:
    """Options for SGLang's cache; on a CPU with its plain torch attention."""
    args = ["--kv-backend", "default"]
    if not has_gpu():
        args += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
    if "--max-total-tokens" not in extra:
        args += ["--max-total-tokens", "20000"]
    return args + list(extra)


def kvc_settings(name: str) -> dict[str, str]:
    """Settings from a name: a page format, or a policy and its settings like `snapkv+budget=4x+high=k4v4`."""
    head, *settings = name.split("+")
    out = {"policy": "quantize", "high": head} if head in FORMATS else {"policy": head}
    return out | {k.replace("-", "_"): v for k, v in (setting.split("=", 1) for setting in settings)}


def kvc(
    name: str = "k4v4", *extra: str, block: int = 128, memory: str | None = "512MiB", shared: bool = True
) -> list[str]:
    """Options for the compressed cache with the format or policy `name` (`kvc_settings`). If `memory` is None, `extra`
    must set it. shared: requests without a salt share prefixes under every policy."""
    args = ["--kv-backend", "kvc", "--kvc-block-size", str(block), *(["--kvc-memory", memory] if memory else [])]
    settings = kvc_settings(name)
    if shared and settings["policy"] != "quantize":
        settings = {"trust": "all"} | settings
    for option, value in settings.items():
        args += ["--kvc-" + option.replace("_", "-"), value]
    return args + list(extra)


def either(name: str, *extra: str, block: int, memory: str = "1GB") -> list[str]:
    """Options of `stock` or `kvc`. Stock has pages of one block, so that both hit at the same boundaries.

    On a GPU, `ON_GPU` is added, and stock uses its default attention or KVC_STOCK_ATTENTION. `extra` overrides both.
    """
    if has_gpu():
        attention = ["--attention-backend", os.environ.get("KVC_STOCK_ATTENTION") or default_attention()]
        extra = (*ON_GPU.split(), *(attention if name == "stock" else []), *extra)
    if name == "stock":
        return stock("--page-size", str(block), *extra)
    return kvc(name, *extra, block=block, memory=memory)


# ---- the server


class Server:
    """A server process, as a context manager. All of its output goes to `log`."""

    def __init__(
        self,
        args: list[str],
        *,
        model: Path | str | None = None,
        env: dict[str, str] | None = None,
        port: int | None = None,
        popen: Callable[..., Any] = subprocess.Popen,
    ):
        model = model or demo_model()
        if model is None:
            raise ServerError("The demo model is missing; create it with: python -m sglang_kvc.demo.model")
        # The server starts in another folder, where a relative path would count as a name on the hub.
        self.model = str(Path(model).resolve() if Path(model).exists() else model)
        self.args = list(args)
        self.any_port = port is None
        self._listen_at(port)
        self.env = environment(env)
        self.log = Path(tempfile.mkdtemp(prefix="kvc-server-")) / "server.log"
        self.popen = popen
        self.process: subprocess.Popen | None = None
        self.guard: Guard | None = None
        self.started = 0  # log lines that `errors` skips
        self.seconds_to_start = 0.0

    def _listen_at(self, port: int | None) -> None:
        """Set the HTTP port (default: a free one) and the port for communication between ranks."""
        free = ports.free_ports(2)
        self.port = port or free[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = Client(self.url)
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        # Otherwise SGLang uses an ephemeral port.
        if not any(x.split("=")[0] == "--nccl-port" for x in self.args):
            where += ["--nccl-port", str(free[1])]
        arguments = [*self.args, "--model-path", self.model, *where]
        self.command = [sys.executable, "-m", "sglang.launch_server", *arguments]

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        for attempt in range(START_ATTEMPTS):
            try:
                return self._start()
            except PortTakenError:
                if not self.any_port or attempt == START_ATTEMPTS - 1:
                    raise
                self._listen_at(None)

    def _start(self) -> None:
        self.guard = Guard()
        with open(self.log, "w") as out:
            self.process = self.popen(
                self.command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.log.parent,  # not the repository, because `python -m` adds the current folder to the path
                start_new_session=True,
            )
        self.guard.watch(self.process.pid)
        began = time.monotonic()
        try:
            while not self._healthy():
                # SGLang's ranks outlive an HTTP server whose port is taken.
                if any(ports.TAKEN in x.lower() for x in self._lines()):
                    raise PortTakenError(f"another process took a port of the server:\n{self.tail()}")
                if not self.alive:
                    raise ServerError(f"the server ended with code {self.process.returncode}:\n{self.tail()}")
                if time.monotonic() - began > START_TIMEOUT:
                    raise ServerError(f"the server was not up after {START_TIMEOUT} s:\n{self.tail()}")
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self.seconds_to_start = time.monotonic() - began
        if has_gpu():  # the start logs errors for optional parts of SGLang that the machine lacks
            self.started = len(self._lines())

    def _healthy(self) -> bool:
        try:
            return requests.get(self.url + "/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill the server, from any thread. Pending requests get an error."""
        if (process := self.process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the server and all its child processes."""
        if self.process is None:
            return
        if self.alive:
            # Interrupted, the HTTP server ends its children, then itself. On SIGTERM it would wait for seconds.
            os.kill(self.process.pid, signal.SIGINT)
            self._wait()
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sig)  # its session contains only the server
            except ProcessLookupError:
                break
            self._wait()
        self.process = None
        self.guard.release()

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT)

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self._lines()[-lines:])

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def errors(self) -> list[str]:
        """Lines of the log that a healthy server never writes."""
        bad = ("Traceback (most recent call last)", "memory leak", "Error:", "Scheduler hit an exception")
        lines = self._lines()[self.started :]
        # The HTTP server logs each refused request, which is expected.
        return [x for x in lines if any(b in x for b in bad) and "[http_server] Error" not in x]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment of a server with the variables of `extra`."""
    # The command line decides the platform, as for a user.
    inherited = {k: v for k, v in os.environ.items() if k != "SGLANG_PLATFORM"}
    return {
        **inherited,
        # One thread by default, because on a shared machine threads spin at barriers.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        # Otherwise every request to /health generates a token, and the cache never becomes idle.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "HF_HUB_OFFLINE": "1",
        **(extra or {}),
    }


STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


# ---- result files


def device_name() -> str:
    """Name of the accelerator, or of the processor with the number of cores that this process may use."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"CPU, {len(os.sched_getaffinity(0))} cores, {name}"


class Score(NamedTuple):
    """One figure of the scoreboard."""

    value: float
    unit: str
    baseline: str = ""  # the baseline and its configuration; empty if there is none
    n: int = 1  # number of runs (or requests, if one run times many) of which `value` is the median
    low: float | None = None  # lower and upper limit of `value` over these runs
    high: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self._asdict().items() if v not in (None, "")}


COMMIT_AT_START = commit()


def measured_commit() -> str:
    """The commit. If it changed during the benchmark, both commits, because servers may have run either."""
    now = commit()
    return now if now == COMMIT_AT_START else f"{COMMIT_AT_START}..{now}"


def command_line() -> str:
    """Command line of this benchmark, as typed at the repository root."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    return shlex.join(["python", *name, *sys.argv[1:]])


def write_result(
    name: str,
    numbers: dict[str, Any],
    *,
    scores: dict[str, Score | tuple] | None = None,
    quiet: bool = False,
    path: Path | None = None,
) -> Path:
    """Write `bench/results/<name>.json`: `numbers` as measured, `scores` as name -> fields of a `Score`.

    `quiet`: print nothing, for intermediate results. `path`: another file.
    """
    path = (path or RESULTS / f"{name}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "name": name,
        "command": command_line(),
        "commit": measured_commit(),
        "device": device_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "scores": {name: Score(*score).to_dict() for name, score in (scores or {}).items()},
        "numbers": numbers,
    }
    # Written atomically, so that no run leaves half a file and concurrent runs do not mix their writes.
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)
    if quiet:
        return path
    for key, score in record["scores"].items():
        print(f"{key:40} {score['value']:.4f} {score['unit']}")
    print(f"written: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path

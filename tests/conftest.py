"""Rules for all tests: fixed random numbers, no deadlines, and a process either with or without Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined. Files named `test_interpret*.py` need it, all other tests must
not see it. A pytest run therefore collects one kind and skips the other. It collects the interpreter tests with `-m
interpreter`, when all paths on its command line name such files, or when TRITON_INTERPRET=1 is already set.
"""

import os
import random
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

# `--hypothesis-profile random` looks for new examples in properties that do not fix theirs.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("fixed")


def pytest_configure(config):
    paths, expression = [a.partition("::")[0] for a in config.args], config.option.markexpr
    interpreted = [name for name in paths if needs_interpreter(name)]
    plain = [name for name in paths if name.endswith(".py") and name not in interpreted]
    if expression == "interpreter" or (not expression and interpreted and interpreted == paths):
        os.environ["TRITON_INTERPRET"] = "1"
    elif interpreter() and plain:
        raise pytest.UsageError(f"{plain[0]} runs without Triton's interpreter; unset TRITON_INTERPRET")
    elif not interpreter() and not expression and interpreted:
        raise pytest.UsageError(f"{interpreted[0]} needs Triton's interpreter, other paths do not; run it by itself")
    if interpreter():
        if "triton" in sys.modules:
            raise pytest.UsageError("a plugin imported triton too early; set TRITON_INTERPRET=1")
        os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        torch.set_num_threads(1)  # torch has already read OMP_NUM_THREADS
    if hasattr(config, "workerinput"):
        # Workers of pytest-xdist share the cores. With more threads, each small operation would wait for a busy core.
        torch.set_num_threads(1)
    if expression == "gpu":
        config.pluginmanager.register(FailuresAtOnce(), "failures-at-once")
    if not torch.cuda.is_available():
        # pytest's command line has no --kv-backend, which would select the CPU platform.
        os.environ.setdefault("SGLANG_PLATFORM", "kvc_cpu")


class FailuresAtOnce:
    """Prints the end of a failure when it happens, because a GPU run that hits its time limit prints no summary."""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext[-1500:]}", flush=True)


def interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def needs_interpreter(path: str | Path) -> bool:
    name = Path(path).name
    return name.startswith("test_interpret") and name.endswith(".py")


def pytest_report_header():
    if interpreter():
        return "Triton's interpreter: on; only files test_interpret*.py are collected"
    return "Triton's interpreter: off; files test_interpret*.py are left out (run them with: -m interpreter)"


def pytest_ignore_collect(collection_path):
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return True if needs_interpreter(collection_path) != interpreter() else None


def pytest_collection_modifyitems(items):
    """Mark interpreter tests, skip tests that no GPU can run, and run long tests first, so that no worker waits for
    them at the end."""
    for item in items:
        if needs_interpreter(item.path):
            item.add_marker(pytest.mark.interpreter)
        if item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"))
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("server", "slow")))


def pytest_runtest_setup(item):
    """Seed the generators before fixtures of any scope draw from them."""
    seed_generators(item.nodeid)


def seed_generators(name: str) -> None:
    """Seed the global generators of Python, numpy and torch with the name of a test."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

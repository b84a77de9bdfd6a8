"""For all tests: no test draws different numbers from one run to the next, and none has a deadline."""

import os
import random
import zlib

import numpy as np
import torch
from hypothesis import settings

# `--hypothesis-profile random` looks for new examples, in the properties that do not fix their own.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("fixed")

if not torch.cuda.is_available():
    # pytest's command line has no --kv-backend, by which the platform for CPUs would know that it is wanted.
    os.environ.setdefault("SGLANG_PLATFORM", "kvc_cpu")


def pytest_collection_modifyitems(items):
    """The longest single test begins early, so that it is not what all wait for at the end."""
    items.sort(key=lambda item: "test_ops_triton.py" not in item.nodeid)


def pytest_runtest_setup(item):
    """Before the test's fixtures of any scope draw from a generator."""
    seed_generators(item.nodeid)


def seed_generators(name: str) -> None:
    """Seed the global generators of Python, numpy and torch by the name of a test."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

"""For all tests."""

import os

import torch

if not torch.cuda.is_available():
    # pytest's command line has no --kv-backend, by which the platform for CPUs would know that it is wanted.
    os.environ.setdefault("SGLANG_PLATFORM", "kvc_cpu")


def pytest_collection_modifyitems(items):
    """The longest single test begins early, so that it is not what all wait for at the end."""
    items.sort(key=lambda item: "test_ops_triton.py" not in item.nodeid)

"""Compiles CUDA sources of the Hopper kernels for the host, with the stand-ins that a test puts next to them."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def compiled(folder: Path, optimize: str) -> ctypes.CDLL:
    """The shared library of `driver.cpp` in `folder`; without the merge kernel, whose header becomes empty."""
    (folder / "extend_merge.cuh").write_text("")
    out = folder / "host.so"
    command = [COMPILER, "-std=c++20", optimize, "-w", "-shared", "-fPIC", folder / "driver.cpp", "-o", out]
    done = subprocess.run([*command, "-fsigned-char"], capture_output=True, text=True)
    if "_Float16" in done.stderr:
        pytest.skip("the C++ compiler has no fp16")
    assert not done.returncode, done.stderr
    return ctypes.CDLL(str(out))

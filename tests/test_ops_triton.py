"""Runs `tests/ops_triton` with Triton's interpreter switched on."""

import os
import subprocess
import sys
from pathlib import Path


def test_triton_kernels_under_the_interpreter():
    folder = Path(__file__).parent / "ops_triton"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Without this pytest would take itself for a worker of the xdist run that it was started from.
    env = {k: v for k, v in env.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    result = subprocess.run(command, env=env, cwd=folder.parent.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]

"""Planted error for compute-sanitizer, in a kernel that has the name of one of ours.

    compute-sanitizer --tool memcheck python bench/kernels/planted.py memcheck
"""

import ctypes
import sys
import tempfile
from pathlib import Path

import torch

from kvc_kernels.common import nvrtc

BODIES = {
    "memcheck": "x[(1ll << 34) + threadIdx.x] = 1;",
    "racecheck": "__shared__ int s[64]; s[threadIdx.x] = threadIdx.x; x[threadIdx.x] = s[63 - threadIdx.x];",
}


class Arguments(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p)]


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    kernel = f'extern "C" __global__ void extend(int* x) {{ {BODIES[sys.argv[1]]} }}\n'
    (folder / "planted.cu").write_text(kernel)
    nvrtc.SOURCES = folder
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    nvrtc.Kernel(nvrtc.Module("planted.cu", ""), "extend").launch(1, 64, Arguments(out.data_ptr()))
    torch.cuda.synchronize()

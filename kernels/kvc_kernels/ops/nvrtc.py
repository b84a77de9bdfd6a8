"""CUDA C++ at run time: NVRTC compiles it (torch brings the library; no nvcc, no headers), the driver launches it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent.parent / "cuda"
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name)


def _nvrtc() -> ctypes.CDLL:
    major = torch.version.cuda.split(".")[0]
    try:
        return _library(f"libnvrtc.so.{major}")
    except OSError:  # not on the loader's path before torch has used it
        import nvidia

        found = [p for root in nvidia.__path__ for p in Path(root).glob(f"cu{major}/lib/libnvrtc.so.{major}")]
        if not found:
            raise
        return _library(str(found[0]))


def _check(lib: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with code {code}")


def compile_source(name: str, constants: str, arch: str = "sm_90a") -> tuple[bytes, str]:
    """`cuda/<name>` behind the text `constants` -> (cubin, what the compiler had to say)."""
    lib = _nvrtc()
    headers = {p.name: p.read_bytes() for p in SOURCES.glob("*.cuh")}
    n = len(headers)
    program = ctypes.c_void_p()
    source = f'{constants}\n#line 1 "{name}"\n'.encode() + (SOURCES / name).read_bytes()
    _check(lib, lib.nvrtcCreateProgram(
        ctypes.byref(program), source, name.encode(), n, (ctypes.c_char_p * n)(*headers.values()),
        (ctypes.c_char_p * n)(*(h.encode() for h in headers)),
    ), "nvrtcCreateProgram")  # fmt: skip
    options = [f"--gpu-architecture={arch}", "--std=c++20", "--ptxas-options=-v", "--device-as-default-execution-space"]
    options = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    failed = lib.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    said = log.value.decode(errors="replace")
    if failed:
        raise RuntimeError(f"{name} does not compile:\n{said}")
    _check(lib, lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    cubin = ctypes.create_string_buffer(size.value)
    _check(lib, lib.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, said


class Kernel:
    """A kernel with one argument, a struct by value, and the shared memory that its module's `shared_bytes` names."""

    def __init__(self, name: str, function: str, constants: str):
        cubin, _ = compile_source(name, constants)
        driver = self._driver = _library("libcuda.so.1")
        torch.cuda.current_stream()  # the context exists
        module, address, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
        self._function, shared = ctypes.c_void_p(), ctypes.c_int()
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        code = driver.cuModuleGetFunction(ctypes.byref(self._function), module, function.encode())
        _check(driver, code, "cuModuleGetFunction")
        code = driver.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, b"shared_bytes")
        _check(driver, code, "cuModuleGetGlobal")
        _check(driver, driver.cuMemcpyDtoH_v2(ctypes.byref(shared), address, 4), "cuMemcpyDtoH")
        self.shared = shared.value
        code = driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, self.shared)
        _check(driver, code, f"asking for {self.shared} bytes of shared memory")

    def launch(self, programs: int, threads: int, arguments: ctypes.Structure) -> None:
        """`programs` blocks of `threads` threads on the current stream; the struct is copied at once."""
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self._driver.cuLaunchKernel(
            self._function, programs, 1, 1, threads, 1, 1, self.shared, stream, pointer, None
        )
        _check(self._driver, code, "cuLaunchKernel")

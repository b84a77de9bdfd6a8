"""CUDA C++ at run time: torch's NVRTC compiles it without nvcc or headers, and the driver launches it."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)
SOURCES = Path(__file__).parents[1] / "extend" / "cuda"
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name)


def _nvrtc() -> ctypes.CDLL:
    major = torch.version.cuda.split(".")[0]
    try:
        return _library(f"libnvrtc.so.{major}")
    except OSError:  # not on the loader's path until torch has used it
        import nvidia

        # Packages of CUDA 13 share a folder, those of CUDA 12 have one each.
        patterns = [f"{folder}/lib/libnvrtc.so.{major}" for folder in (f"cu{major}", "cuda_nvrtc")]
        paths = [p for root in nvidia.__path__ for pattern in patterns for p in Path(root).glob(pattern)]
        if not paths:
            raise
        return _library(str(paths[0]))


@cache
def available() -> bool:
    """Whether the compiler is available; it comes with torch's CUDA packages."""
    try:
        _nvrtc()
    except (OSError, ImportError) as error:
        logger.warning("NVRTC is missing (%s): kernels in CUDA C++ are replaced by slower ones in Triton.", error)
        return False
    return True


def _check(lib: ctypes.CDLL, code: int, action: str) -> None:
    if code:
        raise RuntimeError(f"{action} failed with code {code}")


def compile_source(name: str, constants: str, arch: str = "sm_90a") -> tuple[bytes, str]:
    """`extend/cuda/<name>` after the text `constants` -> (cubin, compiler log)."""
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
    message = log.value.decode(errors="replace")
    if failed:
        raise RuntimeError(f"{name} does not compile:\n{message}")
    _check(lib, lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
    cubin = ctypes.create_string_buffer(size.value)
    _check(lib, lib.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, message


class Module:
    """`extend/cuda/<name>`, compiled for the device in use."""

    def __init__(self, name: str, constants: str):
        cubin, _ = compile_source(name, constants)
        self.driver = _library("libcuda.so.1")
        torch.cuda.current_stream()  # the context exists
        self.handle = ctypes.c_void_p()
        _check(self.driver, self.driver.cuModuleLoadData(ctypes.byref(self.handle), cubin), "cuModuleLoadData")

    def integer(self, name: str) -> int:
        """The value of a constant of the module."""
        address, size, value = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        code = self.driver.cuModuleGetGlobal_v2(
            ctypes.byref(address), ctypes.byref(size), self.handle, name.encode()
        )
        _check(self.driver, code, f"looking for {name}")
        _check(self.driver, self.driver.cuMemcpyDtoH_v2(ctypes.byref(value), address, 4), f"reading {name}")
        return value.value


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Config(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")],
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Kernel:
    """A kernel of `module` with one argument, a struct by value. `early`: its thread blocks may start before the
    preceding kernel ends, and wait for it themselves (griddepcontrol.wait).
    """

    def __init__(self, module: Module, function: str, *, shared: int = 0, early: bool = False):
        self._driver, self._function = module.driver, ctypes.c_void_p()
        code = self._driver.cuModuleGetFunction(ctypes.byref(self._function), module.handle, function.encode())
        _check(self._driver, code, f"looking for {function}")
        code = self._driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared)
        _check(self._driver, code, f"asking for {shared} bytes of shared memory")
        self._attribute = _Attribute(id=PROGRAMMATIC_SERIALIZATION, value=1)
        self._config = _Config(
            gy=1, gz=1, by=1, bz=1, shared=shared, attributes=ctypes.pointer(self._attribute), count=int(early)
        )
        self._pointers = (ctypes.c_void_p * 1)()  # addresses of the arguments of a launch

    def launch(self, ctas: int, threads: int, arguments: ctypes.Structure) -> None:
        """`ctas` CTAs of `threads` threads on the current stream; the struct is copied at once."""
        config, self._pointers[0] = self._config, ctypes.addressof(arguments)
        config.gx, config.bx, config.stream = ctas, threads, torch.cuda.current_stream().cuda_stream
        code = self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, self._pointers, None)
        _check(self._driver, code, "cuLaunchKernelEx")

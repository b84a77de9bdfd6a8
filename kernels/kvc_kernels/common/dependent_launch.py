"""Programmatic dependent launch: a kernel starts while the kernel before it in the stream drains (Hopper and newer).

A kernel launched with `LAUNCH` calls `gdc_wait()` before its first load or store. The wait returns when the kernel
before it has completed and its writes are visible. So only launch latency overlaps; the order of accesses stays.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LAUNCH = {"PDL": True, "launch_pdl": True}


@triton.jit
def wait(TRIGGER: tl.constexpr):
    """Wait for the kernel before this one. With TRIGGER, CTAs of the kernel behind it may then start where there is
    room, which thus means that the kernel before is complete.
    """
    gdc_wait()
    if TRIGGER:
        gdc_launch_dependents()


@lru_cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that has the constexpr `PDL`."""
    able = device.type == "cuda" and not knobs.runtime.interpret
    return LAUNCH if able and torch.cuda.get_device_capability(device)[0] >= 9 else {"PDL": False}

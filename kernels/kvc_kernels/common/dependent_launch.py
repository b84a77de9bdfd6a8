"""Programmatic dependent launch: a kernel starts while the kernel before it in the stream drains (Hopper and newer).

A kernel launched with `LAUNCH` calls `gdc_wait()` before its first load or store. The wait returns when the kernel
before it has completed and its writes are visible. So only launch latency overlaps; the order of accesses stays.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton import knobs

LAUNCH = {"PDL": True, "launch_pdl": True}


@lru_cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that has the constexpr `PDL`."""
    able = device.type == "cuda" and not knobs.runtime.interpret
    return LAUNCH if able and torch.cuda.get_device_capability(device)[0] >= 9 else {"PDL": False}

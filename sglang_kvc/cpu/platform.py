"""Serving without a GPU: an SGLang platform on which every operation falls back to native torch.

SGLang's CPU engine needs a build of its kernels that no package registry ships. An out-of-tree platform does not.
Entry point of group `sglang.srt.platforms`; written against SGLang 0.5.23: `CpuDeviceMixin`, `SRTPlatform`.

SGLang asks every installed platform. This one takes over only if both conditions hold:

* `--kv-backend` is given, on the command line or in the file of `--config`. `--kv-backend default` also counts: it
  serves stock SGLang on such a machine.
* There is no accelerator, no platform of another package, and no `SGLANG_USE_CPU_ENGINE=1`.

`SGLANG_PLATFORM=kvc_cpu`, SGLang's way to choose a platform, asks for it without a command line (a Python `Engine`) and
overrides both conditions.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from sglang_kvc.options.command_line import CPU_PLATFORM, names_backend

ENTRY_POINT = "sglang_kvc.cpu.platform:activate"
ACCELERATORS = ("cuda", "xpu", "npu", "hpu", "musa", "mps")  # modules of torch with `is_available`


def activate() -> str | None:
    """The class path of this platform if it takes over (see above), else None."""
    if os.environ.get("SGLANG_PLATFORM") != CPU_PLATFORM:
        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not names_backend():
            return None
        platforms = entry_points(group="sglang.srt.platforms")
        if any(entry.value != ENTRY_POINT for entry in platforms) or _has_accelerator():
            return None
    return "sglang_kvc.cpu.platform_class:TorchCpuPlatform"


def _has_accelerator() -> bool:
    import torch  # late import: SGLang asks at every start, mostly without --kv-backend

    modules = (getattr(torch, name, None) for name in ACCELERATORS)
    return (
        torch.version.hip is not None
        or any(m.is_available() for m in modules if hasattr(m, "is_available"))
        or torch.accelerator.is_available()
    )

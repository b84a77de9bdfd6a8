"""Serving without a GPU: an SGLang platform on which every operation falls back to native torch.

SGLang's own CPU engine needs a build of its kernels that no package registry ships. An out-of-tree platform does not.
Entry point of group `sglang.srt.platforms`; written against SGLang 0.5.17: `CpuDeviceMixin`, `SRTPlatform`.

SGLang asks every installed platform, so this one takes over only where it was asked for and nothing else can serve:

* `--kv-backend` is given, on the command line or in the file of `--config`. `--kv-backend default` also counts: it
  serves stock SGLang on such a machine.
* There is no accelerator, no platform of another package, and no `SGLANG_USE_CPU_ENGINE=1`.

`SGLANG_PLATFORM=kvc_cpu`, SGLang's own way to choose a platform, asks for it without a command line (a Python `Engine`)
and overrides the second rule.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

NAME, VALUE = "kvc_cpu", "sglang_kvc.cpu.platform:activate"  # of the entry point
ACCELERATORS = ("cuda", "xpu", "npu", "hpu", "musa", "mps")  # modules of torch that can be asked


def activate() -> str | None:
    """The platform's class path where it shall serve (see above), else None, so that SGLang picks another."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        from sglang_kvc.options.command_line import names_backend

        if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not names_backend():
            return None
        if any(entry.value != VALUE for entry in entry_points(group="sglang.srt.platforms")) or _has_accelerator():
            return None
    return "sglang_kvc.cpu.platform_class:TorchCpuPlatform"


def _has_accelerator() -> bool:
    import torch

    modules = (getattr(torch, name, None) for name in ACCELERATORS)
    return (
        torch.version.hip is not None
        or any(m.is_available() for m in modules if hasattr(m, "is_available"))
        or torch.accelerator.is_available()
    )

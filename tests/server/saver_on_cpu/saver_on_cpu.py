"""A plug-in for test servers: a memory saver for a CPU, which overwrites memory instead of releasing it."""

from contextlib import contextmanager, nullcontext

import torch
from torch.overrides import TorchFunctionMode

POISON = 0xFF  # NaN in bf16 and fp16, -1 as an index
CREATE = "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create"
CHECK = "sglang_kvc.options.start.check_memory_saver"


class Recording(TorchFunctionMode):
    """Records the storages of all tensors created within it."""

    def __init__(self, storages: dict):
        super().__init__()
        self.storages = storages

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.storages[out.untyped_storage().data_ptr()] = out.untyped_storage()
        return out


class Saver:
    """Replaces SGLang's adapter of `torch_memory_saver`. Tensors created in a region are poisoned while it is paused
    and must not be written during that time."""

    enabled = True

    def __init__(self):
        self.regions: dict[str, dict] = {}

    def bytes_of(self, tag: str) -> list[torch.Tensor]:
        storages = self.regions.get(tag, {}).values()
        return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages]

    @contextmanager
    def region(self, tag, enable_cpu_backup=False):
        with Recording(self.regions.setdefault(tag, {})):
            yield

    def pause(self, tag):
        if tag == "kv_cache":  # a weight update restores the weights
            for memory in self.bytes_of(tag):
                memory.fill_(POISON)

    def resume(self, tag):
        if tag == "kv_cache" and not all((memory == POISON).all() for memory in self.bytes_of(tag)):
            raise RuntimeError("memory was written that had been given back")

    def configure_subprocess(self):
        return nullcontext()

    cuda_graph = disable = configure_subprocess


SAVER = Saver()


def load():
    """SGLang synchronizes the accelerator that torch was built for, whether or not one is present."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(CREATE, lambda orig, enable: SAVER if enable else orig(enable), HookType.AROUND)
    HookRegistry.register(CHECK, lambda orig, config, on, cpu: None, HookType.AROUND)
    torch.cuda.synchronize = lambda device=None: None

"""A plug-in for test servers: DP attention on a CPU without SGLang's own CPU engine.

SGLang pins memory, copies rows with Triton and calls GPU collectives wherever that engine is off.
"""

import torch
import torch.distributed as dist

GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
COPY = "sglang.srt.layers.dp_attention.memcpy_func"


def copy_rows(dst, src, dim, offset, sz, offset_src):
    """Copy `sz` rows from or to position `offset` of the rows of all ranks."""
    n, at = int(sz), int(offset)
    if offset_src:
        dst[:n].copy_(src[at : at + n])
    else:
        dst[at : at + n].copy_(src[:n])


def gather(self, output, input):
    dist.all_gather_into_tensor(output, input.contiguous(), group=self.device_group)


def scatter(self, output, input):
    total = input.clone()
    dist.all_reduce(total, group=self.device_group)
    output.copy_(total.chunk(self.world_size)[self.rank_in_group])


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(COPY, copy_rows, HookType.REPLACE)
    HookRegistry.register(f"{GROUP}.all_gather_into_tensor", gather, HookType.REPLACE)
    HookRegistry.register(f"{GROUP}.reduce_scatter_tensor", scatter, HookType.REPLACE)
    tensor = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **options: tensor(*args, **options)

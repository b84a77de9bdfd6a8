"""`sglang.srt.managers.schedule_batch.release_req`: what is evicted when a running request is retracted.

SGLang then makes room for 20 more tokens of each request that stays. Most of them will lie in packed blocks. Counting
them as uncompressed would evict several times more cached tokens than needed.
"""

from __future__ import annotations

import math

from .registry import hook

RELEASE = "sglang.srt.managers.schedule_batch.release_req"
PARAMETERS = (
    "req remaing_req_count server_args req_to_token_pool token_to_kv_pool_allocator tree_cache hisparse_coordinator "
    "offload_kv"
)


def around_release_req(orig, **arguments):
    from sglang.srt.environ import envs

    from sglang_kvc.adapter.allocator import KvcAllocator

    allocator = arguments["token_to_kv_pool_allocator"]
    if not isinstance(allocator, KvcAllocator):
        return orig(**arguments)
    runtime, tokens = allocator.runtime, arguments["remaing_req_count"] * envs.SGLANG_RETRACT_DECODE_STEPS.get()
    with runtime.exact_need(math.ceil(runtime.packed_tokens(tokens, runtime.policy.rung_of(None)))):
        return orig(**arguments)


def register() -> None:
    hook(RELEASE, "around", PARAMETERS, around_release_req)

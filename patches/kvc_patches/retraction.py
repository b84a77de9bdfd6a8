"""`schedule_batch.release_req`: what stays of a running request that is retracted, and how much is evicted for it.

SGLang frees all that the request wrote. Here its full blocks go to the tree first, which evicts what it must.

SGLang makes room for 20 more tokens of each request that stays. Most of these tokens end in packed blocks; counted as
uncompressed they would evict several times more cached tokens than needed.
"""

from __future__ import annotations

import math

from .lookup import runtime_of
from .registry import hook

RELEASE = "sglang.srt.managers.schedule_batch.release_req"
PARAMETERS = (
    "req remaing_req_count req_to_token_pool token_to_kv_pool_allocator tree_cache hisparse_coordinator "
    "offload_kv"
)


def around_release_req(orig, **arguments):
    from sglang.srt.environ import envs

    runtime = runtime_of(arguments["token_to_kv_pool_allocator"])
    if runtime is None:
        return orig(**arguments)
    arguments["tree_cache"].keep_retracted(arguments["req"])
    tokens = arguments["remaing_req_count"] * envs.SGLANG_RETRACT_DECODE_STEPS.get()
    need = runtime.capacity.packed_tokens(tokens, runtime.policy.format_id_of(None))
    with runtime.capacity.exact_need(math.ceil(need)):
        return orig(**arguments)


def register() -> None:
    hook(RELEASE, "around", PARAMETERS, around_release_req)

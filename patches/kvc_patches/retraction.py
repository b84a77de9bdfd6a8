"""`schedule_batch.release_req`: keeps the blocks of a retracted request, and limits the eviction that follows.

SGLang frees everything that the request wrote. Here its full blocks first go to the tree, which evicts if necessary.

SGLang makes room for 20 more tokens of each remaining request. Most of these tokens end up in packed blocks. Counted as
uncompressed, they would evict several times more cached tokens than needed.
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

"""Every hook into SGLang, one file per SGLang module touched, each with the signature that it relies on.

`load` only registers; SGLang applies all hooks afterwards and merely logs what fails, so `registry.verify` checks them
before a pool is built.
"""


def load() -> None:
    """Entry point of group `sglang.srt.plugins`. SGLang calls it once in each process; with `--kv-backend default`
    every hook passes its call through unchanged."""
    from . import server_args

    server_args.register()
    from . import admission, allocation, fused_store, invariants, memory_pool, scheduler, triton_support

    for module in (admission, allocation, fused_store, invariants, memory_pool, scheduler, triton_support):
        module.register()
    try:
        from . import internal_state, metrics
    except ImportError:
        return
    internal_state.register()
    metrics.register()

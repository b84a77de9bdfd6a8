"""Every hook into SGLang, one file per SGLang module touched, each with the signature that it relies on.

`load` only registers; SGLang applies all hooks afterwards and merely logs what fails, so `registry.verify` checks them
before a pool is built.
"""


MODULES = (
    "server_args",
    "memory_pool",  # its hook verifies all others, so it is there even where a later module fails
    "admission",
    "allocation",
    "fused_store",
    "grammar",
    "internal_state",
    "invariants",
    "limits",
    "metrics",
    "requests",
    "retraction",
    "scheduler",
    "triton_support",
)


def load() -> None:
    """Entry point of group `sglang.srt.plugins`. SGLang calls it once in each process; with `--kv-backend default`
    every hook passes its call through unchanged."""
    from importlib import import_module

    for name in MODULES:
        import_module(f".{name}", __name__).register()
    import_module(".registry", __name__).loaded = True  # type: ignore[attr-defined]

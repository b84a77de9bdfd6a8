"""All hooks into SGLang, one file per concern, each with the signature that it relies on.

A hook asks the runtime and calls the original. `load` only registers: SGLang applies the hooks afterwards and only logs
those that fail, so `registry.verify` checks them before a pool is built. `patches/README.md` lists the state that is
passed past SGLang's signatures; `docs/porting.md` lists every hooked function. `sglang_kvc/adapter/` holds the classes
that SGLang calls by its own registries.
"""

from importlib import import_module

MODULES = (
    "server_args",
    "memory_pool",  # its hook verifies all others, so it is registered even where a later module fails
    "admission",
    "allocation",
    "experts",
    "fused_store",
    "internal_state",
    "invariants",
    "limits",
    "memory_saver",
    "metrics",
    "probes",
    "requests",
    "retraction",
    "scheduler",
    "sessions",
    "waiting_order",
    "weights",
)


def load() -> None:
    """Entry point of group `sglang.srt.plugins`. SGLang calls it once in each process; with `--kv-backend default`
    every hook passes its call through unchanged."""
    for name in MODULES:
        import_module(f".{name}", __name__).register()
    import_module(".registry", __name__).loaded = True  # type: ignore[attr-defined]

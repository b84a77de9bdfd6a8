"""`python -m kvc_patches`: the table of hooks, and where the installed SGLang differs from the recorded signatures.

It exits with 1 where a hook does not fit, and works with any SGLang version. See `docs/porting.md`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

from . import MODULES, registry


def main() -> int:
    for name in MODULES:
        if name == "server_args":  # refuses another version, and hooks a class
            continue
        try:
            import_module(f".{name}", __package__).register()
        except (ImportError, AttributeError) as e:
            print(f"{name}.py does not register: {e}")
    print("\n".join(["| file | hook | function in sglang.srt |", "|---|---|---|", *registry.table()]))
    lost = sorted(registry.TARGETS - set(registry.HOOKS) - {registry.SERVER_ARGS})
    changed = registry.changed_parameters()
    print(f"\nhooks written for SGLang {registry.SGLANG_VERSION}, installed {version('sglang')}")
    print("\n".join([*(f"{t}: not registered" for t in lost), *(f"{t}: {line}" for t, line in changed.items())]))
    return int(bool(lost or changed))


if __name__ == "__main__":
    raise SystemExit(main())

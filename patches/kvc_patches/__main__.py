"""`python -m kvc_patches`: the table of hooks, and where the installed SGLang differs from the recorded signatures.

It exits with 1 where a hook does not fit, and works with any SGLang version. `--compare OLD_SITE NEW_SITE` compares two
releases by their source instead. See `docs/porting.md`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

from . import MODULES, registry


def main() -> int:
    if sys.argv[1:]:
        return _compare(sys.argv[1:])
    for name in MODULES:
        if name == "server_args":  # refuses another version, and hooks a class
            continue
        try:
            import_module(f".{name}", __package__).register()
        except (ImportError, AttributeError) as e:
            print(f"{name}.py does not register: {e}")
    print("\n".join(["| file | hook | function in sglang.srt |", "|---|---|---|", *registry.table()]))
    missing = sorted(registry.TARGETS - set(registry.HOOKS) - {registry.SERVER_ARGS})
    changed = registry.changed_parameters()
    print(f"\nhooks written for SGLang {registry.SGLANG_VERSION}, installed {version('sglang')}")
    print("\n".join([*(f"{t}: not registered" for t in missing), *(f"{t}: {line}" for t, line in changed.items())]))
    return int(bool(missing or changed))


def _compare(argv: list[str]) -> int:
    from .compare import report

    if argv[0] != "--compare" or len(argv) != 3:
        print("usage: python -m kvc_patches [--compare OLD_SITE NEW_SITE]", file=sys.stderr)
        return 2
    lines, unchanged = report(*argv[1:])
    print("\n".join([*lines, "", f"{unchanged} more functions are the same in both"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

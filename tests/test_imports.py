"""The import graph, read from the source: which modules may import which others, SGLang and Triton."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"sglang_kvc": ROOT, "kvc_kernels": ROOT / "kernels", "kvc_patches": ROOT / "patches"}

# Folders and files of sglang_kvc, low to high: each imports only those before it.
ORDER = (
    "errors",
    "calibration",
    "policies",
    "cache",
    "options",
    "calibration.measure",  # a command that uses the settings; the files that it writes are lower
    "engine",
    "stats",
    "adapter",
    "cpu",
    "demo",
    "cli",
)

# Modules other than kvc_patches that may import sglang.srt, and the reason.
SGLANG = {
    "sglang_kvc.adapter": "subclasses the pool, allocator, radix cache and attention backend that SGLang calls",
    "sglang_kvc.cpu.platform_class": "subclasses SGLang's platform",
    "sglang_kvc.options.server_args": "subclasses SGLang's ServerArgs",
    "sglang_kvc.options.start": "reads what SGLang made of the arguments",
    "sglang_kvc.options.model_facts": "reads SGLang's ModelConfig, in the function that is given one",
}
# Modules that may import triton, in addition to the *_kernel files of kvc_kernels and GPU-only code.
NO_TRITON = ("sglang_kvc.cache", "sglang_kvc.options", "sglang_kvc.policies", "sglang_kvc.calibration")

# Modules of kvc_kernels that other packages may import.
ENTRANCES = ("kvc_kernels.ops", "kvc_kernels.formats", "kvc_kernels.layout", "kvc_kernels.store")
# Modules outside kvc_kernels that may also import its other modules, and the reason.
INNER_KERNELS = {
    "bench.kernels": "times single kernels and their tunings",
    "bench.rivals.decode": "tunes the decode kernel for the comparison",
}
# Modules of sglang_kvc that may choose by the device of a tensor, and the reason. Others leave the choice to the
# operations of kvc_kernels.
DEVICE_CHOICES = {
    "sglang_kvc.adapter.model_identity": "reads weights, which lie outside a page store, at the speed of their memory",
}

# (importer, imported) pairs that break a rule.
KNOWN: set[tuple[str, str]] = set()


class Import(NamedTuple):
    source: str
    target: str
    late: bool  # inside a function


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of all packages."""
    out = {}
    for package, folder in PACKAGES.items():
        for file in sorted((folder / package).rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return out


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(source: str, file: Path) -> list[Import]:
    package = source if file.name == "__init__.py" else source.rpartition(".")[0]
    out: list[Import] = []

    def visit(node: ast.AST, late: bool) -> None:
        if _is_type_checking(node):
            return  # names in annotations, never imported at run time
        if isinstance(node, ast.Import):
            out.extend(Import(source, alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:  # a name in a module, or a module of a package
                name = f"{base}.{alias.name}"
                out.append(Import(source, name if name in modules() else base, late))
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, late)

    visit(ast.parse(file.read_text()), False)
    return [i for i in out if (i.source, i.target) not in KNOWN]


@cache
def imports() -> tuple[Import, ...]:
    return tuple(i for name, file in modules().items() for i in _imports(name, file))


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _folder(name: str) -> str | None:
    """The entry of `ORDER` that a module of sglang_kvc belongs to, None for the package itself."""
    inner = name.removeprefix("sglang_kvc").removeprefix(".")
    return max((f for f in ORDER if _within(inner, f)), key=len, default=None)


def _circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_have_no_import_circle(package):
    graph: dict[str, set[str]] = {name: set() for name in modules() if _within(name, package)}
    for i in imports():
        # An import from a module's own package needs a name that `__init__` has already bound.
        if not i.late and i.source in graph and i.target in graph and not _within(i.source, i.target):
            graph[i.source].add(i.target)
    assert _circle(graph) == []


def test_every_folder_has_place_in_order():
    inside = {name for name in modules() if _within(name, "sglang_kvc") and name != "sglang_kvc"}
    assert {name for name in inside if _folder(name) is None} == set()
    assert set(ORDER) == {_folder(name) for name in inside}


def test_folders_import_only_lower_folders():
    """Late imports also count, because they would hide a circle."""
    upward = [
        f"{i.source} imports {i.target}"
        for i in imports()
        if _within(i.source, "sglang_kvc") and _within(i.target, "sglang_kvc") and i.target != "sglang_kvc"
        and ORDER.index(_folder(i.source)) < ORDER.index(_folder(i.target))
    ]  # fmt: skip
    assert upward == []


def test_order_matches_package_docstring():
    text = ast.get_docstring(ast.parse(modules()["sglang_kvc"].read_text()))
    assert " < ".join(ORDER) in " ".join(text.split())


@pytest.mark.parametrize("package", ["kvc_kernels", "sglang_kvc"])
def test_packages_import_only_lower_packages(package):
    higher = {"kvc_kernels": ("sglang_kvc", "kvc_patches"), "sglang_kvc": ("kvc_patches",)}[package]
    upward = [i for i in imports() if _within(i.source, package) and any(_within(i.target, h) for h in higher)]
    assert upward == []


def _bench() -> dict[str, Path]:
    return {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in (ROOT / "bench").rglob("*.py")}


def test_kernels_are_imported_through_entrances():
    outside = [i for i in imports() if not _within(i.source, "kvc_kernels")]
    outside += [i for name, file in _bench().items() for i in _imports(name, file)]
    inner = [i for i in outside if _within(i.target, "kvc_kernels") and i.target not in ENTRANCES]
    assert [i for i in inner if not any(_within(i.source, a) for a in INNER_KERNELS)] == []
    assert {a for a in INNER_KERNELS if not any(_within(i.source, a) for i in inner)} == set(), "unused exceptions"


def _compares_device(node: ast.AST) -> bool:
    """Whether a node is a comparison with `device.type` or `x.device.type`, or reads `x.is_cuda` or `x.is_cpu`."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_cpu")
    sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    return any(ast.unparse(side).endswith("device.type") for side in sides)


@pytest.mark.parametrize(
    "text, compares",
    [
        ("x.device.type == 'cpu'", True),
        ("'cuda' != device.type", True),
        ("x.is_cuda", True),
        ("{'device': x.device.type}", False),
        ("store.on_gpu", False),
    ],
)
def test_device_comparisons_are_recognized(text, compares):
    assert any(_compares_device(node) for node in ast.walk(ast.parse(text))) == compares


def test_few_modules_choose_by_device_of_a_tensor():
    inside = {name: file for name, file in modules().items() if _within(name, "sglang_kvc")}
    users = {name for name, file in inside.items() if any(map(_compares_device, ast.walk(ast.parse(file.read_text()))))}
    assert users == set(DEVICE_CHOICES)


def test_sglang_is_imported_in_few_places():
    users = {i.source for i in imports() if _within(i.target, "sglang")}
    allowed = ("kvc_patches", *SGLANG)
    assert {u for u in users if not any(_within(u, a) for a in allowed)} == set()
    assert {a for a in allowed if not any(_within(u, a) for u in users)} == set(), "exceptions without a use"


def test_cpu_records_and_settings_import_no_triton():
    users = {i.source for i in imports() if _within(i.target, "triton")}
    assert {u for u in users if any(_within(u, folder) for folder in NO_TRITON)} == set()

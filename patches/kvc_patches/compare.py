"""`python -m kvc_patches --compare OLD_SITE NEW_SITE`: changes in the parts of SGLang that the plug-in relies on.

Each folder holds a `sglang` package, installed or unpacked. Both are read as source, so neither must be importable.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from . import registry

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    module: str
    node: ast.AST


class Site:
    """Functions and classes of the package `sglang` in a folder, by dotted path."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "sglang").is_dir():
            raise SystemExit(f"error: {self.folder} has no folder sglang; give the folder that holds the package.")
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        path = self.folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, target: str) -> Found | None:
        """The definition of a function, method or class, found through imports and base classes."""
        module, _, name = target.rpartition(".")
        if self.tree(module) is not None:
            return self._named(module, name)
        owner = self.find(module) if module else None
        return self.methods(owner).get(name) if owner else None

    def _named(self, module: str, name: str) -> Found | None:
        tree = self.tree(module)
        imported = None
        for node in _top(tree) if tree else ():
            if isinstance(node, (Function, ast.ClassDef)) and node.name == name:
                return Found(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        imported = imported or (self._source(module, node), alias.name)
        return self._named(*imported) if imported and imported[0].startswith("sglang") else None

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        is_package = self.folder.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".") + ["x"] * is_package
        return ".".join([*parts[: -node.level], *([node.module] if node.module else [])])

    def methods(self, owner: Found) -> dict[str, Found]:
        """Methods of a class by name, those of its bases included."""
        out: dict[str, Found] = {}
        for base in reversed(getattr(owner.node, "bases", [])):
            if isinstance(base, ast.Name) and (above := self._named(owner.module, base.id)):
                out |= self.methods(above)
        body = getattr(owner.node, "body", [])
        return out | {n.name: Found(owner.module, n) for n in body if isinstance(n, Function)}


def _top(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements of a module, also those under `if` and `try`."""
    todo: list[ast.AST] = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            yield node
            if isinstance(node, (ast.If, ast.Try)):
                todo.append(node)


class Subclass(NamedTuple):
    """name: name of our class.
    base: dotted path of its base class in SGLang.
    methods: names of its methods.
    reads: names that it reads from `self` or `super()`.
    """

    name: str
    base: str
    methods: set[str]
    reads: set[str]


def subclasses() -> list[Subclass]:
    """Every class of `sglang_kvc` with each of its base classes in SGLang, direct or through another of our classes."""
    (folder,) = find_spec("sglang_kvc").submodule_search_locations
    classes: dict[str, tuple[ast.ClassDef, dict[str, str]]] = {}
    for path in sorted(Path(folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
            for alias in node.names
        }
        classes |= {n.name: (n, imported) for n in tree.body if isinstance(n, ast.ClassDef)}

    def in_sglang(name: str) -> Iterator[str]:
        node, imported = classes[name]
        for base in (b.id for b in node.bases if isinstance(b, ast.Name)):
            if base in imported:
                yield imported[base]
            elif base in classes:
                yield from in_sglang(base)

    out = []
    for name, (node, _) in classes.items():
        methods = {n.name for n in node.body if isinstance(n, Function)}
        reads = {
            n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self", "super()")
        }
        out += [Subclass(name, base, methods, reads) for base in in_sglang(name)]
    return out


def _parameters(node: ast.AST) -> list[str]:
    """Parameters with their defaults, as text, without annotations."""
    args = getattr(node, "args", None)
    if args is None:
        return []
    for a in ast.walk(args):
        if isinstance(a, ast.arg):
            a.annotation = None
    return ast.unparse(args).split(", ")


def _body(node: ast.AST) -> str:
    body = node.body  # type: ignore[attr-defined]
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return ast.dump(ast.Module(body[documented:], []))


def change(old: Found | None, new: Found | None) -> str | None:
    """The change between two releases as text, None if nothing changed."""
    if old is None or new is None:
        return "not found" if new is old else "new" if old is None else "gone"
    before, after = _parameters(old.node), _parameters(new.node)
    gone, added = [p for p in before if p not in after], [p for p in after if p not in before]
    parts = [*(f"-{p}" for p in gone), *(f"+{p}" for p in added)]
    parts = [" ".join(parts)] if parts else ["other order"] if before != after else []
    if [ast.dump(d) for d in old.node.decorator_list] != [ast.dump(d) for d in new.node.decorator_list]:  # type: ignore
        parts.append("decorators")
    if _body(old.node) != _body(new.node):
        parts.append("body")
    return ", ".join(parts) or None


def report(old_folder: str | Path, new_folder: str | Path) -> tuple[list[str], int]:
    """The table's lines, and the number of functions that did not change."""
    old, new = Site(old_folder), Site(new_folder)
    rows = [("hook", t, change(old.find(t), new.find(t))) for t in sorted(registry.TARGETS - {registry.SERVER_ARGS})]
    for ours in subclasses():
        owners = old.find(ours.base), new.find(ours.base)
        before, after = ({} if o is None else s.methods(o) for s, o in zip((old, new), owners))
        if owners[1] is None:
            rows.append((ours.name, ours.base, "gone" if owners[0] else "not found"))
        for method in sorted({*before, *after}):
            what = change(before.get(method), after.get(method))
            use = "overrides" if method in ours.methods else "reads" if method in ours.reads else None
            if use or (what in ("new", "gone") and not method.startswith("_")):
                rows.append((f"{ours.name} {use}" if use else ours.name, f"{ours.base}.{method}", what))
    lines = [f"| {user} | `{t.removeprefix('sglang.srt.')}` | {what} |" for user, t, what in rows if what]
    return ["| used by | in sglang.srt | change |", "|---|---|---|", *lines], sum(what is None for *_, what in rows)

"""`python -m kvc_patches --compare`: its report on two small packages."""

from __future__ import annotations

import pytest

from kvc_patches import compare, registry

CACHE = "sglang.srt.mem_cache.radix_cache"
OLD = {
    "srt/mem_cache/base.py": """
class Base:
    def evict(self, num_tokens): return 1
    def flush(self): return 2
    def _order(self): return 3
    def gone(self): return 4
""",
    "srt/mem_cache/radix_cache.py": """
from sglang.srt.mem_cache.base import Base
class RadixCache(Base):
    def match(self, key: str, limit=None): return key
    def insert(self, key): return key
""",
    "srt/mem_cache/__init__.py": "",
    "srt/run.py": """
def step(batch, overlap): return batch
def same(batch):
    '''Old words.'''
    return batch
def lost(batch): return batch
def moved(batch): return batch
""",
}
NEW = {
    "srt/mem_cache/base.py": """
class Root:
    def evict(self, params): return 1
    def flush(self): return 2
    def _order(self): return 30
    def lock(self): return 5
class Base(Root): pass
""",
    "srt/mem_cache/radix/__init__.py": "from .tree import RadixCache",
    "srt/mem_cache/radix/tree.py": """
from ..base import Base
class RadixCache(Base):
    def match(self, key: bytes, limit=0): return key
    @property
    def insert(self, key): return [key]
""",
    "srt/mem_cache/radix_cache.py": """
if True:
    from sglang.srt.mem_cache.radix import RadixCache
""",
    "srt/run.py": """
from sglang.srt.steps import moved
def step(batch, *, mode="fast"): return batch
def same(batch: list) -> list:
    '''New words.'''
    return batch
""",
    "srt/steps.py": "def moved(batch): return batch",
}
OURS = [
    compare.Subclass("Tree", f"{CACHE}.RadixCache", {"evict", "insert", "own"}, {"_order", "match"}),
    compare.Subclass("Pool", "sglang.srt.pool.Pool", {"size"}, set()),
]


@pytest.fixture
def sites(tmp_path, monkeypatch):
    for name, files in (("old", OLD), ("new", NEW)):
        for path, text in files.items():
            file = tmp_path / name / "sglang" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    hooks = {f"sglang.srt.run.{name}" for name in ("step", "same", "lost", "moved", "never")}
    monkeypatch.setattr(registry, "TARGETS", frozenset({*hooks, f"{CACHE}.RadixCache.flush", registry.SERVER_ARGS}))
    monkeypatch.setattr(compare, "subclasses", lambda: OURS)
    return str(tmp_path / "old"), str(tmp_path / "new")


def test_changed_functions_are_listed(sites):
    lines, unchanged = compare.report(*sites)
    tree = "mem_cache.radix_cache.RadixCache"
    assert lines[2:] == [
        "| hook | `run.lost` | gone |",
        "| hook | `run.never` | not found |",
        "| hook | `run.step` | -overlap +* +mode='fast' |",
        f"| Tree reads | `{tree}._order` | body |",
        f"| Tree overrides | `{tree}.evict` | -num_tokens +params |",
        f"| Tree | `{tree}.gone` | gone |",
        f"| Tree overrides | `{tree}.insert` | decorators, body |",
        f"| Tree | `{tree}.lock` | new |",
        f"| Tree reads | `{tree}.match` | -limit=None +limit=0 |",
        "| Pool | `pool.Pool` | not found |",
    ]
    assert unchanged == 3  # `flush`, `moved`, and a function in which only docstring and annotations differ


def test_equal_versions_list_no_changes(sites):
    lines, _ = compare.report(sites[0], sites[0])
    assert lines[2:] == ["| hook | `run.never` | not found |", "| Pool | `pool.Pool` | not found |"]


def test_folder_without_sglang_is_rejected(sites, tmp_path):
    with pytest.raises(SystemExit, match="no folder sglang"):
        compare.report(sites[0], tmp_path)


def test_our_subclasses_are_found():
    bases = {(s.name, s.base) for s in compare.subclasses()}
    assert ("KvcRadixCache", "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache") in bases
    assert ("KvcServerArgs", registry.SERVER_ARGS) in bases
    tree = next(s for s in compare.subclasses() if s.name == "KvcRadixCache")
    assert "evict" in tree.methods and "unlock" in tree.reads

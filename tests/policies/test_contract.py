"""The contract of every scorer, share and policy. Cases come from the registries, so a new entry there is tested
automatically.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from kvc_kernels import ops
from sglang_kvc.policies import BLOCK, POLICIES, SCORERS, SHARES, Policy, Prune, make_policy
from sglang_kvc.policies.scorers.base import RowScorer

from .support import H, L, P, World, statistics

SINKS = 5
CASES: dict[str, Policy] = {name: cls() for name, cls in POLICIES.items()}
CASES["sinks of more than a page"] = Prune(sinks=20, keep=0.1)
for name in SCORERS:
    CASES |= {f"scorer {name}, keep {k}": Prune(scorer=name, keep=k, sinks=SINKS) for k in (0.3, 0.5)}
for name in SHARES:
    CASES |= {f"share {name}, keep {k}": Prune(share=name, keep=k, sinks=SINKS) for k in (0.01, 0.7, 1)}
    CASES[f"share {name}, low"] = Prune(share=name, low="k2v2", sinks=SINKS)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    return statistics(tmp_path_factory.mktemp("statistics"))


@pytest.fixture(params=CASES, ids=str)
def policy(request, file) -> Policy:
    policy = CASES[request.param]
    if isinstance(policy, Prune) and policy.needs:
        return type(policy)(**{f.name: getattr(policy, f.name) for f in fields(policy)} | {"calibration": file})
    return policy


def pages(world: World, tiers: torch.Tensor) -> torch.Tensor:
    """Pages `[n, L, H]` that the tiers take in the packed block format."""
    total = torch.zeros(tiers.shape[:3], dtype=torch.int64)
    block_format = world.store.block_formats[1]
    for tier, fmt in ((2, block_format.high), (1, block_format.low)):
        if fmt is not None:
            total += -(-(tiers == tier).sum(-1) // world.store.layout.page(fmt).tokens)
    return total


def test_contract(policy):
    world = World.make(policy)
    block_format = world.store.block_formats[1]
    tiers = world.tiers()
    assert tiers.dtype == torch.int8 and tiers.shape == (3, L, H, P)
    assert set(tiers.unique().tolist()) <= ({0, 2} if block_format.low is None else {0, 1, 2})

    # A compaction needs no plan if everything is kept.
    assert not policy.keeps_all or policy.plan(world.evidence(), block_format) is None

    # Plans are deterministic, and each block's plan is independent of the blocks planned with it and of their order.
    assert torch.equal(world.tiers(), tiers)
    assert torch.equal(world.tiers((2, 0, 1)), tiers[[2, 0, 1]])
    assert torch.equal(world.tiers((1,)), tiers[1:2])

    # The number of pages is that of the block format, both in the plan and in the store that applies it.
    planned = pages(world, tiers)
    by_block = planned.sum((1, 2))
    assert (by_block == block_format.pages).all() if block_format.exact else (by_block <= block_format.pages).all()
    if isinstance(policy, Prune):
        assert (planned >= 1).all()
        assert (tiers[0, :, :, : policy.sinks] == 2).all()
        if policy.low is not None:
            assert (tiers > 0).all() != (policy.name == "arkv")
    moved = ops.compact(world.store, world.row[:3], 1, tiers, from_format=0)
    assert moved.tolist() == by_block.tolist()
    ops.check_invariants(world.store)


def test_only_sinks_are_protected(monkeypatch):
    """Later tokens score higher. In the sequence's first block the sinks are kept anyway, and the token after them is
    dropped; in the second block the first tokens are dropped."""

    class Later(RowScorer):
        name = "later"

        def score_layer(self, evidence, layer):
            return evidence.positions()[:, None, :].expand(-1, evidence.layout.heads, -1)

    monkeypatch.setitem(SCORERS, "later", Later)
    sinks = 4
    kept = World.make(Prune(scorer="later", share="uniform", sinks=sinks)).tiers((0, 1)) == 2
    assert kept[0, :, :, :sinks].all() and not kept[0, :, :, sinks].any()
    assert not kept[1, :, :, :sinks].any()


def test_block_scope_uses_only_rows_of_block(policy):
    """Other tokens after a block, other queries and other block ids give the same plan; a different plan needs a wider
    scope."""
    first = World.make(policy)
    other = World.make(policy, first_block=5, change_after=P)
    assert not torch.equal(first.q, other.q)
    same = torch.equal(first.tiers((0,)), other.tiers((0,)))
    if policy.scope == BLOCK:
        assert same and not policy.collects_scores
    else:
        assert policy.collects_scores


def test_settings_reach_policy(policy):
    from types import SimpleNamespace

    from sglang_kvc.options.resolve import resolve_config

    given = {f"kvc_{f.name}": getattr(policy, f.name) for f in fields(policy)}
    config = resolve_config(SimpleNamespace(kvc_policy=policy.name, **given, kvc_page_bytes=None))
    assert make_policy(config) == policy


@pytest.mark.parametrize("registry", [SCORERS, SHARES, POLICIES], ids=["scorers", "shares", "policies"])
def test_classes_are_registered_under_their_names(registry):
    for name, cls in registry.items():
        assert cls.name == name == name.lower() and cls.__doc__.strip()
        assert hash(cls()) == hash(cls())


def test_example_scorer_of_docs_works(monkeypatch):
    """The docs' example of a custom policy works as printed: a file, a line, a name on the command line."""
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    code = next(x for x in re.findall(r"```python\n(.*?)```", page, re.S) if "RowScorer" in x)
    module = {"__name__": "sglang_kvc.policies.scorers.own", "__package__": "sglang_kvc.policies.scorers"}
    exec(compile(code, "policies.md", "exec", dont_inherit=True), module)
    (cls,) = (x for x in module.values() if getattr(x, "__module__", "") == module["__name__"])
    monkeypatch.setitem(SCORERS, cls.name, cls)
    test_contract(Prune(scorer=cls.name, share="ada"))
    test_block_scope_uses_only_rows_of_block(Prune(scorer=f"{cls.name}:power=2"))


@pytest.mark.parametrize("name, kind, cls", [
    *((name, "scorer", cls) for name, cls in SCORERS.items()), *((name, "share", cls) for name, cls in SHARES.items())
])  # fmt: skip
def test_page_about_policies_has_all_settings(name, kind, cls):
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    label = f"`{name}` ({kind})" if name in SCORERS and name in SHARES else f"`{name}`"
    settings = ", ".join(f"`{f.name}` {str(f.default).lower().removesuffix('.0')}" for f in fields(cls))
    assert not settings or f"| {label} | {settings} |" in page

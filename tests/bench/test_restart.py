"""The restart benchmark: damage changes every file, and small differences do not count as changed answers."""

import random
from types import SimpleNamespace

from bench.serve import restart


def test_damage_always_changes_file(tmp_path):
    rng, path = random.Random(1), tmp_path / "block.kvc"
    shorter = 0
    for _ in range(200):
        content = rng.randbytes(rng.randint(1, 40))
        path.write_bytes(content)
        restart.damage(path, rng)
        now = path.read_bytes()
        assert now != content and len(now) <= len(content)
        shorter += len(now) < len(content)
    assert 50 < shorter < 150


def test_answer_counts_as_changed_beyond_tolerance():
    def answer(ids, *logprobs, top=()):
        return SimpleNamespace(ids=ids, logprobs=logprobs, top=list(top))

    def changed(after):
        return restart.changed(answer([1, 2], -0.1, -0.2, top=({1: -0.1}, {2: -0.2, 3: -0.25})), after)

    assert not changed(answer([1, 2], -0.1, -0.2005))
    assert changed(answer([1, 2], -0.1, -0.202))
    assert changed(answer([1, 3], -0.1, -0.2, top=({1: -0.1}, {3: -0.2, 2: -0.25})))

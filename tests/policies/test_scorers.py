"""Every scorer against its paper's equation, token by token in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvc_kernels import ops
from kvc_kernels.formats import FORMATS
from sglang_kvc.policies import Prune
from sglang_kvc.policies.published.arkv import Arkv

from .support import DECODED, PROMPT, SCALE, D, G, H, L, P, World, by_block, score, statistics

N = PROMPT + DECODED
SAMPLED = ops.ScoreSampling().decode_stride
FORWARDS = [(0, PROMPT), *((PROMPT + i, PROMPT + i + 1) for i in range(DECODED))]


def heads(kv: int) -> range:
    return range(kv * G, (kv + 1) * G)


def pooled(scores: np.ndarray, size: int, best) -> np.ndarray:
    """For each token, `best` over the tokens of its block within size // 2 of it; `[L, H, N]`, whole blocks only."""
    out = np.zeros_like(scores)
    for j in range(3 * P):
        near = [t for t in range(j - size // 2, j + size // 2 + 1) if t // P == j // P and t >= 0]
        out[..., j] = best(scores[..., near], -1)
    return out


def chosen(first: int, last: int, window: int | None = None, stride: int = 1) -> tuple[list[int], int]:
    """The sampled queries of a forward and their weights."""
    step = SAMPLED if last - first == 1 else stride
    every = range(first if window is None else max(first, last - window), last)
    return [i for i in every if i % step == step - 1], step


def summed(a: np.ndarray, window: int | None, power: int, skip: int, stride: int = 1) -> np.ndarray:
    """sum over chosen queries i >= j + max(1, skip) and over a KV head's query heads of A_hij^power."""
    out = np.zeros((L, H, N))
    for first, last in FORWARDS:
        queries, step = chosen(first, last, window, stride)
        for i in queries:
            for j in range(i + 1):
                if i - j >= max(1, skip):
                    for kv in range(H):
                        out[:, kv, j] += step * sum(a[:, h, i, j] ** power for h in heads(kv))
    return out


@pytest.fixture(scope="module")
def attention() -> np.ndarray:
    return World.make(Prune()).attention()


def check(scorer: str, want: np.ndarray, **options) -> None:
    got = score(World.make(Prune(scorer=scorer, **options)))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    "scorer, window, power, skip, pool, best",
    [
        ("h2o", None, 1, 0, 1, np.max),
        ("snapkv", 32, 1, 0, 7, np.max),
        ("snapkv:window=16,pool=5,kind=mean", 16, 1, 0, 5, np.mean),
        ("kv-compress", 8, 2, 0, 7, np.max),
        ("kv-compress:power=1", 8, 1, 0, 7, np.max),
        ("kv-compress-full", None, 2, 10, 1, np.max),
    ],
)
def test_summed_attention(attention, scorer, window, power, skip, pool, best):
    check(scorer, by_block(pooled(summed(attention, window, power, skip), pool, best)))


@pytest.mark.parametrize("scorer, power, skip", [("h2o", 1, 0), ("kv-compress-full", 2, 10)])
def test_strided_queries(attention, scorer, power, skip):
    check(f"{scorer}:stride=4", by_block(summed(attention, None, power, skip, 4)))


def test_recent_tokens_come_before_heavy_hitters(attention):
    got = score(World.make(Prune(scorer="h2o:recent=0.25")))
    want = by_block(summed(attention, None, 1, 0))
    np.testing.assert_allclose(got[..., : 3 * P // 4], want[..., : 3 * P // 4], rtol=2e-4, atol=1e-6)
    assert got[..., 3 * P // 4 :].min() > got[..., : 3 * P // 4].max()


@pytest.mark.parametrize("window, stride", [(None, 1), (8, 1), (None, 8), (8, 4)])
def test_mean_attention(attention, window, stride):
    total, seen = np.zeros((L, H, N)), np.zeros(N)
    for first, last in FORWARDS:
        queries, step = chosen(first, last, window, stride)
        for kv in range(H):
            sums = [sum((attention[:, h, i] * (np.arange(N) < i) for i in queries), np.zeros(1)) for h in heads(kv)]
            total[:, kv] += step * np.stack(np.broadcast_arrays(*sums, total[:, kv])[:-1]).max(0)
        # With a window only queries after the whole block count.
        seen += [step * sum(i > (j if window is None else j // P * P + P - 1) for i in queries) for j in range(N)]
    check(f"mean-attention:window={window or 0},stride={stride}", by_block(total / np.maximum(seen, 1)))


def test_keydiff():
    k = World.make(Prune()).k.double().numpy()
    want = np.zeros((3, L, H, P))
    for b, l, h in np.ndindex(3, L, H):
        block = k[l, b * P : (b + 1) * P, h]
        unit = block / np.linalg.norm(block, axis=1, keepdims=True)
        anchor = unit.mean(0)
        for i in range(P):
            want[b, l, h, i] = -unit[i] @ anchor / np.linalg.norm(anchor)
    check("keydiff", want)


def test_streaming_llm_and_random():
    got = score(World.make(Prune(scorer="streaming-llm")))
    assert (np.diff(got, axis=-1) > 0).all() and (got == got[:1, :1, :1]).all()
    got = score(World.make(Prune(scorer="random")))
    assert len(np.unique(got)) == got.size and abs(got.mean() - 0.5) < 0.05
    # The hash of position 70, layer 1, head 0 must be the same on every machine and in every version; computed by hand.
    x = (70 * 0x9E3779B1 + 2 * 0x85EBCA77) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    assert got[1, 1, 0, 70 - P] == (x >> 8) / 2**24


def rotation(position: int, frequencies: np.ndarray) -> np.ndarray:
    """The matrix of the rotary embedding, halves paired."""
    r, half = np.eye(D), len(frequencies)
    for j, f in enumerate(frequencies):
        c, s = np.cos(position * f), np.sin(position * f)
        r[j, j] = r[half + j, half + j] = c
        r[j, half + j], r[half + j, j] = -s, s
    return r


@pytest.mark.parametrize("covariance", ["true", "false"])
@pytest.mark.parametrize("rotated", [False, True])
def test_expected_attention(tmp_path, covariance, rotated):
    from safetensors.torch import load_file, save_file

    path, horizon, epsilon = statistics(tmp_path), 16, 0.5
    stats = load_file(path)
    if rotated:
        del stats["rotary_frequencies"]
        save_file(stats, path := str(tmp_path / "rotated.safetensors"))
    mu, cov = (stats[n].double().numpy() for n in ("query_mean", "query_covariance"))
    spec = f"expected-attention:epsilon={epsilon},horizon={horizon},covariance={covariance}"
    world = World.make(Prune(scorer=spec, calibration=path))
    k, v = world.k.double().numpy(), world.v.double().numpy()
    want = np.zeros((3, L, H, P))
    for b, l, h in np.ndindex(3, L, H):
        r = np.eye(D)
        if not rotated:
            f = stats["rotary_frequencies"].double().numpy()
            r = np.mean([rotation(t, f) for t in range((b + 1) * P, (b + 1) * P + horizon)], 0)
        at, share = range(b * P, (b + 1) * P), np.zeros(P)
        for g in heads(h):
            m, s = r @ mu[l, g], r @ cov[l, g] @ r.T
            z = np.array([SCALE * m @ k[l, i, h] + SCALE**2 / 2 * k[l, i, h] @ s @ k[l, i, h] for i in at])
            if covariance == "false":
                z = np.array([SCALE * m @ k[l, i, h] for i in at])
            share += np.exp(z) / np.exp(z).sum() / G
        want[b, l, h] = (share * P + epsilon) / P * np.linalg.norm(v[l, at, h], axis=-1)
    np.testing.assert_allclose(score(world), want, rtol=2e-3)


def test_expected_attention_is_an_expectation():
    """exp(mu.k + k S k / 2) is the mean of exp(q.k) over normal queries, checked by sampling."""
    gen = torch.Generator().manual_seed(0)
    keys, half = torch.randn(1, 1, 8, 4, generator=gen), torch.randn(4, 4, generator=gen) / 3
    mu = torch.randn(1, 4, generator=gen)
    q = mu + torch.randn(200_000, 4, generator=gen) @ half.T
    want = torch.exp(q @ keys[0, 0].T).mean(0)
    got = ops.expected_attention(keys, torch.ones(1, 1, 8, 1), mu, (half @ half.T)[None], 0.0, 1.0)
    assert torch.allclose(got[0, 0], want / want.sum(), rtol=0.05)


def pseudo_attention(world: World, stats: dict, horizon: int) -> np.ndarray:
    """A[b, l, h, m, i]: the attention of pseudo query m, at a position after block b, to that block's token i."""
    samples, f = (stats[name].double().numpy() for name in ("query_samples", "rotary_frequencies"))
    k, count = world.k.double().numpy(), samples.shape[2]
    out = np.zeros((3, L, H * G, count, P))
    for b, l, h, m in np.ndindex(3, L, H * G, count):
        q = rotation((b + 1) * P + m * horizon // count, f) @ samples[l, h, m]
        e = np.exp(SCALE * (k[l, b * P : (b + 1) * P, h // G] @ q))
        out[b, l, h, m] = e / e.sum()
    return out


@pytest.fixture(scope="module")
def pseudo(tmp_path_factory):
    from safetensors.torch import load_file

    path = statistics(tmp_path_factory.mktemp("pseudo"))
    return path, load_file(path)


@pytest.mark.parametrize("horizon", [1, 50])
def test_dapq(pseudo, horizon):
    path, stats = pseudo
    world = World.make(Prune(scorer=f"dapq:horizon={horizon}", calibration=path))
    want = pseudo_attention(world, stats, horizon).sum(3)
    np.testing.assert_allclose(score(world), want.reshape(3, L, H, G, P).sum(3), rtol=1e-3)


@pytest.mark.parametrize("settings, gamma, pool", [("", 200, 5), (":gamma=0,pool=1", 0, 1)])
def test_cake(pseudo, settings, gamma, pool):
    path, stats = pseudo
    world = World.make(Prune(scorer=f"cake{settings}", calibration=path))
    attention = pseudo_attention(world, stats, 128)
    means = attention.mean(3)
    changing = ((attention - means[:, :, :, None]) ** 2).mean(3)
    scores = (means + gamma * changing).reshape(3, L, H, G, P).mean(3)
    near = [range(max(0, i - pool // 2), min(P, i + pool // 2 + 1)) for i in range(P)]
    want = np.stack([scores[..., list(j)].mean(-1) for j in near], -1)
    np.testing.assert_allclose(score(world), want, rtol=1e-3)


def test_gate(pseudo):
    path, stats = pseudo
    world = World.make(Prune(scorer="gate", calibration=path))
    k, v = world.k.double().numpy(), world.v.double().numpy()
    w1, b1, w2, b2 = (stats[f"gate_{name}"].double().numpy() for name in ("in", "in_bias", "out", "out_bias"))
    want = np.zeros((3, L, H, P))
    for b, l, h, i in np.ndindex(3, L, H, P):
        t = b * P + i
        key = rotation(t, stats["rotary_frequencies"].double().numpy()).T @ k[l, t, h]
        hidden = w1[l, h] @ np.concatenate((key, v[l, t, h])) + b1[l, h]
        want[b, l, h, i] = w2[l, h] @ hidden.clip(0) + b2[l, h]
    np.testing.assert_allclose(score(world), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_compresskv(attention, pseudo, count):
    path, stats = pseudo
    sums = by_block(pooled(summed(attention, 8, 1, 0), 5, np.mean))
    want = np.zeros_like(sums)
    for l in range(L):
        best = sorted(range(H), key=lambda h: -float(stats["head_retrieval"][l, h]))[:count]
        want[:, l] = sum(sums[:, l, h] for h in best)[:, None]
    got = score(World.make(Prune(scorer=f"compresskv:heads={count}", calibration=path)))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)


def test_arkv(attention, pseudo):
    """Tokens have three states, in the order of the heavy hitters: high pages by layer, low pages by score, dropped."""
    policy = Arkv(calibration=pseudo[0], sinks=0)
    world = World.make(policy)
    sums, tiers = by_block(summed(attention, None, 1, 0)), world.tiers().numpy()
    high, low = (world.store.layout.page(f).tokens for f in (FORMATS["k8v8"], FORMATS["k4v2"]))
    pages = round(0.25 * L * H * P / high)
    preference = [2.0 * 0.4, 3.0 * 0.1]
    by_layer = ops.apportion(preference, pages, H, H * P // high)
    for b in range(3):
        rest = {}
        for l, h in np.ndindex(L, H):
            num_high = high * ops.spread(by_layer[l], H)[h]
            order = np.argsort(-sums[b, l, h], kind="stable")
            assert sorted(order[:num_high]) == sorted(np.flatnonzero(tiers[b, l, h] == 2))
            rest[l, h] = [order[i : i + low] for i in range(num_high, P, low)]
        worth = sorted(((-sums[b, l, h, page[0]], l, h, i) for (l, h), x in rest.items() for i, page in enumerate(x)))
        low_pages = worth[: round(0.25 * L * H * P / low)]
        stored = {(l, h, int(t)) for _, l, h, i in low_pages for t in rest[l, h][i]}
        assert stored == {tuple(map(int, x)) for x in np.argwhere(tiers[b] == 1)}
        assert (tiers[b] == 0).any()


@pytest.mark.parametrize("settings, window, values", [("", 32, True), (":window=0,values=false", None, False)])
def test_defensivekv(attention, settings, window, values):
    worst = np.zeros((L, H, N))
    for first, last in FORWARDS:
        for i in chosen(first, last, window)[0]:
            for kv in range(H):
                largest = attention[:, heads(kv), i, :i].max(1)
                worst[:, kv, :i] = np.maximum(worst[:, kv, :i], largest)
    want = by_block(pooled(worst, 5, np.mean))
    want = np.maximum(want, want.mean(-1, keepdims=True))
    world = World.make(Prune(scorer=f"defensivekv{settings}"))
    if values:
        want = want * by_block(np.linalg.norm(world.v.double().numpy(), axis=-1).transpose(0, 2, 1))
    np.testing.assert_allclose(score(world), want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("settings, step, length", [("", 1, 0), (",stride=4,decode_stride=2", 2, 0), ("", 1, N + 40)])
def test_lazy_eviction(attention, settings, step, length):
    alpha = 0.05
    last, longest = np.tile(np.arange(1.0, N + 1), (L, H, 1)), np.zeros((L, H, N))
    sure = np.ones((L, H, N), bool)
    for l, kv, j in np.ndindex(L, H, 3 * P):
        used = []
        for first, end in FORWARDS:
            # A prefill counts as its last important query.
            stride = step if end - first == 1 else 4 if settings else 1
            paid = {i + 1: attention[l, heads(kv), i, j].max() for i in range(first, end) if (i + 1) % stride == 0}
            sure[l, kv, j] &= all(abs(x - alpha) > 1e-5 for x in paid.values())
            used += [t for t, x in paid.items() if x >= alpha and t > j + 1][-1:]
        times = [j + 1, *used]
        last[l, kv, j] = times[-1]
        # The interval from the token's own step counts until the second use.
        longest[l, kv, j] = max(np.diff(times if len(used) < 2 else used), default=0)
    last, longest, sure = by_block(last), by_block(longest), by_block(sure)
    now = np.maximum(last.max((1, 2, 3), keepdims=True), length)
    due = 2 / (1 + np.exp(np.minimum((now - last) / (longest + 1e-5 * step), 700)))
    often = 2 / (1 + np.exp(np.maximum(longest / step - 1, 0)))
    want = due + np.where(longest > 0, often, 0)
    world = World.make(Prune(scorer=f"lazy-eviction:alpha={alpha}{settings}"))
    got = world.policy.scorer.score(world.evidence(lengths=length)).double().numpy()
    assert sure.mean() > 0.9 and 0.1 < (longest > 0).mean() < 0.95 and (last > PROMPT).any()
    np.testing.assert_allclose(got[sure], want[sure], rtol=1e-3, atol=1e-6)


def test_tokens_in_use_outlast_overdue_ones():
    """A token used every 40 tokens stays while its next use is due, and goes before a token that was just used when it
    is long overdue."""
    from kvc_kernels.scores.recurrence import recurred

    words = torch.zeros(P)
    for token, uses in ((0, (100, 140, 180)), (1, (60, 70, 80)), (2, (178, 180)), (3, ())):
        for step in uses:
            words[token] = recurred(words[token : token + 1], torch.tensor([float(step)]), True)[0]

    class Seen:
        lengths, sampling = torch.tensor([200]), None

        def attention_scores(self):
            return words.view(1, 1, 1, P)

        def positions(self):
            return torch.arange(P).float()[None]

    from sglang_kvc.policies.published.lazy_eviction import LazyEviction

    recurring, overdue, busy, unused = LazyEviction().score(Seen())[0, 0, 0, :4].tolist()
    assert recurring > 100 * overdue and busy > overdue and recurring > unused == 0

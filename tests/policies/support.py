"""A small setting for plans: a prompt that ran through attention, its blocks, and a calibration file of its shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.layout import PoolLayout
from kvc_kernels.store import PageStore
from sglang_kvc.policies import Evidence, Policy, Prune

L, H, G, D, P = 2, 2, 2, 32, 64  # layers, KV heads, query heads per KV head, head size, tokens per block
PAGE_BYTES = 1200  # 16 tokens of k8v8 or k4v4, 32 of k2v2, 8 of bf16
PROMPT, DECODED = 3 * P + 30, 2  # the second decode step is sampled
SCALE = D**-0.5


def rows(seed: int = 0, tokens: int = PROMPT + DECODED) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q `[L, tokens, H * G, D]`, K and V `[L, tokens, H, D]` in bf16; keys with per-channel biases."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(L, tokens, H * G, D, generator=gen)
    k = torch.randn(L, tokens, H, D, generator=gen) + torch.randn(D, generator=gen)
    v = torch.randn(L, tokens, H, D, generator=gen) * (0.5 + torch.rand(L, tokens, H, 1, generator=gen))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def statistics(folder) -> str:
    """A calibration file with all statistics that a scorer or share may need."""
    from safetensors.torch import save_file

    gen = torch.Generator().manual_seed(5)
    half = torch.randn(L, H * G, D, D, generator=gen) / D**0.5
    tensors = {
        "query_mean": torch.randn(L, H * G, D, generator=gen),
        "query_covariance": half @ half.transpose(-1, -2),
        "rotary_frequencies": 100.0 ** -(torch.arange(D // 2) / (D // 2)),
        "query_samples": torch.randn(L, H * G, 4, D, generator=gen),
        "importance_retention": torch.stack((torch.arange(1, 17) / 16, 1 - 0.5 ** torch.arange(1, 17))),
        "attention_entropy": torch.tensor([2.0, 3.0]),
        "attention_shift": torch.tensor([0.4, 0.1]),
        "attention_variance": torch.tensor([5.0, 2.0]),
        "head_retrieval": torch.tensor([[0.1, 0.3], [0.4, 0.2]]),
        "gate_in": torch.randn(L, H, 6, 2 * D, generator=gen),
        "gate_in_bias": torch.randn(L, H, 6, generator=gen),
        "gate_out": torch.randn(L, H, 6, generator=gen),
        "gate_out_bias": torch.randn(L, H, generator=gen),
    }
    path = str(folder / "statistics.safetensors")
    save_file(tensors, path)
    return path


@dataclass
class World:
    """A store in which a prompt has been prefilled and a few tokens decoded, all of it uncompressed."""

    policy: Policy
    store: PageStore
    row: torch.Tensor  # block ids of the sequence
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def make(cls, policy: Policy, seed: int = 0, first_block: int = 1, change_after: int | None = None) -> World:
        """A world. Tokens from position `change_after` on, and all queries, are drawn from another seed."""
        q, k, v = rows(seed)
        if change_after is not None:
            q, k2, v2 = rows(seed + 1)
            k[:, change_after:], v[:, change_after:] = k2[:, change_after:], v2[:, change_after:]
        layout = PoolLayout(L, H, D, P, PAGE_BYTES, has_scores=policy.collects_scores)
        policy.check(layout)
        store = PageStore.create(
            layout,
            policy.block_formats(layout),
            num_pages=10 * layout.block_pages_bf16,
            num_blocks=10,
            dtype=torch.bfloat16,
            device="cpu",
        )
        row = torch.arange(first_block, first_block + 4)
        ops.take_bf16(store, row)
        world = cls(policy, store, row, q, k, v)
        world.forward(0, PROMPT)
        for i in range(DECODED):
            world.forward(PROMPT + i, 1)
        return world

    def forward(self, prefix: int, new: int) -> None:
        at = torch.arange(prefix, prefix + new)
        sampling = self.policy.score_sampling
        kw = {"scale": SCALE, "sampling": sampling}
        for layer in range(L):
            ops.append(self.store, layer, self.row[at // P], at % P, self.k[layer, at], self.v[layer, at])
            if new == 1:
                lens = torch.tensor([prefix + 1])
                ops.decode_attention(self.store, layer, self.q[layer, at], self.row[None], lens, **kw)
            else:
                ops.extend_attention(self.store, layer, self.q[layer, at], self.row[None], [prefix], [new], **kw)
        if sampling is not None:
            counted = None if new == 1 else torch.tensor([min(new, sampling.window or new)])
            ops.count_queries(self.store, self.row[None], torch.tensor([prefix + new]), counted, sampling)

    def evidence(self, blocks=(0, 1, 2), lengths: int = 0) -> Evidence:
        blocks = torch.tensor(blocks)
        lengths = torch.full_like(blocks, lengths)
        return Evidence(
            self.store, self.row[blocks], blocks * P, lengths, torch.full_like(blocks, PROMPT), from_format=0,
            sampling=self.policy.score_sampling,
        )

    def tiers(self, blocks=(0, 1, 2)) -> torch.Tensor:
        tiers = self.policy.plan(self.evidence(blocks), self.store.block_formats[1])
        return ops.keep_all(len(blocks), self.store.layout) if tiers is None else tiers

    # ---- references computed from the rows alone

    def attention(self) -> np.ndarray:
        """A[l, h, i, j]: the attention of query i of query head h to token j, fp64, causal, without compression."""
        q, k = (x.double().numpy() for x in (self.q, self.k))
        n = q.shape[1]
        out = np.zeros((L, H * G, n, n))
        for l in range(L):
            for h in range(H * G):
                for i in range(n):
                    e = np.exp(SCALE * (k[l, : i + 1, h // G] @ q[l, i, h]))
                    out[l, h, i, : i + 1] = e / e.sum()
        return out


def by_block(scores: np.ndarray) -> np.ndarray:
    """`[L, H, tokens]` of a sequence -> `[3, L, H, P]`, its full blocks."""
    return scores[..., : 3 * P].reshape(L, H, 3, P).transpose(2, 0, 1, 3)


def score(world: World) -> np.ndarray:
    """Scores of the policy's scorer, `[3, L, H, P]`."""
    policy = world.policy
    assert isinstance(policy, Prune)
    from dataclasses import replace

    from sglang_kvc.calibration.tensors import load

    stats = load(policy.calibration, torch.device("cpu")) if policy.needs else None
    return policy.scorer.score(replace(world.evidence(), calibration=stats)).double().numpy()

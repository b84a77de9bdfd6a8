"""OSCAR's decode attention, from its SGLang branch (`--kv-cache-dtype int2`). It is Triton with three launches.

Keys and values have 2 bits, with a scale and a zero per token and head. The first 64 and the last 256 tokens of a
request are bf16. The code is for commit 473ff3f9. Rotations are not part of the kernel.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

KERNELS = "sglang-research/python/sglang/srt/layers/attention/triton_ops/decode_attention.py"
FIRST, RECENT = 64, 256  # tokens in bf16: SGLANG_MIXED_KV_PREFIX_TOKENS, SGLANG_MIXED_KV_RECENT_TOKENS
EXACT_SPLITS = 8  # SGLANG_MIXED_KV_HP_MAX_SPLITS
SPLITS = (2, 4, 8, 16, 32)  # parts of the packed tokens; OSCAR's default is 8, its notes recommend 32


def load(checkout: Path) -> ModuleType:
    """OSCAR's module of decode kernels. Its imports from SGLang come from the installed package."""
    path = checkout / KERNELS
    if not path.exists():
        raise SystemExit(f"error: {path} is not there; clone https://github.com/FutureMLS-Lab/OSCAR")
    spec = importlib.util.spec_from_file_location("oscar_decode_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Case:
    """Random stored tokens of requests with equal lengths. Pools are lists with one item per layer.

    Codes are uint8 `[slots, H, D / 4]`; 2-bit code i of byte j is feature i * D / 4 + j. Scales and zeros are fp32
    `[slots, H, 2]`; a value is (code - zero) * scale. Slots are in random order, as in a used pool.
    """

    module: ModuleType
    batch: int
    tokens: int
    heads: int
    group: int
    dim: int
    layers: int
    device: str
    splits: int = 8
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        b, h, d, dev = self.batch, self.heads, self.dim, self.device
        self.exact = min(self.tokens, FIRST + RECENT)
        self.packed = self.tokens - self.exact
        n, m = b * self.packed, b * self.exact
        shape = (2, n, h, d // 4)
        self.codes = [torch.randint(0, 256, shape, dtype=torch.uint8, device=dev) for _ in range(self.layers)]
        meta = [torch.rand((2, n, h, 2), device=dev) for _ in range(self.layers)]
        self.meta = [x * x.new_tensor([1.0, 2.0]) + x.new_tensor([0.5, 0.5]) for x in meta]
        self.rows = [torch.randn((2, m, h, d), device=dev).to(self.dtype) for _ in range(self.layers)]
        self.order, self.exact_order = torch.randperm(n, device=dev), torch.randperm(m, device=dev)
        steps = torch.arange(b + 1, dtype=torch.int32, device=dev)
        self.starts, self.exact_starts = steps * self.packed, steps * self.exact
        self.q = torch.randn((b, h * self.group, d), device=dev).to(self.dtype)
        self.out = torch.full_like(self.q, float("nan"))
        self.split(self.splits)

    def split(self, splits: int) -> None:
        """Split the packed tokens of each request into at most `splits` parts."""
        self.splits = splits
        shape = (self.batch, self.heads * self.group, EXACT_SPLITS + splits)
        self.part_o = torch.empty((*shape, self.dim), dtype=torch.float32, device=self.device)
        self.part_lse = torch.empty(shape, dtype=torch.float32, device=self.device)
        self.counts = torch.full((self.batch,), splits, dtype=torch.int32, device=self.device)
        self.exact_counts = torch.full((self.batch,), EXACT_SPLITS, dtype=torch.int32, device=self.device)

    @property
    def bytes(self) -> int:
        """Bytes that an ideal kernel reads for one layer."""
        packed = self.dim // 4 + 8
        return 2 * self.batch * self.heads * (self.packed * packed + self.exact * 2 * self.dim)

    def run(self, layer: int) -> torch.Tensor:
        layer %= self.layers
        (k, v), (k_meta, v_meta), (exact_k, exact_v) = self.codes[layer], self.meta[layer], self.rows[layer]
        return self.module.decode_attention_fwd_int2_unified(
            self.q, exact_k, exact_v, k, v, k_meta, v_meta, self.out, self.exact_starts, self.exact_order, self.starts,
            self.order, self.part_o, self.part_lse, self.exact_counts, self.counts, EXACT_SPLITS, self.splits,
            self.dim**-0.5,
        )  # fmt: skip

    def dense(self, layer: int, request: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values fp64 `[tokens, D]` of one request, by head."""
        packed = self.order[request * self.packed : (request + 1) * self.packed]
        exact = self.exact_order[request * self.exact : (request + 1) * self.exact]
        out = []
        for side in (0, 1):
            codes, meta = self.codes[layer][side, packed], self.meta[layer][side, packed].double()
            codes_by_feature = torch.cat([(codes >> 2 * i) & 3 for i in range(4)], -1).double()
            values = (codes_by_feature - meta[..., 1:]) * meta[..., :1]
            out.append(torch.cat([values, self.rows[layer][side, exact].double()]))
        return list(zip(*(x.unbind(1) for x in out)))

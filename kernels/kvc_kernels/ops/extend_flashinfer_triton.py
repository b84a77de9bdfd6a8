"""New tokens among themselves by FlashInfer's ragged prefill, where it can be imported."""

from __future__ import annotations

import warnings

import torch

try:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
except Exception:  # not installed, or broken by the versions around it: the Triton kernels do without
    BatchPrefillWithRaggedKVCacheWrapper = None

WORKSPACE_BYTES = 128 << 20


class RaggedPrefill:
    """Causal attention of new tokens, `q[N, Hq, D]` over `k`, `v` `[N, H, D]`; the plan is made at the first layer."""

    def __init__(self, device: torch.device, *, query_heads: int, heads: int, head_dim: int, dtype: torch.dtype):
        self.heads = (query_heads, heads, head_dim)
        self.dtype = dtype
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self.planned: tuple[float, float] | None = None

    @classmethod
    def create(cls, device: torch.device, **options) -> RaggedPrefill | None:
        """None where FlashInfer cannot serve: no GPU, not installed, or its kernels cannot be built.

        One token is run at once, so that building them takes time at the start and not in the first request.
        """
        if device.type != "cuda" or BatchPrefillWithRaggedKVCacheWrapper is None:
            return None
        try:
            made = cls(device, **options)
            made.plan([1])
            query_heads, heads, head_dim = made.heads
            q, k = (torch.zeros((1, n, head_dim), dtype=made.dtype, device=device) for n in (query_heads, heads))
            made.run(q, k, k, scale=1.0, logit_cap=0.0, lse=True)
        except Exception as error:
            warnings.warn(f"FlashInfer does not work here, prefill goes through Triton: {error}", stacklevel=2)
            return None
        return made

    def plan(self, extend_lens: list[int]) -> None:
        self.starts = torch.tensor([0, *extend_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.planned = None

    def run(self, q, k, v, *, scale: float, logit_cap: float, lse: bool):
        """Output `[N, Hq, D]`, and with `lse` also the base-2 log-sum-exp fp32 `[N, Hq]`."""
        if self.planned != (scale, logit_cap):
            # Host tensors: nothing has to be read back from the device.
            self.wrapper.plan(
                self.starts, self.starts, *self.heads, causal=True, sm_scale=scale,
                logits_soft_cap=logit_cap or None, q_data_type=self.dtype,
            )  # fmt: skip
            self.planned = (scale, logit_cap)
        return self.wrapper.run(q, k, v, return_lse=lse)

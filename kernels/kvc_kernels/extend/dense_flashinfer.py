"""Attention of new tokens to themselves and to staged blocks by FlashInfer's prefill, if it can be imported."""

from __future__ import annotations

import numpy as np
import torch

from ..common.upload import upload

try:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
except Exception:  # not installed, or broken by the versions of other packages: Triton kernels are used
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper = None

WORKSPACE_BYTES = 128 << 20  # minimum, as FlashInfer recommends
# The kernel for all cards. The one for Hopper has a race in its epilogue, and FlashAttention 3 serves Hopper.
BACKEND = "fa2"


def workspace_bytes(multiprocessors: int, group: int, head_dim: int) -> int:
    """Bytes that suffice for FlashInfer's partial results in every plan.

    Its kernel splits long lists of keys so that two programs run on each multiprocessor. It keeps an fp32 row and a
    log-sum-exp for each query of every program's tile, for all query heads that share a KV head (`PrefillPlan` in its
    `scheduler.cuh`), and raises in the middle of a forward if these do not fit.
    """
    tile = 128 if head_dim < 256 else 64
    return max(WORKSPACE_BYTES, 2 * multiprocessors * group * tile * (head_dim + 1) * 4 + (1 << 20))


def make_workspace(device: torch.device, query_heads: int, heads: int, head_dim: int) -> torch.Tensor:
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return torch.empty(workspace_bytes(sms, query_heads // heads, head_dim), dtype=torch.uint8, device=device)


class StagingCopy:
    """The copy of a plan from FlashInfer's page-locked buffer, which the next plan overwrites.

    The next plan therefore waits for the copy. Otherwise a kernel may read the plan of a later forward and write to the
    rows of that forward. The copy is queued before a forward's kernels, so the host waits only if it is a full forward
    ahead.
    """

    def __init__(self):
        self.event = torch.cuda.Event()  # complete until it is recorded

    def wait(self) -> None:
        self.event.synchronize()

    def queued(self) -> None:
        self.event.record()


class RaggedPrefill:
    """Causal attention of new tokens, `q[N, Hq, D]` over `k`, `v` `[N, H, D]`; the plan is made at the first layer."""

    def __init__(self, device: torch.device, *, query_heads: int, heads: int, head_dim: int, dtype: torch.dtype):
        self.heads, self.dtype, self.device = (query_heads, heads, head_dim), dtype, device
        workspace = make_workspace(device, *self.heads)
        self.wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=BACKEND)
        self.copy = StagingCopy()
        self.planned: tuple[float, float] | None = None

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether FlashInfer can be imported on a machine with a GPU."""
        return device.type == "cuda" and BatchPrefillWithRaggedKVCacheWrapper is not None

    def paged(self, device: torch.device, page: int, *, causal: bool = True, window: int = -1, first=None):
        """A paged form for the same heads. `first`: another paged form, whose runs precede this one's on one stream."""
        return StagedPrefill(self, device, page, causal=causal, window=window, workspace=first and first.workspace)

    def plan(self, extend_lens: list[int]) -> None:
        self.starts = torch.tensor([0, *extend_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.planned = None

    def run(self, q, k, v, *, scale: float, logit_cap: float, lse: bool, into: tuple | None = None):
        """Output `[N, Hq, D]`, and with `lse` also the base-2 log-sum-exp fp32 `[N, Hq]`; both written to `into`."""
        if self.planned != (scale, logit_cap):
            self.copy.wait()
            # Host tensors: nothing has to be read back from the device.
            self.wrapper.plan(
                self.starts, self.starts, *self.heads, causal=True, sm_scale=scale,
                logits_soft_cap=logit_cap or None, q_data_type=self.dtype,
            )  # fmt: skip
            self.copy.queued()
            self.planned = (scale, logit_cap)
        if into is not None:
            return self.wrapper.run(q, k, v, out=into[0], lse=into[1], return_lse=True)
        return self.wrapper.run(q, k, v, return_lse=lse)


class StagedPrefill:
    """Attention of runs of new tokens to blocks in dense buffers. If causal, the last block ends with the run itself.

    To FlashInfer, the buffers `k`, `v` `[slots, P, H, D]` are a page store with one page per block. A run sees a list
    of slots, and lists of different runs may share slots.
    """

    def __init__(
        self,
        like: RaggedPrefill | StagedPrefill,
        device: torch.device,
        page: int,
        *,
        causal: bool = True,
        window: int = -1,
        workspace=None,
    ):
        """`workspace`: that of another instance, if the runs of both follow each other on one stream. `window` >= 0: a
        query sees its own token and `window` tokens before it."""
        self.heads, self.dtype, self.page, self.device, self.causal = like.heads, like.dtype, page, device, causal
        self.window = window
        if workspace is None:
            workspace = make_workspace(device, *self.heads)
        self.workspace = workspace
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=BACKEND)
        self.copy = StagingCopy()
        self.planned: tuple[float, float] | None = None

    def plan(self, tokens: list[int], slots: list[list[int]] | list[np.ndarray], last: list[int]) -> None:
        """Run i of `tokens[i]` new tokens sees the blocks in `slots[i]`, and `last[i]` tokens of the last block. If
        causal, the run's tokens are the last of these. All arguments are on the host."""

        def starts(x):
            return torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)

        indices = upload(np.concatenate(slots, dtype=np.int32, casting="same_kind"), self.device)
        counts = [len(run_slots) for run_slots in slots]
        self.lists = (starts(tokens), starts(counts), indices, torch.tensor(last, dtype=torch.int32))
        self.planned = None

    def run(self, q, k, v, into: tuple, *, scale: float, logit_cap: float) -> None:
        """Write the output and, if it is not None, the base-2 log-sum-exp to `into`."""
        if self.planned != (scale, logit_cap):
            self.copy.wait()
            self.wrapper.plan(
                *self.lists, *self.heads, self.page, causal=self.causal, sm_scale=scale,
                logits_soft_cap=logit_cap or None, q_data_type=self.dtype, window_left=self.window,
            )  # fmt: skip
            self.copy.queued()
            self.planned = (scale, logit_cap)
        self.wrapper.run(q, (k, v), out=into[0], lse=into[1], return_lse=into[1] is not None)

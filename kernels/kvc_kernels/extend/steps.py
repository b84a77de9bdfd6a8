"""Steps of the attention of one prefill: chosen by `ExtendAttention.plan`, followed by `run` for each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExtendSteps:
    """The engines of one forward: one for each part of the tokens, and the merge of their results.

    `prefix`: engine of the tokens that are read from pages.
    - "triton": the Triton kernel over pages of any format; "hopper": the CUDA C++ kernel.
    - "unpacked": a prefill library, over blocks unpacked to dense rows in passes.
    - "decode": the decode kernel with several queries per request.
    - None: no query reads a page.

    `new`: engine of the new tokens among themselves.
    - "prefix": the engine of the prefix takes them, too.
    - "ragged": a prefill library, over the dense new rows.
    - "paged": a prefill library, over staged rows of the new tokens' blocks and of the staged blocks before them.

    `staged`: uncompressed blocks are fake-quantized into dense rows before the attention of each layer. `rows`: query
    rows of a tile of the kernel over pages, 0 without one.
    """

    prefix: Literal["triton", "hopper", "unpacked", "decode"] | None
    new: Literal["prefix", "ragged", "paged"] = "prefix"
    staged: bool = False
    rows: int = 0

    @property
    def merge(self) -> Literal["kernel", "passes"] | None:
        """Merge of the states of prefix and new tokens. "kernel": the kernel over pages starts from the state of
        the new tokens; "passes": each pass over unpacked blocks is merged into it; None: there is one state only."""
        if self.prefix is None or self.new == "prefix":
            return None
        return "passes" if self.prefix == "unpacked" else "kernel"

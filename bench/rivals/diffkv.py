"""DiffKV's decode attention, from LeanKV's code. It is CUDA C++ with one thread block per query head.

A page has one head and one format. A table lists high pages from the left and low pages from the right. The kernel also
accumulates scores of tokens. The code is for commit 6cf5d20. It is compiled for one GQA group and the given formats
instead of all 120 kernels.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

SOURCE = "csrc/attention/sparse_attention_kernels.cu"
CUT = "#define CALL_LAUNCHER("  # the code from here on instantiates all formats
KEY_VEC, KEY_THREADS, VALUE_VEC, VALUE_THREADS = 4, 4, 2, 8  # its cache_utils.h
PARTITION = 4800
# (Key bits, value bits) -> tokens per page, with one scale and zero (fp16) per token and head.
PAGE_TOKENS = {(8, 8): 24, (8, 4): 32, (8, 2): 37, (4, 4): 46, (4, 2): 60, (4, 1): 69}

BINDING = """
void {name}(torch::Tensor slots, torch::Tensor positions, torch::Tensor out, torch::Tensor sums, torch::Tensor maxima,
            torch::Tensor part_o, torch::Tensor scores, torch::Tensor q, torch::Tensor pages, int64_t layer,
            int64_t heads, double scale, torch::Tensor tables, torch::Tensor lens, int64_t most) {{
  sparse_paged_attention_launcher<__nv_bfloat16, {bits}, 1, 1, 1, 1, {tokens}, 8>(
      slots, positions, out, sums, maxima, part_o, scores, q, pages, layer, heads, scale, tables, lens, most, {{}});
}}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("run", &{name}); }}
"""


def source(text: str, high: tuple[int, int], low: tuple[int, int], group: int) -> str:
    """Source to compile from DiffKV's file: the launcher of one format and GQA group, and a binding."""
    if CUT not in text:
        raise SystemExit("error: DiffKV's kernel file is not the one of commit 6cf5d20")
    head = text[: text.index(CUT)]
    case = r"\n *case (\d+):\n *LAUNCH_SPARSE_PAGED_ATTENTION\(128, \1\);\n *break;"
    head, cases = re.subn(case, lambda m: m[0] if int(m[1]) == group else "", head)
    if cases < 6:
        raise SystemExit("error: DiffKV's kernel file has other GQA groups than that of commit 6cf5d20")
    tokens = f"{PAGE_TOKENS[high]}, {PAGE_TOKENS[low]}"
    return head + BINDING.format(name="decode", bits=", ".join(map(str, (*high, *low))), tokens=tokens)


def load(checkout: Path, high: tuple[int, int], low: tuple[int, int], group: int) -> ModuleType:
    """Compile the extension with `run`. This needs nvcc and ninja, and one or two minutes."""
    from torch.utils.cpp_extension import load as build

    path = checkout / SOURCE
    if not path.exists():
        raise SystemExit(f"error: {path} is not there; clone https://github.com/zyqCSL/DiffKV")
    name = "diffkv_" + "_".join(map(str, (*high, *low, group)))
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.cu").write_text(source(path.read_text(), high, low, group))
    return build(
        name, [str(folder / f"{name}.cu")], extra_include_paths=[str(path.parent)], build_directory=str(folder),
        extra_cuda_cflags=["-O3", "--expt-relaxed-constexpr"],
    )  # fmt: skip


@dataclass(frozen=True)
class Page:
    """Layout of a page of `tokens` tokens, in units of 16 bits."""

    key_bits: int
    value_bits: int
    dim: int = 128

    @property
    def tokens(self) -> int:
        return PAGE_TOKENS[self.key_bits, self.value_bits]

    @property
    def key_packs(self) -> int:
        return self.dim * self.key_bits // 16

    @property
    def value_packs(self) -> int:
        return self.dim * self.value_bits // 16

    @property
    def padded(self) -> int:
        """Number of tokens, rounded up as in the value part."""
        return -(-self.tokens // VALUE_VEC) * VALUE_VEC

    @property
    def key_meta(self) -> int:
        return _up(self.tokens * self.key_packs, 16)

    @property
    def values(self) -> int:
        return _up(self.key_meta + 2 * self.tokens, 64)

    @property
    def value_meta(self) -> int:
        return self.values + _up(self.padded * self.value_packs, 16)

    @property
    def scores(self) -> int:
        return self.value_meta + _up(2 * self.tokens, 16)

    @property
    def size(self) -> int:
        """Size with a score (fp32) and a position (int32) of each token."""
        return self.scores + 2 * _up(2 * self.tokens, 16)

    def unpack(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values fp64 `[.., tokens, D]` of int16 pages `[.., size]`."""
        keys = _codes(page, self._keys(), self.key_bits)
        values = _codes(page, self._values(), self.value_bits)
        return keys * self._meta(page, self.key_meta, 0) + self._meta(page, self.key_meta, 1), (
            values * self._meta(page, self.value_meta, 0) + self._meta(page, self.value_meta, 1)
        )

    def _keys(self) -> torch.Tensor:
        """Index of each feature's code from the start of the page, int64 `[tokens, D]`. Four threads read a key. Each
        reads consecutive features in vectors of four packs. Vectors of all tokens are adjacent."""
        token, d, pack = torch.arange(self.tokens)[:, None], torch.arange(self.dim), 16 // self.key_bits
        thread, rest = d // (self.dim // KEY_THREADS), d % (self.dim // KEY_THREADS)
        vector, inner = rest // pack // KEY_VEC, rest // pack % KEY_VEC
        at = ((vector * self.tokens + token) * KEY_THREADS + thread) * KEY_VEC + inner
        return at * pack + rest % pack

    def _values(self) -> torch.Tensor:
        """Index of each feature's code for values. Eight threads read two tokens at a time. Packs of all tokens are
        adjacent."""
        token, d, pack = torch.arange(self.tokens)[:, None], torch.arange(self.dim), 16 // self.value_bits
        thread, rest = d // (self.dim // VALUE_THREADS), d % (self.dim // VALUE_THREADS)
        pair, inner = token // VALUE_VEC, token % VALUE_VEC
        at = rest // pack * self.padded * VALUE_THREADS + (pair * VALUE_THREADS + thread) * VALUE_VEC + inner
        return (self.values + at) * pack + rest % pack

    def _meta(self, page: torch.Tensor, at: int, which: int) -> torch.Tensor:
        """Scales (0) or zeros (1) fp64 `[.., tokens, 1]`."""
        both = page[..., at : at + 2 * self.tokens].contiguous().view(torch.float16)
        return both.unflatten(-1, (self.tokens, 2))[..., which, None].double()

    def random(self, n: int, size: int, device: str) -> torch.Tensor:
        """Pages of random codes, int16 `[n, size]`, with values of about 1."""
        page = torch.randint(-(1 << 15), 1 << 15, (n, size), dtype=torch.int16, device=device)
        for at, bits in ((self.key_meta, self.key_bits), (self.value_meta, self.value_bits)):
            meta = torch.empty((n, self.tokens, 2), dtype=torch.float16, device=device)
            meta[..., 0].uniform_(2.0, 4.0).div_((1 << bits) - 1)
            meta[..., 1].uniform_(-2.0, -1.0)
            page[:, at : at + 2 * self.tokens] = meta.flatten(1).view(torch.int16)
        page[:, self.scores : self.size] = 0
        return page


def _up(x: int, to: int) -> int:
    return -(-x // to) * to


def _codes(page: torch.Tensor, index: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes fp64 `[.., tokens, D]` at the code indices `index`. The lowest bits of an int16 come first."""
    pack = 16 // bits
    index = index.to(page.device)
    return ((page[..., index // pack].int() >> (index % pack * bits)) & ((1 << bits) - 1)).double()


@dataclass
class Case:
    """Random stored tokens. `counts`: high and low tokens of each request, layer and head, int `[B, L, H, 2]`."""

    module: ModuleType | None
    high: Page
    low: Page
    counts: torch.Tensor
    group: int
    device: str

    def __post_init__(self):
        self.batch, self.layers, self.heads, _ = self.counts.shape
        per = torch.tensor([self.high.tokens, self.low.tokens])
        self.pages = -(-self.counts // per)
        size = _up(max(self.high.size, self.low.size), 64)
        n = int(self.pages.sum())
        many = int(self.pages[..., 0].sum())
        self.store = torch.cat([p.random(c, size, self.device) for p, c in ((self.high, many), (self.low, n - many))])
        places = [torch.randperm(many).tolist(), (many + torch.randperm(n - many)).tolist()]
        columns = int(self.pages.sum(-1).max())
        tables = torch.zeros((*self.counts.shape[:-1], columns), dtype=torch.int32)
        for row, (a, b) in zip(tables.view(-1, columns), self.pages.view(-1, 2).tolist()):
            for i in range(a):
                row[i] = places[0].pop()
            for i in range(b):
                row[columns - 1 - i] = places[1].pop()
        dev, hq, dim = self.device, self.heads * self.group, self.high.dim
        self.tables, self.lens = tables.to(dev), self.counts.int().to(dev)
        self.most = int(self.counts.sum(-1).max())
        parts = 1 if self.most <= PARTITION else -(-self.most // PARTITION) + 1
        self.slots = torch.arange(self.batch, dtype=torch.int32, device=dev)
        self.positions = torch.full((self.batch,), self.most, dtype=torch.int32, device=dev)
        self.sums, self.maxima = (torch.empty((self.batch, hq, parts), device=dev) for _ in range(2))
        self.part_o = torch.empty((self.batch, hq, parts, dim), dtype=torch.bfloat16, device=dev)
        self.scores = torch.empty((self.batch, hq, self.most), device=dev)
        self.q = torch.randn((self.batch, hq, dim), device=dev).bfloat16()
        self.out = torch.full_like(self.q, float("nan"))

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and zeros that an ideal kernel reads for one layer."""
        total = 0
        for side, page in enumerate((self.high, self.low)):
            total += int(self.counts[:, 0, :, side].sum()) * (2 * (page.key_packs + page.value_packs) + 8)
        return total

    def run(self, layer: int) -> torch.Tensor:
        self.module.run(
            self.slots, self.positions, self.out, self.sums, self.maxima, self.part_o, self.scores, self.q, self.store,
            layer % self.layers, self.heads, self.high.dim**-0.5, self.tables, self.lens, self.most,
        )  # fmt: skip
        return self.out

    def dense(self, layer: int, request: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values fp64 `[tokens, D]` of one request, by head."""
        out = []
        for h in range(self.heads):
            row, sides = self.tables[request, layer, h], []
            counts, pages = self.counts[request, layer, h].tolist(), self.pages[request, layer, h].tolist()
            for page, n, m, ids in zip((self.high, self.low), counts, pages, (row, row.flip(0))):
                k, v = page.unpack(self.store[ids[:m].long()])
                sides.append((k.flatten(0, 1)[:n], v.flatten(0, 1)[:n]))
            out.append(tuple(torch.cat(x) for x in zip(*sides)))
        return out

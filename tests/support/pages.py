"""Small stores, and token-by-token numpy references written from the definition of the formats."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from kvc_kernels import ops
from kvc_kernels.formats import BF16, FORMATS
from kvc_kernels.layout import BlockFormat, PoolLayout, choose_page_bytes, page_bytes_for
from kvc_kernels.store import PageStore

F = FORMATS


class KernelStore(PageStore):
    """A store whose operations run as kernels even on the CPU, under Triton's interpreter or with launches disabled."""

    use_kernels = True


class TorchStore(PageStore):
    """A store whose operations run in plain torch even on a GPU."""

    use_kernels = False


def block_formats_of(*specs: str) -> tuple[BlockFormat, ...]:
    """Block formats from names: block_formats_of("k8v4+k4v2", "k4v4"), after bf16."""
    out = [BlockFormat(BF16)]
    for spec in specs:
        names = spec.split("+")
        out.append(BlockFormat(F[names[0]], F[names[1]] if len(names) > 1 else None))
    return tuple(out)


def make_store(
    block_formats=block_formats_of("k4v4"),  # noqa: B008
    *,
    layers=1,
    heads=2,
    head_dim=32,
    block_tokens=32,
    has_scores=False,
    blocks=6,
    spare=2,
    dtype=torch.bfloat16,
    page_bytes=None,
) -> PageStore:
    """A store with pages for `blocks` uncompressed blocks and `spare` additional block ids. Its free bytes are
    garbage."""
    formats = [f for r in block_formats for f in (r.high, r.low) if f is not None and f.packed] or [BF16]
    page_bytes = page_bytes or choose_page_bytes(
        formats, head_dim=head_dim, block_tokens=block_tokens, has_scores=has_scores
    )
    layout = PoolLayout(layers, heads, head_dim, block_tokens, page_bytes, has_scores)
    store = PageStore.create(
        layout,
        block_formats,
        num_pages=1 + layout.block_pages_bf16 * blocks,
        num_blocks=1 + blocks + spare,
        dtype=dtype,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(1)
    store.pages.random_(0, 256, generator=generator)
    store.headers.view(torch.int16).random_(-32768, 32767, generator=generator)
    return store


def random_kv(store: PageStore, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V `[L, tokens, H, D]` in the model dtype; keys with per-channel biases and one loud token."""
    g = store.layout
    gen = torch.Generator().manual_seed(seed)
    shape = (g.layers, tokens, g.heads, g.head_dim)
    k = torch.randn(shape, generator=gen) + 4 * torch.randn(g.head_dim, generator=gen)
    v = torch.randn(shape, generator=gen)
    k[:, tokens // 2] *= 3
    return k.to(store.dtype), v.to(store.dtype)


def fill(store: PageStore, blocks: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Take `blocks` and append K, V `[L, tokens, H, D]` to them in order."""
    ops.take_bf16(store, blocks)
    p = store.layout.block_tokens
    at = torch.arange(k.shape[1])
    for layer in range(store.layout.layers):
        ops.append(store, layer, blocks[at // p], at % p, k[layer], v[layer])


def packed_prompt(*, head_dim: int, block_tokens: int) -> tuple[PageStore, torch.Tensor, torch.Tensor]:
    """A store of two layers and two heads in k4v4, rows int32 `[2, 4]` and lengths int32 `[2]` of two requests.

    The first request's prompt of four blocks and a tail is packed into its first three blocks, of which layer 1 leaves
    one empty for head 0 and two for head 1. The second request's first block is packed whole.
    """
    page_bytes = page_bytes_for(F["k4v4"], block_tokens // 2, head_dim=head_dim, has_scores=False)
    size = {"head_dim": head_dim, "block_tokens": block_tokens, "page_bytes": page_bytes}
    store = make_store(layers=2, blocks=8, **size)
    fill(store, torch.tensor([4, 2, 7, 1, 5]), *random_kv(store, 4 * block_tokens + 3))
    fill(store, torch.tensor([3, 6]), *random_kv(store, block_tokens + 9, seed=1))
    ops.compact(store, torch.tensor([3]), 1, None, from_format=0)
    order = torch.rand(2, 2, 4 * block_tokens, generator=torch.Generator().manual_seed(2)).argsort(-1)
    pages = torch.tensor([[6, 0], [3, 1]])  # each page holds half a block
    ops.pack_kept(store, torch.tensor([4, 2, 7, 1]), 3, 1, order[..., : 3 * block_tokens].int(), pages)
    rows = torch.tensor([[4, 2, 7, 5], [3, 6, 0, 0]], dtype=torch.int32)
    return store, rows, torch.tensor([3 * block_tokens + 3, block_tokens + 9], dtype=torch.int32)


def random_tiers(
    store: PageStore, n: int, block_format: BlockFormat, gen: np.random.Generator, ceiling=None
) -> torch.Tensor:
    """Random tiers for n blocks, some heads empty, some whole; never above `ceiling`."""
    g = store.layout
    shape = (n, g.layers, g.heads, g.block_tokens)
    tiers = gen.integers(0, 3, shape)
    kind = gen.integers(0, 6, shape[:3])
    tiers[kind == 0] = 0
    tiers[kind == 1] = 2
    if block_format.low is None:
        tiers = np.where(tiers > 0, 2, 0)
    tiers = torch.from_numpy(tiers).to(torch.int8)
    return tiers if ceiling is None else torch.minimum(tiers, ceiling)


def free_pages(store: PageStore) -> torch.Tensor:
    """Free page ids in the order in which they will be taken."""
    head, tail = store.cursor.tolist()
    return store.ring[torch.arange(head, tail, device=store.device) % store.ring.numel()]


# ---- reference of one head


def half(x) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float16)


def encode(x, scale, zero, bits: int) -> np.ndarray:
    """Codes of fp32 x under fp32 scale and zero, feature by feature."""
    top = 2**bits - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint((np.float32(x) - np.float32(zero)) / np.float32(scale))
    return np.clip(np.where(np.float32(scale) > 0, codes, 0), 0, top).astype(np.uint8)


def grid(bits: int) -> int:
    return {8: 1, 4: 17, 2: 85}[bits]


def lower(codes: np.ndarray, source: int, target: int) -> np.ndarray:
    """Codes at fewer (or more) bits, converted through every format in between."""
    codes = codes.astype(np.float64)
    for bits, factor in ((4, 17), (2, 5)):
        if target <= bits < source:
            codes = np.rint(codes / factor)
    if target > source:
        codes = codes * (2**target - 1) / (2**source - 1)
    return codes.astype(np.uint8)


@dataclass
class RefToken:
    """One stored token: codes, scales and zeros, score; plain rows (fp32 arrays of bf16 values) while uncompressed."""

    position: int
    k: np.ndarray
    v: np.ndarray
    value_meta: np.ndarray | None = None  # fp16 [G, 2]
    score: float = 0.0


def quantize_value(v: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    groups = np.split(np.float32(v), len(v) // 32 if bits == 2 else 1)
    meta = np.array([[half((g.max() - g.min()) / np.float32(2**bits - 1)), half(g.min())] for g in groups])
    codes = [encode(g, m[0], m[1], bits) for g, m in zip(groups, meta)]
    return np.concatenate(codes), meta


def value_of(t: RefToken) -> np.ndarray:
    groups = np.split(np.float32(t.v), len(t.value_meta))
    return np.concatenate([g * np.float32(m[0]) + np.float32(m[1]) for g, m in zip(groups, t.value_meta)])


@dataclass
class RefHead:
    """The contents of one block and head: tokens by tier, and the header `[2, D]` of the key channels."""

    block_format: BlockFormat
    tiers: dict[int, list[RefToken]]
    header: np.ndarray | None = None

    def compact(self, to: BlockFormat, tiers: np.ndarray, has_scores: bool) -> RefHead:
        """Move to packed block format `to`. Token index: its position if pages hold positions, else its stored rank."""
        stored = [(t, tier) for tier in (2, 1) for t in self.tiers[tier]]
        known = has_scores or not self.block_format.high.packed
        index = {(t.position if known else i): (t, tier) for i, (t, tier) in enumerate(stored)}
        chosen = {2: [], 1: []}
        for i in range(len(tiers)):
            if i in index and tiers[i] and (tiers[i] == 2 or to.low):
                chosen[int(tiers[i])].append((i, *index[i]))
        header = self.header
        if not self.block_format.high.packed:
            rows = np.array([t.k for c in chosen.values() for _, t, _ in c], np.float32)
            header = np.zeros((2, len(stored[0][0].k)), np.float16)
            if len(rows):
                lo, hi = rows.min(0), rows.max(0)
                header = np.stack([half((hi - lo) / np.float32(255)), half(lo)])
        out = {2: [], 1: []}
        for tier, fmt in ((2, to.high), (1, to.low)):
            for i, t, source_tier in chosen[tier]:
                source = self.block_format.high if source_tier == 2 else self.block_format.low
                out[tier].append(self._token(i, t, source, fmt, header))
        return RefHead(to, out, header)

    @staticmethod
    def _token(i, t, source, fmt, header) -> RefToken:
        if not source.packed:
            scale = np.float32(header[0]) * np.float32(grid(fmt.key_bits))
            k = encode(t.k, scale, header[1], fmt.key_bits)
            v, value_meta = quantize_value(t.v, fmt.value_bits)
            return RefToken(i, k, v, value_meta, t.score)
        k = lower(t.k, source.key_bits, fmt.key_bits)
        v, value_meta = t.v, t.value_meta
        if source.value_bits != fmt.value_bits:
            v, value_meta = quantize_value(value_of(t), fmt.value_bits)
        return RefToken(i, k, v, value_meta, t.score)

    def key_of(self, t: RefToken, tier: int) -> np.ndarray:
        bits = (self.block_format.high if tier == 2 else self.block_format.low).key_bits
        return np.float32(t.k) * (np.float32(self.header[0]) * grid(bits)) + np.float32(self.header[1])


def ref_page_tokens(layout: PoolLayout, fmt) -> int:
    """Tokens per page, counted from the definition of the segments."""
    t = 0
    while ref_offsets(layout, fmt, t + 16)["end"] <= layout.page_bytes:
        t += 16
    return t


def ref_offsets(layout: PoolLayout, fmt, t: int) -> dict[str, int]:
    d = layout.head_dim
    groups = d // 32 if fmt.value_bits == 2 else 1
    sizes = [
        ("key_codes", t * d * fmt.key_bits // 8),
        ("value_codes", t * d * fmt.value_bits // 8),
        ("value_meta", groups * 4 * t),
        ("scores", 4 * t if layout.has_scores else 0),
        ("positions", 2 * t if layout.has_scores else 0),
    ]
    at, out = 0, {}
    for name, size in sizes:
        out[name] = at
        at += (size + 15) // 16 * 16
    out["end"] = at
    return out


def ref_pages(layout: PoolLayout, fmt, tokens: list[RefToken]) -> list[bytes]:
    """The bytes of the pages of one tier, one token and one feature at a time."""
    per_page, d = ref_page_tokens(layout, fmt), layout.head_dim
    at = ref_offsets(layout, fmt, per_page)
    out = []
    for first in range(0, len(tokens), per_page):
        page = bytearray(layout.page_bytes)

        def put(offset, value, dtype, page=page):
            raw = np.asarray(value, dtype).tobytes()
            page[offset : offset + len(raw)] = raw

        for slot, t in enumerate(tokens[first : first + per_page]):
            width = d * fmt.key_bits // 8
            for f in range(d):
                page[at["key_codes"] + slot * width + f % width] |= int(t.k[f]) << (f // width * fmt.key_bits)
            width = d * fmt.value_bits // 8
            for f in range(d):
                page[at["value_codes"] + (f % width) * per_page + slot] |= int(t.v[f]) << (f // width * fmt.value_bits)
            for g, meta in enumerate(t.value_meta):
                for i in (0, 1):
                    put(at["value_meta"] + 2 * ((g * 2 + i) * per_page + slot), meta[i], np.float16)
            if layout.has_scores:
                put(at["scores"] + 4 * slot, t.score, np.float32)
                put(at["positions"] + 2 * slot, t.position, np.int16)
        out.append(bytes(page))
    return out


# ---- reference of a whole store: page ids in the order in which they must be taken and returned


@dataclass
class RefStore:
    """A plain Python model of ring, table and contents; `rows[block][l][h]` is a RefHead."""

    store: PageStore
    free: deque = field(default_factory=deque)
    table: dict = field(default_factory=dict)  # block -> {(l, h): (high page ids, low page ids)}
    rows: dict = field(default_factory=dict)

    def __post_init__(self):
        self.free.extend(range(1, self.store.pages.shape[0]))

    def heads(self):
        g = self.store.layout
        return [(l, h) for l in range(g.layers) for h in range(g.heads)]

    def take(self, blocks):
        e = self.store.layout.head_pages_bf16
        for b in blocks:
            self.table[b] = {lh: ([self.free.popleft() for _ in range(e)], []) for lh in self.heads()}
            self.rows[b] = {lh: RefHead(BlockFormat(BF16), {2: [], 1: []}) for lh in self.heads()}

    def append(self, block, layer, position, k, v):
        """k, v fp32 `[H, D]` of bf16 values."""
        for h in range(len(k)):
            tokens = self.rows[block][layer, h].tiers[2]
            tokens[:] = [t for t in tokens if t.position != position]
            tokens.append(RefToken(position, k[h], v[h]))

    def compact(self, blocks, to: BlockFormat, tiers):
        g = self.store.layout
        old = {b: self.table[b] for b in blocks}
        for i, b in enumerate(blocks):
            self.table[b] = {}
            for l, h in self.heads():
                head = self.rows[b][l, h].compact(to, np.asarray(tiers[i, l, h]), g.has_scores)
                self.rows[b][l, h] = head
                need = [
                    -(-len(head.tiers[t]) // ref_page_tokens(g, f)) if f else 0 for t, f in ((2, to.high), (1, to.low))
                ]
                self.table[b][l, h] = tuple([self.free.popleft() for _ in range(n)] for n in need)
        for b in blocks:
            self._give(old[b])

    def _give(self, table):
        for lh in self.heads():
            for ids in table[lh]:
                self.free.extend(ids)

    def release(self, blocks):
        for b in blocks:
            self._give(self.table.pop(b))
            del self.rows[b]

    def check(self):
        """Ring, table, counts and block formats equal the model's."""
        s = self.store
        ops.check_invariants(s)
        head, tail = s.cursor.tolist()
        n = s.ring.numel()
        assert [int(s.ring[i % n]) for i in range(head, tail)] == list(self.free)
        for b, table in self.table.items():
            for (l, h), (high, low) in table.items():
                row = s.table[b, l, h].tolist()
                assert row[: len(high)] == high
                assert row[len(row) - len(low) :][::-1] == low
                head_ref = self.rows[b][l, h]
                if head_ref.block_format.high.packed:
                    assert s.counts[b, l, h].tolist() == [len(head_ref.tiers[2]), len(head_ref.tiers[1])]
            assert s.block_formats[int(s.format_id[b])] is head_ref.block_format or int(s.format_id[b]) == 0

    def check_bytes(self, block):
        """Page bytes and key header of a packed block equal the reference's."""
        s = self.store
        for (l, h), ids in self.table[block].items():
            head = self.rows[block][l, h]
            for tier, fmt, pages in ((2, head.block_format.high, ids[0]), (1, head.block_format.low, ids[1])):
                if fmt is None:
                    continue
                want = ref_pages(s.layout, fmt, head.tiers[tier])
                assert len(want) == len(pages)
                for page, raw in zip(pages, want):
                    assert s.pages[page].numpy().tobytes() == raw, (block, l, h, tier)
            if head.header is not None:
                assert np.array_equal(s.headers[block, l, h].numpy(), head.header)

// Unpacks codes to fp16 tiles in shared memory, as wgmma reads them. 128 threads unpack one tile of 64 tokens.
//
// A tile of keys is [64 tokens, 128 features], as two halves of 64 features; a tile of values [128 features, 64 tokens].
#pragma once
#include "hopper.cuh"

constexpr int TILE = 64;            // tokens of a tile
constexpr int DIM = 128;            // features of a head
constexpr int HALF_TILE = TILE * 128;  // bytes of 64 tokens and 64 features in fp16
constexpr int UNPACKERS = 128;      // threads

__host__ __device__ constexpr u32 both(u32 half) { return half << 16 | half; }

// Field FIELD of the bytes of a word, as four fp16 numbers: the bits in the mantissa of 1024 give 1024 + 2^shift c, and an
// FMA removes the offset and the factor. Exact for every code.
template <int BITS, int FIELD>
__device__ __forceinline__ void numbers(u32 x, u32& low, u32& high) {
  low = bytes_of<0x4140>(x, 0x64646464);
  high = bytes_of<0x4342>(x, 0x64646464);
  constexpr int shift = BITS * FIELD;
  if constexpr (BITS < 8) {
    constexpr u32 keep = both(0xFF00 | ((1 << BITS) - 1) << shift);
    low &= keep;
    high &= keep;
  }
  if constexpr (shift == 0) {
    low = add2(low, both(0xE400));  // - 1024
    high = add2(high, both(0xE400));
  } else {
    constexpr u32 down = both(0x3C00 - (shift << 10)), less = both(0xE400 - (shift << 10));  // 2^-shift, -1024 * 2^-shift
    low = fma2(low, down, less);
    high = fma2(high, down, less);
  }
}

// Eight codes of one field, times scale plus zero, to 16 bytes of a tile.
template <int BITS, int FIELD>
__device__ __forceinline__ void unpack8(u32 to, u32 x0, u32 x1, const u32 (&s)[4], const u32 (&z)[4]) {
  u32 a, b, c, d;
  numbers<BITS, FIELD>(x0, a, b);
  numbers<BITS, FIELD>(x1, c, d);
  store16(to, fma2(a, s[0], z[0]), fma2(b, s[1], z[1]), fma2(c, s[2], z[2]), fma2(d, s[3], z[3]));
}


// A thread's bytes of a tile of codes: 8 of every ROWS-th row of ROW bytes. `raw` is its warp's share of the tile, 256 bytes
// per round.
template <int ROW, int COUNT>
struct Share {
  static constexpr int GROUPS = ROW / 8, ROWS = UNPACKERS / GROUPS, ROUNDS = COUNT / ROWS;
  int group, first;
  u32 x0[ROUNDS], x1[ROUNDS];

  __device__ __forceinline__ Share(u32 raw, int thread) : group(thread % GROUPS), first(thread / GROUPS) {
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) load8(raw + i * 256 + thread % 32 * 8, x0[i], x1[i]);
  }
};

// Scale and zero of the features that a thread unpacks, of up to two fields. All tiles of a block share them, so they stay in
// registers: reading them takes as long as reading the codes (4 wavefronts per instruction).
struct KeyScales {
  u32 s[2][4], z[2][4];
};

template <int BITS>
__device__ __forceinline__ void load_key_scales(u32 meta, int chunk, u32 (&s)[4], u32 (&z)[4]) {
  load16(meta + chunk * 16, s);
  load16(meta + 2 * DIM + chunk * 16, z);
  if constexpr (BITS < 8) {
#pragma unroll
    for (int j = 0; j < 4; j++) s[j] = mul2(s[j], both(BITS == 4 ? 0x4C40 : 0x5550));  // 17, 85
  }
}

template <int BITS, int FIELD, class S>
__device__ __forceinline__ void unpack_key_field(const S& codes, u32 to, const u32 (&s)[4], const u32 (&z)[4]) {
  const int chunk = FIELD * S::GROUPS + codes.group;
  const u32 column = to + chunk / 8 * HALF_TILE;
#pragma unroll
  for (int i = 0; i < S::ROUNDS; i++) {
    unpack8<BITS, FIELD>(column + swizzled(codes.first + i * S::ROWS, chunk % 8), codes.x0[i], codes.x1[i], s, z);
  }
}

// Codes [64, 16 * BITS bytes] -> keys. `meta`: fp16 [2, 128], scale on the 8-bit grid and zero by feature.
// `fresh`: `held` has those of another block.
template <int BITS>
__device__ __forceinline__ void unpack_keys(u32 raw, u32 meta, u32 to, bool fresh, KeyScales& held, int thread) {
  using Codes = Share<16 * BITS, TILE>;
  if constexpr (BITS > 2) {
    // One round at a time, with the codes of the next round in flight, because registers hold the scales.
    const int group = thread % Codes::GROUPS, first = thread / Codes::GROUPS;
    if (fresh) {
      load_key_scales<BITS>(meta, group, held.s[0], held.z[0]);
      if constexpr (BITS == 4) load_key_scales<BITS>(meta, Codes::GROUPS + group, held.s[1], held.z[1]);
    }
    raw += thread % 32 * 8;
    to += swizzled(first, group % 8) + group / 8 * HALF_TILE;
    u32 x0, x1;
    load8(raw, x0, x1);
#pragma unroll
    for (int i = 0; i < Codes::ROUNDS; i++) {
      u32 y0 = 0, y1 = 0;
      if (i + 1 < Codes::ROUNDS) load8(raw + (i + 1) * 256, y0, y1);
      const u32 row = to + i * Codes::ROWS * 128;
      unpack8<BITS, 0>(row, x0, x1, held.s[0], held.z[0]);
      if constexpr (BITS == 4) unpack8<BITS, 1>(row + HALF_TILE, x0, x1, held.s[1], held.z[1]);
      x0 = y0, x1 = y1;
    }
  } else {  // four fields are too many to hold
    const Codes codes(raw, thread);
    u32 s[4], z[4];
    load_key_scales<BITS>(meta, codes.group, s, z);
    unpack_key_field<BITS, 0>(codes, to, s, z);
    load_key_scales<BITS>(meta, codes.GROUPS + codes.group, s, z);
    unpack_key_field<BITS, 1>(codes, to, s, z);
    load_key_scales<BITS>(meta, 2 * codes.GROUPS + codes.group, s, z);
    unpack_key_field<BITS, 2>(codes, to, s, z);
    load_key_scales<BITS>(meta, 3 * codes.GROUPS + codes.group, s, z);
    unpack_key_field<BITS, 3>(codes, to, s, z);
  }
}

template <int BITS, int FIELD, class S>
__device__ __forceinline__ void unpack_value_field(const S& codes, const u32 (&s)[4], const u32 (&z)[4], u32 to) {
#pragma unroll
  for (int i = 0; i < S::ROUNDS; i++) {
    const int row = FIELD * 16 * BITS + codes.first + i * S::ROWS;
    unpack8<BITS, FIELD>(to + swizzled(row, codes.group), codes.x0[i], codes.x1[i], s, z);
  }
}

// Scale and zero of a thread's eight tokens, 0 from token `live` on: the bytes there may be NaN, which p = 0 does not remove.
__device__ __forceinline__ void load_token_scales(u32 meta, int group, int live, u32 (&s)[4], u32 (&z)[4]) {
  load16(meta + group * 16, s);
  load16(meta + 2 * TILE + group * 16, z);
  if (live < TILE) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = group * 8 + 2 * j;
      const u32 keep = (token < live ? 0xFFFF : 0) | (token + 1 < live ? 0xFFFF0000 : 0);
      s[j] &= keep;
      z[j] &= keep;
    }
  }
}

// Codes [16 * BITS, 64 bytes] (tokens contiguous) -> values. `meta`: fp16 [G, 2, 64], scale and zero by token;
// G = 4 groups of 32 features with 2 bits, else 1. The tile has `live` tokens.
template <int BITS>
__device__ __forceinline__ void unpack_values(u32 raw, u32 meta, u32 to, int live, int thread) {
  constexpr int GROUP_BYTES = 4 * TILE;
  const Share<TILE, 16 * BITS> codes(raw, thread);
  u32 s[4], z[4];
  load_token_scales(meta, codes.group, live, s, z);
  unpack_value_field<BITS, 0>(codes, s, z, to);
  if constexpr (BITS == 2) load_token_scales(meta + GROUP_BYTES, codes.group, live, s, z);
  if constexpr (BITS <= 4) unpack_value_field<BITS, 1>(codes, s, z, to);
  if constexpr (BITS == 2) {
    load_token_scales(meta + 2 * GROUP_BYTES, codes.group, live, s, z);
    unpack_value_field<BITS, 2>(codes, s, z, to);
    load_token_scales(meta + 3 * GROUP_BYTES, codes.group, live, s, z);
    unpack_value_field<BITS, 3>(codes, s, z, to);
  }
}

// --- rows in the model's dtype: new tokens, blocks that were never packed ------------------------------------------

// Converts two features to fp16, clamped to its range.
template <bool BF16>
__device__ __forceinline__ u32 model_pair(u32 x) {
  if constexpr (!BF16) return x;
  float low = __uint_as_float(x << 16), high = __uint_as_float(x & 0xFFFF0000);
  low = fminf(fmaxf(low, -65504.0f), 65504.0f);
  high = fminf(fmaxf(high, -65504.0f), 65504.0f);
  return halves(low, high);
}

template <bool BF16>
__device__ __forceinline__ float model_float(u32 x) {
  if constexpr (BF16) return __uint_as_float(x << 16);
  return float_of(x);
}

template <bool BF16>
__device__ __forceinline__ u32 model_pair_of(float low, float high) {
  if constexpr (!BF16) return halves(low, high);
  return bfloats(low, high);
}

// Converts rows of keys to a tile. `row_at(token)` points to a token's 128 features; the tile has `live` tokens, at least
// one. A thread converts half of a row. Rows after the last token are read from it and set to 0.
template <bool BF16>
__device__ __forceinline__ void copy_half_row(u32 to, int row, const void* from, bool live) {
#pragma unroll
  for (int part = 0; part < 2; part++) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __ldg(static_cast<const uint4*>(from) + part * 4 + i);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 y = live ? x[i] : make_uint4(0, 0, 0, 0);
      store16(to + swizzled(row, part * 4 + i), model_pair<BF16>(y.x), model_pair<BF16>(y.y), model_pair<BF16>(y.z),
              model_pair<BF16>(y.w));
    }
  }
}

template <bool BF16, class Rows>
__device__ __forceinline__ void copy_keys(const Rows& row_at, u32 to, int live, int thread) {
  const int token = thread / 2, half = thread % 2;
  copy_half_row<BF16>(to + half * HALF_TILE, token, row_at(min(token, live - 1)) + half * 128, token < live);
}

// Converts rows of values to a tile whose tokens are contiguous. A warp takes eight tokens at a time, two features per lane.
template <bool BF16, class Rows>
__device__ __forceinline__ void copy_values(const Rows& row_at, u32 to, int live, int thread) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int task = thread / 32; task < 16; task += UNPACKERS / 32) {
    const int group = task % 8, feature = task / 8 * 64 + 2 * lane;
    u32 x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      x[i] = __ldg(reinterpret_cast<const u32*>(row_at(min(group * 8 + i, live - 1)) + feature * 2));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = group * 8 + i < live ? model_pair<BF16>(x[i]) : 0;
    u32 low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      low[i] = __byte_perm(x[2 * i], x[2 * i + 1], 0x5410);
      high[i] = __byte_perm(x[2 * i], x[2 * i + 1], 0x7632);
    }
    store16(to + swizzled(feature, group), low[0], low[1], low[2], low[3]);
    store16(to + swizzled(feature + 1, group), high[0], high[1], high[2], high[3]);
  }
}

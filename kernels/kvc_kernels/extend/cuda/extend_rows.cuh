// The sums of 64 query rows in the registers of a warpgroup, and how their results are stored.
#pragma once

constexpr float NOTHING = -1.0e30f;  // log-sum-exp of no token

// The share of one thread: rows r and r + 8, two of every eight features.
struct Rows {
  float o[64];
  float m[2], l[2];  // maximum and sum; the latter is this thread's share

  __device__ __forceinline__ Rows() : m{NOTHING, NOTHING}, l{0.0f, 0.0f} {
#pragma unroll
    for (float& y : o) y = 0.0f;
  }
};

// Place of a query row of the request in the output: the number of its head's vector.
__device__ __forceinline__ i64 output_row(const Item& item, int row) {
  return static_cast<i64>(item.start + row / G) * (H * G) + cta_head() * G + row % G;
}

// Adds the state of the new tokens, computed by another kernel.
__device__ __forceinline__ void add_new(const Arguments& a, const Item& item, int row, Rows& x) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (row + 8 * j >= item.rows) continue;
    const i64 place = output_row(item, row + 8 * j);
    const float lse = a.new_lse[place], top = fmaxf(x.m[j], lse);
    const float keep = exp2_fast(x.m[j] - top), weight = lse > NOTHING ? exp2_fast(lse - top) : 0.0f;
    x.m[j] = top;
    x.l[j] = x.l[j] * keep + weight;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const u32 y = __ldg(reinterpret_cast<const u32*>(a.new_o + (place * DIM + i * 8 + threadIdx.x % 4 * 2) * 2));
      float &low = x.o[i * 4 + j * 2], &high = x.o[i * 4 + j * 2 + 1];
      low = low * keep + weight * model_float<MODEL_BF16>(y);
      high = high * keep + weight * model_float<MODEL_BF16>(y >> 16);
    }
  }
}

// Stores the results to the output, or to `part_o` if the tile has several KV splits. `part_o` has 64 rows in the order of
// the threads, which `merge` relies on, so few instructions write full sectors. Code size matters here: each instruction
// runs once, and nothing hides its fetch.
__device__ __forceinline__ void store_rows(const Arguments& a, const Item& item, int row, Rows& x) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    x.l[j] += __shfl_xor_sync(~0u, x.l[j], 1);
    x.l[j] += __shfl_xor_sync(~0u, x.l[j], 2);
  }
  if (a.new_o && item.from == 0) add_new(a, item, row, x);
  const int part = item.slot < 0 ? 0 : (item.slot * H + cta_head()) * ROWS + row - item.first;  // its place in part_lse
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const bool some = x.l[j] > 0.0f;
    const float lse = some ? x.m[j] + log2_fast(x.l[j]) : NOTHING, over = some ? reciprocal(x.l[j]) : 1.0f;
    u32 y[16];
    if (item.slot >= 0) {
#pragma unroll
      for (int i = 0; i < 16; i++) y[i] = halves(x.o[i * 4 + j * 2] * over, x.o[i * 4 + j * 2 + 1] * over);
      u8* to = a.part_o + (static_cast<i64>(part / 64 * 8 + j) * 128 + threadIdx.x % 128) * 16;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        *reinterpret_cast<uint4*>(to + i * (2 * 128 * 16)) = make_uint4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
      }
      if (threadIdx.x % 4 == 0) a.part_lse[part + 8 * j] = lse;
    } else if (row + 8 * j < item.rows) {
      const i64 place = output_row(item, row + 8 * j);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        y[i] = model_pair_of<MODEL_BF16>(x.o[i * 4 + j * 2] * over, x.o[i * 4 + j * 2 + 1] * over);
        *reinterpret_cast<u32*>(a.out + (place * DIM + i * 8 + threadIdx.x % 4 * 2) * 2) = y[i];
      }
      if (threadIdx.x % 4 == 0 && a.out_lse) a.out_lse[place] = lse;
    }
  }
}

// Merges the partial results of a query tile by log-sum-exp, one warp per row. CTAs start while the last CTAs of `extend`
// still run, and wait for them.
#pragma once

struct MergeArguments {
  const u8* part_o;  // fp16 [slots, H, ROWS, DIM], each 64 rows in the order of `store_rows`
  const float* part_lse;
  const int* merges;  // int [n, 5]: query start, first row, end row, first slot, slots
  u8* out;
  float* out_lse;
};

__device__ __forceinline__ float of_all_lanes(float x, bool largest) {
#pragma unroll
  for (int i = 16; i; i /= 2) {
    const float y = __shfl_xor_sync(~0u, x, i);
    x = largest ? fmaxf(x, y) : x + y;
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(128) merge(const __grid_constant__ MergeArguments a) {
  const int lane = threadIdx.x % 32, at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int within = at % ROWS, h = at / ROWS % H, *merge = a.merges + at / (ROWS * H) * 5;
  const int start = merge[0], row = merge[1] + within, end = merge[2], slot = merge[3], slots = merge[4];
  // A thread of `extend` has 16 bytes of every 512: features 2 t, 2 t + 1 of four groups of eight. Two lanes share them here.
  const int thread = within % 64 / 16 * 32 + within % 8 * 4 + lane / 2 % 4, first = lane / 8 * 4 + lane % 2 * 2;
  const int at_lane = ((lane / 8 * 2 + within % 16 / 8) * 128 + thread) * 16 + lane % 2 * 8;
  wait_for_kernel_ahead();
  if (row >= end) return;
  float m = NOTHING, l = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 0; first < slots; first += 32) {
    const int n = min(slots - first, 32);
    const i64 part = (static_cast<i64>(slot + first) * H + h) * ROWS + within;
    const u8* rows = a.part_o + part / 64 * (64 * DIM * 2) + at_lane;
    const float lse = lane < n ? a.part_lse[part + static_cast<i64>(lane) * (H * ROWS)] : NOTHING;
    const float top = fmaxf(m, of_all_lanes(lse, true)), keep = exp2_fast(m - top);
    const float mine = lse > NOTHING ? exp2_fast(lse - top) : 0.0f;
    l = l * keep + of_all_lanes(mine, false);
    m = top;
#pragma unroll
    for (float& x : o) x *= keep;
#pragma unroll 8
    for (int i = 0; i < n; i++) {
      const uint2 x = *reinterpret_cast<const uint2*>(rows + static_cast<i64>(i) * (H * ROWS * DIM * 2));
      const float share = __shfl_sync(~0u, mine, i);
      o[0] += share * model_float<false>(x.x), o[1] += share * model_float<false>(x.x >> 16);
      o[2] += share * model_float<false>(x.y), o[3] += share * model_float<false>(x.y >> 16);
    }
  }
  const bool some = l > 0.0f;
  const float over = some ? reciprocal(l) : 1.0f;
  const i64 place = static_cast<i64>(start + row / G) * (H * G) + h * G + row % G;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 y = model_pair_of<MODEL_BF16>(o[2 * i] * over, o[2 * i + 1] * over);
    *reinterpret_cast<u32*>(a.out + (place * DIM + (first + i) * 8 + lane / 2 % 4 * 2) * 2) = y;
  }
  if (a.out_lse && lane == 0) a.out_lse[place] = some ? m + log2_fast(l) : NOTHING;
}

// Partial results of a query tile -> its rows, by log-sum-exp; a warp a row. Blocks start while the last of `extend` still
// run, and wait for them.
#pragma once

struct JoinArguments {
  const u8* part_o;  // fp16 [slots, H, ROWS, DIM]
  const float* part_lse;
  const int* joins;  // int [n, 5]: query start, first row, end row, first slot, slots
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

extern "C" __global__ void __launch_bounds__(128) join(const __grid_constant__ JoinArguments a) {
  const int lane = threadIdx.x % 32, at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int within = at % ROWS, h = at / ROWS % H, *join = a.joins + at / (ROWS * H) * 5;
  const int start = join[0], row = join[1] + within, end = join[2], slot = join[3], slots = join[4];
  wait_for_kernel_ahead();
  if (row >= end) return;
  float m = NOTHING, l = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 0; first < slots; first += 32) {
    const int n = min(slots - first, 32);
    const i64 part = (static_cast<i64>(slot + first) * H + h) * ROWS + within;
    const float lse = lane < n ? a.part_lse[part + static_cast<i64>(lane) * (H * ROWS)] : NOTHING;
    const float top = fmaxf(m, of_all_lanes(lse, true)), keep = exp2_fast(m - top);
    const float mine = lse > NOTHING ? exp2_fast(lse - top) : 0.0f;
    l = l * keep + of_all_lanes(mine, false);
    m = top;
#pragma unroll
    for (float& x : o) x *= keep;
#pragma unroll 8
    for (int i = 0; i < n; i++) {
      const i64 from = (part + static_cast<i64>(i) * (H * ROWS)) * DIM + lane * 4;
      const uint2 x = *reinterpret_cast<const uint2*>(a.part_o + from * 2);
      const float share = __shfl_sync(~0u, mine, i);
      o[0] += share * model_float<false>(x.x), o[1] += share * model_float<false>(x.x >> 16);
      o[2] += share * model_float<false>(x.y), o[3] += share * model_float<false>(x.y >> 16);
    }
  }
  const bool some = l > 0.0f;
  const float over = some ? reciprocal(l) : 1.0f;
  const i64 place = static_cast<i64>(start + row / G) * (H * G) + h * G + row % G;
  const uint2 y = make_uint2(
      model_pair_of<MODEL_BF16>(o[0] * over, o[1] * over), model_pair_of<MODEL_BF16>(o[2] * over, o[3] * over));
  *reinterpret_cast<uint2*>(a.out + (place * DIM + lane * 4) * 2) = y;
  if (a.out_lse && lane == 0) a.out_lse[place] = some ? m + log2_fast(l) : NOTHING;
}

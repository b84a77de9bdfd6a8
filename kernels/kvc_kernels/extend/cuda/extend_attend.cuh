// A multiplying warpgroup: GROUPS times 64 query rows (new token x query head of one group) over all tiles.
//
// Products are issued two at a time, the output of one group of rows and the logits of the next. Those of the other
// warpgroup run while this one computes exponentials. Three things keep ptxas from moving or spilling accumulators (it
// places the first at R24 and the rest after it): nothing is loaded into `Rows`, no product is in flight across the end of
// the loop, and accumulators are pinned after each wait for products.
#pragma once
#include "extend_rows.cuh"

// A row's maximum is only raised when a thread's 16 probabilities of that row exceed this in sum. fp16 holds such numbers
// with the same relative precision as those below 1, and most tiles need no maximum, no reduction across threads, and no
// rescaling.
constexpr float MOST_SUM = 1024.0f;

// Loads GROUPS times 64 query rows from `first` on, as fp16, each group as two halves of features. All loads are issued
// before the first one is used.
__device__ __forceinline__ void load_queries(const Arguments& a, const Item& item, int first, u32 to, int thread) {
  const int half = thread % 2;
  uint4 x[GROUPS][8];
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const int row = min(first + i * 64 + thread / 2, item.rows - 1);
    const i64 token = item.start + row / G;
    const u8* from = a.q + token * a.q_stride_n + (cta_head() * G + row % G) * a.q_stride_h + half * 128;
#pragma unroll
    for (int j = 0; j < 8; j++) x[i][j] = __ldg(reinterpret_cast<const uint4*>(from) + j);
  }
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const bool real = first + i * 64 + thread / 2 < item.rows;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const uint4 y = real ? x[i][j] : make_uint4(0, 0, 0, 0);
      store16(to + i * QUERY_BYTES + half * HALF_TILE + swizzled(thread / 2, j), model_pair<MODEL_BF16>(y.x),
              model_pair<MODEL_BF16>(y.y), model_pair<MODEL_BF16>(y.z), model_pair<MODEL_BF16>(y.w));
    }
  }
}

// Number of this thread, read again at each use, because the loop needs the register.
__device__ __forceinline__ int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(x));
  return x;
}

// Sets the logits of tokens that a row does not see to -infinity.
__device__ __forceinline__ void mask(float (&s)[32], const Arguments& a, int2 seen, int group) {
  const int thread = thread_again(), first = seen.y >= 0 ? Item(a).first : 0;
  const int row = first + (thread / 128 - 2) * (64 * GROUPS) + group * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int upto = (row + 8 * j) / G - seen.y + 1;
    const int limit = (seen.y >= 0 ? min(upto, seen.x) : seen.x) - thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float& y = s[i / 2 * 4 + j * 2 + i % 2];
      if (i / 2 * 8 + i % 2 >= limit) y = __int_as_float(0xFF800000);
    }
  }
}

// Probabilities in fp16 relative to the rows' maxima, and their sums per row, taken over the rounded probabilities.
__device__ __forceinline__ void exponentials(u32 (&p)[16], float (&sum)[2], const float (&s)[32], const Rows& x, float factor) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const float m = x.m[i % 2];
    p[i] = halves(exp2_fast(fmaf(s[2 * i], factor, -m)), exp2_fast(fmaf(s[2 * i + 1], factor, -m)));
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const u32 pairs = add2(add2(add2(p[j], p[j + 2]), add2(p[j + 4], p[j + 6])),
                           add2(add2(p[j + 8], p[j + 10]), add2(p[j + 12], p[j + 14])));
    sum[j] = model_float<false>(pairs) + model_float<false>(pairs >> 16);
  }
}

// Turns the raw products of a tile into probabilities, and rescales the earlier sums to the new maxima.
__device__ __forceinline__ void softmax(
    u32 (&p)[16], float (&s)[32], Rows& x, const Arguments& a, int2 seen, int group) {
  if constexpr (CAPPED) {
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = a.cap_factor * (1.0f - 2.0f * reciprocal(exp2_fast(s[i] * a.inner) + 1.0f));
  }
  const float factor = CAPPED ? 1.0f : a.factor;
  if (seen.x < TILE || seen.y >= 0) mask(s, a, seen, group);
  float sum[2];
  exponentials(p, sum, s, x, factor);
  if (__any_sync(~0u, !(sum[0] <= MOST_SUM) || !(sum[1] <= MOST_SUM))) {  // infinite at the first tile
    float shrink[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float top = s[2 * j];
#pragma unroll
      for (int i = 0; i < 16; i++) top = fmaxf(top, s[i / 2 * 4 + j * 2 + i % 2]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float m = fmaxf(x.m[j], top * factor);
      shrink[j] = exp2_fast(x.m[j] - m);
      x.l[j] *= shrink[j];
      x.m[j] = m;
    }
#pragma unroll
    for (int i = 0; i < 64; i++) x.o[i] *= shrink[i / 2 % 2];
    exponentials(p, sum, s, x, factor);
  }
  x.l[0] += sum[0];
  x.l[1] += sum[1];
}

// Starts s = q k^T.
__device__ __forceinline__ void begin_logits(float (&s)[32], u32 q, u32 k) {
  products_begin();
#pragma unroll
  for (int i = 0; i < DIM / 16; i++) {  // 16 features are 32 bytes; the second half lies HALF_TILE further
    const int step = i % 4 * 2 + i / 4 * (HALF_TILE / 16);
    product_64x64(s, tile_descriptor(q + step), tile_descriptor(k + step), i);
  }
  products_commit();
}

// Starts o += p v; p in fp16.
__device__ __forceinline__ void begin_output(Rows& x, const u32 (&p)[16], u32 v) {
  products_begin();
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) {
    product_64x128(x.o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], tile_descriptor(v + 2 * i));
  }
  products_commit();
}

__device__ __forceinline__ void attend(const Arguments& a, const Shared& s, int warpgroup) {
  const u32 q_at = s.at + Q_AT + warpgroup * GROUPS * QUERY_BYTES;
  {
    const Item item(a);
    const int thread = threadIdx.x % 128, first = item.first + warpgroup * GROUPS * 64;
    load_queries(a, item, first, q_at, thread);
  }
  fence_for_products();
  named_barrier(1 + warpgroup, 128);
  const u32 q = tile_number(q_at), k0 = tile_number(s.keys(0)), v0 = tile_number(s.values(0));
  const auto at = [](int stage) { return stage * (TILE_BYTES / 16); };
  Rows x, y;  // the first group of 64 rows, and the second where there are two
  float logits[32];
  u32 p[16];
  int stage = 0, parity = 0;
  barrier_wait(s.keys_full(0), 0);
  int2 seen = s.seen()[0];
  begin_logits(logits, q, k0);
  products_wait<0>();
  pin(logits);
  while (seen.x >= 0) {
    softmax(p, logits, x, a, seen, 0);
    barrier_wait(s.values_full(stage), parity);
    if constexpr (GROUPS == 2) {
      begin_output(x, p, v0 + at(stage));
      begin_logits(logits, q + QUERY_BYTES / 16, k0 + at(stage));
      products_wait<0>();
      pin(logits);
      pin(x.o);
    }
    barrier_arrive(s.keys_empty(stage));
    if constexpr (GROUPS == 2) {
      softmax(p, logits, y, a, seen, 1);
    }
    const int now = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
    barrier_wait(s.keys_full(stage), parity);
    seen = s.seen()[stage];
    // After the last tile these logits are computed from stale data and not used.
    if constexpr (GROUPS == 2) begin_output(y, p, v0 + at(now));
    else begin_output(x, p, v0 + at(now));
    begin_logits(logits, q, k0 + at(stage));
    products_wait<0>();
    pin(logits);
    if constexpr (GROUPS == 2) pin(y.o);
    else pin(x.o);
    barrier_arrive(s.values_empty(now));
  }
  let_next_kernel_start();
  const Item item(a);
  const int thread = thread_again() % 128;
  const int row = item.first + warpgroup * GROUPS * 64 + thread / 32 * 16 + thread % 32 / 4;
  store_rows(a, item, row, x);
  if constexpr (GROUPS == 2) store_rows(a, item, row + 64, y);
}

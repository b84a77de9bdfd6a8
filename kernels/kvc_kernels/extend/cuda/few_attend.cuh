// A multiplying warpgroup: every second page of the CTA, against all of its query rows.
//
// While the tensor cores compute the output of a tile, the warps unpack the keys of the next tile; while they compute its
// logits, the warps unpack its values. No product is in flight across the end of the loop, because ptxas would then
// serialize the products.
#pragma once

constexpr int PAIRS = QUERIES / 8;  // pairs of neighboring query rows whose logits a thread holds
// Probabilities are relative to 2^5 times a maximum, which is raised when one reaches 2. That sets a single bit in fp16.
constexpr float ABOVE = 5.0f;
constexpr u32 TWO_OR_MORE = both(0x4000);

// The state of a thread, for query rows 8 i + 2 g and 8 i + 2 g + 1: maxima, partial sums of probabilities, and outputs.
struct Sums {
  float o[2][QUERIES / 2];  // one half of the features each
  float m[2 * PAIRS];
  u32 l[PAIRS];  // fp16; a thread sees one token in 32

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int i = 0; i < QUERIES / 2; i++) o[0][i] = o[1][i] = 0.0f;
#pragma unroll
    for (float& x : m) x = NOTHING;
#pragma unroll
    for (u32& x : l) x = 0;
  }
};

// Copies the query rows as fp16, in two halves of the features, in the feature order of `few_operands.cuh`.
__device__ __forceinline__ void load_queries(const Arguments& a, u32 to) {
  const Item item(a);
  const int thread = threadIdx.x % 128, half = thread % 2, at = thread / 2, row = item.first + at;
  if (at >= QUERIES) return;
  u32 x[32];
#pragma unroll
  for (u32& y : x) y = 0;
  if (row < item.rows) {
    const i64 token = item.start + row / G;
    const u8* from = a.q + token * a.q_stride_n + (cta_head() * G + row % G) * a.q_stride_h + half * 128;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint4 y = __ldg(reinterpret_cast<const uint4*>(from) + i);
      x[4 * i] = model_pair<MODEL_BF16>(y.x), x[4 * i + 1] = model_pair<MODEL_BF16>(y.y);
      x[4 * i + 2] = model_pair<MODEL_BF16>(y.z), x[4 * i + 3] = model_pair<MODEL_BF16>(y.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) store16(to + half * HALF_Q + swizzled(at, i), x[i], x[8 + i], x[16 + i], x[24 + i]);
}

// Sets the logits of tokens that a query does not see to -infinity. `seen`: tokens in the tile; number of its first new
// token, or EVERYONE.
__device__ __forceinline__ void mask(float (&s)[QUERIES / 2], const Arguments& a, int2 seen) {
  const Lane t;
  const int first = seen.y >= 0 ? Item(a).first : 0;
#pragma unroll
  for (int i = 0; i < QUERIES / 2; i++) {
    const int token = t.token(i / 2 % 2), query = first + i / 4 * 8 + t.g * 2 + i % 2;
    if (token >= seen.x || (seen.y >= 0 && seen.y + token > query / G)) s[i] = __int_as_float(0xFF800000);
  }
}

__device__ __forceinline__ void exponentials(u32 (&p)[2 * PAIRS], const float (&s)[QUERIES / 2], const Sums& x, float factor) {
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; i++) {
    const float m0 = x.m[i / 2 * 2], m1 = x.m[i / 2 * 2 + 1];
    p[i] = halves(exp2_fast(fmaf(s[2 * i], factor, -m0)), exp2_fast(fmaf(s[2 * i + 1], factor, -m1)));
  }
}

__device__ __forceinline__ void store_probabilities(const u32 (&p)[2 * PAIRS], u32 to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  to += swizzled(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < PAIRS / 2; i++) store_transposed(to + i * 2048, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
  fence_for_products();
}

// Raises the maxima to those of all tokens of the tile, and rescales the sums.
__device__ __forceinline__ void raise(const float (&s)[QUERIES / 2], Sums& x, float* tops, float factor, int barrier) {
  const Lane t;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    float top[2] = {fmaxf(s[4 * i], s[4 * i + 2]), fmaxf(s[4 * i + 1], s[4 * i + 3])};
#pragma unroll
    for (int j = 4; j < 32; j *= 2) {
      top[0] = fmaxf(top[0], __shfl_xor_sync(~0u, top[0], j));
      top[1] = fmaxf(top[1], __shfl_xor_sync(~0u, top[1], j));
    }
    if (t.r == 0) *reinterpret_cast<float2*>(tops + t.warp * QUERIES + i * 8 + t.g * 2) = make_float2(top[0], top[1]);
  }
  named_barrier(barrier, 128);
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    float2 top = *reinterpret_cast<const float2*>(tops + i * 8 + t.g * 2);
#pragma unroll
    for (int j = 1; j < 4; j++) {
      const float2 y = *reinterpret_cast<const float2*>(tops + j * QUERIES + i * 8 + t.g * 2);
      top.x = fmaxf(top.x, y.x), top.y = fmaxf(top.y, y.y);
    }
    float shrink[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float& m = x.m[2 * i + e];
      const float now = fmaxf(m, fmaf(e ? top.y : top.x, factor, ABOVE));
      shrink[e] = exp2_fast(m - now);
      m = now;
    }
    x.l[i] = mul2(x.l[i], halves(shrink[0], shrink[1]));
#pragma unroll
    for (int j = 0; j < 4; j++) x.o[0][4 * i + j] *= shrink[j % 2], x.o[1][4 * i + j] *= shrink[j % 2];
  }
}

// The pages of a warpgroup, 64 tokens at a time.
struct Cursor {
  int stage, parity = 0, at = 0;  // at: first token within the page
  int4 word;

  __device__ __forceinline__ explicit Cursor(int warpgroup) : stage(warpgroup) {}

  __device__ __forceinline__ void wait(const Shared& s) {
    barrier_wait(s.full(stage), parity);
    word = s.words()[stage];
  }

  // After the last tile, this unpacks old contents of the ring; the products are not used.
  __device__ __forceinline__ void keys(u32 (&k)[32], const Arguments& a, const Shared& s) const {
    bool dense = word.x != END;
    for_class(word.x, [&]<int C>() {
      constexpr Class c = CLASSES[C];
      if constexpr (c.key_bits < 16) {
        load_keys<C>(k, s.page(stage), at, s.page(stage) + HEADER_AT);
        dense = false;
      }
    });
    if (dense) load_dense_keys(k, a, word);
  }

  // Advances to the next tile. Returns `seen` of this tile; its token count is negative after the last tile.
  __device__ __forceinline__ int2 values(u32 (&v)[2][16], const Arguments& a, const Shared& s, u32 room, int barrier) {
    bool dense = word.x != END;
    const int live = min(word.y - at, TILE);
    for_class(word.x, [&]<int C>() {
      constexpr Class c = CLASSES[C];
      if constexpr (c.key_bits < 16) {
        load_values<C>(v, s.page(stage), at, live);
        dense = false;
      }
    });
    if (dense) load_dense_values(v, a, word, room, barrier);
    const int2 seen = make_int2(word.x == END ? -1 : live, word.x == NEW_TOKENS ? word.z : EVERYONE);
    at += TILE;
    if (at >= word.y) {
      barrier_arrive(s.empty(stage));
      at = 0, stage += 2;
      if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
    return seen;
  }
};

__device__ __forceinline__ void begin_logits(float (&s)[QUERIES / 2], const u32 (&k)[32], u32 q) {
  products_begin();
#pragma unroll
  for (int j = 0; j < DIM / 16; j++) {
    const u32 at = q + j / 4 * (HALF_Q / 16) + j % 4 * 2;
    product(s, k[4 * j], k[4 * j + 1], k[4 * j + 2], k[4 * j + 3], tile_descriptor(at), j);
  }
  products_commit();
}

__device__ __forceinline__ void begin_output(Sums& x, const u32 (&v)[2][16], u32 p) {
  products_begin();
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int j = 0; j < TILE / 16; j++) {
      const u32* y = v[half] + 4 * j;
      product(x.o[half], y[0], y[1], y[2], y[3], tile_descriptor(p + 2 * j), 1);
    }
  }
  products_commit();
}

// Adds up the sums of both warpgroups and stores the results.
__device__ __forceinline__ void finish(const Arguments& a, const Shared& s, int warpgroup, Sums& x) {
  const Lane t;
  float *mine = s.tops(warpgroup), *sums = s.sums();
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    float l[2] = {model_float<false>(x.l[i]), model_float<false>(x.l[i] >> 16)};
#pragma unroll
    for (int j = 4; j < 32; j *= 2) {
      l[0] += __shfl_xor_sync(~0u, l[0], j);
      l[1] += __shfl_xor_sync(~0u, l[1], j);
    }
    const int query = i * 8 + t.g * 2;
    if (t.r == 0) {
      *reinterpret_cast<float2*>(mine + t.warp * QUERIES + query) = make_float2(l[0], l[1]);
      if (t.warp == 0) *reinterpret_cast<float2*>(s.maxima(warpgroup) + query) = make_float2(x.m[2 * i], x.m[2 * i + 1]);
    }
  }
  named_barrier(3, 256);  // from here on no thread reads the ring
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const int query = i * 8 + t.g * 2;
    const float2 other = *reinterpret_cast<const float2*>(s.maxima(1 - warpgroup) + query);
    const float shrink[2] = {VALUE_UNIT * exp2_fast(x.m[2 * i] - fmaxf(x.m[2 * i], other.x)),
                             VALUE_UNIT * exp2_fast(x.m[2 * i + 1] - fmaxf(x.m[2 * i + 1], other.y))};
#pragma unroll
    for (int j = 0; j < 4; j++) x.o[0][4 * i + j] *= shrink[j % 2], x.o[1][4 * i + j] *= shrink[j % 2];
  }
  const auto place = [&](int half, int i) {
    return sums + (i / 4 * 8 + t.g * 2 + i % 2) * SUM_PITCH + half * 64 + t.warp * 16 + i / 2 % 2 * 8 + t.r;
  };
  if (warpgroup == 1) {
#pragma unroll
    for (int i = 0; i < QUERIES; i++) *place(i / (QUERIES / 2), i % (QUERIES / 2)) = x.o[i / (QUERIES / 2)][i % (QUERIES / 2)];
  }
  named_barrier(3, 256);
  if (warpgroup == 1) return;
#pragma unroll
  for (int i = 0; i < QUERIES; i++) *place(i / (QUERIES / 2), i % (QUERIES / 2)) += x.o[i / (QUERIES / 2)][i % (QUERIES / 2)];
  named_barrier(1, 128);
  const Item item(a);
  const int row = t.warp * 16 + t.r;
  if (row >= QUERIES) return;
  Rows y;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const float *at = sums + (row + 8 * j) * SUM_PITCH + t.g * 2, m0 = s.maxima(0)[row + 8 * j], m1 = s.maxima(1)[row + 8 * j];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float2 z = *reinterpret_cast<const float2*>(at + i * 8);
      y.o[i * 4 + j * 2] = z.x, y.o[i * 4 + j * 2 + 1] = z.y;
    }
    y.m[j] = fmaxf(m0, m1);
    const float* l = s.tops(0) + t.g * QUERIES + row + 8 * j;  // of warp g of both warpgroups
    y.l[j] = l[0] * exp2_fast(m0 - y.m[j]) + l[4 * QUERIES] * exp2_fast(m1 - y.m[j]);
  }
  store_rows(a, item, item.first + row, y);
}

__device__ __forceinline__ void attend(const Arguments& a, const Shared& s, int warpgroup) {
  if (warpgroup == 0) load_queries(a, s.at + Q_AT);
  fence_for_products();
  named_barrier(3, 256);
  const u32 q = tile_number(s.at + Q_AT), p_at = s.probabilities(warpgroup);
  const int barrier = 1 + warpgroup;
  const float factor = CAPPED ? 1.0f : a.factor * KEY_UNIT;
  Sums x;
  Cursor next(warpgroup);
  float logits[QUERIES / 2];
  u32 k[32], v[2][16], p[2 * PAIRS];
  int buffer = 0;
  next.wait(s);
  next.keys(k, a, s);
  begin_logits(logits, k, q);
  int2 seen = next.values(v, a, s, p_at, barrier);
  products_wait<0>();
  pin(logits);
  while (seen.x >= 0) {
    if constexpr (CAPPED) {
#pragma unroll
      for (float& y : logits) y = a.cap_factor * (1.0f - 2.0f * reciprocal(exp2_fast(y * (a.inner * KEY_UNIT)) + 1.0f));
    }
    if (seen.x < TILE || seen.y >= 0) mask(logits, a, seen);
    exponentials(p, logits, x, factor);
    u32 bits = 0;
#pragma unroll
    for (u32 y : p) bits |= y;
    store_probabilities(p, p_at + buffer * P_BYTES);
    if (barrier_any(barrier, 128, bits & TWO_OR_MORE)) {
      raise(logits, x, s.tops(warpgroup), factor, barrier);
      exponentials(p, logits, x, factor);
      store_probabilities(p, p_at + buffer * P_BYTES);
      named_barrier(barrier, 128);
    }
    begin_output(x, v, tile_number(p_at) + buffer * (P_BYTES / 16));
    buffer ^= 1;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) x.l[i] = add2(x.l[i], add2(p[2 * i], p[2 * i + 1]));
    next.wait(s);
    next.keys(k, a, s);
    begin_logits(logits, k, q);
    products_wait<1>();
    seen = next.values(v, a, s, p_at, barrier);
    products_wait<0>();
    pin(logits);
    pin(x.o[0]);
    pin(x.o[1]);
  }
  let_next_kernel_start();
  finish(a, s, warpgroup, x);
}

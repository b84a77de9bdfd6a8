// Keys and values of 64 tokens as the operand that wgmma takes from registers, fp16.
//
// The thread in lane 4 r + g of warp w holds rows 16 w + r and 16 w + 8 + r of operand A, and columns 2 g, 2 g + 1, 2 g + 8 and
// 2 g + 9 of every 16. Rows of K and columns of V^T are tokens; columns of K are features. Index 16 j + 8 h + 2 g + e of the
// operand stands for token or feature 16 g + 4 j + 2 h + e (within each half of the features). One 16-byte load of codes
// then gives a thread its elements in the order of use. Queries have their features in the same order (`load_queries`),
// and the product of the logits delivers them in the order of V^T's columns.
#pragma once

// Unpacked keys are scaled by 2^-12 and values by 2^-10. A code is then a subnormal number, and its scale fits fp16 as long as
// the codes of a channel span less than 3840 and those of a token less than 960. Only the result is rounded.
constexpr float KEY_UNIT = 4096.0f, VALUE_UNIT = 1024.0f;

// For values and for keys: 1, and the factors of 4-bit and 8-bit scales. Scales of keys are on the 8-bit grid.
constexpr u32 ONE[] = {both(0x1400), both(0x0C00)};      // 2^-10, 2^-12
constexpr u32 NIBBLES[] = {both(0x6400), both(0x6C40)};  // 2^10, 17 * 2^8: a nibble is in bits 4..7
constexpr u32 BYTES[] = {both(0x7400), both(0x6C00)};    // 2^14, 2^12

struct Lane {
  int warp, r, g;

  __device__ __forceinline__ Lane() : warp(threadIdx.x % 128 / 32), r(threadIdx.x % 32 / 4), g(threadIdx.x % 4) {}
  __device__ __forceinline__ int token(int h) const { return r / 2 * 16 + warp * 4 + h * 2 + r % 2; }  // of a logit
};

// Two words of four codes (bytes, or their upper halves) times scale plus zero.
__device__ __forceinline__ void four(u32 x, u32& low, u32& high, const u32* s, const u32* z) {
  low = fma2(bytes_of<0x4140>(x, 0), s[0], z[0]);
  high = fma2(bytes_of<0x4342>(x, 0), s[1], z[1]);
}

__device__ __forceinline__ void load8_words(u32 from, u32 (&x)[8]) {
  u32 a[4], b[4];
  load16(from, a);
  load16(from + 16, b);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = a[i], x[4 + i] = b[i];
}

template <int BITS, bool KEYS>
__device__ __forceinline__ void load_scales(u32 scale, u32 zero, u32 (&s)[8], u32 (&z)[8]) {
  load8_words(scale, s);
  load8_words(zero, z);
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] = mul2(s[i], (BITS == 4 ? NIBBLES : BYTES)[KEYS]), z[i] = mul2(z[i], ONE[KEYS]);
}

template <int HALF>
__device__ __forceinline__ u32 nibbles(u32 x) {
  return (HALF ? x : x << 4) & 0xF0F0F0F0;
}

// Unpacks the keys of token `at` and those after it, class C. `page`: the first page; `header`: fp16 [2, 128], scale on the
// 8-bit grid and zero.
template <int C>
__device__ __forceinline__ void load_keys(u32 (&k)[32], u32 page, int at, u32 header) {
  constexpr int BITS = CLASSES[C].key_bits, T = CLASSES[C].tokens;
  const Lane t;
  u32 codes = page + (at + t.token(0)) * (16 * BITS) + t.g * 16;
  if constexpr (pages_of_entry(CLASSES[C]) > 1) codes += t.r / 2 * 16 / T * (page_pitch(CLASSES[C]) - T * 16 * BITS);
  header += t.g * 32;
  u32 x[2][4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (half == 0 || BITS == 8) {
      load16(codes + half * 64, x[0]);
      load16(codes + half * 64 + 2 * 16 * BITS, x[1]);
    }
    u32 s[8], z[8];
    load_scales<BITS, true>(header + half * 128, header + half * 128 + 2 * DIM, s, z);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 y = x[h][j];
        if constexpr (BITS == 4) y = half ? nibbles<1>(y) : nibbles<0>(y);
        u32* to = k + (half * 4 + j) * 4 + h;
        four(y, to[0], to[2], s + 2 * j, z + 2 * j);
      }
    }
  }
}

// The same for values. Only `live` tokens exist; the bytes after them may be NaN, which p = 0 does not remove.
template <int C>
__device__ __forceinline__ void load_values(u32 (&v)[2][16], u32 page, int at, int live) {
  constexpr int BITS = CLASSES[C].value_bits, T = CLASSES[C].tokens;
  const Lane t;
  at += t.g * 16;
  if constexpr (pages_of_entry(CLASSES[C]) > 1) page += at / T * page_pitch(CLASSES[C]), at %= T;
  const u32 codes = page + CLASSES[C].value_codes + (t.warp * 16 + t.r) * T + at;
  const u32 meta = page + CLASSES[C].value_meta + at * 2;
  u32 s[8], z[8];
  load_scales<BITS, false>(meta, meta + 2 * T, s, z);
  if (live < TILE) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int token = t.g * 16 + 2 * i;
      const u32 keep = (token < live ? 0xFFFF : 0) | (token + 1 < live ? 0xFFFF0000 : 0);
      s[i] &= keep, z[i] &= keep;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 x[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half == 0 || BITS == 8) load16(codes + (half * 64 + h * 8) * T, x);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 y = x[j];
        if constexpr (BITS == 4) y = half ? nibbles<1>(y) : nibbles<0>(y);
        u32* to = v[half] + j * 4 + h;
        four(y, to[0], to[2], s + 2 * j, z + 2 * j);
      }
    }
  }
}

// --- rows in the model's dtype: new tokens, blocks that were never packed ------------------------------------------

// Maps a token to its row of keys or values in device memory.
struct Row {
  const u8* base;
  i64 stride;        // of new tokens, which are contiguous
  const int* pages;  // null: new tokens
  int page_tokens, first;

  __device__ __forceinline__ const u8* operator()(int token) const {
    if (!pages) return base + (first + token) * stride;
    const int at = first + token;
    return base + static_cast<i64>(__ldg(pages + at / page_tokens)) * PAGE_BYTES + at % page_tokens * (2 * DIM);
  }
};

template <bool KEYS>
__device__ __forceinline__ Row rows_of(const Arguments& a, int4 word) {
  if (word.x == NEW_TOKENS) {
    const i64 stride = KEYS ? a.k_stride_n : a.v_stride_n, head = KEYS ? a.k_stride_h : a.v_stride_h;
    return Row{(KEYS ? a.k : a.v) + Item(a).start * stride + cta_head() * head, stride, nullptr, 1, word.z};
  }
  constexpr Class c = CLASSES[0];
  return Row{a.pages + (KEYS ? 0 : c.value_codes), 0, a.table + block_head(a, word.w) * E, c.tokens, word.z};
}

__device__ __forceinline__ void load_dense_keys(u32 (&k)[32], const Arguments& a, int4 word) {
  const Lane t;
  const Row row = rows_of<true>(a, word);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u8* from = row(min(t.token(h), word.y - 1)) + t.g * 32;
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(from + part / 2 * 128) + part % 2);
      u32* to = k + (part / 2 * 4 + part % 2 * 2) * 4 + h;
      to[0] = mul2(model_pair<MODEL_BF16>(x.x), ONE[true]), to[2] = mul2(model_pair<MODEL_BF16>(x.y), ONE[true]);
      to[4] = mul2(model_pair<MODEL_BF16>(x.z), ONE[true]), to[6] = mul2(model_pair<MODEL_BF16>(x.w), ONE[true]);
    }
  }
}

// Transposes through `room`, 64 rows of 128 bytes that the warpgroup does not need, one half of the features at a time.
__device__ __forceinline__ void load_dense_values(u32 (&v)[2][16], const Arguments& a, int4 word, u32 room, int barrier) {
  const Lane t;
  const Row row = rows_of<false>(a, word);
  const int thread = threadIdx.x % 128, token = thread / 2, lane = threadIdx.x % 32;
  const u8* from = row(min(token, word.y - 1)) + thread % 2 * 64;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    named_barrier(barrier, 128);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 x = __ldg(reinterpret_cast<const uint4*>(from + half * 128) + i);
      if (token >= word.y) x = make_uint4(0, 0, 0, 0);
      store16(room + swizzled(token, thread % 2 * 4 + i), mul2(model_pair<MODEL_BF16>(x.x), ONE[false]),
              mul2(model_pair<MODEL_BF16>(x.y), ONE[false]), mul2(model_pair<MODEL_BF16>(x.z), ONE[false]),
              mul2(model_pair<MODEL_BF16>(x.w), ONE[false]));
    }
    named_barrier(barrier, 128);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      // Lane i addresses matrix i / 8: eight features of eight tokens.
      const int i = lane % 8, its_token = i / 2 * 16 + j * 4 + lane / 16 * 2 + i % 2, chunk = t.warp * 2 + lane / 8 % 2;
      u32* to = v[half] + 4 * j;
      load_transposed(room + swizzled(its_token, chunk), to[0], to[1], to[2], to[3]);
    }
  }
  named_barrier(barrier, 128);
}

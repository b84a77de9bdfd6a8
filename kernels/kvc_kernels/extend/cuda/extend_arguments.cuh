// Arguments of the kernels over pages, and the work item of a CTA. `extend/hopper.py` defines the constants in capitals that
// are not defined here.
#pragma once
#include "unpack.cuh"

struct Class {  // `FormatClass` of `common/format_class.py`, field by field
  int key_bits, value_bits, tokens, side, value_codes, value_meta, scores, positions, used_bytes;
  int tile_tokens, tile_pages, stages;
};

constexpr Class CLASSES[] = {KVC_CLASSES};
constexpr int NC = sizeof(CLASSES) / sizeof(Class);
// Marks in place of a class: the new tokens themselves, no further tile, nothing listed yet.
constexpr int NEW_TOKENS = 15, END = 14, BEGIN = 13;
constexpr int EVERYONE = -1;       // in place of the first new token of a tile: every row sees all of it

struct Arguments {
  const u8 *q, *k, *v;
  u8* out;
  const u8* new_o;       // null: the new tokens among themselves are done here
  const float* new_lse;
  u8* part_o;  // fp16
  float *part_lse, *out_lse;
  const int* items;
  const i64* lists;
  const int* sizes;
  const u8* pages;
  const int* table;
  const short* counts;
  const u8* headers;
  i64 q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h;  // bytes
  int max_blocks, layer;
  // Logits to base 2: products * factor; with CAPPED, cap_factor * tanh(products * inner / (2 log2 e)).
  float factor, inner, cap_factor;
};

// The work item of a CTA; see ExtendPlan. It is loaded again at each use, because the loops over tiles need the registers.
struct Item {
  int request, start, first, rows, from, to, of, slot;

  __device__ __forceinline__ explicit Item(const Arguments& a) {
    const int* item = kept(a.items + blockIdx.x / H * 8);
    request = item[0], start = item[1], first = item[2], rows = item[3];
    from = item[4], to = item[5], of = item[6], slot = item[7];
  }
};

__device__ __forceinline__ int cta_head() { return blockIdx.x % H; }

__device__ __forceinline__ i64 block_head(const Arguments& a, int block) {
  return static_cast<i64>(block) * LH + a.layer * H + cta_head();
}

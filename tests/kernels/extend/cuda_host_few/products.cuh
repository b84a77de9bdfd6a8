// What few.cu needs of Hopper beyond `cuda_host/hopper.cuh`: products of a warpgroup whose first operand lies in
// registers, matrices stored and loaded transposed, copies of whole pages. As the PTX ISA describes them.
#pragma once
#include <map>

struct float2 { float x, y; };
struct int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float __int_as_float(u32 x) { return std::bit_cast<float>(x); }
inline float exp2_fast(float x) { return __builtin_exp2f(x); }
inline float log2_fast(float x) { return __builtin_log2f(x); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float reciprocal(float x) { return 1 / x; }
inline float __shfl_xor_sync(u32, float x, int by) {
  return std::bit_cast<float>(from_lane(std::bit_cast<int>(x), static_cast<int>(threadIdx.x % 32) ^ by));
}
inline void let_next_kernel_start() {}

// --- barriers ----------------------------------------------------------------------------------------------------

Meeting named[16];
inline void named_barrier(int id, int all) { meet(named[id], all); }
inline bool any_of[16];
inline bool barrier_any(int id, int all, u32 x) {
  any_of[id] |= x != 0;
  meet(named[id], all);
  const bool y = any_of[id];
  meet(named[id], all);
  any_of[id] = false;
  meet(named[id], all);
  return y;
}

std::map<u32, i64> arrivals;  // of barriers: bytes that are still to come
inline void barrier_expect(u32 bar, u32 bytes) {
  arrivals[bar] += bytes;
  if (arrivals[bar] == 0) barrier_arrive(bar);
}
inline void copy_run(u32 to, const void* from, u32 bytes, u32 bar) {
  check(reinterpret_cast<uintptr_t>(from) % 16 == 0 && to % 16 == 0 && bytes % 16 == 0 && to + bytes <= sizeof(memory));
  memcpy(memory + to, from, bytes);
  check((arrivals[bar] -= bytes) >= 0);
  if (arrivals[bar] == 0) barrier_arrive(bar);  // the copying thread's own, too
}

// --- matrices ----------------------------------------------------------------------------------------------------

struct Deposit { u32 at, x[4]; };
inline Deposit deposits[LANES];

inline void store_transposed(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const int self = threadIdx.x, warp = self / 32 * 32, matrix = self % 32 / 8, row = self % 8;
  deposits[self] = {to, {a, b, c, d}};
  __syncwarp();
  u32 words[4];
  for (int i = 0; i < 8; i++) {  // element (i, row) of the matrix
    const u32 x = deposits[warp + 4 * i + row / 2].x[matrix] >> row % 2 * 16 & 0xFFFF;
    words[i / 2] = i % 2 ? words[i / 2] | x << 16 : x;
  }
  memcpy(place(to, 16), words, 16);
  __syncwarp();
}
inline void load_transposed(u32 from, u32& a, u32& b, u32& c, u32& d) {
  const int self = threadIdx.x, warp = self / 32 * 32, lane = self % 32;
  deposits[self].at = from;
  __syncwarp();
  u32* to[4] = {&a, &b, &c, &d};
  for (int m = 0; m < 4; m++) {
    u32 x[2];
    for (int e = 0; e < 2; e++) {
      unsigned short y;
      memcpy(&y, place(deposits[warp + 8 * m + lane % 4 * 2 + e].at, 16) + lane / 4 * 2, 2);
      x[e] = y;
    }
    *to[m] = x[0] | x[1] << 16;
  }
  __syncwarp();
}

// --- products ----------------------------------------------------------------------------------------------------

inline u32 tile_number(u32 address) { return (address & 0x3FFFF) >> 4 | 1 << 16; }
inline u64 tile_descriptor(u32 number) { return number; }
inline void products_begin() {}
inline void products_commit() {}
template <int N> void products_wait() {}
template <int N> void pin(float (&)[N]) {}

template <int N>
void product(float (&c)[N], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
  const int self = threadIdx.x, lane = self % 32;
  deposits[self] = {static_cast<u32>(b), {a0, a1, a2, a3}};
  meet(named[8 + self / 128], 128);
  check(deposits[self / 128 * 128].at == b);
  for (int i = 0; i < N; i++) {
    const int row = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;  // of a thread's two rows
    double sum = add ? c[i] : 0;
    for (int k = 0; k < 16; k++) {
      const u32 x = deposits[self / 4 * 4 + k % 8 / 2].x[row + k / 8 * 2] >> k % 2 * 16;
      u32 at = ((b & 0x3FFF) << 4) + column * 128 + k * 2;
      at ^= (at >> 7 & 7) << 4;
      unsigned short y;
      memcpy(&y, place(at, 2), 2);
      sum += half(x) * half(y);
    }
    c[i] = sum;
  }
  meet(named[8 + self / 128], 128);
}

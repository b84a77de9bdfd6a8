// Takes the place of extend/cuda/hopper.cuh for a C++ compiler of the host: HOST_WARPS warps, and for `extend.cu` one thread that
// takes their tiles, run in turn on stacks of their own, and change where they wait. What shared memory held before is NaN.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
struct int2 { int x, y; };
struct uint4 { u32 x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <class A, class B> std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <class A, class B> std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
template <class T> T __ldg(const T* p) { return *p; }
inline float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
inline float fminf(float a, float b) { return a < b ? a : b; }
inline float fmaxf(float a, float b) { return a > b ? a : b; }

// --- threads -----------------------------------------------------------------------------------------------------

#ifndef HOST_WARPS
#define HOST_WARPS 8
#endif
constexpr int LANES = HOST_WARPS * 32, THREADS = HOST_WARPS == 8 ? LANES + 1 : LANES;
alignas(1024) u8 memory[228 << 10];
struct { u32 x; } threadIdx, blockIdx;

struct Thread {
  ucontext_t start;
  jmp_buf at;
  bool begun, over;
  std::vector<char> stack;
  struct Copy { u8* to; const void* from; };
  std::vector<std::vector<Copy>> copies;  // groups that are on their way
};
Thread threads[THREADS];
jmp_buf scheduler;
u64 progress, coin;

inline void check(bool good) { if (!good) abort(); }

inline void change() {
  const u32 self = threadIdx.x;
  if (!_setjmp(threads[self].at)) _longjmp(scheduler, 1);
}

struct Meeting { int threads = 0; u64 round = 0; };
Meeting meetings[HOST_WARPS + 1];

inline void meet(Meeting& m, int all) {
  const u64 round = m.round;
  progress++;
  if (++m.threads == all) m.threads = 0, m.round++;
  while (m.round == round) change();
}

inline void __syncthreads() { meet(meetings[HOST_WARPS], THREADS); }
inline void __syncwarp() { if (threadIdx.x < LANES) meet(meetings[threadIdx.x / 32], 32); }

inline int shuffled[LANES];
inline int from_lane(int x, int lane) {
  const int self = threadIdx.x;
  if (self >= LANES) return x;
  shuffled[self] = x;
  __syncwarp();
  const int y = shuffled[self / 32 * 32 + lane];
  __syncwarp();
  return y;
}
inline int __shfl_sync(u32, int x, int lane) { return from_lane(x, lane); }
inline int __shfl_up_sync(u32, int x, int by) {
  const int lane = threadIdx.x % 32;
  return from_lane(x, lane < by ? lane : lane - by);
}

struct Barrier { unsigned short all, left; u32 phase; };
inline Barrier& barrier(u32 at) { check(at % 8 == 0); return *reinterpret_cast<Barrier*>(memory + at); }
inline void barrier_init(u32 at, u32 n) { barrier(at) = {static_cast<unsigned short>(n), static_cast<unsigned short>(n), 0}; }
inline void barrier_arrive(u32 at) {
  Barrier& b = barrier(at);
  progress++;
  if (--b.left == 0) b.left = b.all, b.phase ^= 1;
}
inline void barrier_wait(u32 at, u32 parity) {
  while (barrier(at).phase == parity) change();
  progress++;
}
inline void fence_for_barriers() {}
inline void fence_for_products() {}
template <int N> void registers_more() {}
template <int N> void registers_fewer() {}
template <class T> T kept(T x) { return x; }

// --- shared memory -----------------------------------------------------------------------------------------------

inline u32 shared_address(const void* p) { return static_cast<u32>(static_cast<const u8*>(p) - memory); }
inline u8* place(u32 at, u32 bytes) { check(at % bytes == 0 && at + bytes <= sizeof(memory)); return memory + at; }

// A copy arrives at once or when it is waited for: nothing may count on either.
inline void copy16(u32 to, const void* from) {
  check(reinterpret_cast<uintptr_t>(from) % 16 == 0);
  coin = coin * 6364136223846793005ull + 1442695040888963407ull;
  if (coin >> 63) memcpy(place(to, 16), from, 16);
  else threads[threadIdx.x].copies.back().push_back({place(to, 16), from});
}
inline void copies_commit() { threads[threadIdx.x].copies.emplace_back(); }
template <int N>
void copies_wait() {
  auto& groups = threads[threadIdx.x].copies;  // the last one is not committed
  while (groups.size() > N + 1) {
    for (auto& c : groups[0]) memcpy(c.to, c.from, 16);
    groups.erase(groups.begin());
  }
}
inline void store16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const u32 x[4] = {a, b, c, d};
  memcpy(place(to, 16), x, 16);
}
inline void load8(u32 from, u32& a, u32& b) { memcpy(&a, place(from, 8), 4), memcpy(&b, memory + from + 4, 4); }
inline void load16(u32 from, u32 (&x)[4]) { memcpy(x, place(from, 16), 16); }
inline u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// --- two halves (fp16) in a word ---------------------------------------------------------------------------------

inline u32 __byte_perm(u32 x, u32 y, u32 which) {
  u32 z = 0;
  for (int i = 0; i < 4; i++) z |= static_cast<u32>((u64{y} << 32 | x) >> (which >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return z;
}
template <u32 WHICH> u32 bytes_of(u32 x, u32 y) { return __byte_perm(x, y, WHICH); }
inline double half(u32 x) { return static_cast<float>(std::bit_cast<_Float16>(static_cast<unsigned short>(x))); }
inline u32 pair(double low, double high) {
  const auto bits = [](double x) { return u32{std::bit_cast<unsigned short>(static_cast<_Float16>(x))}; };
  return bits(low) | bits(high) << 16;
}
inline u32 halves(float low, float high) { return pair(low, high); }
inline u32 fma2(u32 a, u32 b, u32 c) { return pair(half(a) * half(b) + half(c), half(a >> 16) * half(b >> 16) + half(c >> 16)); }
inline u32 add2(u32 a, u32 b) { return pair(half(a) + half(b), half(a >> 16) + half(b >> 16)); }
inline u32 mul2(u32 a, u32 b) { return pair(half(a) * half(b), half(a >> 16) * half(b >> 16)); }
inline float float_of(u32 x) { return half(x); }
inline u32 bfloats(float low, float high) {
  const auto bits = [](float x) {
    const u32 y = std::bit_cast<u32>(x);
    return y + 0x7FFF + (y >> 16 & 1) >> 16;
  };
  return bits(low) | bits(high) << 16;
}

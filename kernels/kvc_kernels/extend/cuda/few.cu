// Attention of few new tokens over a long prefix on Hopper: at most 64 query rows of a KV head; head_dim 128.
//
// The products are transposed: S^T = K Q^T and O^T = V^T P^T. Unpacked keys and values are the operand that wgmma takes from
// registers, so they never pass through shared memory. One warp copies whole pages to shared memory. Two warpgroups take
// the pages in turn and keep separate sums. `extend/hopper.py` defines the constants in capitals that are not defined here.
#include "extend_arguments.cuh"

constexpr int ROWS = 64;  // query rows of a slot of partial results
static_assert(QUERIES == 32 || QUERIES == 64, "query rows that are multiplied");

__host__ __device__ constexpr int page_end(Class c) { return c.key_bits == 16 ? 0 : c.value_meta + 4 * c.tokens; }

// Pages per entry of the ring, and bytes between their starts, so that equal offsets of two pages lie in different banks.
__host__ __device__ constexpr int pages_of_entry(Class c) { return c.tokens < TILE && TILE % c.tokens == 0 ? TILE / c.tokens : 1; }
__host__ __device__ constexpr int page_pitch(Class c) { return (page_end(c) + 127) / 128 * 128 + 2 * c.tokens; }

__host__ __device__ constexpr int most_entry_bytes() {
  int most = 0;
  for (const Class& c : CLASSES) {
    const int bytes = (pages_of_entry(c) - 1) * page_pitch(c) + page_end(c);
    if (c.key_bits < 16 && bytes > most) most = bytes;
  }
  return most;
}

// --- shared memory -------------------------------------------------------------------------------------------------

constexpr int HALF_Q = QUERIES * 128, P_BYTES = QUERIES * 128;
constexpr int HEADER_AT = (most_entry_bytes() + 127) / 128 * 128, STAGE_BYTES = HEADER_AT + 4 * DIM;
constexpr int SUM_PITCH = DIM + 4;  // floats; neither order of access has bank conflicts
constexpr int SUMS_BYTES = QUERIES * SUM_PITCH * 4;
constexpr int SHARED_LIMIT = 227 * 1024, LISTED = 256;  // pages listed at a time
constexpr int Q_AT = 0, P_AT = Q_AT + 2 * HALF_Q, RING_AT = P_AT + 4 * P_BYTES, RING_LIMIT = SHARED_LIMIT - 8192;
constexpr int RING_FITS = (RING_LIMIT - RING_AT) / STAGE_BYTES / 2 * 2;
constexpr int STAGES = RING_FITS < 16 ? RING_FITS : 16;  // even: a warpgroup takes every second stage
static_assert(STAGES >= 4, "too much shared memory");
constexpr int RING_BYTES = STAGES * STAGE_BYTES > SUMS_BYTES ? STAGES * STAGE_BYTES : SUMS_BYTES;
constexpr int TOPS_AT = RING_AT + RING_BYTES;          // per warpgroup: float [4, QUERIES]
constexpr int LIST_AT = TOPS_AT + 2 * 4 * QUERIES * 4;  // int [LISTED]
constexpr int MAXIMA_AT = LIST_AT + LISTED * 4;        // per warpgroup: float [QUERIES]
constexpr int WORDS_AT = MAXIMA_AT + 2 * QUERIES * 4;  // int4 [STAGES]: the contents of each stage
constexpr int BARRIERS_AT = WORDS_AT + STAGES * 16;
constexpr int SHARED_BYTES = BARRIERS_AT + 2 * STAGES * 8;
static_assert(SHARED_BYTES + 1024 <= SHARED_LIMIT, "too much shared memory");
extern "C" __constant__ const int shared_bytes = SHARED_BYTES + 1024;  // with room to align it

struct Shared {
  u8* base;
  u32 at;  // its address; aligned to 1024 bytes

  __device__ u32 probabilities(int warpgroup) const { return at + P_AT + warpgroup * 2 * P_BYTES; }
  __device__ u32 page(int stage) const { return at + RING_AT + stage * STAGE_BYTES; }
  __device__ float* sums() const { return reinterpret_cast<float*>(base + RING_AT); }
  __device__ float* tops(int warpgroup) const { return reinterpret_cast<float*>(base + TOPS_AT) + warpgroup * 4 * QUERIES; }
  __device__ int* list() const { return reinterpret_cast<int*>(base + LIST_AT); }
  __device__ float* maxima(int warpgroup) const { return reinterpret_cast<float*>(base + MAXIMA_AT) + warpgroup * QUERIES; }
  __device__ int4* words() const { return reinterpret_cast<int4*>(base + WORDS_AT); }
  __device__ u32 full(int stage) const { return at + BARRIERS_AT + stage * 8; }
  __device__ u32 empty(int stage) const { return at + BARRIERS_AT + (STAGES + stage) * 8; }
};

// Calls f.operator()<C>() for the class C == `c`. The compiler knows the classes, but not the class of a page.
template <int C = 0, class F>
__device__ __forceinline__ void for_class(int c, F f) {
  if constexpr (C < NC) {
    if (c == C) f.template operator()<C>();
    else for_class<C + 1>(c, f);
  }
}

#include "extend_rows.cuh"
#include "extend_merge.cuh"
#include "few_pages.cuh"
#include "few_operands.cuh"
#include "few_attend.cuh"

extern "C" __global__ void __launch_bounds__(3 * 128, 1) extend(const __grid_constant__ Arguments a) {
  extern __shared__ u8 memory[];
  const u32 start = shared_address(memory), at = (start + 1023) & ~1023u;
  const Shared s{memory + (at - start), at};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.full(i), 1);
      barrier_init(s.empty(i), 128);
    }
    fence_for_barriers();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that all lanes have the same value
  if (warpgroup == 0) {
    registers_fewer<PAGE_REGISTERS>();
    if (threadIdx.x < 32) copy_pages(a, s);
  } else {
    registers_more<ATTEND_REGISTERS>();
    attend(a, s, warpgroup - 1);
  }
}

// Prefill attention on Hopper: new tokens over their cached prefix, read from pages; head_dim 128.
//
// Two warpgroups unpack pages of any format to fp16 tiles of 64 keys and values in shared memory. Two more, with GROUPS
// times 64 query rows each, multiply the tiles (wgmma) and compute the softmax. `extend/hopper.py` defines the constants in
// capitals that are not defined here.
#include "extend_arguments.cuh"

// --- shared memory -------------------------------------------------------------------------------------------------

// Bytes of one warp's part of the keys or values of a tile.
__host__ __device__ constexpr int raw_bytes(Class c) {
  const int keys = 4 * c.key_bits * TILE + 4 * DIM;
  const int values = 4 * c.value_bits * TILE + (c.value_bits == 2 ? 16 : 4) * TILE;
  return c.key_bits == 16 ? 0 : keys > values ? keys : values;
}

__host__ __device__ constexpr int most_raw_bytes() {
  int most = 0;
  for (const Class& c : CLASSES) most = raw_bytes(c) > most ? raw_bytes(c) : most;
  return most;
}

constexpr int ROWS = 2 * GROUPS * 64;  // query rows of a CTA
constexpr int TILE_BYTES = 2 * HALF_TILE, QUERY_BYTES = 64 * 2 * DIM;
constexpr int LISTED = 32;  // tiles listed at a time
constexpr int Q_AT = 0, K_AT = Q_AT + 2 * GROUPS * QUERY_BYTES, V_AT = K_AT + STAGES * TILE_BYTES;
constexpr int RAW_BYTES = most_raw_bytes(), RAW_AT = V_AT + STAGES * TILE_BYTES;
constexpr int WARPS = 2 * UNPACKERS / 32;  // that unpack
constexpr int SHARED_LIMIT = 227 * 1024, BESIDE = 9216;  // what a block may have; what the rest takes at most
constexpr int RING_FITS = RAW_BYTES ? (SHARED_LIMIT - BESIDE - RAW_AT) / (WARPS * RAW_BYTES) : 2;
constexpr int RING = RING_FITS < 4 ? RING_FITS : 4;       // packed tiles on their way or being unpacked
constexpr int LIST_AT = RAW_AT + RING * WARPS * RAW_BYTES;  // a warp: LISTED times the pages of runs of 16 tokens, int [4]
constexpr int WORDS_AT = LIST_AT + WARPS * LISTED * 16;     // a warp: LISTED + RING times what TileList says
constexpr int SEEN_AT = WORDS_AT + WARPS * (LISTED + RING) * 8;  // STAGES times: what the others see of a tile, int2
constexpr int STATE_AT = SEEN_AT + STAGES * 8;  // a warp: int [4], of TileList
constexpr int BARRIERS_AT = STATE_AT + WARPS * 16;
constexpr int SHARED_BYTES = BARRIERS_AT + 4 * STAGES * 8;
static_assert(RAW_AT % 16 == 0 && LIST_AT % 16 == 0, "copies are 16 bytes wide");
static_assert(RING >= 2 && SHARED_BYTES + 1024 - LIST_AT <= BESIDE, "too much shared memory");
extern "C" __constant__ const int shared_bytes = SHARED_BYTES + 1024;  // with room to align it

struct Shared {
  u8* base;
  u32 at;  // its address; aligned to 1024 bytes

  __device__ u32 keys(int stage) const { return at + K_AT + stage * TILE_BYTES; }
  __device__ u32 values(int stage) const { return at + V_AT + stage * TILE_BYTES; }
  __device__ u32 raw(int slot, int warp) const { return at + RAW_AT + (slot * WARPS + warp) * RAW_BYTES; }
  __device__ int* list(int warp) const { return reinterpret_cast<int*>(base + LIST_AT) + warp * LISTED * 4; }
  __device__ int2* words(int warp) const { return reinterpret_cast<int2*>(base + WORDS_AT) + warp * (LISTED + RING); }
  __device__ int* state(int warp) const { return reinterpret_cast<int*>(base + STATE_AT) + warp * 4; }
  __device__ int2* seen() const { return reinterpret_cast<int2*>(base + SEEN_AT); }
  __device__ u32 keys_full(int stage) const { return at + BARRIERS_AT + stage * 8; }
  __device__ u32 keys_empty(int stage) const { return at + BARRIERS_AT + (STAGES + stage) * 8; }
  __device__ u32 values_full(int stage) const { return at + BARRIERS_AT + (2 * STAGES + stage) * 8; }
  __device__ u32 values_empty(int stage) const { return at + BARRIERS_AT + (3 * STAGES + stage) * 8; }
};

#include "extend_tiles.cuh"
#include "extend_attend.cuh"
#include "extend_merge.cuh"

extern "C" __global__ void __launch_bounds__(4 * 128, 1) extend(const __grid_constant__ Arguments a) {
  extern __shared__ u8 memory[];
  const u32 start = shared_address(memory), at = (start + 1023) & ~1023u;
  const Shared s{memory + (at - start), at};
  if (threadIdx.x == 0) {
    // Every thread arrives. One arrival per warp, after a warp barrier, is no faster, and compute-sanitizer does not
    // understand it.
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.keys_full(i), UNPACKERS);
      barrier_init(s.values_full(i), UNPACKERS);
      barrier_init(s.keys_empty(i), 2 * 128);
      barrier_init(s.values_empty(i), 2 * 128);
    }
    fence_for_barriers();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // one value for a warp, as the compiler then knows
  if (warpgroup < 2) {
    registers_fewer<UNPACK_REGISTERS>();
    if (warpgroup == 0) unpack_tiles<true>(a, s);
    else unpack_tiles<false>(a, s);
  } else {
    registers_more<ATTEND_REGISTERS>();
    attend(a, s, warpgroup - 2);
  }
}

// The unpacking warpgroups, one for keys and one for values: list the CTA's tiles, copy their codes ahead, and unpack them
// in order.
//
// Their warps never wait for each other: each lists all tiles, and copies only the bytes that it unpacks, with its own
// copy of scales and zeros. (A barrier per tile, with shared copies, takes as long as the unpacking.)
#pragma once

constexpr int BLOCK_TILES = (P + TILE - 1) / TILE;
constexpr int LISTED_BLOCKS = LISTED / BLOCK_TILES < 32 ? LISTED / BLOCK_TILES : 32;
static_assert(LISTED_BLOCKS > 0, "blocks of more than 2048 tokens");
static_assert(NC <= BEGIN, "marks of tiles that are none of a class");

// Calls f.operator()<C>() for the class C == `c`. The compiler knows the classes, but not the class of a tile.
template <int C = 0, class F>
__device__ __forceinline__ void for_class(int c, F f) {
  if constexpr (C < NC) {
    if (c == C) f.template operator()<C>();
    else for_class<C + 1>(c, f);
  }
}

// The CTA's tiles in order: first the new tokens themselves, which need no lists, so that copies of the other tiles run
// meanwhile; then by class and block. Each unpacking warp lists them in chunks. Its position in the list is in shared
// memory, because it is rarely needed.
struct TileList {
  int2* words;  // block, mark << 24 | first << 12 | tokens of the block
  int* pages;   // of each run of 16 tokens
  int* state;   // class, next block of its list, end

  __device__ TileList(const Shared& s, int unpacker)
      : words(s.words(unpacker)), pages(s.list(unpacker)), state(s.state(unpacker)) {}
};

// Lists the next new tokens of the CTA as tiles.
__device__ __forceinline__ int list_new(const TileList& to, int& at, int end, int lane) {
  const int n = min((end - at + TILE - 1) / TILE, 32), first = at + lane * TILE;
  if (lane < n) to.words[lane] = make_int2(first, NEW_TOKENS << 24 | min(end - first, TILE));
  at += n * TILE;
  return n;
}

__device__ __forceinline__ int list_blocks(const Arguments& a, const TileList& to, int mark, int& at, int end, int lane) {
  const int n = min(end - at, LISTED_BLOCKS);
  int side = 0, tokens = 1;
  bool packed = false;
  for_class(mark, [&]<int C>() {
    side = CLASSES[C].side, tokens = CLASSES[C].tokens, packed = CLASSES[C].key_bits < 16;
  });
  int block = 0, count = 0;
  if (lane < n) {
    const i64 list = static_cast<i64>(Item(a).request) * NC + mark;
    const i64 entry = a.lists[list * a.max_blocks + at + lane];
    block = entry >> 32;
    count = packed ? a.counts[block_head(a, block) * 2 + side] : static_cast<int>(entry);
  }
  at += n;
  const int tiles = (count + TILE - 1) / TILE;
  int before = tiles;
  for (int i = 1; i < 32; i *= 2) {
    const int x = __shfl_up_sync(~0u, before, i);
    if (lane >= i) before += x;
  }
  const int total = __shfl_sync(~0u, before, 31);
  before -= tiles;
  for (int i = 0; i < tiles; i++) to.words[before + i] = make_int2(block, mark << 24 | i * TILE << 12 | count);
  if (packed) {
    __syncwarp();
    int page[LISTED * 4 / 32];  // all are asked for before one is waited for
#pragma unroll
    for (int j = 0; j < LISTED * 4 / 32; j++) {
      const int i = lane + j * 32;
      page[j] = 0;  // 16 tokens that do not exist: nobody looks there
      if (i < total * 4) {
        const int2 word = to.words[i / 4];
        const int token = (word.y >> 12 & 0xFFF) + i % 4 * 16;
        const int* row = a.table + block_head(a, word.x) * E + side * (E - 1);
        if (token < (word.y & 0xFFF)) page[j] = __ldg(row + (1 - 2 * side) * (token / tokens));
      }
    }
#pragma unroll
    for (int j = 0; j < LISTED * 4 / 32; j++) {
      if (lane + j * 32 < total * 4) to.pages[lane + j * 32] = page[j];
    }
  }
  return total;
}

// Lists further tiles; returns their number, 0 after the last one.
__device__ __noinline__ int list_tiles(const Arguments& a, u8* base, int unpacker) {
  const Shared s{base, 0};
  const TileList to(s, unpacker);
  const int lane = threadIdx.x % 32;
  int mark = to.state[0], at = to.state[1], end = to.state[2], n = 0;
  __syncwarp();  // every lane is done with the old list, and has read where it ended
  while (n == 0 && (at < end || mark != NC)) {
    if (at < end) {
      n = mark == NEW_TOKENS ? list_new(to, at, end, lane) : list_blocks(a, to, mark, at, end, lane);
      continue;
    }
    const Item item(a);
    // New tokens at the start of the first split.
    const int new_tokens = a.new_o ? 0 : (min(item.first + ROWS, item.rows) + G - 1) / G;
    at = end = 0;
    mark = mark == BEGIN ? NEW_TOKENS : mark == NEW_TOKENS ? 0 : mark + 1;
    if (mark < NC) {
      // The new tokens count as blocks at the front of the last class.
      const u32 blocks = a.sizes[item.request * NC + mark], ahead = mark == NC - 1 ? (new_tokens + P - 1) / P : 0;
      at = max((blocks + ahead) * item.from / item.of, ahead) - ahead;
      end = max((blocks + ahead) * item.to / item.of, ahead) - ahead;
    } else if (mark == NEW_TOKENS && item.from == 0) {
      end = new_tokens;
    }
  }
  if (lane == 0) to.state[0] = mark, to.state[1] = at, to.state[2] = end;
  __syncwarp();
  return n;
}

// Starts a warp's copies of one side of a packed tile: its `Share` of the codes, and all scales and zeros. Runs of 16 tokens
// that do not exist are skipped. Reading them from a dummy page instead would make all CTAs request the same L2 lines
// (docs/kernels/decode.md).
template <int C, bool KEYS>
__device__ __forceinline__ void fetch(
    const Arguments& a, int2 word, const int* run_pages, u32 to, int warp, int lane) {
  constexpr Class c = CLASSES[C];
  constexpr int T = c.tokens, BITS = KEYS ? c.key_bits : c.value_bits, KEY = 16 * BITS;
  constexpr int KEY_ROWS = UNPACKERS * 8 / KEY, ROW_CHUNKS = KEY / 16;  // rows a round of all threads, chunks a row
  const int first = word.y >> 12 & 0xFFF, live = (word.y & 0xFFF) - first;
  const u8* whole = kept(a.pages + static_cast<i64>(run_pages[0]) * PAGE_BYTES);
  const auto copy = [&](u32 to, int token, int offset, int token_bytes) {  // 16 bytes, from the token's on
    const u8* page = whole;
    int within = first % T + token;
    if constexpr (T % TILE != 0) {
      page = a.pages + static_cast<i64>(run_pages[token / 16]) * PAGE_BYTES;
      within = (first + token) % T;
    }
    if (token / 16 * 16 < live) copy16(to, page + (offset + within * token_bytes));
  };
#pragma unroll
  for (int i = 0; i < BITS / 2; i++) {
    if constexpr (T == TILE) {  // such a page holds a warp's share of a round in 256 consecutive bytes
      const int at = lane / 16 * 1024 + warp * 256 + lane % 16 * 16 + i * 2048;
      const bool there = KEYS ? at < (live + 15) / 16 * (16 * KEY) : lane % 4 * 16 < live;
      if (there) copy16(to + i * 512, whole + ((KEYS ? 0 : c.value_codes) + at));
    } else if constexpr (KEYS) {
      const int token = warp * (KEY_ROWS / 4) + lane % 16 / ROW_CHUNKS + (2 * i + lane / 16) * KEY_ROWS;
      copy(to + i * 512, token, lane % ROW_CHUNKS * 16, KEY);
    } else {
      const int row = warp * 4 + lane % 16 / 4 + (2 * i + lane / 16) * 16;
      copy(to + i * 512, lane % 4 * 16, c.value_codes + row * T, 1);
    }
  }
  to += TILE * KEY / 4;
  if constexpr (!KEYS) {
    constexpr int CHUNKS = 8 * 2 * (BITS == 2 ? 4 : 1);
#pragma unroll
    for (int i = 0; i < CHUNKS; i += 32) {
      if (CHUNKS >= 32 || lane < CHUNKS) {
        copy(to + i * 16, lane % 8 * 8, c.value_meta + (i + lane) / 8 * (2 * T), 2);
      }
    }
  } else {
    copy16(to, a.headers + block_head(a, word.x) * (4 * DIM) + lane * 16);
  }
}

// Rows of keys or values in the model's dtype: consecutive new tokens.
struct NewRows {
  const u8* base;
  i64 stride;

  __device__ __forceinline__ const u8* operator()(int token) const { return base + token * stride; }
};

// Rows of an uncompressed block, in pages.
template <int T>
struct PageRows {
  const u8* base;
  const int* pages;
  int first;

  __device__ __forceinline__ const u8* operator()(int token) const {
    const u32 t = first + token;
    return base + static_cast<i64>(pages[t / T]) * PAGE_BYTES + t % T * (2 * DIM);
  }
};

template <bool KEYS, class Rows>
__device__ __forceinline__ void copy_rows(const Rows& rows, u32 to, int live) {
  if constexpr (KEYS) copy_keys<MODEL_BF16>(rows, to, live, threadIdx.x % 128);
  else copy_values<MODEL_BF16>(rows, to, live, threadIdx.x % 128);
}

template <bool KEYS>
__device__ __noinline__ void copy_dense(const Arguments& a, int2 word, u32 to, int live) {
  const int mark = word.y >> 24;
  if (mark == NEW_TOKENS) {
    const i64 stride = KEYS ? a.k_stride_n : a.v_stride_n, head = KEYS ? a.k_stride_h : a.v_stride_h;
    const i64 row = Item(a).start + word.x;
    copy_rows<KEYS>(NewRows{(KEYS ? a.k : a.v) + row * stride + cta_head() * head, stride}, to, live);
  }
  for_class(mark, [&]<int C>() {
    constexpr Class c = CLASSES[C];
    if constexpr (c.key_bits == 16) {
      const int* pages = a.table + block_head(a, word.x) * E;
      copy_rows<KEYS>(PageRows<c.tokens>{a.pages + (KEYS ? 0 : c.value_codes), pages, word.y >> 12 & 0xFFF}, to, live);
    }
  });
}

// Unpacks the keys or the values of all tiles, by one warpgroup.
template <bool KEYS>
__device__ __forceinline__ void unpack_tiles(const Arguments& a, const Shared& s) {
  const int thread = kept(threadIdx.x % 128), lane = thread % 32, warp = thread / 32, unpacker = KEYS ? warp : 4 + warp;
  const TileList tiles(s, unpacker);
  int2* words = tiles.words + LISTED;  // of the tiles on their way, by place in the ring
  if (lane == 0) tiles.state[0] = BEGIN, tiles.state[1] = tiles.state[2] = 0;
  __syncwarp();
  const auto full = [&](int stage) { return KEYS ? s.keys_full(stage) : s.values_full(stage); };
  const auto empty = [&](int stage) { return KEYS ? s.keys_empty(stage) : s.values_empty(stage); };
  int listed = 0, next = 0;
  KeyScales held = {};
  bool fresh = true;  // they are to be read
  for (int i = 1 - RING;; i++) {
    const int self = kept(thread);  // so that little of what follows from it is held from tile to tile
    copies_wait<RING - 2>();
    __syncwarp();  // tile i is there, and every lane is done with tile i - 1, whose place is next
    if (next == listed) {
      listed = list_tiles(a, s.base, unpacker), next = 0;
      held = {}, fresh = true;  // nothing has to live through a call: such registers would be spilled
    }
    const int ahead = (i + RING - 1) % RING;
    int2 coming = make_int2(0, END << 24);
    if (next < listed) coming = tiles.words[next];
    if (lane == 0) words[ahead] = coming;
    for_class(coming.y >> 24, [&]<int C>() {
      if constexpr (CLASSES[C].key_bits < 16) {
        fetch<C, KEYS>(a, coming, tiles.pages + next * 4, s.raw(ahead, unpacker) + self % 32 * 16, self / 32, self % 32);
      }
    });
    copies_commit();
    if (next < listed) next++;
    if (i < 0) continue;
    const int slot = i % RING, stage = i % STAGES, parity = i / STAGES & 1 ^ 1;
    const int2 word = words[slot];
    const int mark = word.y >> 24, live = min((word.y & 0xFFF) - (mark == NEW_TOKENS ? 0 : word.y >> 12 & 0xFFF), TILE);
    const u32 raw = s.raw(slot, unpacker), to = KEYS ? s.keys(stage) : s.values(stage);
    if (!KEYS && mark == END) return;
    barrier_wait(empty(stage), parity);
    if (KEYS && thread == 0) {
      // Tokens of the tile, -1 after the last one, and the number of its first new token.
      s.seen()[stage] = make_int2(mark == END ? -1 : live, mark == NEW_TOKENS ? word.x : EVERYONE);
    }
    bool dense = mark != END;
    for_class(mark, [&]<int C>() {
      constexpr Class c = CLASSES[C];
      if constexpr (c.key_bits < 16) {
        constexpr int CODES = TILE * 4 * (KEYS ? c.key_bits : c.value_bits);
        if constexpr (KEYS) {
          fresh = fresh || (word.y >> 12 & 0xFFF) == 0;
          unpack_keys<c.key_bits>(raw, raw + CODES, to, fresh, held, self);
          fresh = false;
        } else {
          unpack_values<c.value_bits>(raw, raw + CODES, to, live, self);
        }
        dense = false;
      }
    });
    if (dense) {
      copy_dense<KEYS>(a, word, to, live);
      held = {}, fresh = true;
    }
    fence_for_products();
    barrier_arrive(full(stage));
    if (mark == END) return;
  }
}

// The warp that lists the pages of a CTA and copies entire pages into the ring.
//
// `words` describes an entry of the ring: mark, tokens, first token, block. An entry holds one packed page, or as many small
// pages as make 64 tokens. For rows in the model's dtype (classes of 16 bits, NEW_TOKENS) it holds nothing: it stands for 64
// tokens, which the other warps read from device memory.
#pragma once

struct Ring {
  const Shared& s;
  int at = 0;  // number of entries so far

  // Waits in all lanes for an empty stage and returns it.
  __device__ __forceinline__ int next() {
    const int stage = at % STAGES, parity = at / STAGES & 1 ^ 1;
    at++;
    barrier_wait(s.empty(stage), parity);
    return stage;
  }

  __device__ __forceinline__ void put_mark(int mark, int tokens, int first, int block) {
    const int stage = next();
    if (threadIdx.x == 0) {
      s.words()[stage] = make_int4(mark, tokens, first, block);
      barrier_arrive(s.full(stage));
    }
  }

  __device__ __forceinline__ void put_rows(int mark, int tokens, int block) {
    for (int first = 0; first < tokens; first += TILE) put_mark(mark, min(tokens - first, TILE), first, block);
  }

  // Copies the pages of `tokens` tokens, without the key rows after the last token.
  template <int C>
  __device__ __forceinline__ void put_pages(const Arguments& a, const int* pages, int tokens, int block) {
    constexpr Class c = CLASSES[C];
    constexpr int KEY_BYTES = c.key_bits * DIM / 8, REST = page_end(c) - c.value_codes;
    const int stage = next();
    if (threadIdx.x == 0) {
      s.words()[stage] = make_int4(C, tokens, 0, block);
      const u32 bar = s.full(stage), whole = tokens / c.tokens, part = tokens % c.tokens;
      barrier_expect(bar, whole * page_end(c) + (part ? part * KEY_BYTES + REST : 0) + 4 * DIM);
      for (u32 i = 0; i * c.tokens < tokens; i++) {
        const u8* from = a.pages + static_cast<i64>(pages[i]) * PAGE_BYTES;
        const u32 to = s.page(stage) + i * page_pitch(c);
        copy_run(to, from, i < whole ? page_end(c) : part * KEY_BYTES, bar);
        if (i == whole) copy_run(to + c.value_codes, from + c.value_codes, REST, bar);
      }
      copy_run(s.page(stage) + HEADER_AT, a.headers + block_head(a, block) * (4 * DIM), 4 * DIM, bar);
    }
    __syncwarp();
  }
};

template <int C>
__device__ __forceinline__ void copy_class(const Arguments& a, const Shared& s, Ring& ring, const i64* list, int at, int end) {
  constexpr Class c = CLASSES[C];
  const int lane = threadIdx.x;
  if constexpr (c.key_bits == 16) {
    for (; at < end; at++) {
      const i64 entry = __ldg(list + at);
      ring.put_rows(C, static_cast<int>(entry), entry >> 32);
    }
  } else {
    constexpr int MOST = (P + c.tokens - 1) / c.tokens;  // pages of a block
    constexpr int BLOCKS = LISTED / MOST < 32 ? LISTED / MOST : 32;
    static_assert(BLOCKS > 0, "too many pages in a block");
    for (; at < end; at += BLOCKS) {
      const int n = min(end - at, BLOCKS);
      int block = 0, count = 0;
      if (lane < n) {
        block = __ldg(list + at + lane) >> 32;
        count = a.counts[block_head(a, block) * 2 + c.side];
      }
      __syncwarp();  // all lanes have read the previous list
      for (int i = 0; i < n * MOST; i += 32) {
        const int mine = i + lane, from = min(mine / MOST, 31), page = mine % MOST;
        const int its_block = __shfl_sync(~0u, block, from), its_count = __shfl_sync(~0u, count, from);
        if (mine < n * MOST) {
          int id = 0;
          if (page * c.tokens < its_count) {
            id = __ldg(a.table + block_head(a, its_block) * E + c.side * (E - 1) + (1 - 2 * c.side) * page);
          }
          s.list()[mine] = id;
        }
      }
      __syncwarp();
      for (int b = 0; b < n; b++) {
        const int its_block = __shfl_sync(~0u, block, b), its_count = __shfl_sync(~0u, count, b);
        for (int page = 0; page * c.tokens < its_count; page += pages_of_entry(c)) {
          const int tokens = min(its_count - page * c.tokens, pages_of_entry(c) * c.tokens);
          ring.put_pages<C>(a, s.list() + b * MOST + page, tokens, its_block);
        }
      }
    }
  }
}

__device__ __forceinline__ void copy_pages(const Arguments& a, const Shared& s) {
  Ring ring{s};
  const Item item(a);
  const int new_tokens = a.new_o ? 0 : (min(item.first + ROWS, item.rows) + G - 1) / G;
  if (item.from == 0) ring.put_rows(NEW_TOKENS, new_tokens, 0);
  for (int i = 0; i < NC; i++) {
    // The new tokens count as blocks at the front of the last class.
    const u32 blocks = a.sizes[item.request * NC + i], ahead = i == NC - 1 ? (new_tokens + P - 1) / P : 0;
    const int from = max((blocks + ahead) * item.from / item.of, ahead) - ahead;
    const int to = max((blocks + ahead) * item.to / item.of, ahead) - ahead;
    const i64* list = a.lists + (static_cast<i64>(item.request) * NC + i) * a.max_blocks;
    for_class(i, [&]<int C>() { copy_class<C>(a, s, ring, list, from, to); });
  }
  ring.put_mark(END, 0, 0, 0);
  ring.put_mark(END, 0, 0, 0);  // one for each warpgroup
}

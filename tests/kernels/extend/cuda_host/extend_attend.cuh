// In place of the multiplying warpgroups: hands on what they would multiply, as plain rows.
#pragma once

struct Tile {
  int2 seen;
  unsigned short k[TILE][DIM], v[DIM][TILE];
};
Tile* handed;
int room, tiles;

inline void attend(const Arguments&, const Shared& s, int) {
  for (int i = 0;; i++) {
    const int stage = i % STAGES, parity = i / STAGES & 1;
    barrier_wait(s.keys_full(stage), parity);
    const int2 seen = s.seen()[stage];
    if (seen.x < 0) return;
    barrier_wait(s.values_full(stage), parity);
    for (int turns = coin >> 58; turns > 0; turns--) progress++, change();  // now and then others are far ahead
    check(tiles < room);
    Tile& to = handed[tiles++];
    to.seen = seen;
    for (int row = 0; row < DIM; row++) {
      for (int chunk = 0; chunk < 8; chunk++) {
        const int token = row % TILE, at = row / TILE;  // of a key: its number, which half of its features
        memcpy(&to.k[token][at * 64 + chunk * 8], place(s.keys(stage) + at * HALF_TILE + swizzled(token, chunk), 16), 16);
        memcpy(&to.v[row][chunk * 8], place(s.values(stage) + swizzled(row, chunk), 16), 16);
      }
    }
    // As soon as the barriers let others write, nothing of the tile is there.
    memset(memory + s.keys(stage), 0xFF, TILE_BYTES);
    memset(memory + s.values(stage), 0xFF, TILE_BYTES);
    for (int thread = 0; thread < 256; thread++) barrier_arrive(s.keys_empty(stage)), barrier_arrive(s.values_empty(stage));
  }
}

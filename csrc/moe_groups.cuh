// csrc/moe_groups.cuh: which rows go to which expert, worked out by every block for itself, without another launch.
//   A pick is one (row, slot) of expert_ids [T, k]; an id outside 0..NUM-1 is none. The picks of an expert are cut into
//   tiles of at most TILE_PICKS; tiles are numbered expert by expert.
//   A unit of work is a tile of picks times a tile of output features. Units are numbered expert by expert, within an
//   expert by feature tile, and the tiles of picks come innermost: they read the same weights, from DRAM once.
//   Order among the picks changes no result: every pick has its own column of the matrix products.
//   test tests/kernels/test_moe_int4.py
#pragma once

#include "common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int TILE_PICKS = 8;           // N of an mma
constexpr int LISTED = 8 * TILE_PICKS;  // picks of one expert that a list holds

// Null ids: every pick goes to expert 0 (the shared expert).
DEVICE int expert_of(const i32* expert_ids, int pick) { return expert_ids ? expert_ids[pick] : 0; }

template <int NUM>
struct Tiles {
  int first[NUM + 1];  // number of an expert's first tile; the last entry is the number of all tiles
  int picks[NUM];
  int warp_tiles[WARPS];

  // All threads of the block.
  DEVICE void build(const i32* expert_ids, int num_picks) {
    constexpr int OWN = cdiv(NUM, THREADS);  // neighbouring experts that a thread adds up
    for (int e = threadIdx.x; e < NUM; e += THREADS) picks[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < num_picks; p += THREADS) {
      const u32 expert = expert_of(expert_ids, p);
      if (expert < NUM) atomicAdd(&picks[expert], 1);
    }
    __syncthreads();
    int tiles[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int e = threadIdx.x * OWN + i;
      tiles[i] = e < NUM ? cdiv(picks[e], TILE_PICKS) : 0;
      own += tiles[i];
    }
    int through = own;  // tiles of this lane and of the lanes before it
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
      const int before = __shfl_up_sync(FULL_MASK, through, offset);
      if (lane_id() >= offset) through += before;
    }
    if (lane_id() == WARP - 1) warp_tiles[warp_id()] = through;
    __syncthreads();
    int next = through - own;
    for (int w = 0; w < warp_id(); ++w) next += warp_tiles[w];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int e = threadIdx.x * OWN + i;
      if (e < NUM) first[e] = next;
      next += tiles[i];
    }
    if (threadIdx.x == THREADS - 1) first[NUM] = next;
    __syncthreads();
  }

  DEVICE int count() const { return first[NUM]; }

  // The expert of a tile: the last one whose first tile is not behind it.
  DEVICE int expert(int tile) const {
    int low = 0, high = NUM;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= tile) low = middle;
      else high = middle;
    }
    return low;
  }

  // One warp: calls take(n, pick) for picks number skip + n of an expert, n = 0.. up to LISTED; returns how many.
  template <typename Take>
  DEVICE int list(const i32* expert_ids, int num_picks, int expert, int skip, Take take) const {
    const int size = min(picks[expert] - skip, LISTED);
    int found = -skip;
    for (int base = 0; base < num_picks && found < size; base += WARP) {
      const int p = base + lane_id();
      const bool mine = p < num_picks && expert_of(expert_ids, p) == expert;
      const u32 all = __ballot_sync(FULL_MASK, mine);
      const int n = found + __popc(all & ((1u << lane_id()) - 1));
      if (mine && n >= 0 && n < size) take(n, p);
      found += __popc(all);
    }
    return size;
  }
};

// Where a unit of work lies.
template <int NUM, int FEATURE_TILES>
struct Unit {
  const Tiles<NUM>& tiles;
  int expert = 0, feature_tile = 0, pick_tile = 0;
  int pick_tiles = 0, last = 0;  // of the expert: its tiles of picks, and the number of the tile behind them

  DEVICE void find(int unit) {
    take_expert(unit / FEATURE_TILES);
    const int inside = unit - tiles.first[expert] * FEATURE_TILES;
    feature_tile = inside / pick_tiles;
    pick_tile = inside % pick_tiles;
  }

  DEVICE void next() {
    if (++pick_tile < pick_tiles) return;
    pick_tile = 0;
    if (++feature_tile < FEATURE_TILES) return;
    feature_tile = 0;
    if (last < tiles.count()) take_expert(last);
  }

 private:
  DEVICE void take_expert(int tile) {
    expert = tiles.expert(tile);
    last = tiles.first[expert + 1];
    pick_tiles = last - tiles.first[expert];
  }
};

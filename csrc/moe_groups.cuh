// csrc/moe_groups.cuh: which rows go to which expert, worked out by every block for itself, without another launch.
//   A pick is one (row, slot) of expert_ids [T, k]; an id outside 0..NUM-1 is none. The picks of an expert are cut into
//   tiles of at most TILE_PICKS; tiles are numbered expert by expert.
//   A unit of work is a tile of picks times a tile of output features. Units are numbered expert by expert, within an
//   expert by PARTS feature tiles, and the tiles of picks come next: they read the same weights, from DRAM once.
//   Order among the picks changes no result: every pick has its own column of the matrix products.
//   test tests/kernels/test_moe_int4.py
#pragma once

#include "fresh.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int TILE_PICKS = 8;           // N of an mma: a tile's picks, or a multiple of it
constexpr int LISTED = 8 * TILE_PICKS;  // picks of one expert that a list holds
constexpr int HELD = 1024;              // picks whose experts a block keeps

struct Picks {
  const i32* expert_ids;  // null: every pick goes to expert 0 (the shared expert)
  int count;
};

template <int NUM, int PICKS>
struct Tiles {
  alignas(8) u16 experts[NUM > 1 ? HELD : 4];
  int first[NUM + 1];  // number of an expert's first tile; the last entry is the number of all tiles
  int picks[NUM];
  int warp_tiles[WARPS];

  // All threads of the block.
  DEVICE void build(const Picks& all) {
    constexpr int OWN = cdiv(NUM, THREADS);  // neighbouring experts that a thread adds up
    static_assert(NUM < 65536, "u16");
    for (int e = threadIdx.x; e < NUM; e += THREADS) picks[e] = all.expert_ids ? 0 : all.count;
    __syncthreads();
    for (int p = threadIdx.x; all.expert_ids && p < all.count; p += THREADS) {
      const u32 expert = load_fresh(all.expert_ids + p);
      if (expert < NUM) atomicAdd(&picks[expert], 1);
      if (NUM > 1 && p < HELD) experts[p] = min(expert, 65535u);
    }
    __syncthreads();
    int tiles[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int e = threadIdx.x * OWN + i;
      tiles[i] = e < NUM ? cdiv(picks[e], PICKS) : 0;
      own += tiles[i];
    }
    const int through = warp_sum_through(own);
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
  DEVICE int list(const Picks& all, int expert, int skip, Take take) const {
    const int size = min(picks[expert] - skip, LISTED);
    if (!all.expert_ids) {
      for (int n = lane_id(); n < size; n += WARP) take(n, skip + n);
      return size;
    }
    int found = -skip;
    constexpr int AT_ONCE = 4;
    for (int base = 0; base < min(all.count, HELD) && found < size; base += AT_ONCE * WARP) {
      const int p = base + AT_ONCE * lane_id();
      take_own(load_vec<u16, AT_ONCE>(experts + p), expert, p, all.count, size, found, take);
    }
    for (int base = HELD; base < all.count && found < size; base += WARP) {
      const int p = base + lane_id();
      const Vec<int, 1> one = {{p < all.count ? load_fresh(all.expert_ids + p) : -1}};
      take_own(one, expert, p, all.count, size, found, take);
    }
    return size;
  }

 private:
  // One warp: takes picks p.. of a lane, whose experts are `of`, where they are the expert's. `found` counts those of
  // all lanes, from -skip on.
  template <typename T, int N, typename Take>
  static DEVICE void take_own(const Vec<T, N>& of, int expert, int p, int count, int size, int& found, Take take) {
    bool mine[N];
    int n = found;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      mine[i] = p + i < count && of[i] == expert;
      const u32 votes = __ballot_sync(FULL_MASK, mine[i]);
      n += __popc(votes & ((1u << lane_id()) - 1));
      found += __popc(votes);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (mine[i] && n >= 0 && n < size) take(n, p + i);
      n += mine[i];
    }
  }
};

// Where a unit of work lies. PARTS tiles of features side by side, from a multiple of PARTS on, may be taken as one.
template <int NUM, int PICKS, int FEATURE_TILES, int PARTS>
struct Unit {
  const Tiles<NUM, PICKS>& tiles;
  int left = 0;  // units to come, this one included
  int expert = 0, feature_tile = 0, pick_tile = 0;
  int pick_tiles = 0, last = 0;  // of the expert: its tiles of picks, and the number of the tile behind them

  DEVICE void find(int unit) {
    take_expert(unit / FEATURE_TILES);
    const int inside = unit - tiles.first[expert] * FEATURE_TILES;
    feature_tile = inside / (pick_tiles * PARTS) * PARTS + inside % PARTS;
    pick_tile = inside / PARTS % pick_tiles;
  }

  DEVICE int parts() const { return feature_tile % PARTS == 0 ? min(left, PARTS) : 1; }

  DEVICE void next() {
    const int taken = parts();
    left -= taken;
    feature_tile += taken;
    if (feature_tile % PARTS) return;
    feature_tile -= PARTS;
    if (++pick_tile < pick_tiles) return;
    pick_tile = 0;
    feature_tile += PARTS;
    if (feature_tile < FEATURE_TILES) return;
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

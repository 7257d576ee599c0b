// csrc/moe_groups.cuh: which rows go to which expert, worked out by every block for itself, without another launch.
//   A pick is one (row, slot) of expert_ids [T, k]; an id outside 0..NUM-1 is none. The picks of an expert are cut into
//   tiles of at most TILE_PICKS; tiles are numbered expert by expert.
//   A unit of work is a tile of picks times a tile of output features. Units are numbered expert by expert, within an
//   expert by feature tiles; tiles of picks are neighbours then: they read the same weights, from DRAM once.
//   Order among the picks changes no result: every pick has its own column of the matrix products.
//   test tests/kernels/test_moe_int4.py
#pragma once

#include "fresh.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int TILE_PICKS = 8;           // N of an mma: a tile's picks, or a multiple of it
constexpr int LISTED = 8 * TILE_PICKS;  // picks of one expert that a list holds
constexpr int HELD = 1024;              // picks that a block keeps sorted by expert

struct Picks {
  const i32* expert_ids;  // null: every pick goes to expert 0 (the shared expert)
  int count;
};

template <int NUM, int PICKS>
struct Tiles {
  static constexpr int SORTED = NUM > 1 ? HELD : 0, TURNS = SORTED / THREADS;  // picks that `order` has, of a thread

  // A thread's picks among the first SORTED.
  struct Own {
    u32 expert[TURNS + 1];
    int place[TURNS + 1];  // how many of the expert's came before, by chance
  };

  u16 order[NUM > 1 ? HELD : 1];  // the first HELD picks, expert by expert
  int start[NUM + 1];             // place in `order` of an expert's first pick
  int first[NUM + 1];  // number of an expert's first tile; the last entry is the number of all tiles
  int picks[NUM];
  int warp_sums[WARPS];

  // Whether every pick goes to the only expert.
  static DEVICE bool everyones(const Picks& all) { return NUM == 1 && !all.expert_ids; }

  // All threads of the block: where each expert's tiles are. `sort` says which picks these hold.
  DEVICE Own build(const Picks& all) {
    constexpr int OWN = cdiv(NUM, THREADS);  // neighbouring experts that a thread adds up
    constexpr int HELD_BITS = 11;
    static_assert(HELD < 1 << HELD_BITS, "two sums in one");
    for (int e = threadIdx.x; e < NUM; e += THREADS) {
      picks[e] = everyones(all) ? all.count : 0;  // behind the first HELD
      start[e] = 0;                               // picks among the first HELD
    }
    __syncthreads();
    Own own;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int p = i * THREADS + threadIdx.x;
      own.expert[i] = p < all.count ? load_fresh(all.expert_ids + p) : NUM;
      if (own.expert[i] < NUM) own.place[i] = atomicAdd(&start[own.expert[i]], 1);
    }
    for (int p = SORTED + threadIdx.x; !everyones(all) && p < all.count; p += THREADS) {
      const u32 of = load_fresh(all.expert_ids + p);
      if (of < NUM) atomicAdd(&picks[of], 1);
    }
    __syncthreads();
    int sums[OWN], tiles_and_picks = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int e = threadIdx.x * OWN + i;
      if (e < NUM) picks[e] += start[e];
      sums[i] = e < NUM ? cdiv(picks[e], PICKS) << HELD_BITS | start[e] : 0;
      tiles_and_picks += sums[i];
    }
    const int through = warp_sum_through(tiles_and_picks);
    if (lane_id() == WARP - 1) warp_sums[warp_id()] = through;
    __syncthreads();
    int next = through - tiles_and_picks;
    for (int w = 0; w < warp_id(); ++w) next += warp_sums[w];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int e = threadIdx.x * OWN + i;
      if (e < NUM) {
        first[e] = next >> HELD_BITS;
        start[e] = next & ((1 << HELD_BITS) - 1);
      }
      next += sums[i];
    }
    if (threadIdx.x == THREADS - 1) {
      first[NUM] = next >> HELD_BITS;
      start[NUM] = next & ((1 << HELD_BITS) - 1);
    }
    __syncthreads();
    return own;
  }

  // All threads of the block. Who came first is chance: picks are put in the order of their numbers, so that all blocks
  // cut the same tiles.
  DEVICE void sort(Own own) {
    if (TURNS == 0) return;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (own.expert[i] < NUM) order[start[own.expert[i]] + own.place[i]] = i * THREADS + threadIdx.x;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (own.expert[i] >= NUM) continue;
      const int begin = start[own.expert[i]], end = start[own.expert[i] + 1];
      own.place[i] = begin;
      for (int n = begin; n < end; ++n) own.place[i] += order[n] < i * THREADS + threadIdx.x;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      if (own.expert[i] < NUM) order[own.place[i]] = i * THREADS + threadIdx.x;
    }
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
    if (everyones(all)) {
      for (int n = lane_id(); n < size; n += WARP) take(n, skip + n);
      return size;
    }
    const int held = start[expert + 1] - start[expert];
    for (int n = lane_id(); n < min(size, held - skip); n += WARP) take(n, order[start[expert] + skip + n]);
    int found = held - skip;
    for (int base = SORTED; base < all.count && found < size; base += WARP) {
      const int p = base + lane_id();
      const bool mine = p < all.count && load_fresh(all.expert_ids + p) == expert;
      const u32 votes = __ballot_sync(FULL_MASK, mine);
      const int n = found + __popc(votes & ((1u << lane_id()) - 1));
      if (mine && n >= 0 && n < size) take(n, p);
      found += __popc(votes);
    }
    return size;
  }
};

// Where a unit of work lies. A block walks from its last unit to its first one.
template <int NUM, int PICKS, int FEATURE_TILES>
struct Unit {
  const Tiles<NUM, PICKS>& tiles;
  int expert = 0, feature_tile = 0, pick_tile = 0;
  int pick_tiles = 0;  // of the expert

  DEVICE void find(int unit) {
    expert = tiles.expert(unit / FEATURE_TILES);
    pick_tiles = tiles.first[expert + 1] - tiles.first[expert];
    const int inside = unit - tiles.first[expert] * FEATURE_TILES;
    feature_tile = inside / pick_tiles;
    pick_tile = inside % pick_tiles;
  }

  // The unit before.
  DEVICE void next() {
    if (--pick_tile >= 0) return;
    if (--feature_tile < 0) {
      feature_tile = FEATURE_TILES - 1;
      do {
        --expert;
        pick_tiles = tiles.first[expert + 1] - tiles.first[expert];
      } while (pick_tiles == 0);
    }
    pick_tile = pick_tiles - 1;
  }
};

// csrc/moe_many_plan.cuh: moe_many_plan sorts the picks of many rows by expert and cuts each expert's into tiles.
//   in   expert_ids [T,k] i32, an id outside 0..NUM_EXPERTS-1 is no expert
//   out  order [T k], pick numbers by expert | tiles, their number before them
//   A tile is at most 8 TILE_EIGHTS picks of one expert; an expert's tiles are about equally wide. The widest come
//   first: blocks that take them in turns begin with large ones and end with small ones.
//   test tests/kernels/test_moe_many_rows.py
#pragma once

#include "fresh.cuh"

struct alignas(16) Tile {
  int expert, first, size, unused;  // picks order[first ..]
};

constexpr int PLAN_THREADS = 1024;
static_assert(NUM_EXPERTS <= PLAN_THREADS, "a thread an expert");

// Calls take(pick, expert) for all picks that have an expert; all threads of the block.
template <typename Take>
DEVICE void each_pick(const i32* expert_ids, int num_picks, Take take) {
  constexpr int AT_ONCE = 8;
  for (int base = threadIdx.x; base < num_picks; base += AT_ONCE * PLAN_THREADS) {
    u32 expert[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int pick = base + i * PLAN_THREADS;
      expert[i] = pick < num_picks ? load_fresh(expert_ids + pick) : -1;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (expert[i] < NUM_EXPERTS) take(base + i * PLAN_THREADS, expert[i]);
    }
  }
}

// One block. Which place a pick gets among those of its expert differs from run to run, and changes no result: it has
// its own column of the products.
extern "C" __global__ __launch_bounds__(PLAN_THREADS) void moe_many_plan(
    const i32* expert_ids,  // [T, top_k]
    i32* order,             // [T * top_k]
    Tile* tiles,            // the first one's `expert` is the number of tiles, which follow
    int num_picks) {
  __shared__ int picks[NUM_EXPERTS], next[NUM_EXPERTS], wide[TILE_EIGHTS + 1], warp_picks[PLAN_THREADS / WARP];
  grid_dependency_wait();
  grid_dependency_launch();
  const int e = threadIdx.x;
  if (e < NUM_EXPERTS) picks[e] = 0;
  if (e <= TILE_EIGHTS) wide[e] = 0;
  __syncthreads();
  each_pick(expert_ids, num_picks, [&](int, u32 expert) { atomicAdd(&picks[expert], 1); });
  __syncthreads();
  const int own = e < NUM_EXPERTS ? picks[e] : 0;
  int through = own;  // picks of this expert and of those before it in the warp
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) {
    const int before = __shfl_up_sync(FULL_MASK, through, offset);
    if (lane_id() >= offset) through += before;
  }
  if (lane_id() == WARP - 1) warp_picks[warp_id()] = through;
  const int eights = cdiv(own, 8), count = cdiv(eights, TILE_EIGHTS), width = count ? cdiv(eights, count) : 0;
  if (count) atomicAdd(&wide[width], count);
  __syncthreads();
  int first = through - own;
  for (int w = 0; w < warp_id(); ++w) first += warp_picks[w];
  if (e < NUM_EXPERTS) next[e] = first;
  if (e == 0) {
    int before = 0;
    for (int w = TILE_EIGHTS; w > 0; --w) {
      const int here = wide[w];
      wide[w] = before;
      before += here;
    }
    tiles[0] = {before, 0, 0, 0};
  }
  __syncthreads();
  const int at = count ? atomicAdd(&wide[width], count) : 0;
  for (int i = 0; i < count; ++i) {
    const int skip = i * width * 8;
    tiles[1 + at + i] = {e, first + skip, min(width * 8, own - skip), 0};
  }
  each_pick(expert_ids, num_picks, [&](int pick, u32 expert) { order[atomicAdd(&next[expert], 1)] = pick; });
}

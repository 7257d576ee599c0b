// csrc/moe_many_plan.cuh: moe_many_plan sorts the picks of many rows by expert and cuts each expert's into tiles.
//   in   expert_ids [T,k] i32, an id outside 0..NUM_EXPERTS-1 is no expert | x [T,D]
//   out  order [T k], pick numbers by expert | tiles, their number and that of items taken before them | turned [T,D],
//        x with the inputs of each group of 32 in the order in which the products take them
//   A tile is at most 8 TILE_EIGHTS picks of one expert; an expert's tiles are about equally wide. The widest come
//   first: blocks that take them in turns begin with large ones and end with small ones.
//   test tests/kernels/test_moe_many_rows.py
#pragma once

#include "fresh.cuh"
#include "int4_pairs.cuh"

struct alignas(16) Tile {
  int expert, first, size;  // picks order[first ..]
  int done;                 // counts what is there of their hidden rows
};

constexpr int PLAN_THREADS = 1024, PLAN_PICKS = 2048;  // picks that a block sorts
static_assert(NUM_EXPERTS <= PLAN_THREADS, "a thread an expert");

// Calls take(pick, expert) for the picks from `begin` on that have an expert; all threads of the block.
template <typename Take>
DEVICE void each_pick(const i32* expert_ids, int begin, int end, Take take) {
  constexpr int AT_ONCE = 8;
  for (int base = begin + threadIdx.x; base < end; base += AT_ONCE * PLAN_THREADS) {
    u32 expert[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int pick = base + i * PLAN_THREADS;
      expert[i] = pick < end ? load_fresh(expert_ids + pick) : -1;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (expert[i] < NUM_EXPERTS) take(base + i * PLAN_THREADS, expert[i]);
    }
  }
}

// Where input i of a group of 32 stands. A lane t of a product has inputs 8t..8t+7, a word, whose widened pairs
// (c, c + 4) stand at places 2t and 2t + 1 of the group's c-th eight.
__host__ __device__ constexpr int turned_place(int i) { return i % 4 * 8 + i / 8 * 2 + i / 4 % 2; }

// Word n of lane m to word m of lane n, among lanes 4 i .. 4 i + 3.
DEVICE void transpose_words(u32 (&word)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane_id() & step;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & step) continue;
      const u32 got = __shfl_xor_sync(FULL_MASK, upper ? word[n] : word[n + step], step);
      (upper ? word[n] : word[n + step]) = got;
    }
  }
}

// Turns TURNED units of eight inputs a thread; a row has whole warps of them.
constexpr int TURNED = 4;
DEVICE void turn_rows(const Scalar* x, Scalar* turned, int block, int units) {
#pragma unroll
  for (int i = 0; i < TURNED; ++i) {
    const int at = (block * TURNED + i) * PLAN_THREADS + threadIdx.x;
    if (at >= units) return;
    u32 pairs[4];
    pair_up(pairs, load_fresh(reinterpret_cast<const uint4*>(x) + at));
    transpose_words(pairs);
    reinterpret_cast<uint4*>(turned)[at] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

// The first blocks sort, PLAN_PICKS each, the others turn x. Which place a pick gets among those of its expert differs
// from run to run, and changes no result: it has its own column of the products. What comes next may begin at the end
// only: moe_many_experts, while it waits, would hold the places of the shared expert's products beside this kernel.
extern "C" __global__ __launch_bounds__(PLAN_THREADS) void moe_many_plan(
    const i32* expert_ids,   // [T, top_k]
    i32* order,              // [T * top_k]
    Tile* tiles,             // the first one's `expert` is the number of tiles, which follow; its `first` counts items
    const Scalar* x,         // [T, MODEL_WIDTH]
    Scalar* turned,          // the same
    int num_picks, int units) {
  __shared__ int picks[NUM_EXPERTS];  // of each expert, of all blocks
  __shared__ int next[NUM_EXPERTS];   // place of this block's next pick of an expert
  __shared__ int wide[TILE_EIGHTS + 1], warp_picks[PLAN_THREADS / WARP];
  grid_dependency_wait();
  const int plans = cdiv(num_picks, PLAN_PICKS), block = blockIdx.x;
  if (block >= plans) return turn_rows(x, turned, block - plans, units);
  const int e = threadIdx.x;
  if (e < NUM_EXPERTS) picks[e] = next[e] = 0;
  if (e <= TILE_EIGHTS) wide[e] = 0;
  __syncthreads();
  const int begin = block * PLAN_PICKS;
  each_pick(expert_ids, 0, num_picks, [&](int pick, u32 expert) {
    atomicAdd(&picks[expert], 1);
    if (pick < begin) atomicAdd(&next[expert], 1);
  });
  __syncthreads();
  const int own = e < NUM_EXPERTS ? picks[e] : 0;
  const int through = warp_sum_through(own);  // picks of this expert and of those before it in the warp
  if (lane_id() == WARP - 1) warp_picks[warp_id()] = through;
  const int eights = cdiv(own, 8), count = cdiv(eights, TILE_EIGHTS), width = count ? cdiv(eights, count) : 0;
  if (count) atomicAdd(&wide[width], count);
  __syncthreads();
  int first = through - own;
  for (int w = 0; w < warp_id(); ++w) first += warp_picks[w];
  if (e < NUM_EXPERTS) next[e] += first;
  if (e == 0) {
    int before = 0;
    for (int w = TILE_EIGHTS; w > 0; --w) {
      const int here = wide[w];
      wide[w] = before;
      before += here;
    }
    if (block == 0) tiles[0] = {before, 0, 0, 0};
  }
  __syncthreads();
  const int at = count ? atomicAdd(&wide[width], count) : 0;
  for (int i = 0; i < count && block == 0; ++i) {
    const int skip = i * width * 8;
    tiles[1 + at + i] = {e, first + skip, min(width * 8, own - skip), 0};
  }
  each_pick(expert_ids, begin, min(begin + PLAN_PICKS, num_picks),
            [&](int pick, u32 expert) { order[atomicAdd(&next[expert], 1)] = pick; });
  grid_dependency_launch();
}

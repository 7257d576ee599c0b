// csrc/router.cu: from router logits to the experts of a row: sigmoid, the biased best k, their weights.
//   in   logits [T,E] f32 (by csrc/skinny_linear.cu) | bias [E] f32 | used [T] u8, or null: all rows are used
//   out  expert_ids [T,k] i32, best first, -1 in a row that is not used | weights [T,k] f32, 0 there
//   math s = sigmoid(logits); the k largest s + bias, equal ones by the smaller id; weights s / (sum + 1e-20) scale
//   cost 4 E bytes a row; bound by latency
//   ref  kernels/reference/layer.py:router | test tests/kernels/test_router.py | archs all
//
// A block takes a row, a thread an expert, a warp experts from all over the row. The k-th best of the warps' best keys
// is a bound that k experts reach: those that do, a dozen of 384, are the candidates, and each counts how many of the
// others beat it.
#include "fresh.cuh"

#if !defined(NUM_EXPERTS) || !defined(CHOSEN)
#error "NUM_EXPERTS = E and CHOSEN = k"
#endif

constexpr int THREADS = round_up(NUM_EXPERTS, WARP), WARPS = THREADS / WARP;
static_assert(CHOSEN <= NUM_EXPERTS && CHOSEN <= WARP && THREADS <= 1024, "a thread an expert, a lane a choice");

__host__ __device__ constexpr int power_from(int n) {
  int power = 2;
  while (power < n) power *= 2;
  return power;
}
constexpr int SHARERS = CHOSEN == 1 ? WARP : WARP / power_from(CHOSEN);  // threads that compare one candidate

struct Candidate {
  u32 key;
  i32 id;
};

// Orders floats as integers, above 0, which stands for no expert. NaN comes last, as in torch, no two alike: a stage
// that is timed alone meets rows of them, which take 0.3 us longer than others so, and 1.3 us if all are alike.
DEVICE u32 key_of(float v, int id) {
  if (isnan(v)) return FULL_MASK - id;
  const u32 bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// How many of the first LANES lanes beat this one's key; equal keys by the smaller lane. All lanes call.
template <int LANES>
DEVICE int place_among(u32 key) {
  int place = 0;
#pragma unroll
  for (int other = 0; other < LANES; ++other) {
    const u32 theirs = __shfl_sync(FULL_MASK, key, other);
    place += other < lane_id() ? theirs >= key : theirs > key;
  }
  return place;
}

// A key that CHOSEN experts reach at least, above that of no expert. All lanes call; `best` are the warps' best keys.
DEVICE u32 bound_of(const u32 (&best)[WARPS]) {
  if constexpr (WARPS < CHOSEN) return 1;
  const int lane = lane_id();
  const u32 key = lane < WARPS ? best[lane] : 0;
  const int place = place_among<WARPS>(key);
  const u32 here = __ballot_sync(FULL_MASK, lane < WARPS && place == CHOSEN - 1);
  return max(1u, __shfl_sync(FULL_MASK, key, __ffs(here) - 1));
}

// Grid T.
extern "C" __global__ void __launch_bounds__(THREADS)
    router_choose(const float* __restrict__ logits,  // [T, NUM_EXPERTS]
                  const float* __restrict__ bias,    // [NUM_EXPERTS]
                  const u8* __restrict__ used,       // [T] or null
                  i32* __restrict__ expert_ids,      // [T, CHOSEN]
                  float* __restrict__ weights,       // [T, CHOSEN]
                  int normalize, float scale) {
  __shared__ Candidate candidates[THREADS];
  __shared__ float scores[THREADS], chosen[CHOSEN];
  __shared__ u32 best[WARPS];
  __shared__ int num_candidates;
  grid_dependency_launch();
  const int thread = threadIdx.x, lane = lane_id(), id = lane / 4 * (4 * WARPS) + 4 * warp_id() + lane % 4;
  const i64 row = blockIdx.x;
  const float added = id < NUM_EXPERTS ? load_fresh(bias + id) : 0.0f;
  grid_dependency_wait();
  const bool in_use = used == nullptr || load_fresh(used + row);
  const float score = id < NUM_EXPERTS ? 1.0f / (1.0f + expf(-load_fresh(logits + row * NUM_EXPERTS + id))) : 0.0f;
  const u32 key = id < NUM_EXPERTS ? key_of(score + added, id) : 0;
  const u32 warp_best = __reduce_max_sync(FULL_MASK, key);
  if (lane == 0) best[warp_id()] = warp_best;
  if (thread == 0) num_candidates = 0;
  __syncthreads();
  bool reaches = key >= bound_of(best);
  u32 reaching = __ballot_sync(FULL_MASK, reaches);
  if (__popc(reaching) > CHOSEN) {  // many alike: no more than can be chosen
    const int place_in_warp = place_among<WARP>(key);
    reaches = reaches && place_in_warp < CHOSEN;
    reaching = __ballot_sync(FULL_MASK, reaches);
  }
  int place = 0;
  if (lane == 0 && reaching) place = atomicAdd(&num_candidates, __popc(reaching));
  place = __shfl_sync(FULL_MASK, place, 0) + __popc(reaching & ((1u << lane) - 1));
  if (reaches) {
    candidates[place] = {key, id};
    scores[place] = score;
  }
  __syncthreads();
  const int count = num_candidates, which = thread / SHARERS;  // CHOSEN a warp at most, so that all have their threads
  const bool compares = which < count;
  const Candidate mine = candidates[compares ? which : 0];
  int beaten = 0;
#pragma unroll 4
  for (int other = thread % SHARERS; other < count; other += SHARERS) {
    const Candidate theirs = candidates[other];
    beaten += theirs.key > mine.key || (theirs.key == mine.key && theirs.id < mine.id);
  }
  if constexpr (SHARERS > 1) beaten = warp_sum<SHARERS>(beaten);
  if (compares && beaten < CHOSEN && thread % SHARERS == 0) {
    chosen[beaten] = scores[which];
    expert_ids[row * CHOSEN + beaten] = in_use ? mine.id : -1;
  }
  __syncthreads();
  if (warp_id() == 0) {
    const float weight = lane < CHOSEN ? chosen[lane] : 0.0f, total = warp_sum<power_from(CHOSEN)>(weight);
    if (lane < CHOSEN) {
      weights[row * CHOSEN + lane] = in_use ? (normalize ? weight / (total + 1e-20f) : weight) * scale : 0.0f;
    }
  }
}

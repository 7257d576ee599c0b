// csrc/router.cu: from router logits to the experts of a row: sigmoid, the biased best k, their weights.
//   in   logits [T,E] f32 (by csrc/skinny_linear.cu) | bias [E] f32 | used [T] u8, or null: all rows are used
//   out  expert_ids [T,k] i32, best first, -1 in a row that is not used | weights [T,k] f32, 0 there
//   math s = sigmoid(logits); the k largest s + bias, equal ones by the smaller id; weights s / (sum + 1e-20) scale
//   cost 4 E bytes a row; bound by latency
//   ref  kernels/reference/layer.py:router | test tests/kernels/test_router.py | archs all
//
// A block takes a row, a thread an expert. Places are counted, not searched: a warp's best k are those that fewer than
// k of its lanes beat; among these candidates of all warps the row's best k are found in the same way.
#include "common.cuh"

#if !defined(NUM_EXPERTS) || !defined(CHOSEN)
#error "NUM_EXPERTS = E and CHOSEN = k"
#endif

constexpr int THREADS = round_up(NUM_EXPERTS, WARP), WARPS = THREADS / WARP;
constexpr int CANDIDATES = WARPS * CHOSEN;

__host__ __device__ constexpr int sharers(int candidates_a_warp) {
  int n = 1;
  while (2 * n * candidates_a_warp <= WARP) n *= 2;
  return n;
}
constexpr int SHARERS = sharers(CHOSEN);  // threads that compare one candidate
static_assert(CHOSEN <= NUM_EXPERTS && CHOSEN <= WARP && THREADS <= 1024, "a thread an expert, a lane a choice");

struct Candidate {
  u32 key;
  i32 id;
};

// Orders floats as integers, above 0, which stands for no expert; NaN comes last, as in torch.
DEVICE u32 key_of(float v) {
  if (isnan(v)) return FULL_MASK;
  const u32 bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Grid T.
extern "C" __global__ void __launch_bounds__(THREADS)
    router_choose(const float* __restrict__ logits,  // [T, NUM_EXPERTS]
                  const float* __restrict__ bias,    // [NUM_EXPERTS]
                  const u8* __restrict__ used,       // [T] or null
                  i32* __restrict__ expert_ids,      // [T, CHOSEN]
                  float* __restrict__ weights,       // [T, CHOSEN]
                  int normalize, float scale) {
  __shared__ Candidate candidates[CANDIDATES];
  __shared__ float scores[CANDIDATES], chosen[CHOSEN];
  grid_dependency_launch();
  const int id = threadIdx.x, lane = lane_id();
  const i64 row = blockIdx.x;
  const float added = id < NUM_EXPERTS ? bias[id] : 0.0f;
  grid_dependency_wait();
  const bool in_use = used == nullptr || used[row];
  const float score = id < NUM_EXPERTS ? 1.0f / (1.0f + expf(-logits[row * NUM_EXPERTS + id])) : 0.0f;
  const u32 key = id < NUM_EXPERTS ? key_of(score + added) : 0;
  int place = 0;
#pragma unroll
  for (int other = 0; other < WARP; ++other) {
    const u32 theirs = __shfl_sync(FULL_MASK, key, other);
    place += other < lane ? theirs >= key : theirs > key;
  }
  if (place < CHOSEN) {
    candidates[warp_id() * CHOSEN + place] = {key, id};
    scores[warp_id() * CHOSEN + place] = score;
  }
  __syncthreads();
  // As many candidates a warp as it has brought, each compared by SHARERS neighbouring lanes.
  const int which = warp_id() * CHOSEN + lane / SHARERS;
  const bool compares = lane / SHARERS < CHOSEN;
  const Candidate mine = candidates[compares ? which : 0];
  int beaten = 0;
#pragma unroll 8
  for (int other = lane % SHARERS; other < CANDIDATES; other += SHARERS) {
    const Candidate theirs = candidates[other];
    beaten += theirs.key > mine.key || (theirs.key == mine.key && theirs.id < mine.id);
  }
  if constexpr (SHARERS > 1) beaten = warp_sum<SHARERS>(beaten);
  if (compares && beaten < CHOSEN && lane % SHARERS == 0) {
    chosen[beaten] = scores[which];
    expert_ids[row * CHOSEN + beaten] = in_use ? mine.id : -1;
  }
  __syncthreads();
  if (warp_id() == 0) {
    const float weight = lane < CHOSEN ? chosen[lane] : 0.0f, total = warp_sum(weight);
    if (lane < CHOSEN) {
      weights[row * CHOSEN + lane] = in_use ? (normalize ? weight / (total + 1e-20f) : weight) * scale : 0.0f;
    }
  }
}

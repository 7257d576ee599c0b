// csrc/router.cu: from router logits to the experts of a row: sigmoid, the biased best k, their weights.
//   in   logits [T,E] f32 (by csrc/skinny_linear.cu) | bias [E] f32 | used [T] u8, or null: all rows are used
//   out  expert_ids [T,k] i32, best first, -1 in a row that is not used | weights [T,k] f32, 0 there
//   math s = sigmoid(logits); the k largest s + bias, equal ones by the smaller id; weights s / (sum + 1e-20) scale
//   cost 4 E bytes a row; bound by latency
//   ref  kernels/reference_layer.py:router | test tests/kernels/test_router.py | archs all
//
// A warp takes a row. A lane holds neighbouring experts, so that among equal values the first lane has the smaller id.
#include "common.cuh"

#if !defined(NUM_EXPERTS)
#error "NUM_EXPERTS = E"
#endif

constexpr int EACH = cdiv(NUM_EXPERTS, WARP);
constexpr int MAX_CHOSEN = WARP;
constexpr u32 NOBODY = 0;  // below the key of every value

// Orders floats as integers; NaN comes last, as in torch.
DEVICE u32 key_of(float v) {
  if (isnan(v)) return FULL_MASK;
  const u32 bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Grid T, k <= MAX_CHOSEN.
extern "C" __global__ void __launch_bounds__(WARP)
    router_choose(const float* __restrict__ logits,  // [T, NUM_EXPERTS]
                  const float* __restrict__ bias,    // [NUM_EXPERTS]
                  const u8* __restrict__ used,       // [T] or null
                  i32* __restrict__ expert_ids,      // [T, k]
                  float* __restrict__ weights,       // [T, k]
                  int k, int normalize, float scale) {
  const int lane = threadIdx.x, first = lane * EACH;
  const i64 row = blockIdx.x;
  float biases[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) biases[i] = first + i < NUM_EXPERTS ? bias[first + i] : 0.0f;
  grid_dependency_launch();
  grid_dependency_wait();
  const bool in_use = used == nullptr || used[row];
  float scores[EACH];
  u32 keys[EACH], best = NOBODY;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + i < NUM_EXPERTS) scores[i] = 1.0f / (1.0f + expf(-logits[row * NUM_EXPERTS + first + i]));
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    keys[i] = first + i < NUM_EXPERTS ? key_of(scores[i] + biases[i]) : NOBODY;
    best = max(best, keys[i]);
  }
  i32 id = -1;  // lane j keeps choice number j
  float weight = 0.0f;
  for (int j = 0; j < k; ++j) {
    const u32 top = __reduce_max_sync(FULL_MASK, best);
    const int winner = __ffs(__ballot_sync(FULL_MASK, best == top)) - 1;
    int index = 0;
    float score = 0.0f;
    if (lane == winner) {
      bool found = false;
      best = NOBODY;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const bool here = !found && keys[i] == top;
        if (here) index = i, score = scores[i], keys[i] = NOBODY;
        found |= here;
        best = max(best, keys[i]);
      }
    }
    index = __shfl_sync(FULL_MASK, first + index, winner);
    score = __shfl_sync(FULL_MASK, score, winner);
    if (lane == j) id = index, weight = score;
  }
  const float total = warp_sum(weight);
  if (lane < k) {
    if (normalize) weight = weight / (total + 1e-20f);
    expert_ids[row * k + lane] = in_use ? id : -1;
    weights[row * k + lane] = in_use ? weight * scale : 0.0f;
  }
}

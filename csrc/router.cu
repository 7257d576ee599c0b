// csrc/router.cu: from router logits to the experts of a row: sigmoid, the biased best k, their weights.
//   in   parts [S,T,E] f32, which add up to the logits (csrc/router_gate.cu, or S = 1) | bias [E] f32
//        used [T] u8, or null: all rows are used
//   out  expert_ids [T,k] i32, best first, -1 in a row that is not used | weights [T,k] f32, 0 there
//   math s = sigmoid(logits); the k largest s + bias, equal ones by the smaller id; weights s / (sum + 1e-20) scale
//   cost 4 S E bytes a row, of L2; bound by latency
//   ref  kernels/reference/layer.py:router | test tests/kernels/test_router.py | archs all
//
// A block takes a row, a thread four neighbouring experts, a warp whole lines of memory from all over the row: the bias
// is the same few lines for all blocks, and a line of L2 answers one request after the other. The k-th best of the best
// keys of groups of lanes is a bound that k experts reach: those that do, a dozen of 384, are the candidates, of which
// one warp counts for each how many beat it.
//
// -D constants: NUM_EXPERTS = E | CHOSEN = k | SUMMANDS = S.
#include "fresh.cuh"

#if !defined(NUM_EXPERTS) || !defined(CHOSEN) || !defined(SUMMANDS)
#error "NUM_EXPERTS, CHOSEN and SUMMANDS"
#endif

__host__ __device__ constexpr int power_from(int n) {
  int power = 2;
  while (power < n) power *= 2;
  return power;
}
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int EACH = 4, WARPS = cdiv(NUM_EXPERTS, WARP * EACH), THREADS = WARPS * WARP;
constexpr bool WHOLE = NUM_EXPERTS % EACH == 0;  // rows of whole 16-byte words
static_assert(CHOSEN <= NUM_EXPERTS && CHOSEN <= WARP && NUM_EXPERTS <= 1024, "a lane a choice");
// Groups of lanes of a warp; three times as many in all as are chosen, where there are so many lanes.
constexpr int WANTED_GROUPS = larger(4, power_from(cdiv(3 * CHOSEN, WARPS)));
constexpr int GROUPS = WANTED_GROUPS < WARP ? WANTED_GROUPS : WARP, ALL_GROUPS = GROUPS * WARPS;
constexpr int MOST = larger(WARP, WARPS * CHOSEN);  // candidates
constexpr int AT_ONCE = 16;                         // that one is compared with

struct Shared {
  alignas(16) u32 best[ALL_GROUPS];  // keys, of each group
  alignas(16) u64 candidates[round_up(MOST, AT_ONCE)];  // as `order_of` says, in any order, 0 behind them
  float scores[MOST], chosen_scores[CHOSEN];
  i32 chosen[CHOSEN];
  int num_candidates;
};

// Orders floats as integers, above 0, which stands for no expert. NaN comes first, as in torch, no two alike.
DEVICE u32 key_of(float v, int id) {
  const u32 bits = __float_as_uint(v), key = bits ^ (u32(i32(bits) >> 31) | 0x80000000u);
  return isnan(v) ? FULL_MASK - id : key;
}

// The larger key is the larger number, of equal keys that of the smaller id.
DEVICE u64 order_of(u32 key, int id) { return u64(key) << 32 | u32(~id); }
DEVICE int id_of(u64 order) { return ~u32(order); }

// As 1.0f / (1.0f + expf(-x)), whose division branches for denominators that are not met here.
DEVICE float sigmoid(float x) {
  const float denominator = 1.0f + expf(-x);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(denominator));
  r = fmaf(r, fmaf(-denominator, r, 1.0f), r);
  return denominator > 1e38f ? 0.0f : r;
}

// What the four experts from `first` on have; those behind the last one have anything.
DEVICE void load_four(float (&to)[EACH], const float* from, int first) {
  if constexpr (WHOLE) {
    const float4 word = load_fresh(reinterpret_cast<const float4*>(from + min(first, NUM_EXPERTS - EACH)));
    to[0] = word.x, to[1] = word.y, to[2] = word.z, to[3] = word.w;
  } else {
#pragma unroll
    for (int j = 0; j < EACH; ++j) to[j] = load_fresh(from + min(first + j, NUM_EXPERTS - 1));
  }
}

// A key that CHOSEN experts reach at least, above that of no expert. All lanes call.
DEVICE u32 bound_of(const u32 (&best)[ALL_GROUPS]) {
  if constexpr (ALL_GROUPS < CHOSEN) return 1;
  u32 least = FULL_MASK;
#pragma unroll
  for (int begin = 0; begin < ALL_GROUPS; begin += WARP) {
    const int group = begin + lane_id();
    const u32 mine = group < ALL_GROUPS ? best[group] : 0;
    int above = 0;
#pragma unroll
    for (int other = 0; other < ALL_GROUPS; other += 4) {
      const auto theirs = load_vec<u32, 4>(&best[other]);
#pragma unroll
      for (const u32 key : theirs.data) above += key > mine;
    }
    least = min(least, above < CHOSEN ? mine : FULL_MASK);
  }
  return max(1u, __reduce_min_sync(FULL_MASK, least));
}

// The CHOSEN best of this warp's experts, one by one: for rows where more are alike than there is room for.
DEVICE void find_one_by_one(u32 (&keys)[EACH], const float (&scores)[EACH], int first, Shared& shared) {
  for (int i = WARPS * CHOSEN + threadIdx.x; i < MOST; i += THREADS) shared.candidates[i] = 0;
#pragma unroll 1
  for (int n = 0; n < CHOSEN; ++n) {
    u64 mine = 0;
    float score = 0.0f;
#pragma unroll
    for (int j = EACH - 1; j >= 0; --j) {
      const u64 order = order_of(keys[j], first + j);
      if (order > mine) mine = order, score = scores[j];
    }
    const u32 key = u32(mine >> 32), top = __reduce_max_sync(FULL_MASK, key);
    const int id = __reduce_min_sync(FULL_MASK, key == top ? id_of(mine) : NUM_EXPERTS);
    if (key != top || id_of(mine) != id) continue;
    shared.candidates[warp_id() * CHOSEN + n] = mine, shared.scores[warp_id() * CHOSEN + n] = score;
#pragma unroll
    for (int j = 0; j < EACH; ++j) keys[j] = first + j == id ? 0 : keys[j];
  }
}

// Grid T.
extern "C" __global__ void __launch_bounds__(THREADS)
    router_choose(const float* __restrict__ parts,  // [SUMMANDS, T, NUM_EXPERTS]
                  const float* __restrict__ bias,   // [NUM_EXPERTS], at a multiple of 16 bytes
                  const u8* __restrict__ used,      // [T] or null
                  i32* __restrict__ expert_ids,     // [T, CHOSEN]
                  float* __restrict__ weights,      // [T, CHOSEN]
                  int normalize, float scale) {
  __shared__ Shared shared;
  grid_dependency_launch();
#pragma unroll 1
  for (int i = threadIdx.x; i < round_up(MOST, AT_ONCE); i += THREADS) shared.candidates[i] = 0;
  if (threadIdx.x == 0) shared.num_candidates = 0;
  // A warp's 16-byte words of a row: 8 neighbours, a line of memory, then the next warp's.
  const int lane = lane_id(), warp = warp_id(), first = EACH * (lane / 8 * (8 * WARPS) + 8 * warp + lane % 8);
  const i64 row = blockIdx.x;
  float added[EACH], summands[SUMMANDS][EACH];
  load_four(added, bias, first);
  grid_dependency_wait();
#pragma unroll
  for (int s = 0; s < SUMMANDS; ++s) load_four(summands[s], parts + (s * i64(gridDim.x) + row) * NUM_EXPERTS, first);
  const bool in_use = used == nullptr || load_fresh(used + row);  // last, as ptxas would else look at it first
  // This branch also keeps the loads together: ptxas would else wait for the first before it asks for the last.
  if (!in_use) {
    if (threadIdx.x < CHOSEN) expert_ids[row * CHOSEN + lane] = -1, weights[row * CHOSEN + lane] = 0.0f;
    return;
  }
  float scores[EACH];
  u32 keys[EACH], best = 0;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    float logit = summands[0][j];
#pragma unroll
    for (int s = 1; s < SUMMANDS; ++s) logit += summands[s][j];
    scores[j] = sigmoid(logit);
    keys[j] = first + j < NUM_EXPERTS ? key_of(scores[j] + added[j], first + j) : 0;
    best = max(best, keys[j]);
  }
#pragma unroll
  for (int offset = WARP / 2; offset >= GROUPS; offset /= 2) best = max(best, __shfl_xor_sync(FULL_MASK, best, offset));
  if (lane < GROUPS) shared.best[warp * GROUPS + lane] = best;
  __syncthreads();
  const u32 bound = bound_of(shared.best);
  int reaching = 0;
#pragma unroll
  for (const u32 key : keys) reaching += key >= bound;
  if (reaching) {
    int place = atomicAdd(&shared.num_candidates, reaching);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      if (keys[j] < bound) continue;
      if (place < MOST) shared.candidates[place] = order_of(keys[j], first + j), shared.scores[place] = scores[j];
      ++place;
    }
  }
  __syncthreads();
  int count = shared.num_candidates;
  if (count > MOST) {
    find_one_by_one(keys, scores, first, shared);
    __syncthreads();
    count = WARPS * CHOSEN;
  }
  if (warp > 0) return;
#pragma unroll 1
  for (int which = lane; which < count; which += WARP) {
    const u64 mine = shared.candidates[which];
    int beaten = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += AT_ONCE) {
#pragma unroll
      for (int other = begin; other < begin + AT_ONCE; other += 2) {
        const auto two = load_vec<u64, 2>(&shared.candidates[other]);
        beaten += (two[0] > mine) + (two[1] > mine);
      }
    }
    if (beaten < CHOSEN) shared.chosen[beaten] = id_of(mine), shared.chosen_scores[beaten] = shared.scores[which];
  }
  __syncwarp();
  const float weight = lane < CHOSEN ? shared.chosen_scores[lane] : 0.0f, sum = warp_sum<power_from(CHOSEN)>(weight);
  if (lane < CHOSEN) {
    expert_ids[row * CHOSEN + lane] = shared.chosen[lane];
    weights[row * CHOSEN + lane] = (normalize ? weight / (sum + 1e-20f) : weight) * scale;
  }
}

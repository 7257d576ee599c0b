// csrc/tree_build.cuh: what tree_build.cu works on: arguments, shared memory, and the candidates, read and checked.
//   A row of candidates is bad when it holds NaN, +inf, nothing finite, a log-probability above rounding, or an id out
//   of range beside a finite one.
//   test tests/kernels/test_tree_build.py
#pragma once

#include "common.cuh"

constexpr int MAX_DEPTH = 31, MAX_WIDTH = 256, MAX_BUDGET = 1024;
constexpr int MAX_PER_THREAD = 3;  // pool entries
constexpr int BINS = 256;
constexpr float POSITIVE_TOLERANCE = 1e-4f;  // a log-probability is at most 0; in float32 it may round to a little more
constexpr double MASS_TOLERANCE = 1e-4;

struct Params {
  const float* log_probs;  // [S, L, K]
  const i32* token_ids;    // [S, L, K]
  i32 *token, *parent, *depth, *rank, *first_child, *next_sibling;  // [S, N]
  float* logp;                                                      // [S, N]
  u32* ancestors;                                                   // [S, N, ceil(N/32)]
  i32 *num_nodes, *nonfinite_rows;                                  // [S]
  float* missed_mass;                                               // [S, L]
  u8* truncated;                                                    // [S]
  int num_depths, width, budget, capacity;                          // L, K, B, entries of the pool
  int last_id;  // no id is above it
  int whole;    // the candidates are the whole vocabulary: 1 yes, 0 no, -1 if they look like it
};

constexpr int ORDER_DEPTHS = 8;  // ranks that a word holds

// Dynamic shared memory behind Common, as `_shared_bytes` in tree_build.py counts it.
constexpr int PLAN_BYTES = 26;  // an entry: everything up to `list`, free after the sort
struct Plan {
  double* score;      // [capacity]
  u64* order;         // [capacity]: the first ranks of the tuple, first one highest
  u32* link;          // [capacity]: pack_link
  u32* bound;         // [capacity]: (nodes at or before the parent for sure) | (product of rank + 1 up to it) << 16
  u16* list;          // [capacity]: entries by bin
  i32* histogram;     // [BINS]
  i32* next;          // [BINS]: place in `list`
  float* log_probs;   // [L, K], sorted, as given: at most 0 only after fminf
  u16* up;            // [N]: a row's parent
  u8* unsorted;       // [L, K]: places before sorting, of rows that came unsorted

  DEVICE Plan(u64* base, int capacity, int depths, int width, int rows) {
    score = reinterpret_cast<double*>(base);
    order = reinterpret_cast<u64*>(score + capacity);
    link = reinterpret_cast<u32*>(order + capacity);
    bound = link + capacity;
    list = reinterpret_cast<u16*>(bound + capacity);
    histogram = reinterpret_cast<i32*>(list + capacity);
    next = histogram + BINS;
    log_probs = reinterpret_cast<float*>(next + BINS);
    up = reinterpret_cast<u16*>(log_probs + depths * width);
    unsorted = reinterpret_cast<u8*>(up + rows);
  }
};

// What the threads of a block tell each other.
struct Common {
  u32 bad_rows, unsorted_rows;  // one bit a depth
  int num_finite[MAX_DEPTH];    // candidates above -inf
  int usable;                   // depths before the first bad one
  int looks_whole;
  int count, tail, num_sorted;  // entries of the pool, root included; the same while it grows; of list
  int head;                     // entries before it have made their offers
  bool finished;                // no entry is left to expand
  int grown;                    // growth has stopped
  float floor, scale;           // of the bins
  int cut;                      // lowest bin that is still of interest
  u32 seen[WARP][MAX_WIDTH / 32];  // ids below K of each depth
};
constexpr int COMMON_BYTES = 1280;
static_assert(sizeof(Common) <= COMMON_BYTES && COMMON_BYTES % 16 == 0, "Common stands before Plan");

// Read the candidates, a warp a row, and note what is unusual about them.
DEVICE void load_candidates(const Params& p, const Plan& plan, Common& common) {
  constexpr int AT_ONCE = 2;  // loads come first: they cannot pass stores by themselves
  for (int row = warp_id(); row < p.num_depths; row += blockDim.x / WARP) {
    const i64 first = (i64(blockIdx.x) * p.num_depths + row) * p.width;
    const float* values = p.log_probs + first;
    bool bad = false, rises = false;
    int num_finite = 0;
    for (int start = lane_id(); start - lane_id() < p.width; start += AT_ONCE * WARP) {
      float x[AT_ONCE], next[AT_ONCE];
      i32 id[AT_ONCE];
#pragma unroll
      for (int e = 0; e < AT_ONCE; ++e) {
        const int i = min(start + e * WARP, p.width - 1);
        x[e] = values[i];
        next[e] = values[min(i + 1, p.width - 1)];
        id[e] = p.token_ids[first + i];
      }
#pragma unroll
      for (int e = 0; e < AT_ONCE; ++e) {
        const int i = start + e * WARP;
        const bool finite = x[e] > -INFINITY_F32;
        if (i < p.width) plan.log_probs[row * p.width + i] = x[e];
        if (p.whole < 0 && i < p.width && id[e] >= 0 && id[e] < p.width) {
          atomicOr(&common.seen[row][id[e] / 32], 1u << (id[e] % 32));
        }
        bad |= !(x[e] <= POSITIVE_TOLERANCE) || (finite && (id[e] < 0 || id[e] > p.last_id));
        rises |= !(x[e] >= next[e]);
        num_finite += __popc(__ballot_sync(FULL_MASK, finite && i < p.width));
      }
    }
    bad = __any_sync(FULL_MASK, bad);
    rises = __any_sync(FULL_MASK, rises);
    if (lane_id() > 0) continue;
    common.num_finite[row] = num_finite;
    if (bad) atomicOr(&common.bad_rows, 1u << row);
    if (rises) atomicOr(&common.unsorted_rows, 1u << row);
  }
}

// Sort the rows that came unsorted: a warp a row, each value's place is the number of those before it.
DEVICE void sort_rows(const Params& p, const Plan& plan, Common& common) {
  float* sorted = reinterpret_cast<float*>(plan.score) + warp_id() * MAX_WIDTH;
  static_assert(2 * 16 >= sizeof(float) * MAX_WIDTH / WARP, "two entries a thread hold a row a warp");
  for (int row = warp_id(); row < p.num_depths; row += blockDim.x / WARP) {
    if (!(common.unsorted_rows >> row & 1) || (common.bad_rows >> row & 1)) continue;
    float* values = plan.log_probs + row * p.width;
    for (int i = lane_id(); i < p.width; i += WARP) {
      const float x = values[i];
      int place = 0;
      for (int j = 0; j < p.width; ++j) place += values[j] > x || (values[j] == x && j < i);
      sorted[place] = x;
      plan.unsorted[row * p.width + place] = u8(i);
    }
    __syncwarp();
    for (int i = lane_id(); i < p.width; i += WARP) values[i] = sorted[i];
    __syncwarp();
  }
}

// Depths whose row is not bad, as bits; a whole warp calls.
DEVICE u32 good_rows(const Params& p, const Common& common) {
  const int row = lane_id();
  return __ballot_sync(FULL_MASK, row < p.num_depths && common.num_finite[row] > 0) & ~common.bad_rows;
}

// exp(x) for x of at most about 0, with an error below 1e-16: the library's is several times as long.
DEVICE double exp_of(float x) {
  const float kept = fmaxf(x, -60.0f), power = rintf(kept * LOG2_E);
  const double rest = fma(-double(power), 0.6931471805599453094, double(kept));
  constexpr double TERMS[] = {1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0,
                              1 / 40320.0,      1 / 5040.0,      1 / 720.0,      1 / 120.0,     1 / 24.0,
                              1 / 6.0,          1 / 2.0,         1.0,            1.0};
  double sum = TERMS[0];
#pragma unroll
  for (int i = 1; i < 14; ++i) sum = fma(sum, rest, TERMS[i]);
  return x < -60.0f ? 0.0 : sum * __longlong_as_double(i64(1023 + int(power)) << 52);
}

// Whether this lane's word of the ids of a row is as full as it can be.
DEVICE bool all_seen(const u32* seen, int width) {
  const int bits = width - 32 * lane_id();
  if (bits <= 0) return true;
  return seen[lane_id()] == (bits >= 32 ? FULL_MASK : (1u << bits) - 1);
}

// Some warps meanwhile find the mass outside of each row and whether its ids are 0..K-1; `part` of `parts` is this one.
DEVICE void weigh_rows(const Params& p, const Plan& plan, Common& common, int part, int parts) {
  const u32 good = good_rows(p, common);
  for (int row = part; row < p.num_depths; row += parts) {
    double mass = 0;
#pragma unroll 2
    for (int i = lane_id(); i < p.width; i += WARP) mass += exp_of(plan.log_probs[row * p.width + i]);
    mass = warp_sum(mass);
    const bool counted = __all_sync(FULL_MASK, all_seen(common.seen[row], p.width));
    if (lane_id() > 0) continue;
    const bool usable = good >> row & 1;
    if (!counted || !usable || !(fabs(mass - 1) <= MASS_TOLERANCE)) common.looks_whole = 0;
    p.missed_mass[i64(blockIdx.x) * p.num_depths + row] = usable ? float(fmax(1 - mass, 0.0)) : 1.0f;
  }
  if (part == 0 && lane_id() == 0) p.nonfinite_rows[blockIdx.x] = p.width > 0 ? p.num_depths - __popc(good) : 0;
}

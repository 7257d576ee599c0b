// csrc/moe_slices.cu: `down` of routed INT4 experts and of the shared one for a few rows, and the sums over a row's
//   picks: moe_int4.cu's moe_down and moe_sum as one kernel, with equal bits.
//   in   hidden [T,k,I] as x | shared_hidden [T,SHARED_WIDTH], or null | expert_ids [T,k] i32, an id outside 0..E-1 is
//        no expert | weights [T,k] f32 | down [E,D,I] INT4 words i32 and scales | shared_down [D,SHARED_WIDTH] as x
//   out  out [T,D] as x
//   math out[t] = sum over s of weights[t,s] down_e(hidden[t,s]), e = expert_ids[t,s], + shared_down(shared_hidden[t])
//   cost U (D I / 2 + D I / 32 scales) bytes for U distinct experts, 2 D I FLOP a pick: bound by bytes
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_slices.py | sm_90a (shared memory)
//
// A block owns FEATURES outputs at a time, PASSES times, of all experts: it has all picks' results of them in shared
// memory and adds them up there, so that nothing but `out` is written. Warps share nothing: each streams the slices of
// experts of its own through a ring of its own, without barriers of the block. One warp more has the shared expert.
// Ids are older than the kernel ahead, and weights are nobody's output: who goes where is worked out, and the rings are
// filled, while that kernel still runs.
//
// -D constants: shapes and dtypes as moe_int4.cu | FEATURES, a multiple of 4 | PASSES | STREAMS warps
#include "fresh.cuh"
#include "int4_pairs.cuh"
#include "mma.cuh"

constexpr bool SHARED = SHARED_WIDTH > 0;
constexpr int THREADS = (STREAMS + SHARED) * WARP;
constexpr int WARPS = THREADS / WARP;
constexpr int K = INNER_WIDTH, GROUPS = K / GROUP;      // a group of a row is 16 bytes
constexpr int CHAIN = power_of_two_divisor(GROUPS, 2);  // groups whose products are added up before all are
constexpr int TILE_ROWS = 16, TILES = cdiv(FEATURES, TILE_ROWS);  // M of an mma; the last tile may have fewer rows
constexpr int EIGHTS = cdiv(FEATURES, 8);
constexpr int TILE_PICKS = 8;                             // N of an mma
constexpr int WEIGHT_BYTES = FEATURES * GROUPS * 16;
constexpr int SCALE_ROW = GROUPS * sizeof(PackedScale);
constexpr int SLOT_BYTES = round_up(WEIGHT_BYTES + FEATURES * SCALE_ROW, 128);  // of a warp
constexpr int RING_BYTES = STREAMS * SLOT_BYTES;

static_assert(MODEL_WIDTH % (FEATURES * PASSES) == 0 && FEATURES % 4 == 0, "equal slices, four features a thread");
static_assert(4 * SCALE_ROW % 16 == 0, "16 bytes a copy");
static_assert(K % GROUP == 0 && GROUPS <= 8, "a lane has all inputs of its pick in registers");

static_assert(NUM_EXPERTS <= 1024, "a unit is packed into 32 bits");

// Picks of one expert: `count` from `first` on, in the plan's order. A launch has fewer than 2,048.
struct Unit {
  u32 packed;
  DEVICE int expert() const { return packed & 1023; }
  DEVICE int first() const { return packed >> 10 & 2047; }
  DEVICE int count() const { return packed >> 21; }
};
struct Pick {
  float weight;
  u16 expert, place;  // NUM_EXPERTS: none; the how manieth of its expert
};

// Who goes where.
struct Plan {
  Pick* picks;  // [picks]
  u16* order;   // [picks], expert by expert
  Unit* units;
  int num_units;

  // All threads; `picks` and `order` are set.
  DEVICE void build(const i32* expert_ids, const float* weights, int num_picks) {
    __shared__ Unit of_experts[NUM_EXPERTS];
    __shared__ int first[NUM_EXPERTS];  // how many picks at first, then number of the first one
    __shared__ int warp_sums[WARPS];
    constexpr int OWN = cdiv(NUM_EXPERTS, THREADS);
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) first[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < num_picks; p += THREADS) {
      const u32 id = load_fresh(expert_ids + p);
      const float weight = load_fresh(weights + p);
      picks[p] = {weight, u16(min(id, u32(NUM_EXPERTS))), u16(id < NUM_EXPERTS ? atomicAdd(&first[id], 1) : 0)};
    }
    __syncthreads();
    // Picks below bit 16, experts that have any above it.
    int counts[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int e = threadIdx.x * OWN + i;
      counts[i] = e < NUM_EXPERTS ? first[e] : 0;
      own += counts[i] + (counts[i] ? 65536 : 0);
    }
    const int through = warp_sum_through(own);
    if (lane_id() == WARP - 1) warp_sums[warp_id()] = through;
    __syncthreads();
    int next = through - own, all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp_id()) next += warp_sums[w];
      all += warp_sums[w];
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (counts[i] == 0) continue;
      const u32 e = threadIdx.x * OWN + i, at = next & 65535;
      first[e] = at;
      of_experts[next >> 16] = {e | at << 10 | u32(counts[i]) << 21};
      next += counts[i] + 65536;
    }
    units = of_experts;
    num_units = all >> 16;
    __syncthreads();
    for (int p = threadIdx.x; p < num_picks; p += THREADS) {
      if (picks[p].expert < NUM_EXPERTS) order[first[picks[p].expert] + picks[p].place] = p;
    }
    __syncthreads();
  }
};

// Byte where a row's 16 bytes lie: the exclusive or keeps one word of eight rows in different banks.
DEVICE u32 place(u32 row, u32 group) {
  constexpr u32 SPAN = GROUPS < 8 ? GROUPS : 8;
  return (row * GROUPS + (group ^ (row / (8 / SPAN) % SPAN))) * 16;
}

// Waits until at most `pending` of this thread's copies are under way; `pending` is known when this is compiled.
DEVICE void wait_copies(int pending) {
  static_assert(TILES <= 4, "see the cases");
  if (pending == 0) copy_async_wait<0>();
  if (pending == 1) copy_async_wait<1>();
  if (pending == 2) copy_async_wait<2>();
  if (pending == 3) copy_async_wait<3>();
}

// Rows of tile m of a slice.
DEVICE constexpr int rows_of(int m) { return m < FEATURES / TILE_ROWS ? TILE_ROWS : FEATURES % TILE_ROWS; }

// Where a warp's copies stand: one unit before the products, and tile m comes to where the products have done with it.
struct Copies {
  const u8 *down, *scales;  // all experts' rows of the block's first slice
  int unit, left;           // left: passes to come, this one included
  const u8 *from = nullptr, *scales_from = nullptr;  // of the unit

  // One warp.
  DEVICE void next(u8* slot, int m, const Unit* units, int count) {
    if (left > 0) {
      if (m == 0) {
        const i64 row = i64(units[unit].expert()) * MODEL_WIDTH + (PASSES - left) * FEATURES;
        from = down + row * (GROUPS * 16) + lane_id() * 16;
        scales_from = scales + row * SCALE_ROW + lane_id() * 16;
      }
      start(shared_address(slot), m);
      if (m + 1 == TILES) {
        unit += STREAMS;
        if (unit >= count) {
          unit = warp_id();
          --left;
        }
      }
    }
    copy_async_commit();
  }

 private:
  DEVICE void start(u32 slot, int m) const {
    constexpr int TURN = cdiv(8 * GROUPS, WARP);  // copies of eight rows
    const int weights = rows_of(m) * GROUPS, scale_units = rows_of(m) * SCALE_ROW / 16, first = m * TILE_ROWS;
#pragma unroll
    for (int i = 0; i < cdiv(weights, WARP); ++i) {
      const int inside = i % TURN * WARP + lane_id();
      const u32 at = place(inside / GROUPS, inside % GROUPS) + i / TURN * (8 * GROUPS * 16);
      const int offset = first * GROUPS * 16 + i * (WARP * 16);
      if ((i + 1) * WARP <= weights || i * WARP + lane_id() < weights) {
        copy_once(slot + first * GROUPS * 16 + at, from + offset);
      }
    }
#pragma unroll
    for (int i = 0; i < cdiv(scale_units, WARP); ++i) {
      const int offset = first * SCALE_ROW + i * (WARP * 16);
      if (i * WARP + lane_id() < scale_units) {
        copy_once(slot + WEIGHT_BYTES + offset + lane_id() * 16, scales_from + offset);
      }
    }
  }
};

// Inputs of a lane's pick: 8 of each group, as they lie.
struct Inputs {
  uint4 of_group[GROUPS];

  DEVICE void load(const uint4* from) {
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) of_group[j] = load_fresh(from + j * 4);
  }
};
DEVICE const uint4* inputs_of(const Scalar* row) { return reinterpret_cast<const uint4*>(row) + lane_id() % 4; }

// The same as fragments, and what takes the surplus of the weights' even pairs off.
struct Fragments {
  u32 b[GROUPS][4];
  float start[GROUPS][4];

  DEVICE explicit Fragments(const Inputs& x) {
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      pair_up(b[j], x.of_group[j]);
      const float zero[4] = {0, 0, 0, 0};
      float half_start[4];
      multiply_from(half_start, SURPLUS, SURPLUS, 0, 0, b[j][0], b[j][1], zero);
      multiply_from(start[j], SURPLUS, SURPLUS, 0, 0, b[j][2], b[j][3], half_start);
    }
  }
};

// One warp: total[h][c] = row 8 h + g of tile m times pick 2 t + c. The inputs are added up in chains, as warps of
// moe_int4.cu that share them would. Rows that a last tile lacks are the last ones once more.
DEVICE void multiply(float (&total)[2][2], const u8* slot, int m, const Fragments& x) {
  constexpr int BYTES = SCALE_ROW;
  struct alignas(BYTES < 16 ? BYTES : 16) Scales {
    PackedScale of_group[GROUPS];
  } scales[2];
  const int g = lane_id() / 4, halves = cdiv(rows_of(m), 8);
  u32 words[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h >= halves) break;
    const int inside = rows_of(m) >= 8 * (h + 1) ? g : min(g, rows_of(m) % 8 - 1);
    words[h] = place(inside, 0) + lane_id() % 4 * 4;
    const u8* scale_row = slot + WEIGHT_BYTES + inside * SCALE_ROW + (m * TILE_ROWS + 8 * h) * SCALE_ROW;
    scales[h] = *reinterpret_cast<const Scales*>(scale_row);
  }
  float chain[2][2] = {};
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    u32 a[2][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (h >= halves) break;
      const u8* tile = slot + (m * TILE_ROWS + 8 * h) * (GROUPS * 16);
      widen<false>(a[h], *reinterpret_cast<const u32*>(tile + ((j * 16) ^ words[h])));
    }
    float half_d[4], d[4];
    multiply_from(half_d, a[0][0], a[1][0], a[0][1], a[1][1], x.b[j][0], x.b[j][1], x.start[j]);
    multiply_from(d, a[0][2], a[1][2], a[0][3], a[1][3], x.b[j][2], x.b[j][3], half_d);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (h >= halves) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        chain[h][c] = fmaf(to_float(scales[h].of_group[j]), d[2 * h + c], chain[h][c]);
        if ((j + 1) % CHAIN) continue;
        total[h][c] += chain[h][c];
        chain[h][c] = 0;
      }
    }
  }
}

#if SHARED_WIDTH > 0
// A row of the slice, in the lane's i-th eight; where there are fewer the last one stands in for them.
DEVICE int row_of(int i) { return min(8 * i + lane_id() / 4, FEATURES - 1); }

// One warp: the shared expert's slice times 8 rows from `base` on, as fragments that come straight from L2 or L1.
DEVICE void multiply_shared(const Scalar* __restrict__ down, const Scalar* hidden, int first_row, int base,
                            int num_rows, float* results) {
  constexpr int ALL = SHARED_WIDTH / GROUP, CHAINS = power_of_two_divisor(ALL, 8);
  static_assert(SHARED_WIDTH % GROUP == 0, "inputs come in groups of 32");
  const int g = lane_id() / 4;
  const uint4* x = inputs_of(hidden + i64(min(base + g, num_rows - 1)) * SHARED_WIDTH);
  float total[EIGHTS][2] = {};
  // As warps of moe_int4.cu that share the inputs: each adds up every CHAINS-th group.
#pragma unroll 2
  for (int c = 0; c < CHAINS; ++c) {
    float d[cdiv(EIGHTS, 2)][4] = {};
#pragma unroll 1
    for (int j = c; j < ALL; j += CHAINS) {
      const uint4 v = load_fresh(x + j * 4);
#pragma unroll
      for (int m = 0; m < cdiv(EIGHTS, 2); ++m) {
        const uint4 low = __ldg(inputs_of(down + i64(first_row + row_of(2 * m)) * SHARED_WIDTH) + j * 4);
        const int odd = min(2 * m + 1, EIGHTS - 1);
        const uint4 high = __ldg(inputs_of(down + i64(first_row + row_of(odd)) * SHARED_WIDTH) + j * 4);
        multiply_add<Scalar>(d[m], {low.x, high.x, low.y, high.y}, v.x, v.y);
        multiply_add<Scalar>(d[m], {low.z, high.z, low.w, high.w}, v.z, v.w);
      }
    }
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      total[i][0] += d[i / 2][i % 2 * 2];
      total[i][1] += d[i / 2][i % 2 * 2 + 1];
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = base + 2 * (lane_id() % 4) + c;
    if (row >= num_rows) break;
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      if (8 * i + g < FEATURES) results[row * FEATURES + 8 * i + g] = total[i][c];
    }
  }
}
#endif

extern "C" __global__ __launch_bounds__(THREADS, 1) void moe_slices(
    const Scalar* hidden,                     // [T, top_k, INNER_WIDTH], may still be written when this kernel starts
    const Scalar* shared_hidden,              // [T, SHARED_WIDTH], the same, or null
    const i32* expert_ids,                    // [T, top_k]
    const float* weights,                     // [T, top_k]
    const u8* __restrict__ down,              // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH]
    const u8* __restrict__ down_scale,        // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH / 32]
    const Scalar* __restrict__ shared_down,   // [MODEL_WIDTH, SHARED_WIDTH], or null
    Scalar* __restrict__ out,                 // [T, MODEL_WIDTH]
    int num_rows, int top_k) {
  extern __shared__ __align__(128) u8 ring[];  // slots of all warps, then results of all picks and rows, then the plan
  const int picks = num_rows * top_k, first_feature = blockIdx.x * (PASSES * FEATURES);
  float* results = reinterpret_cast<float*>(ring + RING_BYTES);
  float* shared_results = results + picks * FEATURES;
  Plan plan;
  plan.picks = reinterpret_cast<Pick*>(shared_results + (SHARED ? num_rows * FEATURES : 0));
  plan.order = reinterpret_cast<u16*>(plan.picks + picks);
  plan.build(expert_ids, weights, picks);
  const int units = plan.num_units;
  const bool streams = warp_id() < STREAMS;
  u8* slot = ring + warp_id() * SLOT_BYTES;
  int unit_at = warp_id(), left = streams && warp_id() < units ? PASSES : 0;  // as in Copies
  Copies copies{down + i64(first_feature) * (GROUPS * 16), down_scale + i64(first_feature) * SCALE_ROW, unit_at, left};
#pragma unroll
  for (int m = 0; m < TILES; ++m) copies.next(slot, m, plan.units, units);
#if SHARED_WIDTH > 0
  if (!streams) {
    const char* slice = reinterpret_cast<const char*>(shared_down + i64(first_feature) * SHARED_WIDTH);
    constexpr int LINES = PASSES * FEATURES * SHARED_WIDTH * int(sizeof(Scalar)) / 128;
    for (int i = lane_id(); i < LINES; i += WARP) asm volatile("prefetch.global.L2 [%0];" : : "l"(slice + i * 128));
  }
#endif
  grid_dependency_wait();
  grid_dependency_launch();
  const auto inputs_at = [&](Unit unit, int base) {
    const int n = min(base + lane_id() / 4, unit.count() - 1);
    return inputs_of(hidden + i64(plan.order[unit.first() + n]) * K);
  };
  Inputs x = {};
  if (left > 0) x.load(inputs_at(plan.units[unit_at], 0));
#pragma unroll 1
  for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll 1
    while (left == PASSES - pass) {
      const Unit unit = plan.units[unit_at];
      unit_at += STREAMS;
      if (unit_at >= units) {
        unit_at = warp_id();
        --left;
      }
#pragma unroll 1
      for (int base = 0; base < unit.count(); base += TILE_PICKS) {
        const bool first = base == 0, last = base + TILE_PICKS >= unit.count();
        const Fragments fragments(x);
        x.load(last ? inputs_at(left > 0 ? plan.units[unit_at] : unit, 0) : inputs_at(unit, base + TILE_PICKS));
        float* to[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int n = base + 2 * (lane_id() % 4) + c;
          to[c] = n < unit.count() ? results + plan.order[unit.first() + n] * FEATURES + lane_id() / 4 : nullptr;
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
          if (first) {
            if (last) wait_copies(TILES - 1);
            else wait_copies(TILES - 1 - m);
            __syncwarp();
          }
          float total[2][2] = {};
          multiply(total, slot, m, fragments);
          if (last) {
            __syncwarp();  // all lanes have read the tile
            copies.next(slot, m, plan.units, units);
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (!to[c]) continue;
#pragma unroll
            for (int h = 0; h < cdiv(rows_of(m), 8); ++h) {
              const int row = m * TILE_ROWS + 8 * h;
              if (row + 8 <= FEATURES || row + lane_id() / 4 < FEATURES) to[c][row] = total[h][c] * INT4_VALUE;
            }
          }
        }
      }
    }
    const int first_row = first_feature + pass * FEATURES;
#if SHARED_WIDTH > 0
    if (!streams) {
#pragma unroll 1
      for (int base = 0; base < num_rows; base += TILE_PICKS) {
        multiply_shared(shared_down, shared_hidden, first_row, base, num_rows, shared_results);
      }
    }
#endif
    __syncthreads();
    // The picks of a row in the order of its slots, the shared expert last.
    for (int i = threadIdx.x; i < num_rows * (FEATURES / 4); i += THREADS) {
      const int row = i / (FEATURES / 4), feature = i % (FEATURES / 4) * 4;
      float sum[4] = {};
      const auto add = [&](float weight, const float* from) {
        const Vec<float, 4> v = load_vec<float, 4>(from + feature);
#pragma unroll
        for (int l = 0; l < 4; ++l) sum[l] = fmaf(weight, v[l], sum[l]);
      };
#pragma unroll 8
      for (int s = 0; s < top_k; ++s) {
        const int pick = row * top_k + s;
        if (plan.picks[pick].expert < NUM_EXPERTS) add(plan.picks[pick].weight, results + pick * FEATURES);
      }
      if (SHARED) add(1.0f, shared_results + row * FEATURES);
      Vec<Scalar, 4> rounded;
#pragma unroll
      for (int l = 0; l < 4; ++l) rounded[l] = from_float<Scalar>(sum[l]);
      store_vec(out + i64(row) * MODEL_WIDTH + first_row + feature, rounded);
    }
    if (pass + 1 < PASSES) __syncthreads();
  }
  copy_async_wait<0>();
}

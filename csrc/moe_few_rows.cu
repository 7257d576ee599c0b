// csrc/moe_few_rows.cu: the experts of one row or a few, INT4 weights of a narrow part of the model: what moe_int4.cu
//   does, in two launches, each of which has one block a multiprocessor whose warps stream weights on their own.
//   in   x [T,D], T <= 4 | expert_ids [T,k] i32, k <= 8, an id outside 0..E-1 is no expert | weights [T,k] f32 |
//        gate_up [E,2I,D] and down [E,D,I], INT4 words and scales | the shared expert's, one dense expert, or null
//   out  out [T,D] | between the kernels: hidden [T,k,I] and the shared expert's, PAIRED
//   math out[t] = sum over s of weights[t,s] down_e(silu(gate_e x_t) * up_e x_t) + shared(x_t), e = expert_ids[t,s]
//   cost U (3 D I / 2 + 3 D I / 32 scales) bytes for U distinct experts, 6 D I FLOP a pick: bound by bytes
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_few_rows.py | sm_90, sm_100 (shared memory)
//
// A lane of a warp knows one of the at most 32 picks, so a warp finds the distinct experts without shared memory. Every
// warp has a ring of its own, which its lanes fill and empty: no barrier stands in the stream of weights.
// A warp of moe_few_gate_up has the same inputs in all units of work, so the rows of x stay in its registers; a unit is
// UNIT_FEATURES of one expert over all inputs, and blocks take units in turn, the shared expert's first, whose weights
// need no ids. A block of moe_few_down has DOWN_FEATURES outputs of all experts, and a warp of it two tiles of them, of
// every SHARES-th expert; a row's slots are added up there.
// A row's bits depend on nothing but its picks: a pick has its own column of the products, sums have one order.
//
// PAIRED: of eight neighbouring inputs the order is 0 4 1 5 2 6 3 7, that of the pairs that an INT4 word widens to.
//
// -D constants: shapes and dtypes as moe_int4.cu | DOWN_FEATURES | UP_SLOTS and DOWN_SLOTS of a warp's ring | UP_BYTES
// and DOWN_BYTES of dynamic shared memory
#include "fresh.cuh"
#include "moe_weights.cuh"

static_assert(PACKED && DTYPE != 0, "tensor cores");
constexpr int MOST_ROWS = 4, MOST_PICKS = WARP;
constexpr bool SHARED = SHARED_WIDTH > 0;

constexpr int GROUPS = power_of_two_divisor(MODEL_WIDTH / GROUP, 16);  // of inputs, a warp of moe_few_gate_up
constexpr int UP_WARPS = MODEL_WIDTH / GROUP / GROUPS;
constexpr int UNIT_FEATURES = 8, SHARED_FEATURES = 2;  // INT4 or dense: as many bytes
constexpr int UNIT_TILES = INNER_WIDTH / UNIT_FEATURES, SHARED_UNITS = SHARED_WIDTH / SHARED_FEATURES;
static_assert(GROUPS >= 8 && UP_WARPS * GROUPS * GROUP == MODEL_WIDTH && UP_WARPS <= 16, "shapes of few_build");

constexpr int TILE = 16, DOWN_TILES = 2;  // rows of a product; products of a warp of moe_few_down
constexpr int DOWN_ROWS = DOWN_TILES * TILE, PARTS = cdiv(DOWN_FEATURES, DOWN_ROWS), SHARES = 8;
constexpr int DOWN_WARPS = PARTS * SHARES, DOWN_THREADS = DOWN_WARPS * WARP;
constexpr int INNER_GROUPS = INNER_WIDTH / GROUP, SHARED_GROUPS = SHARED_WIDTH / GROUP;
constexpr int DOWN_BLOCKS = cdiv(MODEL_WIDTH, DOWN_FEATURES);
static_assert(SHARED_GROUPS <= SHARES, "a group of the shared expert's inputs a warp");
static_assert(DOWN_FEATURES % 8 == 0 && MODEL_WIDTH % 8 == 0, "16 bytes of scales");

// TILES_ tiles of rows of INT4 words in shared memory, GROUPS_ units of 16 bytes a row, and their scales behind them.
template <int GROUPS_, int TILES_>
struct Slot {
  static constexpr int ROW_BYTES = GROUPS_ * 16 + 16;                // one word of eight rows lies in different banks
  static constexpr int SCALE_BYTES = GROUPS_ * sizeof(PackedScale);  // of a row
  static constexpr int ROWS = TILES_ * TILE, SCALES_AT = ROWS * ROW_BYTES;
  static constexpr int BYTES = round_up(SCALES_AT + ROWS * SCALE_BYTES, 128);

  // By one warp: copies groups `first` and on of ROWS rows of a matrix, ROW_GROUPS in each: those from `row` on, but
  // the second eight of each tile from `eighth` on; and none from the `rows`-th on.
  template <int ROW_GROUPS>
  static DEVICE void start(u8* slot, const u8* words, const u8* scales, int first, int row, int eighth, int rows) {
    copy<GROUPS_, 16, ROW_BYTES>(slot, words + (static_cast<i64>(row) * ROW_GROUPS + first) * 16, ROW_GROUPS * 16,
                                 eighth - row - 8, rows);
    constexpr int PIECE = SCALE_BYTES < 16 ? SCALE_BYTES : 16, SIZE = sizeof(PackedScale);
    copy<SCALE_BYTES / PIECE, PIECE, SCALE_BYTES>(slot + SCALES_AT,
                                                  scales + (static_cast<i64>(row) * ROW_GROUPS + first) * SIZE,
                                                  ROW_GROUPS * SIZE, eighth - row - 8, rows);
  }

  // sums[i] += tile i times columns. inputs(j, b, start) gives groups j and j + 1 of the columns in pairs, and their
  // surplus: columns 0..3 have values of the first group and zeros of the second, columns 4..7 have it the other way.
  // So one product has both, each in a column of its own, where its own scale multiplies it.
  template <typename Inputs>
  static DEVICE void multiply(float (&sums)[TILES_][4], const u8* slot, Inputs inputs) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const u8* words = slot + g * ROW_BYTES + t * 4;
    const u8* scales = slot + SCALES_AT + g * SCALE_BYTES + t / 2 * sizeof(PackedScale);
#pragma unroll
    for (int j = 0; j < GROUPS_; j += 2) {
      u32 b[2][4];
      float start[4];
      inputs(j, b, start);
#pragma unroll
      for (int i = 0; i < TILES_; ++i) {
        float d[4], first[4];
        const auto* low_scale = reinterpret_cast<const PackedScale*>(scales + i * TILE * SCALE_BYTES) + j;
        const auto* high_scale = reinterpret_cast<const PackedScale*>(scales + (i * TILE + 8) * SCALE_BYTES) + j;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const u8* word = words + i * TILE * ROW_BYTES + (j + k) * 16;
          u32 low[4], high[4];
          float half_d[4];
          widen<false>(low, *reinterpret_cast<const u32*>(word));
          widen<false>(high, *reinterpret_cast<const u32*>(word + 8 * ROW_BYTES));
          multiply_from(half_d, low[0], high[0], low[1], high[1], b[k][0], b[k][1], k ? first : start);
          multiply_from(k ? d : first, low[2], high[2], low[3], high[3], b[k][2], b[k][3], half_d);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][c] = fmaf(to_float(*(c < 2 ? low_scale : high_scale)), d[c], sums[i][c]);
      }
    }
  }

 private:
  // UNITS units of SIZE bytes of each row, `skip` rows more between the eights of a tile.
  template <int UNITS, int SIZE, int TO_BYTES>
  static DEVICE void copy(u8* to, const u8* from, i64 row_bytes, i64 skip, int rows) {
    constexpr int STEP = WARP / UNITS;  // rows at once
    const int own = lane_id() / UNITS, unit = lane_id() % UNITS;
    from += own * row_bytes + unit * SIZE;
    to += own * TO_BYTES + unit * SIZE;
    if (STEP > 8 && own % TILE >= 8) from += skip * row_bytes;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP) {
      const u8* row = from + r * row_bytes + (STEP <= 8 && r % TILE >= 8 ? skip * row_bytes : 0);
      if (r + own < min(rows, ROWS)) copy_few<SIZE>(to + r * TO_BYTES, row);
    }
  }
};

// A walk round the slots of a warp. A slot's place is added up, not worked out from its number, which all lanes share:
// of a lane's address and a uniform register ptxas (13.0) makes copies that an H200 refuses as illegal instructions.
template <int BYTES, int COUNT>
struct Slots {
  u8 *first, *place = first;

  DEVICE void next() { place = place + BYTES == first + COUNT * BYTES ? first : place + BYTES; }
};

// Adds what columns 0..3 and columns 4..7 have of the rows 0..3: lanes t < 2 have rows 2t and 2t + 1 then.
DEVICE void join_columns(float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += __shfl_xor_sync(FULL_MASK, sum[i], 2);
}

using UpSlot = Slot<GROUPS, 1>;
using DownSlot = Slot<INNER_GROUPS, DOWN_TILES>;

// What the surplus of INT4 pairs adds to a product with two groups of these columns, negative.
DEVICE void surplus(float (&start)[4], const u32 (&b)[2][4]) {
  const float zero[4] = {};
  float next[4], half_start[4];
  multiply_from(next, SURPLUS, SURPLUS, 0, 0, b[0][0], b[0][1], zero);
  multiply_from(half_start, SURPLUS, SURPLUS, 0, 0, b[0][2], b[0][3], next);
  multiply_from(next, SURPLUS, SURPLUS, 0, 0, b[1][0], b[1][1], half_start);
  multiply_from(start, SURPLUS, SURPLUS, 0, 0, b[1][2], b[1][3], next);
}

// sum += a group of dense rows, eight inputs a lane, times columns in pairs.
DEVICE void multiply_dense(float (&sum)[4], const uint4& low, const uint4& high, const u32 (&b)[4]) {
  u32 a[4], a8[4];
  pair_up(a, low);
  pair_up(a8, high);
  multiply_add<Scalar>(sum, {a[0], a8[0], a[1], a8[1]}, b[0], b[1]);
  multiply_add<Scalar>(sum, {a[2], a8[2], a[3], a8[3]}, b[2], b[3]);
}

DEVICE int paired(int feature) { return feature / 8 * 8 + feature % 4 * 2 + feature / 4 % 2; }

// The distinct experts of all picks, by a warp whose lanes have one pick each; in the order of their first picks.
struct Chosen {
  u32 expert;  // of the lane's pick; NUM_EXPERTS is none
  u32 used;    // the lanes that have an expert
  u32 same;    // the lanes that have the same one
  u32 firsts;  // the first lane of each expert

  DEVICE explicit Chosen(u32 id) {  // NUM_EXPERTS or more: none
    expert = min(id, static_cast<u32>(NUM_EXPERTS));
    used = __ballot_sync(FULL_MASK, expert < NUM_EXPERTS);
    same = __match_any_sync(FULL_MASK, expert);
    firsts = __ballot_sync(FULL_MASK, first());
  }
  DEVICE bool first() const { return expert < NUM_EXPERTS && __ffs(same) - 1 == lane_id(); }
  DEVICE int count() const { return __popc(firsts); }
  // The n-th distinct expert and its picks.
  DEVICE void find(int n, u32& of, u32& picks) const {
    const bool here = first() && __popc(firsts & ((1u << lane_id()) - 1)) == n;
    const int lane = __ffs(__ballot_sync(FULL_MASK, here)) - 1;
    of = __shfl_sync(FULL_MASK, expert, lane);
    picks = __shfl_sync(FULL_MASK, same, lane);
  }
};

// The slots of a row among an expert's picks, from bit 0 on.
DEVICE u32 slots_of(u32 picks, int row, int top_k) { return picks >> (row * top_k) & ((1u << top_k) - 1); }

constexpr i64 UP_WORDS = 2ll * INNER_WIDTH * (MODEL_WIDTH / 2), UP_SCALES = UP_WORDS / 16 * sizeof(PackedScale);
constexpr i64 DOWN_WORDS = UP_WORDS / 2, DOWN_SCALES = UP_SCALES / 2;

// Asks L2 for what a block of moe_few_down will read.
DEVICE void prefetch_down(int block, const Chosen& chosen, const u8* down, const u8* down_scale,
                          const u8* shared_down) {
  const auto prefetch = [](const u8* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes) : "memory");
  };
  const int row = block * DOWN_FEATURES, rows = min(DOWN_FEATURES, MODEL_WIDTH - row);
  // A lane's instruction stands alone, so the warps take turns.
  if (chosen.first() && __popc(chosen.firsts & ((1u << lane_id()) - 1)) % UP_WARPS == warp_id()) {
    prefetch(down + chosen.expert * DOWN_WORDS + row * (INNER_WIDTH / 2), rows * (INNER_WIDTH / 2));
    prefetch(down_scale + chosen.expert * DOWN_SCALES + row * DownSlot::SCALE_BYTES, rows * DownSlot::SCALE_BYTES);
  }
  if (SHARED && threadIdx.x == 0) {
    constexpr int ROW_BYTES = SHARED_WIDTH * sizeof(Scalar);
    prefetch(shared_down + static_cast<i64>(row) * ROW_BYTES, rows * ROW_BYTES);
  }
}

// Any grid. Unit u is the shared expert's where u < SHARED_UNITS: its weights do not wait for the ids.
extern "C" __global__ __launch_bounds__(UP_WARPS * WARP) void moe_few_gate_up(
    const Scalar* x,                        // [T, MODEL_WIDTH]
    const i32* expert_ids,                  // [T, top_k]
    const u8* __restrict__ gate_up,         // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH]
    const u8* __restrict__ gate_up_scale,   // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH / 32]
    const u8* __restrict__ shared_gate_up,  // [2 * SHARED_WIDTH, MODEL_WIDTH], or null
    const u8* __restrict__ down,            // as moe_few_down's, like the next two
    const u8* __restrict__ down_scale, const u8* __restrict__ shared_down,
    Scalar* __restrict__ hidden,  // [T, top_k, INNER_WIDTH], behind it the shared expert's [T, SHARED_WIDTH]
    int num_rows, int top_k) {
  constexpr int DENSE_UNITS = GROUPS * 4, ROW_UNITS = MODEL_WIDTH / 8;
  constexpr int DENSE_BYTES = DENSE_UNITS * 16 + 64;  // of a row in a slot: two rows lie in different banks
  static_assert(2 * SHARED_FEATURES * DENSE_BYTES <= UpSlot::BYTES, "a slot holds either");
  static_assert(UP_WARPS * UP_SLOTS * UpSlot::BYTES <= UP_BYTES, "dynamic shared memory of the launch");
  extern __shared__ __align__(128) u8 ring[];
  __shared__ float sums[2][UP_WARPS][MOST_ROWS][TILE + 8];  // 8 more put rows into different banks
  __shared__ float2 surpluses[UP_WARPS][GROUPS / 2][4];  // of columns 2t, 2t + 1
  const int warp = warp_id(), g = lane_id() / 4, t = lane_id() % 4;
  Slots<UpSlot::BYTES, UP_SLOTS> slots{ring + warp * (UP_SLOTS * UpSlot::BYTES)}, filled = slots;
  const auto unit_of = [&](int n) { return static_cast<int>(blockIdx.x + n * gridDim.x); };
  const auto start_shared = [&](int n) {
#pragma unroll
    for (int i = 0; i < 2 * SHARED_FEATURES * DENSE_UNITS / WARP; ++i) {
      const int r = (lane_id() + i * WARP) / DENSE_UNITS, unit = (lane_id() + i * WARP) % DENSE_UNITS;
      const int row = r / SHARED_FEATURES * SHARED_WIDTH + unit_of(n) * SHARED_FEATURES + r % SHARED_FEATURES;
      copy_weights(filled.place + r * DENSE_BYTES + unit * 16,
                   shared_gate_up + (static_cast<i64>(row) * ROW_UNITS + warp * DENSE_UNITS + unit) * 16);
    }
  };
  int begun = 0;  // units whose copies are under way or done
  for (; begun < UP_SLOTS && unit_of(begun) < SHARED_UNITS; ++begun) {
    start_shared(begun);
    filled.next();
    copy_async_commit();
  }
  grid_dependency_wait();
  grid_dependency_launch();
  const u32 id = lane_id() < num_rows * top_k ? load_fresh(expert_ids + lane_id()) : NUM_EXPERTS;
  // Column g is row g % 4 of x, or of the last row behind that, of every other group.
  const bool odd = g >= 4;
  const Scalar* row = x + static_cast<i64>(min(g % 4, num_rows - 1)) * MODEL_WIDTH + warp * (GROUPS * GROUP) + t * 8;
  uint4 loaded[GROUPS / 2];
#pragma unroll
  for (int i = 0; i < GROUPS / 2; ++i) {
    loaded[i] = load_fresh(reinterpret_cast<const uint4*>(row + (2 * i + odd) * GROUP));
  }
  const Chosen chosen(id);
  const int units = SHARED_UNITS + chosen.count() * UNIT_TILES;
  bool last = false;
  const auto start = [&](int n) {
    const int unit = unit_of(n);
    if (unit < SHARED_UNITS) {
      start_shared(n);
    } else if (unit < units) {
      u32 expert, picks;
      chosen.find((unit - SHARED_UNITS) / UNIT_TILES, expert, picks);
      const int feature = (unit - SHARED_UNITS) % UNIT_TILES * UNIT_FEATURES;
      UpSlot::start<MODEL_WIDTH / GROUP>(filled.place, gate_up + expert * UP_WORDS, gate_up_scale + expert * UP_SCALES,
                                         warp * GROUPS, feature, INNER_WIDTH + feature, TILE);
    } else if (!last) {  // nothing of this kernel follows
      for (int b = blockIdx.x; b < DOWN_BLOCKS; b += gridDim.x) prefetch_down(b, chosen, down, down_scale, shared_down);
      last = true;
    }
    copy_async_commit();
    filled.next();
  };
#pragma unroll 1
  for (; begun < UP_SLOTS; ++begun) start(begun);
  u32 b[GROUPS / 2][2][4];
#pragma unroll
  for (int i = 0; i < GROUPS / 2; ++i) {
    u32 own[4];
    float start_of[4];
    pair_up(own, loaded[i]);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      b[i][0][k] = odd ? 0 : own[k];
      b[i][1][k] = odd ? own[k] : 0;
    }
    surplus(start_of, b[i]);
    if (g == 0) surpluses[warp][i][t] = {start_of[0], start_of[1]};
  }
#pragma unroll 1
  for (int n = 0; unit_of(n) < units; ++n) {
    const int unit = unit_of(n);
    const bool routed = unit >= SHARED_UNITS;
    float sums_of[1][4] = {};
    float(&sum)[4] = sums_of[0];
    copy_async_wait<UP_SLOTS - 1>();
    __syncwarp();
    const u8* slot = slots.place;
    if (routed) {
      UpSlot::multiply(sums_of, slot, [&](int j, u32(&columns)[2][4], float(&begin)[4]) {
        const float2 start_of = surpluses[warp][j / 2][t];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          columns[0][i] = b[j / 2][0][i];
          columns[1][i] = b[j / 2][1][i];
          begin[i] = i % 2 ? start_of.y : start_of.x;
        }
      });
    } else {
      float other[4] = {};  // half as many products that wait for the one before
      const u8* dense = slot + g % (2 * SHARED_FEATURES) * DENSE_BYTES + t * 16;  // rows behind the last repeat them
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        multiply_dense(j % 2 ? other : sum, *reinterpret_cast<const uint4*>(dense + j * 64), uint4{}, b[j / 2][j % 2]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += other[i];
    }
    join_columns(sum);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (2 * t + c < num_rows) {
        sums[n % 2][warp][2 * t + c][g] = sum[c];
        sums[n % 2][warp][2 * t + c][g + 8] = sum[2 + c];
      }
    }
    __syncwarp();
    start(n + UP_SLOTS);
    slots.next();
    __syncthreads();  // two units' sums: a warp that writes the next ones waits for the readers of these behind that
    if (warp != n % UP_WARPS) continue;
    const int f = lane_id() % 8, r = lane_id() / 8, features = routed ? UNIT_FEATURES : SHARED_FEATURES;
    u32 expert, picks = 0;
    if (routed) chosen.find((unit - SHARED_UNITS) / UNIT_TILES, expert, picks);
    if (r >= num_rows || f >= features) continue;
    float gate = 0, up = 0;
#pragma unroll
    for (int w = 0; w < UP_WARPS; ++w) {
      gate += sums[n % 2][w][r][f];
      up += sums[n % 2][w][r][features + f];
    }
    gate *= routed ? INT4_VALUE : 1.0f;
    up *= routed ? INT4_VALUE : 1.0f;
    const Scalar result = from_float<Scalar>(__fdividef(gate, 1.0f + expf(-gate)) * up);
    if (routed) {
      const int feature = (unit - SHARED_UNITS) % UNIT_TILES * UNIT_FEATURES + f;
      for (u32 left = slots_of(picks, r, top_k); left; left &= left - 1) {
        hidden[(r * top_k + __ffs(left) - 1) * INNER_WIDTH + paired(feature)] = result;
      }
    } else {
      hidden[num_rows * top_k * INNER_WIDTH + r * SHARED_WIDTH + paired(unit * SHARED_FEATURES + f)] = result;
    }
  }
  copy_async_wait<0>();
}

// Grid DOWN_BLOCKS. expert_ids and weights are older than moe_few_gate_up, whose blocks let this kernel start only
// after they waited for them. One block a multiprocessor is asked for: ptxas had kept to 64 registers and spilled.
extern "C" __global__ __launch_bounds__(DOWN_THREADS, 1) void moe_few_down(
    const Scalar* hidden,                // as moe_few_gate_up's, which may still write it when this kernel starts
    const i32* expert_ids,               // [T, top_k]
    const float* weights,                // [T, top_k]
    const u8* __restrict__ down,         // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH]
    const u8* __restrict__ down_scale,   // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH / 32]
    const u8* __restrict__ shared_down,  // [MODEL_WIDTH, SHARED_WIDTH], or null
    Scalar* __restrict__ out,            // [T, MODEL_WIDTH]
    int num_rows, int top_k) {
  constexpr int UNITS = INNER_WIDTH / 8, DENSE_UNITS = SHARED_WIDTH / 8;  // of 16 bytes, in a row of hidden
  constexpr int HELD = MOST_PICKS * UNITS + MOST_ROWS * DENSE_UNITS, COPIES = cdiv(HELD, DOWN_THREADS);
  constexpr int DENSE_BYTES = SHARED ? DOWN_ROWS * GROUP * sizeof(Scalar) : 0;
  constexpr int WARP_BYTES = DOWN_SLOTS * DownSlot::BYTES + DENSE_BYTES;
  static_assert(DOWN_WARPS * WARP_BYTES <= DOWN_BYTES, "dynamic shared memory of the launch");
  extern __shared__ __align__(128) u8 ring[];
  __shared__ uint4 zeros[UNITS], columns[HELD];  // hidden
  __shared__ float sums[MOST_PICKS + MOST_ROWS * SHARED_GROUPS][PARTS * DOWN_ROWS];  // of picks, then the shared one's
  __shared__ float factors[MOST_PICKS];
  const int num_picks = num_rows * top_k;
  const u32 id = lane_id() < num_picks ? load_fresh(expert_ids + lane_id()) : NUM_EXPERTS;
  const float factor = lane_id() < num_picks ? load_fresh(weights + lane_id()) : 0.0f;
  const int warp = warp_id(), part = warp % PARTS, share = warp / PARTS, g = lane_id() / 4, t = lane_id() % 4;
  const int first_feature = blockIdx.x * DOWN_FEATURES, features = min(DOWN_FEATURES, MODEL_WIDTH - first_feature);
  const int first_row = first_feature + part * DOWN_ROWS, rows = features - part * DOWN_ROWS;  // of this part, or more
  Slots<DownSlot::BYTES, DOWN_SLOTS> slots{ring + warp * WARP_BYTES}, filled = slots;
  u8* dense = ring + warp * WARP_BYTES + DOWN_SLOTS * DownSlot::BYTES;
  if (SHARED && share < SHARED_GROUPS) {
#pragma unroll
    for (int i = 0; i < DOWN_ROWS / 8; ++i) {
      const int r = i * 8 + g;
      const i64 from = static_cast<i64>(first_row + r) * DENSE_UNITS + share * 4 + t;
      if (r < rows) copy_weights(dense + (r * 4 + t) * 16, shared_down + from * 16);
    }
  }
  copy_async_commit();
  const Chosen chosen(id);
  const int count = chosen.count();
  const auto start = [&](int n) {
    if (share + n * SHARES < count) {
      u32 expert, picks;
      chosen.find(share + n * SHARES, expert, picks);
      DownSlot::start<INNER_GROUPS>(filled.place, down + expert * DOWN_WORDS,
                                    down_scale + expert * DOWN_SCALES, 0, first_row, first_row + 8, rows);
    }
    copy_async_commit();
    filled.next();
  };
#pragma unroll 1
  for (int n = 0; n < DOWN_SLOTS; ++n) start(n);
  if (warp == 0) factors[lane_id()] = factor;
  for (int u = threadIdx.x; u < UNITS; u += DOWN_THREADS) zeros[u] = uint4{};
  grid_dependency_wait();
  grid_dependency_launch();
  uint4 copied[COPIES];
  const int held = num_picks * UNITS + num_rows * DENSE_UNITS;
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int u = threadIdx.x + i * DOWN_THREADS;
    if (u < held) copied[i] = load_fresh(reinterpret_cast<const uint4*>(hidden) + u);
  }
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int u = threadIdx.x + i * DOWN_THREADS;
    if (u < held) columns[u] = copied[i];
  }
  __syncthreads();
  const auto load_columns = [](u32(&b)[4], const uint4& v) {
    b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
  };
  // Keeps what the lane has of one column.
  const auto store = [&](int column, const float (&sum)[DOWN_TILES][4], int c, float value) {
    float* to = sums[column] + part * DOWN_ROWS + g;
#pragma unroll
    for (int i = 0; i < DOWN_ROWS / 8; ++i) to[8 * i] = sum[i / 2][i % 2 * 2 + c] * value;
  };
  if (SHARED && share < SHARED_GROUPS) {
    copy_async_wait<DOWN_SLOTS>();
    __syncwarp();
    u32 b[4];
    load_columns(b, columns[num_picks * UNITS + min(g, num_rows - 1) * DENSE_UNITS + share * 4 + t]);
    float sum[DOWN_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < DOWN_TILES; ++i) {
      const u8* low = dense + ((i * TILE + g) * 4 + t) * 16;
      const u8* high = low + 8 * 4 * 16;
      multiply_dense(sum[i], *reinterpret_cast<const uint4*>(low), *reinterpret_cast<const uint4*>(high), b);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (2 * t + c < num_rows) store(MOST_PICKS + (2 * t + c) * SHARED_GROUPS + share, sum, c, 1.0f);
    }
  }
#pragma unroll 1
  for (int n = 0; share + n * SHARES < count; ++n) {
    u32 expert, picks;
    chosen.find(share + n * SHARES, expert, picks);
    // Column g is the pick of row g % 4 among this expert's, of every other group; others are zeros.
    const u32 mine = g % 4 < num_rows ? slots_of(picks, g % 4, top_k) : 0;
    const uint4* column = (mine ? columns + (g % 4 * top_k + __ffs(mine) - 1) * UNITS : zeros) + t;
    const uint4 *first = g < 4 ? column : zeros + t, *second = g < 4 ? zeros + t : column;
    float sum[DOWN_TILES][4] = {};
    copy_async_wait<DOWN_SLOTS - 1>();
    __syncwarp();
    DownSlot::multiply(sum, slots.place, [&](int j, u32(&b)[2][4], float(&begin)[4]) {
      load_columns(b[0], first[j * 4]);
      load_columns(b[1], second[j * 4 + 4]);
      surplus(begin, b);
    });
#pragma unroll
    for (int i = 0; i < DOWN_TILES; ++i) join_columns(sum[i]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 2 * t + c;
      for (u32 left = row < num_rows ? slots_of(picks, row, top_k) : 0; left; left &= left - 1) {
        store(row * top_k + __ffs(left) - 1, sum, c, INT4_VALUE);
      }
    }
    __syncwarp();
    start(n + DOWN_SLOTS);
    slots.next();
  }
  copy_async_wait<0>();
  __syncthreads();
  for (int o = threadIdx.x; o < num_rows * DOWN_FEATURES; o += DOWN_THREADS) {
    const int row = o / DOWN_FEATURES, f = o % DOWN_FEATURES, feature = blockIdx.x * DOWN_FEATURES + f;
    if (feature >= MODEL_WIDTH) continue;
    float total = 0;
    for (int pick = row * top_k; pick < (row + 1) * top_k; ++pick) {
      if (chosen.used >> pick & 1) total = fmaf(factors[pick], sums[pick][f], total);
    }
    if constexpr (SHARED) {
      float shared = 0;
#pragma unroll
      for (int s = 0; s < SHARED_GROUPS; ++s) shared += sums[MOST_PICKS + row * SHARED_GROUPS + s][f];
      total += shared;
    }
    out[static_cast<i64>(row) * MODEL_WIDTH + feature] = from_float<Scalar>(total);
  }
}

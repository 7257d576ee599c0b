// csrc/draft_attention.cu: grouped-query attention of a drafter's block over its context and over the block itself.
//   in   q [S,b,H,d], block keys and values [S,b,G,d], all three with strides between rows | context keys and values
//        [C,P,G,d], C = S or 1 (shared) | start [S] i32, context rows that a stream sees; bf16 or half (-DDTYPE)
//   out  o [S,b,H,d] in q's dtype; where the context is cut into several parts, o_partial [units,splits,64,d] f32 and
//        stats_partial [units,splits,64] f32 x 2 (maximum in log2, sum of weights), which draft_merge adds up
//   math o[i] = sum_j softmax_j(q[i].k[j] / sqrt(d)) v[j]; key j stands at absolute position j, in the context below
//        start and in the block from there on; slot i stands at start + i and sees |j - start - i| < window, and if
//        causal j <= start + i
//   cost 4 b H (start + b) d FLOP, 4 G (start + b) d bytes; at 64 rows a key head both take about as long on an H200
//   how  the b H/G rows that share a key head form tiles of 64. Grid (splits, G tiles, S): a block takes an equal share
//        of the visible key tiles; four warps hold 16 rows each, twice over: each half takes 32 of 64 keys.
//   ref  kernels/reference_draft.py:draft_attention | test tests/kernels/test_draft_attention.py | sm_80 and up
#include "mma.cuh"

struct Config {
  static constexpr int D = HEAD_DIM, CHUNKS = D / 8, ROW_BYTES = 2 * D;
  static constexpr int TILE_ROWS = 64, TILE_KEYS = 64, STAGES = 2;
  static constexpr int ROW_WARPS = TILE_ROWS / 16, KEY_WARPS = 2, WARP_KEYS = TILE_KEYS / KEY_WARPS;
  static constexpr int THREADS = ROW_WARPS * KEY_WARPS * WARP;
  static constexpr int KEY_STEPS = D / 16, VALUE_TILES = D / 8;  // mma steps along a query, tiles of 8 output columns
};
static_assert(sizeof(Scalar) == 2, "bf16 or half");
static_assert(Config::D == 32 || Config::D == 64 || Config::D == 128, "a row is 4, 8 or 16 chunks");
static_assert(Config::THREADS % Config::CHUNKS == 0 && Config::WARP_KEYS % 16 == 0, "whole rows, whole mma steps");

// What the host fixes by shapes.
struct Sizes {
  int num_slots, num_heads, num_kv_heads;  // b, H, G
  int num_rows;                            // P of the context
  int window, causal;
  int num_splits;

  DEVICE int group() const { return num_heads / num_kv_heads; }
  DEVICE int row_tiles() const { return cdiv(num_slots * group(), Config::TILE_ROWS); }
};

// Which keys the slots of one stream see, and how the blocks share them: part i has key tiles
// i * tiles_each .. of num_tiles. Attention and merge must agree on it.
struct Share {
  int start, first, end;  // keys first .. end - 1, those from `start` on in the block
  int num_tiles, tiles_each, num_parts;

  DEVICE Share(const Sizes& sizes, int given_start) {
    start = min(max(given_start, 0), sizes.num_rows);
    end = start + sizes.num_slots;
    first = max(start - sizes.window + 1, 0);
    num_tiles = cdiv(end - first, Config::TILE_KEYS);
    tiles_each = max(cdiv(num_tiles, sizes.num_splits), MIN_TILES);
    num_parts = cdiv(num_tiles, tiles_each);
  }
};

struct Stage {
  alignas(128) u8 keys[Config::TILE_KEYS * Config::ROW_BYTES];
  alignas(128) u8 values[Config::TILE_KEYS * Config::ROW_BYTES];
};
struct Plan {
  alignas(128) u8 queries[Config::TILE_ROWS * Config::ROW_BYTES];
  Stage stages[Config::STAGES];
};
// How the second half of the warps hands its sums over, in the memory of the stages.
struct Exchange {
  float4 o[Config::ROW_WARPS][Config::VALUE_TILES][WARP];
  float4 stats[Config::ROW_WARPS][WARP];
};
static_assert(sizeof(Plan) == PLAN_BYTES, "the launch asks for as much");
static_assert(PLAN_BYTES <= 101376, "shared memory of a block on sm_89 and sm_120");
static_assert(sizeof(Exchange) <= sizeof(Stage) * Config::STAGES, "fits where keys and values stood");

// Offset of a chunk of 16 bytes: 8 rows of one column of chunks, which ldmatrix reads together, lie in different banks.
DEVICE u32 place(int row, int chunk) {
  const int turn = Config::CHUNKS >= 8 ? row % 8 : row / (8 / Config::CHUNKS) % Config::CHUNKS;
  return row * Config::ROW_BYTES + (chunk ^ turn) * 16;
}

// ---- copies ------------------------------------------------------------------------------------------------------

struct Params {
  const Scalar* __restrict__ q;       // [S, b, H, d]
  const Scalar* __restrict__ block_k;  // [S, b, G, d]
  const Scalar* __restrict__ block_v;  // [S, b, G, d]
  const Scalar* __restrict__ keys;     // [C, P, G, d]
  const Scalar* __restrict__ values;   // [C, P, G, d]
  i64 q_stream, q_row, k_stream, k_row, v_stream, v_row, context_stream;
};

// Which stream, key head and tile of rows a block works on.
struct Unit {
  int stream, kv_head, row_tile, index;

  DEVICE Unit(const Sizes& sizes, int y, int z) {
    stream = z, kv_head = y / sizes.row_tiles(), row_tile = y % sizes.row_tiles();
    index = z * sizes.num_kv_heads * sizes.row_tiles() + y;
  }
};

// Rows beyond the last one come as zeros.
DEVICE void copy_queries(const Params& p, const Sizes& sizes, const Unit& unit, Plan& plan) {
  const int group = sizes.group(), chunk = threadIdx.x % Config::CHUNKS;
  const Scalar* base = p.q + unit.stream * p.q_stream + unit.kv_head * group * Config::D + chunk * 8;
#pragma unroll
  for (int row = threadIdx.x / Config::CHUNKS; row < Config::TILE_ROWS; row += Config::THREADS / Config::CHUNKS) {
    const int flat = unit.row_tile * Config::TILE_ROWS + row;
    const bool used = flat < sizes.num_slots * group;
    const Scalar* source = used ? base + flat / group * p.q_row + flat % group * Config::D : p.q;
    copy_async(shared_address(plan.queries) + place(row, chunk), source, used);
  }
}

// Rows past the last key come as zeros, so that what stands there (NaN) meets no weight of 0.
DEVICE void copy_tile(const Params& p, const Sizes& sizes, const Unit& unit, const Share& share, int tile,
                      Stage& stage) {
  const int chunk = threadIdx.x % Config::CHUNKS;
  const i64 column = unit.kv_head * Config::D + chunk * 8, width = i64(sizes.num_kv_heads) * Config::D;
  const u32 keys = shared_address(stage.keys), values = shared_address(stage.values);
#pragma unroll
  for (int row = threadIdx.x / Config::CHUNKS; row < Config::TILE_KEYS; row += Config::THREADS / Config::CHUNKS) {
    const int key = share.first + tile * Config::TILE_KEYS + row, slot = key - share.start;
    const bool valid = key < share.end;
    const Scalar *k = p.keys, *v = p.values;
    if (slot < 0) {
      const i64 at = unit.stream * p.context_stream + key * width + column;
      k += at, v += at;
    } else if (valid) {
      k = p.block_k + unit.stream * p.k_stream + slot * p.k_row + column;
      v = p.block_v + unit.stream * p.v_stream + slot * p.v_row + column;
    }
    copy_async(keys + place(row, chunk), k, valid);
    copy_async(values + place(row, chunk), v, valid);
  }
}

// ---- one warp: 16 rows, 32 keys of each tile ---------------------------------------------------------------------

struct State {
  u32 q[Config::KEY_STEPS][4];        // A fragments
  float o[Config::VALUE_TILES][4];    // D fragments, not yet divided
  float best[2], sum[2];              // of rows lane / 4 and that + 8: maximum in log2; this lane's share of the sum
  int low[2], high[2];                // keys that those rows see
};

DEVICE void begin(State& state, const Sizes& sizes, const Unit& unit, const Share& share, int row_warp) {
#pragma unroll
  for (int n = 0; n < Config::VALUE_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.o[n][i] = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    state.best[i] = -INFINITY_F32, state.sum[i] = 0.0f;
    const int flat = unit.row_tile * Config::TILE_ROWS + row_warp * 16 + i * 8 + lane_id() / 4;
    const int position = share.start + flat / sizes.group();
    state.low[i] = position - sizes.window + 1;
    state.high[i] = min(sizes.causal ? position : position + sizes.window - 1, share.end - 1);
  }
}

DEVICE void load_queries(State& state, const Plan& plan, int row_warp) {
#pragma unroll
  for (int step = 0; step < Config::KEY_STEPS; ++step)
    load_matrices(state.q[step], shared_address(plan.queries) +
                                     place(row_warp * 16 + lane_id() % 16, 2 * step + lane_id() / 16));
}

// Scores of this warp's keys in log2, -inf where a row does not see a key. `key` is the first of the warp's keys.
DEVICE void score(const State& state, u32 keys, int first_row, int key, float scale_log2,
                  float (&scores)[Config::WARP_KEYS / 8][4]) {
  const int row = first_row + lane_id() % 8 + lane_id() / 16 * 8, half = lane_id() / 8 % 2;
#pragma unroll
  for (int step = 0; step < Config::KEY_STEPS; ++step) {
#pragma unroll
    for (int n = 0; n < Config::WARP_KEYS / 8; n += 2) {
      u32 b[4];
      load_matrices(b, keys + place(row + n * 8, 2 * step + half));
      multiply_add<Scalar>(scores[n], state.q[step], b[0], b[1]);
      multiply_add<Scalar>(scores[n + 1], state.q[step], b[2], b[3]);
    }
  }
  // The rows of one tile see different keys only at the window's edge and among the block's slots.
  const bool all = key >= max(state.low[0], state.low[1]) &&
                   key + Config::WARP_KEYS - 1 <= min(state.high[0], state.high[1]);
#pragma unroll
  for (int n = 0; n < Config::WARP_KEYS / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = key + n * 8 + lane_id() % 4 * 2 + i % 2;
      const bool seen = all || (j >= state.low[i / 2] && j <= state.high[i / 2]);
      scores[n][i] = seen ? scores[n][i] * scale_log2 : -INFINITY_F32;
    }
}

// Turns scores into weights, relative to the best score so far, and scales what was summed before.
DEVICE void weigh(State& state, float (&scores)[Config::WARP_KEYS / 8][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best = state.best[h];
#pragma unroll
    for (int n = 0; n < Config::WARP_KEYS / 8; ++n) best = max(best, max(scores[n][2 * h], scores[n][2 * h + 1]));
    best = warp_max<4>(best);
    const float reference = best == -INFINITY_F32 ? 0.0f : best;  // of a row that has seen no key yet
    const float shrink = exp2_fast(state.best[h] - reference);
    state.best[h] = best;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Config::WARP_KEYS / 8; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        scores[n][i] = exp2_fast(scores[n][i] - reference);
        sum += scores[n][i];
      }
    state.sum[h] = state.sum[h] * shrink + sum;
#pragma unroll
    for (int n = 0; n < Config::VALUE_TILES; ++n) state.o[n][2 * h] *= shrink, state.o[n][2 * h + 1] *= shrink;
  }
}

DEVICE void add_values(State& state, u32 values, int first_row, const float (&weights)[Config::WARP_KEYS / 8][4]) {
#pragma unroll
  for (int step = 0; step < Config::WARP_KEYS / 16; ++step) {
    const float (&low)[4] = weights[2 * step], (&high)[4] = weights[2 * step + 1];
    const u32 a[4] = {pack_pair<Scalar>(low[0], low[1]), pack_pair<Scalar>(low[2], low[3]),
                      pack_pair<Scalar>(high[0], high[1]), pack_pair<Scalar>(high[2], high[3])};
    const int row = first_row + step * 16 + lane_id() % 16;
#pragma unroll
    for (int n = 0; n < Config::VALUE_TILES; n += 2) {
      u32 b[4];
      load_matrices_transposed(b, values + place(row, n + lane_id() / 16));
      multiply_add<Scalar>(state.o[n], a, b[0], b[1]);
      multiply_add<Scalar>(state.o[n + 1], a, b[2], b[3]);
    }
  }
}

// ---- results -----------------------------------------------------------------------------------------------------

DEVICE float finite(float best) { return best == -INFINITY_F32 ? 0.0f : best; }

DEVICE void hand_over(const State& state, Exchange& exchange, int row_warp) {
#pragma unroll
  for (int n = 0; n < Config::VALUE_TILES; ++n)
    exchange.o[row_warp][n][lane_id()] = make_float4(state.o[n][0], state.o[n][1], state.o[n][2], state.o[n][3]);
  exchange.stats[row_warp][lane_id()] = make_float4(state.best[0], state.best[1], state.sum[0], state.sum[1]);
}

DEVICE void take_over(State& state, const Exchange& exchange, int row_warp) {
  const float4 stats = exchange.stats[row_warp][lane_id()];
  const float other_best[2] = {stats.x, stats.y}, other_sum[2] = {stats.z, stats.w};
  float mine[2], theirs[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float best = max(state.best[h], other_best[h]);
    mine[h] = exp2f(state.best[h] - finite(best)), theirs[h] = exp2f(other_best[h] - finite(best));
    state.sum[h] = state.sum[h] * mine[h] + other_sum[h] * theirs[h];
    state.best[h] = best;
  }
#pragma unroll
  for (int n = 0; n < Config::VALUE_TILES; ++n) {
    const float4 other = exchange.o[row_warp][n][lane_id()];
    state.o[n][0] = state.o[n][0] * mine[0] + other.x * theirs[0];
    state.o[n][1] = state.o[n][1] * mine[0] + other.y * theirs[0];
    state.o[n][2] = state.o[n][2] * mine[1] + other.z * theirs[1];
    state.o[n][3] = state.o[n][3] * mine[1] + other.w * theirs[1];
  }
}

// Row r of a tile is slot r / (H/G), head r % (H/G) of the key head's; returns where its output begins.
DEVICE i64 output_of(const Sizes& sizes, const Unit& unit, int flat) {
  const int group = sizes.group();
  const i64 row = i64(unit.stream) * sizes.num_slots + flat / group;
  return (row * sizes.num_heads + unit.kv_head * group + flat % group) * Config::D;
}

DEVICE void store(const State& state, const Sizes& sizes, const Unit& unit, int num_parts, int row_warp, Scalar* o,
                  float* o_partial, float2* stats_partial) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = warp_sum<4>(state.sum[h]);
    const int row = row_warp * 16 + h * 8 + lane_id() / 4, flat = unit.row_tile * Config::TILE_ROWS + row;
    if (flat >= sizes.num_slots * sizes.group()) continue;
    if (num_parts == 1) {
      Scalar* to = o + output_of(sizes, unit, flat) + lane_id() % 4 * 2;
#pragma unroll
      for (int n = 0; n < Config::VALUE_TILES; ++n)
        *reinterpret_cast<u32*>(to + n * 8) = pack_pair<Scalar>(state.o[n][2 * h] / sum, state.o[n][2 * h + 1] / sum);
    } else {
      const i64 at = (i64(unit.index) * sizes.num_splits + blockIdx.x) * Config::TILE_ROWS + row;
      float* to = o_partial + at * Config::D + lane_id() % 4 * 2;
#pragma unroll
      for (int n = 0; n < Config::VALUE_TILES; ++n)
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(state.o[n][2 * h], state.o[n][2 * h + 1]);
      if (lane_id() % 4 == 0) stats_partial[at] = make_float2(state.best[h], sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, BLOCKS_A_SM)
    draft_attention(const Scalar* q, const Scalar* block_k, const Scalar* block_v, const Scalar* keys,
                    const Scalar* values, const i32* __restrict__ starts, Scalar* __restrict__ o,
                    float* __restrict__ o_partial, float2* __restrict__ stats_partial, i64 q_stream, i64 q_row,
                    i64 k_stream, i64 k_row, i64 v_stream, i64 v_row, i64 context_stream, int num_slots, int num_heads,
                    int num_kv_heads, int num_rows, int window, int causal, int num_splits, float scale_log2) {
  extern __shared__ __align__(128) u8 memory[];
  Plan& plan = *reinterpret_cast<Plan*>(memory);
  const Params p{q, block_k, block_v, keys, values, q_stream, q_row, k_stream, k_row, v_stream, v_row, context_stream};
  const Sizes sizes{num_slots, num_heads, num_kv_heads, num_rows, window, causal, num_splits};
  const Unit unit(sizes, blockIdx.y, blockIdx.z);
  grid_dependency_wait();
  grid_dependency_launch();
  const Share share(sizes, starts[unit.stream]);
  const int first = blockIdx.x * share.tiles_each, count = min(share.num_tiles - first, share.tiles_each);
  if (count <= 0) return;
  copy_queries(p, sizes, unit, plan);
  const int row_warp = warp_id() % Config::ROW_WARPS, key_warp = warp_id() / Config::ROW_WARPS;
  const bool has_rows = unit.row_tile * Config::TILE_ROWS + row_warp * 16 < num_slots * sizes.group();
#pragma unroll
  for (int i = 0; i < Config::STAGES; ++i) {
    if (i < count) copy_tile(p, sizes, unit, share, first + i, plan.stages[i]);
    copy_async_commit();
  }
  State state;
  begin(state, sizes, unit, share, row_warp);
  for (int i = 0; i < count; ++i) {
    copy_async_wait<Config::STAGES - 1>();
    __syncthreads();
    Stage& stage = plan.stages[i % Config::STAGES];
    if (i == 0) load_queries(state, plan, row_warp);
    if (has_rows) {
      float scores[Config::WARP_KEYS / 8][4] = {};
      const int row = key_warp * Config::WARP_KEYS, key = share.first + (first + i) * Config::TILE_KEYS + row;
      score(state, shared_address(stage.keys), row, key, scale_log2, scores);
      weigh(state, scores);
      add_values(state, shared_address(stage.values), row, scores);
    }
    __syncthreads();
    if (i + Config::STAGES < count)
      copy_tile(p, sizes, unit, share, first + i + Config::STAGES, stage);
    copy_async_commit();
  }
  Exchange& exchange = *reinterpret_cast<Exchange*>(plan.stages);
  if (key_warp == 1) hand_over(state, exchange, row_warp);
  __syncthreads();
  if (key_warp == 1) return;
  take_over(state, exchange, row_warp);
  store(state, sizes, unit, share.num_parts, row_warp, o, o_partial, stats_partial);
}

// ---- merge -------------------------------------------------------------------------------------------------------

constexpr int MERGE_WARPS = 8, EACH = Config::D / WARP;  // values a lane

// Warps of a row add parts w, w + row_warps, ...; then the first adds their sums in order. Grid (blocks of
// MERGE_WARPS / row_warps rows of a tile, G tiles, S), as draft_attention's otherwise.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS* WARP)
    draft_merge(const float* __restrict__ o_partial, const float2* __restrict__ stats_partial,
                const i32* __restrict__ starts, Scalar* __restrict__ o, int num_slots, int num_heads,
                int num_kv_heads, int num_rows, int window, int num_splits, int row_warps) {
  __shared__ Vec<float, EACH> sums[MERGE_WARPS][WARP];
  __shared__ float weights[MERGE_WARPS];
  const Sizes sizes{num_slots, num_heads, num_kv_heads, num_rows, window, 0, num_splits};
  const Unit unit(sizes, blockIdx.y, blockIdx.z);
  const int row = blockIdx.x * (MERGE_WARPS / row_warps) + warp_id() / row_warps, member = warp_id() % row_warps;
  const int flat = unit.row_tile * Config::TILE_ROWS + row;
  const bool used = flat < num_slots * sizes.group();
  grid_dependency_wait();
  const Share share(sizes, starts[unit.stream]);
  if (share.num_parts == 1) return;
  const i64 first = i64(unit.index) * num_splits * Config::TILE_ROWS + (used ? row : 0);
  float best = -INFINITY_F32;
  for (int part = lane_id(); part < share.num_parts; part += WARP)
    best = max(best, stats_partial[first + part * Config::TILE_ROWS].x);
  best = warp_max(best);
  float sum = 0.0f;
  Vec<float, EACH> total;
#pragma unroll
  for (int i = 0; i < EACH; ++i) total[i] = 0.0f;
#pragma unroll 8
  for (int part = member; part < share.num_parts; part += row_warps) {
    const i64 at = first + part * Config::TILE_ROWS;
    const float2 stats = stats_partial[at];
    const Vec<float, EACH> values = load_vec<float, EACH>(o_partial + at * Config::D + lane_id() * EACH);
    const float weight = exp2f(stats.x - best);
    sum += stats.y * weight;
#pragma unroll
    for (int i = 0; i < EACH; ++i) total[i] += values[i] * weight;
  }
  sums[warp_id()][lane_id()] = total;
  if (lane_id() == 0) weights[warp_id()] = sum;
  __syncthreads();
  if (member > 0 || !used) return;
  for (int other = 1; other < row_warps; ++other) {
    sum += weights[warp_id() + other];
#pragma unroll
    for (int i = 0; i < EACH; ++i) total[i] += sums[warp_id() + other][lane_id()][i];
  }
  Scalar* to = o + output_of(sizes, unit, flat) + lane_id() * EACH;
#pragma unroll
  for (int i = 0; i < EACH; ++i) to[i] = from_float<Scalar>(total[i] / sum);
}

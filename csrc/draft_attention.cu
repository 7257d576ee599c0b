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
//        of the visible key tiles of 64; two groups of four warps hold 16 rows a warp and take 32 keys of each tile.
//        The groups copy for themselves and run apart until the end, so that one multiplies while the other loads.
//   ref  kernels/reference/draft.py:draft_attention | test tests/kernels/test_draft_attention.py | sm_80 and up
#include "fresh.cuh"
#include "mma.cuh"
#include "named_barriers.cuh"

struct Config {
  static constexpr int D = HEAD_DIM, CHUNKS = D / 8, ROW_BYTES = 2 * D;
  static constexpr int TILE_ROWS = 64, TILE_KEYS = 64, STAGES = 2;
  static constexpr int GROUPS = 2, GROUP_KEYS = TILE_KEYS / GROUPS, ROW_WARPS = TILE_ROWS / 16;
  static constexpr int GROUP_THREADS = ROW_WARPS * WARP, THREADS = GROUPS * GROUP_THREADS;
  static constexpr int KEY_STEPS = D / 16, VALUE_TILES = D / 8;  // mma steps along a query, tiles of 8 output columns
};
static_assert(sizeof(Scalar) == 2, "bf16 or half");
static_assert(Config::D == 32 || Config::D == 64 || Config::D == 128, "a row is 4, 8 or 16 chunks");
static_assert(Config::GROUP_THREADS % Config::CHUNKS == 0 && Config::GROUP_KEYS % 16 == 0, "whole rows and steps");

// What the host fixes by shapes.
struct Sizes {
  int num_slots, num_heads, num_kv_heads, group, row_tiles;  // b, H, G, H/G, tiles of a key head's rows
  int num_rows;                                              // P of the context
  int window, causal;
  int num_splits;
  float per_group, per_row_tile, per_split;  // reciprocals
};

// x / n for a reciprocal of n, x below 2^21: half a step from every whole number, no rounding crosses one. An integer
// division takes a hundred cycles, and there would be ten of them before the first load.
DEVICE int quotient(int x, float reciprocal) { return int((x + 0.5f) * reciprocal); }

// Which keys the slots of one stream see, and how the blocks share them: part i has key tiles
// i * tiles_each .. of num_tiles. Attention and merge must agree on it.
struct Share {
  int start, first, end;  // keys first .. end - 1, those from `start` on in the block
  int num_tiles, tiles_each;

  DEVICE Share(const Sizes& sizes, int given_start) {
    start = min(max(given_start, 0), sizes.num_rows);
    end = start + sizes.num_slots;
    first = max(start - sizes.window + 1, 0);
    num_tiles = cdiv(end - first, Config::TILE_KEYS);
    tiles_each = max(quotient(num_tiles - 1, sizes.per_split) + 1, MIN_TILES);
  }
  DEVICE bool is_whole() const { return tiles_each >= num_tiles; }
  DEVICE int num_parts() const { return quotient(num_tiles - 1, 1.0f / tiles_each) + 1; }
};

struct Stage {
  alignas(128) u8 keys[Config::GROUP_KEYS * Config::ROW_BYTES];
  alignas(128) u8 values[Config::GROUP_KEYS * Config::ROW_BYTES];
};
struct Plan {
  alignas(128) u8 queries[Config::TILE_ROWS * Config::ROW_BYTES];
  Stage stages[Config::GROUPS][Config::STAGES];
};
// How the second group hands its sums over, in the memory of the stages.
struct Exchange {
  float4 o[Config::ROW_WARPS][Config::VALUE_TILES][WARP];
  float4 stats[Config::ROW_WARPS][WARP];
};
static_assert(sizeof(Plan) == PLAN_BYTES, "the launch asks for as much");
static_assert(PLAN_BYTES <= 101376, "shared memory of a block on sm_89 and sm_120");
static_assert(sizeof(Exchange) <= sizeof(Plan::stages), "fits where keys and values stood");

// Offset of a chunk of 16 bytes: 8 rows of one column of chunks, which ldmatrix reads together, lie in different banks.
DEVICE u32 place(int row, int chunk) {
  const int turn = Config::CHUNKS >= 8 ? row % 8 : row / (8 / Config::CHUNKS) % Config::CHUNKS;
  return row * Config::ROW_BYTES + (chunk ^ turn) * 16;
}

// ---- copies ------------------------------------------------------------------------------------------------------

// Where one stream's rows of one key head stand.
struct Sources {
  const Scalar* __restrict__ q;                                       // the first of its query heads in slot 0
  const Scalar *__restrict__ keys, *__restrict__ values;              // in row 0 of the context
  const Scalar *__restrict__ block_keys, *__restrict__ block_values;  // in slot 0
  int width, q_row, k_row, v_row;                                     // values from row to row
};

// Which stream, key head and tile of rows a block works on.
struct Unit {
  int stream, kv_head, row_tile, index;

  DEVICE Unit(const Sizes& sizes, int y, int z) {
    stream = z, kv_head = quotient(y, sizes.per_row_tile), row_tile = y - kv_head * sizes.row_tiles;
    index = z * sizes.num_kv_heads * sizes.row_tiles + y;
  }
};

// A row of a tile is slot `slot` of query head `head` among those of its key head.
struct Row {
  int slot, head;
  bool used;

  DEVICE Row(const Sizes& sizes, const Unit& unit, int row) {
    const int flat = unit.row_tile * Config::TILE_ROWS + row;
    slot = quotient(flat, sizes.per_group), head = flat - slot * sizes.group;
    used = slot < sizes.num_slots;
  }
};

// What a thread copies of its group's queries, keys or values: chunk `chunk` of rows `row`, `row` + STEP, ...
struct Copier {
  static constexpr int STEP = Config::GROUP_THREADS / Config::CHUNKS, TIMES = Config::GROUP_KEYS / STEP;
  static_assert(STEP % 8 == 0 && TIMES >= 1, "all rows of a thread turn their chunks alike");
  int row, chunk;
  u32 to;  // of its first row in a tile

  DEVICE Copier()
      : row(threadIdx.x % Config::GROUP_THREADS / Config::CHUNKS), chunk(threadIdx.x % Config::CHUNKS),
        to(place(row, chunk)) {}

  // Rows beyond the last one come as zeros.
  DEVICE void queries(const Sources& from, const Sizes& sizes, const Unit& unit, u32 shared) const {
#pragma unroll
    for (int i = 0; i < Config::TILE_ROWS / STEP / Config::GROUPS; ++i) {
      const int place = row + (i * Config::GROUPS + threadIdx.x / Config::GROUP_THREADS) * STEP;
      const Row at(sizes, unit, place);
      const int offset = at.used ? at.slot * from.q_row + at.head * Config::D + chunk * 8 : 0;
      copy_async(shared + to + (place - row) * Config::ROW_BYTES, from.q + offset, at.used);
    }
  }

  // Rows past the last key come as zeros, so that what stands there (NaN) meets no weight of 0.
  DEVICE void keys_from(const Sources& from, const Share& share, int first, const Stage& stage) const {
    const u32 keys = shared_address(stage.keys) + to, values = shared_address(stage.values) + to;
    if (first + Config::GROUP_KEYS <= share.start) {
      const int offset = (first + row) * from.width + chunk * 8;
#pragma unroll
      for (int i = 0; i < TIMES; ++i) {
        copy_async(keys + i * STEP * Config::ROW_BYTES, from.keys + offset + i * STEP * from.width);
        copy_async(values + i * STEP * Config::ROW_BYTES, from.values + offset + i * STEP * from.width);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < TIMES; ++i) {
      const int key = first + row + i * STEP, slot = min(key - share.start, share.end - share.start - 1);
      const bool past = slot < 0, valid = key < share.end;
      const Scalar* k = past ? from.keys + key * from.width : from.block_keys + slot * from.k_row;
      const Scalar* v = past ? from.values + key * from.width : from.block_values + slot * from.v_row;
      copy_async(keys + i * STEP * Config::ROW_BYTES, k + chunk * 8, valid);
      copy_async(values + i * STEP * Config::ROW_BYTES, v + chunk * 8, valid);
    }
  }
};

// ---- one warp: 16 rows, the keys of its group ---------------------------------------------------------------------

// What weights are relative to; of a row that has seen no key, anything finite.
DEVICE float finite(float best) { return best == -INFINITY_F32 ? 0.0f : best; }

struct State {
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
    const int position = share.start + Row(sizes, unit, row_warp * 16 + i * 8 + lane_id() / 4).slot;
    state.low[i] = position - sizes.window + 1;
    state.high[i] = min(sizes.causal ? position : position + sizes.window - 1, share.end - 1);
  }
}

// Scores of the group's keys from number `key` on in log2, -inf where a row does not see a key.
DEVICE void score(const State& state, u32 queries, u32 keys, int key, float scale_log2,
                  float (&scores)[Config::GROUP_KEYS / 8][4]) {
  constexpr int LOADS = Config::GROUP_KEYS / 16;
  const int row = lane_id() % 8 + lane_id() / 16 * 8, half = lane_id() / 8 % 2;
  u32 a[2][4], b[2][LOADS][4];  // of this step and the next: a product that waits for its own load waits long
#pragma unroll
  for (int step = -1; step < Config::KEY_STEPS; ++step) {
    if (step + 1 < Config::KEY_STEPS) {
      load_matrices(a[(step + 1) % 2], queries + place(lane_id() % 16, 2 * step + 2 + lane_id() / 16));
#pragma unroll
      for (int n = 0; n < LOADS; ++n)
        load_matrices(b[(step + 1) % 2][n], keys + place(row + n * 16, 2 * step + 2 + half));
    }
    if (step < 0) continue;
#pragma unroll
    for (int n = 0; n < LOADS; ++n) {
      const u32 (&now)[4] = b[step % 2][n];
      multiply_add<Scalar>(scores[2 * n], a[step % 2], now[0], now[1]);
      multiply_add<Scalar>(scores[2 * n + 1], a[step % 2], now[2], now[3]);
    }
  }
  // The rows of one tile see different keys only at the window's edge and among the block's slots.
  const bool all = key >= max(state.low[0], state.low[1]) &&
                   key + Config::GROUP_KEYS - 1 <= min(state.high[0], state.high[1]);
  if (!__all_sync(FULL_MASK, all)) {
#pragma unroll
    for (int n = 0; n < Config::GROUP_KEYS / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = key + n * 8 + lane_id() % 4 * 2 + i % 2;
        if ((j < state.low[i / 2]) | (j > state.high[i / 2])) scores[n][i] = -INFINITY_F32;
      }
  }
#pragma unroll
  for (int n = 0; n < Config::GROUP_KEYS / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] *= scale_log2;
}

// Turns scores into weights, relative to the best score so far, and scales what was summed before.
DEVICE void weigh(State& state, float (&scores)[Config::GROUP_KEYS / 8][4]) {
  float shrink[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float best = state.best[h];
#pragma unroll
    for (int n = 0; n < Config::GROUP_KEYS / 8; ++n) best = max(best, max(scores[n][2 * h], scores[n][2 * h + 1]));
    best = warp_max<4>(best);
    const float reference = finite(best);
    shrink[h] = exp2_fast(state.best[h] - reference);
    state.best[h] = best;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Config::GROUP_KEYS / 8; ++n)
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        scores[n][i] = exp2_fast(scores[n][i] - reference);
        sum += scores[n][i];
      }
    state.sum[h] = state.sum[h] * shrink[h] + sum;
  }
  if (!__any_sync(FULL_MASK, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < Config::VALUE_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.o[n][i] *= shrink[i / 2];
}

DEVICE void add_values(State& state, u32 values, const float (&weights)[Config::GROUP_KEYS / 8][4]) {
  constexpr int LOADS = 2, GROUPS = Config::VALUE_TILES / (2 * LOADS), ALL = Config::GROUP_KEYS / 16 * GROUPS;
  u32 a[4], b[2][LOADS][4];  // as in `score`
#pragma unroll
  for (int i = -1; i < ALL; ++i) {
    if (i + 1 < ALL) {
#pragma unroll
      for (int n = 0; n < LOADS; ++n)
        load_matrices_transposed(b[(i + 1) % 2][n],
                                 values + place((i + 1) / GROUPS * 16 + lane_id() % 16,
                                                ((i + 1) % GROUPS * LOADS + n) * 2 + lane_id() / 16));
    }
    if (i < 0) continue;
    if (i % GROUPS == 0) {
      const float (&low)[4] = weights[i / GROUPS * 2], (&high)[4] = weights[i / GROUPS * 2 + 1];
      a[0] = pack_pair<Scalar>(low[0], low[1]), a[1] = pack_pair<Scalar>(low[2], low[3]);
      a[2] = pack_pair<Scalar>(high[0], high[1]), a[3] = pack_pair<Scalar>(high[2], high[3]);
    }
#pragma unroll
    for (int n = 0; n < LOADS; ++n) {
      const int column = (i % GROUPS * LOADS + n) * 2;
      const u32 (&now)[4] = b[i % 2][n];
      multiply_add<Scalar>(state.o[column], a, now[0], now[1]);
      multiply_add<Scalar>(state.o[column + 1], a, now[2], now[3]);
    }
  }
}

// ---- results -----------------------------------------------------------------------------------------------------

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

// Where the output of a row begins.
DEVICE i64 output_of(const Sizes& sizes, const Unit& unit, const Row& row) {
  const i64 slot = i64(unit.stream) * sizes.num_slots + row.slot;
  return (slot * sizes.num_heads + unit.kv_head * sizes.group + row.head) * Config::D;
}

DEVICE void store(const State& state, const Sizes& sizes, const Unit& unit, bool is_whole, int row_warp, Scalar* o,
                  float* o_partial, float2* stats_partial) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = warp_sum<4>(state.sum[h]);
    const int row = row_warp * 16 + h * 8 + lane_id() / 4;
    const Row at(sizes, unit, row);
    if (!at.used) continue;
    if (is_whole) {
      Scalar* to = o + output_of(sizes, unit, at) + lane_id() % 4 * 2;
      const float scale = 1.0f / sum;
#pragma unroll
      for (int n = 0; n < Config::VALUE_TILES; ++n)
        *reinterpret_cast<u32*>(to + n * 8) =
            pack_pair<Scalar>(state.o[n][2 * h] * scale, state.o[n][2 * h + 1] * scale);
    } else {
      const i64 part = (i64(unit.index) * sizes.num_splits + blockIdx.x) * Config::TILE_ROWS + row;
      float* to = o_partial + part * Config::D + lane_id() % 4 * 2;
#pragma unroll
      for (int n = 0; n < Config::VALUE_TILES; ++n)
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(state.o[n][2 * h], state.o[n][2 * h + 1]);
      if (lane_id() % 4 == 0) stats_partial[part] = make_float2(state.best[h], sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 2)
    draft_attention(const Scalar* q, const Scalar* block_k, const Scalar* block_v, const Scalar* keys,
                    const Scalar* values, const i32* __restrict__ starts, Scalar* __restrict__ o,
                    float* __restrict__ o_partial, float2* __restrict__ stats_partial, i64 q_stream, i64 k_stream,
                    i64 v_stream, i64 context_stream, int q_row, int k_row, int v_row, int num_slots, int num_heads,
                    int num_kv_heads, int group, int row_tiles, int num_rows, int window, int causal, int num_splits,
                    float per_group, float per_row_tile, float per_split, float scale_log2, int past_is_old) {
  extern __shared__ __align__(128) u8 memory[];
  Plan& plan = *reinterpret_cast<Plan*>(memory);
  const Sizes sizes{num_slots, num_heads, num_kv_heads, group,     row_tiles,    num_rows,
                    window,    causal,    num_splits,   per_group, per_row_tile, per_split};
  const Unit unit(sizes, blockIdx.y, blockIdx.z);
  const Copier copier;
  if (!past_is_old) grid_dependency_wait();
  const Share share(sizes, load_fresh(starts + unit.stream));
  const int first = blockIdx.x * share.tiles_each, count = min(share.num_tiles - first, share.tiles_each);
  if (count <= 0) return;
  if (threadIdx.x < Config::GROUPS) named_barrier_init(1 + threadIdx.x, Config::GROUP_THREADS);
  const int group_of_warps = warp_id() / Config::ROW_WARPS, row_warp = warp_id() % Config::ROW_WARPS;
  Stage* stages = plan.stages[group_of_warps];
  const u32 queries = shared_address(plan.queries);
  const Sources from{q + unit.stream * q_stream + unit.kv_head * group * Config::D,
                     keys + unit.stream * context_stream + unit.kv_head * Config::D,
                     values + unit.stream * context_stream + unit.kv_head * Config::D,
                     block_k + unit.stream * k_stream + unit.kv_head * Config::D,
                     block_v + unit.stream * v_stream + unit.kv_head * Config::D,
                     num_kv_heads * Config::D, q_row, k_row, v_row};
  const int first_key = share.first + first * Config::TILE_KEYS + group_of_warps * Config::GROUP_KEYS;
  // Keys of the context come while the kernel ahead makes queries.
  const bool has_begun = past_is_old && first_key + Config::GROUP_KEYS <= share.start;
  if (has_begun) copier.keys_from(from, share, first_key, stages[0]);
  if (past_is_old) grid_dependency_wait();
  grid_dependency_launch();  // not before the wait: draft_merge reads `starts` ahead of its own
  copier.queries(from, sizes, unit, queries);
  const bool has_rows = Row(sizes, unit, row_warp * 16).used;
  State state;
  begin(state, sizes, unit, share, row_warp);
  if (has_begun) copy_async_commit();
  // Rounds below 0 only start copies: one piece of code for them, as a cold start reads it from far away.
#pragma unroll 1
  for (int i = has_begun ? 2 - Config::STAGES : 1 - Config::STAGES; i < count; ++i) {
    if (i >= 0) {
      copy_async_wait<Config::STAGES - 2>();
      if (i == 0) {
        __syncthreads();  // the queries came by both groups
      } else {
        named_barrier(1 + group_of_warps, Config::GROUP_THREADS);
      }
    }
    const int ahead = i + Config::STAGES - 1;
    if (ahead < count)
      copier.keys_from(from, share, first_key + ahead * Config::TILE_KEYS, stages[ahead % Config::STAGES]);
    copy_async_commit();
    if (i < 0 || !has_rows) continue;
    const Stage& stage = stages[i % Config::STAGES];
    float scores[Config::GROUP_KEYS / 8][4] = {};
    const u32 own = queries + row_warp * 16 * Config::ROW_BYTES;
    score(state, own, shared_address(stage.keys), first_key + i * Config::TILE_KEYS, scale_log2, scores);
    weigh(state, scores);
    add_values(state, shared_address(stage.values), scores);
  }
  __syncthreads();
  Exchange& exchange = *reinterpret_cast<Exchange*>(plan.stages);
  if (group_of_warps == 1) hand_over(state, exchange, row_warp);
  __syncthreads();
  if (group_of_warps == 1) return;
  take_over(state, exchange, row_warp);
  store(state, sizes, unit, share.is_whole(), row_warp, o, o_partial, stats_partial);
}

// ---- merge -------------------------------------------------------------------------------------------------------

constexpr int MERGE_WARPS = 32, EACH = Config::D / WARP, BATCH = 4;  // values a lane, parts that a warp reads at once

// A sum under way: its weights are relative to 2^best.
struct Partial {
  float best = -INFINITY_F32, sum = 0.0f, values[EACH] = {};

  DEVICE void add(float2 stats, const Vec<float, EACH>& other) {
    const float new_best = max(best, stats.x);
    const float mine = exp2f(best - finite(new_best)), theirs = exp2f(stats.x - finite(new_best));
    sum = sum * mine + stats.y * theirs;
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] = values[i] * mine + other[i] * theirs;
    best = new_best;
  }
};

// Warps of a row add up parts w, w + row_warps, ...; then the first adds their sums, which lanes have weighed at once.
// Grid (blocks of MERGE_WARPS / row_warps rows of a tile, G tiles, S), as draft_attention's otherwise.
extern "C" __global__ void __launch_bounds__(MERGE_WARPS* WARP)
    draft_merge(const float* __restrict__ o_partial, const float2* __restrict__ stats_partial,
                const i32* __restrict__ starts, Scalar* __restrict__ o, int num_slots, int num_heads, int num_kv_heads,
                int group, int row_tiles, int num_rows, int window, int num_splits, float per_group,
                float per_row_tile, float per_split, int row_warps) {
  __shared__ Vec<float, EACH> sums[MERGE_WARPS][WARP];
  __shared__ float2 stats[MERGE_WARPS];
  const Sizes sizes{num_slots, num_heads, num_kv_heads, group,     row_tiles,    num_rows,
                    window,    0,         num_splits,   per_group, per_row_tile, per_split};
  const Unit unit(sizes, blockIdx.y, blockIdx.z);
  const int row = (blockIdx.x * MERGE_WARPS + warp_id()) / row_warps, member = warp_id() % row_warps;
  const Row at(sizes, unit, row);
  // draft_attention started after `starts` was written, and this after draft_attention.
  const Share share(sizes, load_fresh(starts + unit.stream));
  const int num_parts = share.num_parts();
  grid_dependency_wait();
  grid_dependency_launch();
  if (num_parts == 1) return;
  const i64 first = i64(unit.index) * num_splits * Config::TILE_ROWS + row;
  Partial total;
  if (at.used) {
    for (int begin = member; begin < num_parts; begin += row_warps * BATCH) {
      float2 part_stats[BATCH];
      Vec<float, EACH> values[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int part = begin + i * row_warps;
        if (part >= num_parts) break;
        const i64 from = first + part * Config::TILE_ROWS;
        part_stats[i] = stats_partial[from];
        values[i] = load_vec<float, EACH>(o_partial + from * Config::D + lane_id() * EACH);
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (begin + i * row_warps < num_parts) total.add(part_stats[i], values[i]);
    }
  }
  Vec<float, EACH> mine;
#pragma unroll
  for (int i = 0; i < EACH; ++i) mine[i] = total.values[i];
  sums[warp_id()][lane_id()] = mine;
  if (lane_id() == 0) stats[warp_id()] = make_float2(total.best, total.sum);
  __syncthreads();
  if (member > 0 || !at.used) return;
  const int count = min(row_warps, num_parts);
  const float2 theirs = lane_id() < count ? stats[warp_id() + lane_id()] : make_float2(-INFINITY_F32, 0.0f);
  const float weight = exp2f(theirs.x - finite(warp_max(theirs.x))), sum = warp_sum(theirs.y * weight);
  float added[EACH] = {};
#pragma unroll 4
  for (int other = 0; other < count; ++other) {
    const float share = __shfl_sync(FULL_MASK, weight, other);
    const Vec<float, EACH> values = sums[warp_id() + other][lane_id()];
#pragma unroll
    for (int i = 0; i < EACH; ++i) added[i] += values[i] * share;
  }
  Scalar* to = o + output_of(sizes, unit, at) + lane_id() * EACH;
#pragma unroll
  for (int i = 0; i < EACH; ++i) to[i] = from_float<Scalar>(added[i] / sum);
}

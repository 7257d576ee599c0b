// csrc/verify_attention_mma.cu: tree attention over a paged MLA cache on the tensor cores of sm_80 and up (mma.sync).
//   in   q [S,N,H,576] | pages [P,64,576], 512 latent then 64 rope | block_table [S,M] i32 | prefix_len [S] i32 |
//        ancestors [S,N,W] u32 | num_nodes [S] i32; q and pages bf16 or half (-DDTYPE)
//   out  o [S,N,H,512] in q's dtype | lse [S,N,H] f32, nats; 0 and -inf where a row is unused or sees no key;
//        of tiles that were cut o_partial [slots,64,512] f32, normalised, and lse_partial [slots,64] f32, log2, for
//        verify_merge.cu
//   math o[i] = sum_j softmax_j(scale q[i].kv[j]) kv[j,:512], j over the prefix and {j : bit j of ancestors[i]}
//   cost 2 N H L (576 + 512) FLOP for L keys, 1152 L bytes; a key is read once for 64 (row, head) pairs
//   how  101,376 bytes of shared memory hold no 64 queries (73,728) beside the keys, so the queries live in registers:
//        two groups of four warps take 32 pairs each, and the warps of a group divide the 576 columns of the scores'
//        sum. They exchange partial scores of 16 keys, each warp finishes one 16 x 8 tile of them, and each adds its
//        128 of 512 output columns. Values are added one block of keys late, so that a single barrier a block serves
//        the exchange and the weights, and products run while scores are finished. The groups run apart.
//   ref  kernels/reference.py:verify_attention | test tests/kernels/test_verify_attention_gpu.py | sm_80 and up
#include "mma.cuh"
#include "verify_schedule.cuh"

struct Config {
  static constexpr int C = 512, WIDTH = 576, PAGE = 64;
  static constexpr int TILE_ROWS = 64, BLOCK_KEYS = 16, STAGES = 4;
  static constexpr int GROUPS = 2, GROUP_WARPS = 4, GROUP_ROWS = TILE_ROWS / GROUPS;
  static constexpr int THREADS = GROUPS * GROUP_WARPS * WARP, GROUP_THREADS = GROUP_WARPS * WARP;
  static constexpr int SLICES = WIDTH / 64, VALUE_SLICES = C / 64;  // of 64 columns, 16 of them a warp of the group
  static constexpr int ROW_BYTES = 2 * WIDTH;
  static constexpr int ROW_STRIDE = ROW_BYTES + 16;  // 8 rows of a column of 16 bytes, read together, lie in all banks
  static constexpr float STALE = 8.0f;  // log2 by which a score may be above its row's reference
};
static_assert(Config::WIDTH % 64 == 0 && Config::C % 64 == 0, "slices of 64 columns");
static_assert(Config::GROUP_ROWS == 32 && Config::BLOCK_KEYS == 16, "2 x 2 tiles of 16 rows and 8 keys, one a warp");
static_assert(Config::STAGES * Config::BLOCK_KEYS == Config::TILE_ROWS, "queries pass through the stages");
static_assert(Config::PAGE % Config::BLOCK_KEYS == 0, "a key block lies in one page");
static_assert(Config::BLOCK_KEYS * 8 == Config::GROUP_THREADS, "a thread copies one chunk of each slice");
static_assert(Config::ROW_STRIDE / 16 % 2 == 1, "an odd number of 16-byte units");
static_assert(sizeof(Scalar) == 2, "bf16 or half");
static_assert(Config::STALE < 15.0f, "weights up to 2^STALE fit half");

using Work = Schedule<Config::TILE_ROWS, Config::BLOCK_KEYS, CUT_TILE_UNITS, CUT_MIN_UNITS, CUT_FIXED_KEYS>;

struct Params {
  const Scalar* __restrict__ q;          // [S, N, H, 576]
  const Scalar* __restrict__ pages;      // [P, 64, 576]
  const i32* __restrict__ block_table;   // [S, M]
  const u32* __restrict__ ancestors;     // [S, N, W]
  int num_words, table_width, num_pages;
  float scale_log2;
};

union Exchange {
  float4 scores[Config::GROUP_WARPS - 1][WARP];  // what a warp is given of its 16 x 8 tile: [from][lane]
  uint2 weights[WARP];                           // what it makes of it: half an A fragment
};
constexpr int EXCHANGE_BYTES = sizeof(Exchange), GROUP_BYTES = Config::GROUP_WARPS * EXCHANGE_BYTES;
constexpr int BUFFER_BYTES = Config::GROUPS * GROUP_BYTES;

struct Plan {
  alignas(128) u8 keys[Config::STAGES][Config::BLOCK_KEYS * Config::ROW_STRIDE];
  Exchange exchange[2][Config::GROUPS][Config::GROUP_WARPS];  // of the latest two key blocks
  float4 row_stats[Config::GROUPS][Config::GROUP_ROWS];  // per warp: a row's maximum (two warps), at the end its sum
  float reference[Config::TILE_ROWS];                    // of each row: weights are 2^(score - reference)
  alignas(8) u64 loaded[Config::STAGES], freed[Config::STAGES], weights_read[Config::GROUPS];
  Part part;
  StreamWork work;
  int has_part, cursor;
  int row_of[Config::TILE_ROWS];  // tree row of each (row, head) pair
};
static_assert(sizeof(Plan) == PLAN_BYTES, "the launch asks for as much");
static_assert(PLAN_BYTES <= 101376, "shared memory of a block on sm_89 and sm_120");

// What a warp holds: 32 rows x 128 columns of the output, its columns of 32 queries, the tile of scores it finished.
struct State {
  float o[2][2 * Config::VALUE_SLICES][4];  // [m tile][n tile][D fragment]
  u32 q[2][Config::SLICES][4];              // [m tile][slice][A fragment]
  float scores[4];                          // D fragment, of the block whose values are added next
  float sum[2], latest[2];  // of this lane's weights of rows g and g + 8 of its tile: before that block, of it
};

// Place of a thread, and addresses in shared memory that follow from it: computing them anew would cost as much as the
// products.
struct Warp {
  int group, member, lane;
  u32 key_fragment, value_fragment;  // of stage 0, for ldmatrix
  u32 scores, weights;               // this lane's in the first buffer's first exchange of the group
  u32 reference;                     // of row g of this warp's tile
};

DEVICE Warp this_warp(const Plan& plan) {
  Warp w;
  w.lane = lane_id();
  w.group = warp_id() / Config::GROUP_WARPS;
  w.member = warp_id() % Config::GROUP_WARPS;
  const int row = w.lane % 8, low = w.lane / 8 % 2, high = w.lane / 16;
  const u32 keys = shared_address(plan.keys), exchange = shared_address(&plan.exchange[0][w.group]);
  w.key_fragment = keys + (row + 8 * high) * Config::ROW_STRIDE + (2 * w.member + low) * 16;
  w.value_fragment = keys + (row + 8 * low) * Config::ROW_STRIDE + (2 * w.member + high) * 16;
  w.scores = exchange + w.lane * sizeof(float4);
  w.weights = exchange + w.lane * sizeof(uint2);
  w.reference = shared_address(&plan.reference[w.group * Config::GROUP_ROWS + w.member / 2 * 16 + w.lane / 4]);
  return w;
}

DEVICE void group_barrier(const Warp& w) { named_barrier(1 + w.group, Config::GROUP_THREADS); }

// Row of the tile of a lane's accumulators at m = i / 2, and of its D fragment's halves h = i % 2.
DEVICE int row_of_value(const Warp& w, int i) { return w.group * Config::GROUP_ROWS + 8 * i + w.lane / 4; }

DEVICE u32 stage_offset(u32 count) { return count % Config::STAGES * (Config::BLOCK_KEYS * Config::ROW_STRIDE); }

// ---- copies ------------------------------------------------------------------------------------------------------

// Key `key` of the part's stream, or null: beyond its last used row, or the table names no page.
DEVICE const Scalar* key_row(const Params& p, const Plan& plan, int key) {
  if (key >= plan.work.prefix + plan.work.nodes) return nullptr;
  const int page = p.block_table[i64(plan.part.stream) * p.table_width + key / Config::PAGE];
  if (page < 0 || page >= p.num_pages) return nullptr;
  return p.pages + (i64(page) * Config::PAGE + key % Config::PAGE) * Config::WIDTH;
}

// Starts the copy of key block `block`, the number `count` of this grid block; the groups take turns. Rows that are not
// there come as zeros, so that what stands in their place (NaN) meets no weight of 0.
DEVICE void start_copy(const Params& p, Plan& plan, const Warp& w, int block, u32 count) {
  if (w.group != count % Config::GROUPS) return;
  const int thread = threadIdx.x % Config::GROUP_THREADS, chunk = thread % 8;
  const Scalar* row = key_row(p, plan, block * Config::BLOCK_KEYS + thread / 8);
  const Scalar* source = (row != nullptr ? row : p.pages) + chunk * 8;
  const u32 stage = count % Config::STAGES;
  const u32 to = shared_address(plan.keys[stage]) + thread / 8 * Config::ROW_STRIDE + chunk * 16;
  // From the fifth block of a part on, the stage holds one that both groups must be through with.
  if (block >= plan.part.first_block + Config::STAGES)
    barrier_wait(shared_address(&plan.freed[stage]), (count / Config::STAGES - 1) % 2);
#pragma unroll
  for (int slice = 0; slice < Config::SLICES; ++slice)
    copy_async(to + slice * 128, source + slice * 64, row != nullptr);
  copy_async_arrive(shared_address(&plan.loaded[stage]));
}

// Brings the tile's queries into registers by way of the stages, which nobody uses at this time.
DEVICE void load_queries(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state) {
  const i64 first = (i64(plan.part.stream) * sizes.num_rows * sizes.num_heads) + plan.part.tile * Config::TILE_ROWS;
  const int used = plan.work.nodes * sizes.num_heads - plan.part.tile * Config::TILE_ROWS;
  const u32 all = shared_address(plan.keys);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int row = step * 32 + threadIdx.x / 8, chunk = threadIdx.x % 8;
    const Scalar* source = p.q + (row < used ? first + row : 0) * Config::WIDTH + chunk * 8;
#pragma unroll
    for (int slice = 0; slice < Config::SLICES; ++slice)
      copy_async(all + row * Config::ROW_STRIDE + slice * 128 + chunk * 16, source + slice * 64, row < used);
  }
  copy_async_commit();
  if (threadIdx.x < Config::TILE_ROWS) {
    plan.row_of[threadIdx.x] = (plan.part.tile * Config::TILE_ROWS + threadIdx.x) / sizes.num_heads;
    plan.reference[threadIdx.x] = -INFINITY_F32;
  }
  copy_async_wait<0>();
  __syncthreads();
  const u32 queries = w.value_fragment + w.group * Config::GROUP_ROWS * Config::ROW_STRIDE;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int slice = 0; slice < Config::SLICES; ++slice)
      load_matrices(state.q[m][slice], queries + m * 16 * Config::ROW_STRIDE + slice * 128);
  __syncthreads();
}

// ---- scores ------------------------------------------------------------------------------------------------------

// This warp's part of the scores of 32 rows and 16 keys, of its 16 columns of each slice. Tile (m, n) goes to warp
// 2 m + n, which finishes it; what this warp finishes stays in `own`.
DEVICE void partial_scores(Plan& plan, const Warp& w, const State& state, u32 count, bool is_first, float (&own)[4]) {
  const u32 keys = w.key_fragment + stage_offset(count);
  float scores[2][2][4] = {};  // [m tile][n tile]
#pragma unroll
  for (int slice = 0; slice < Config::SLICES; ++slice) {
    u32 b[4];
    load_matrices(b, keys + slice * 128);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add<Scalar>(scores[m][n], state.q[m][slice], b[2 * n], b[2 * n + 1]);
  }
  // The weights of the block before the last stand there until everybody has added its values. The first block of a
  // part must not wait: by then the phase after that one has ended as well, and its parity would stand for the next.
  if (!is_first) barrier_wait(shared_address(&plan.weights_read[w.group]), count % 2);
  const u32 to = w.scores + count % 2 * BUFFER_BYTES + w.member * sizeof(float4) * WARP;
#pragma unroll
  for (int i = 0; i < Config::GROUP_WARPS; ++i) {
    const u32 skipped = w.member > i ? sizeof(float4) * WARP : 0;  // nobody sends to itself
    if (i != w.member) store_shared(to + i * EXCHANGE_BYTES - skipped, scores[i / 2][i % 2]);
  }
  const bool second_m = w.member / 2, second_n = w.member % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = second_n ? scores[0][1][i] : scores[0][0][i], high = second_n ? scores[1][1][i] : scores[1][0][i];
    own[i] = second_m ? high : low;
  }
}

// Puts -inf where a row does not see a key.
DEVICE void mask_scores(const Params& p, const Sizes& sizes, const Plan& plan, const Warp& w, int block,
                        float (&scores)[4]) {
  const int nodes = plan.work.nodes;
  const int first = block * Config::BLOCK_KEYS + w.member % 2 * 8 + w.lane % 4 * 2 - plan.work.prefix;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = plan.row_of[row_of_value(w, w.member / 2 * 2 + i / 2)], behind = first + i % 2;
    bool visible = behind < 0 && !sizes.tail_only;
    if (behind >= 0 && behind < nodes && row < nodes) {
      const u32* bits = p.ancestors + (i64(plan.part.stream) * sizes.num_rows + row) * p.num_words;
      visible = bits[behind / 32] >> (behind % 32) & 1;
    }
    if (!visible) scores[i] = -INFINITY_F32;
  }
}

DEVICE float finite(float reference) { return reference == -INFINITY_F32 ? 0.0f : reference; }

// The weights of this warp's tile for the group.
DEVICE void give_weights(const Warp& w, State& state, u32 count, float low, float high) {
  const float w0 = exp2_fast(state.scores[0] - low), w1 = exp2_fast(state.scores[1] - low);
  const float w2 = exp2_fast(state.scores[2] - high), w3 = exp2_fast(state.scores[3] - high);
  state.latest[0] = w0 + w1, state.latest[1] = w2 + w3;
  store_shared(w.weights + count % 2 * BUFFER_BYTES + w.member * EXCHANGE_BYTES, pack_pair<Scalar>(w0, w1),
               pack_pair<Scalar>(w2, w3));
}

// Turns the scores of this warp's tile into weights relative to the rows' references. Returns whether one of this
// lane's is far above.
DEVICE bool finish_scores(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state, int block,
                          u32 count) {
#pragma unroll
  for (int i = 0; i < 4; ++i) state.scores[i] *= p.scale_log2;
  if ((block + 1) * Config::BLOCK_KEYS > plan.work.prefix) mask_scores(p, sizes, plan, w, block, state.scores);
  const float low = load_shared(w.reference), high = load_shared(w.reference + 8 * sizeof(float));
  const bool above = max(state.scores[0], state.scores[1]) > low + Config::STALE ||
                     max(state.scores[2], state.scores[3]) > high + Config::STALE;
  __syncwarp();  // the weights come to stand where partial scores were
  give_weights(w, state, count, finite(low), finite(high));
  return above;
}

// Takes the maxima of all rows whose scores rose far above their references as new ones, scales what was summed before,
// and gives the weights of that block anew.
DEVICE void raise_references(Plan& plan, const Warp& w, State& state, u32 count) {
  const int mine = w.member / 2 * 2;  // rows g and g + 8 of this warp's tile are values `mine` and `mine` + 1
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float best = warp_max<4>(max(state.scores[2 * h], state.scores[2 * h + 1]));
    float* to = reinterpret_cast<float*>(&plan.row_stats[w.group][8 * (mine + h) + w.lane / 4]);
    if (w.lane % 4 == 0) to[w.member % 2] = best;
  }
  group_barrier(w);
  float shrink[4], chosen[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 each = plan.row_stats[w.group][8 * i + w.lane / 4];
    const float best = max(each.x, each.y), old = plan.reference[row_of_value(w, i)];
    const float reference = best > old + Config::STALE ? best : old;
    shrink[i] = exp2f(old - finite(reference));
    if (i / 2 == w.member / 2) chosen[i % 2] = reference;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) state.sum[h] *= w.member / 2 == 0 ? shrink[h] : shrink[2 + h];
  give_weights(w, state, count, finite(chosen[0]), finite(chosen[1]));
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2 * Config::VALUE_SLICES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[m][n][i] *= shrink[2 * m + i / 2];
  group_barrier(w);  // the old references have been read
  if (w.member % 2 == 0 && w.lane % 4 == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) plan.reference[row_of_value(w, mine + h)] = chosen[h];
  }
  group_barrier(w);  // the new ones, and the weights, are there
}

// ---- values ------------------------------------------------------------------------------------------------------

// Adds weights x values to this warp's 128 output columns: 16 of each slice of 64.
DEVICE void add_values(Plan& plan, const Warp& w, State& state, u32 count) {
  const u32 keys = w.value_fragment + stage_offset(count), weights = w.weights + count % 2 * BUFFER_BYTES;
  u32 a[2][4];
#pragma unroll
  for (int i = 0; i < Config::GROUP_WARPS; ++i)
    load_shared(weights + i * EXCHANGE_BYTES, a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
#pragma unroll
  for (int slice = 0; slice < Config::VALUE_SLICES; ++slice) {
    u32 b[4];
    load_matrices_transposed(b, keys + slice * 128);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add<Scalar>(state.o[m][2 * slice + n], a[m], b[2 * n], b[2 * n + 1]);
  }
  __syncwarp();
  if (w.lane == 0) {
    barrier_arrive(shared_address(&plan.freed[count % Config::STAGES]));
    barrier_arrive(shared_address(&plan.weights_read[w.group]));
  }
}

// All key blocks of the part; `count` is the number of its first one and is moved past its last.
DEVICE void attend(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state, u32& count) {
  // What stands in `plan` is read again where it is needed: no register is left to hold it.
  start_copy(p, plan, w, plan.part.first_block, count);
  if (plan.part.first_block + 1 < plan.part.end_block) start_copy(p, plan, w, plan.part.first_block + 1, count + 1);
  bool above = false;
  for (int block = plan.part.first_block;; ++block, ++count) {
    const bool with_scores = block < plan.part.end_block, with_values = block > plan.part.first_block;
    float own[4];
    if (with_scores) {
      barrier_wait(shared_address(&plan.loaded[count % Config::STAGES]), count / Config::STAGES % 2);
      partial_scores(plan, w, state, count, !with_values, own);
      // Not before: the other group, which may be half a block behind, still needs the stage.
      if (block + 2 < plan.part.end_block) start_copy(p, plan, w, block + 2, count + 2);
    }
    // Partial scores of this block are there, weights of the one before.
    above = named_barrier_or(1 + w.group, Config::GROUP_THREADS, above);
    if (above) raise_references(plan, w, state, count - 1);
    if (with_scores) {
      const u32 scores = w.scores + count % 2 * BUFFER_BYTES + w.member * EXCHANGE_BYTES;
#pragma unroll
      for (int from = 0; from < Config::GROUP_WARPS - 1; ++from) {
        const float4 given = load_shared4(scores + from * sizeof(float4) * WARP);
        own[0] += given.x, own[1] += given.y, own[2] += given.z, own[3] += given.w;
      }
    }
    if (with_values) add_values(plan, w, state, count - 1);
    if (!with_scores) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) state.sum[h] += state.latest[h];
#pragma unroll
    for (int i = 0; i < 4; ++i) state.scores[i] = own[i];
    above = finish_scores(p, sizes, plan, w, state, block, count);
  }
}

// Writes row 16 m + 8 h + lane / 4 of the group; `o` points to this lane's first value of it.
template <typename Out>
DEVICE void store_row(Out* o, const float (&values)[2 * Config::VALUE_SLICES][4], int h, float factor) {
#pragma unroll
  for (int n = 0; n < 2 * Config::VALUE_SLICES; ++n) {
    const float low = values[n][2 * h] * factor, high = values[n][2 * h + 1] * factor;
    Out* to = o + n / 2 * 64 + n % 2 * 8;
    if constexpr (sizeof(Out) == 4)
      *reinterpret_cast<float2*>(to) = make_float2(low, high);
    else
      *reinterpret_cast<u32*>(to) = pack_pair<Scalar>(low, high);
  }
}

// Writes the tile, or its share of a tile that was cut. `o` and `lse` point to the tile's first row.
template <typename Out>
DEVICE void store(Plan& plan, const Warp& w, State& state, int used, Out* o, float* lse, float lse_unit) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = warp_sum<4>(state.sum[h] + state.latest[h]);
    float* to = reinterpret_cast<float*>(&plan.row_stats[w.group][8 * (w.member / 2 * 2 + h) + w.lane / 4]);
    if (w.lane % 4 == 0) to[w.member % 2] = sum;
  }
  group_barrier(w);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 each = plan.row_stats[w.group][8 * i + w.lane / 4];
    const float sum = each.x + each.y;
    const int row = w.group * Config::GROUP_ROWS + 8 * i + w.lane / 4;
    if (row < used) {
      if (w.member == 0 && w.lane % 4 == 0)
        lse[row] = sum > 0.0f ? (plan.reference[row] + log2f(sum)) * lse_unit : -INFINITY_F32;
      store_row(o + row * Config::C + w.member * 16 + w.lane % 4 * 2, state.o[i / 2], i % 2,
                sum > 0.0f ? 1.0f / sum : 0.0f);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) verify_attention_mma(
    const Scalar* q, const Scalar* pages, const i32* block_table, const i32* prefix_len, const u32* ancestors,
    const i32* num_nodes, Scalar* o, float* lse, float* o_partial, float* lse_partial, Cut* cuts, int num_streams,
    int num_rows, int num_heads, int num_words, int table_width, int num_pages, int fixed_parts, int tail_only,
    float scale_log2) {
  extern __shared__ __align__(128) u8 shared[];
  Plan& plan = *reinterpret_cast<Plan*>(shared);
  const Params p{q, pages, block_table, ancestors, num_words, table_width, num_pages, scale_log2};
  const Sizes sizes{prefix_len, num_nodes, num_streams, num_rows, num_heads, table_width * Config::PAGE,
                    int(gridDim.x), fixed_parts, tail_only != 0};
  const Warp w = this_warp(plan);
  if (threadIdx.x == 0) {
    plan.cursor = 0;
    cuts[blockIdx.x].num_parts = 0;
    for (int stage = 0; stage < Config::STAGES; ++stage) {
      barrier_init(shared_address(&plan.loaded[stage]), Config::GROUP_THREADS);
      barrier_init(shared_address(&plan.freed[stage]), Config::THREADS / WARP);
    }
    for (int group = 0; group < Config::GROUPS; ++group)
      barrier_init(shared_address(&plan.weights_read[group]), Config::GROUP_WARPS);
  }

  State state;
  u32 count = 0;  // key blocks so far: stage and phase of the barriers
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const Work work(sizes);
      plan.has_part = work.next(blockIdx.x, plan.cursor, plan.part, cuts[blockIdx.x]);
      if (plan.has_part) plan.work = work.stream_work(plan.part.stream);
    }
    __syncthreads();
    if (!plan.has_part) break;
    load_queries(p, sizes, plan, w, state);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2 * Config::VALUE_SLICES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[m][n][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) state.sum[i] = 0.0f, state.latest[i] = 0.0f;
    attend(p, sizes, plan, w, state, count);
    const int first_pair = plan.part.tile * Config::TILE_ROWS, used = plan.work.nodes * num_heads - first_pair;
    if (plan.part.slot >= 0) {
      const i64 place = i64(plan.part.slot) * Config::TILE_ROWS;
      store(plan, w, state, used, o_partial + place * Config::C, lse_partial + place, 1.0f);
    } else {
      const i64 place = i64(plan.part.stream) * num_rows * num_heads + first_pair;
      store(plan, w, state, used, o + place * Config::C, lse + place, LN_2);
    }
  }
}

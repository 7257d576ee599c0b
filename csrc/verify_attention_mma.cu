// csrc/verify_attention_mma.cu: tree attention over a paged MLA cache on the tensor cores of sm_80 and up (mma.sync).
//   in   q [S,N,H,576] | pages [P,64,576], 512 latent then 64 rope | block_table [S,M] i32 | prefix_len [S] i32 |
//        ancestors [S,N,W] u32 | num_nodes [S] i32; q and pages bf16 or half (-DDTYPE)
//   out  o [S,N,H,512] in q's dtype | lse [S,N,H] f32, nats; 0 and -inf where a row is unused or sees no key;
//        of tiles that were cut o_partial [slots,64,512] f32, normalised, and lse_partial [slots,64] f32, log2, for
//        verify_merge.cu
//   math o[i] = sum_j softmax_j(scale q[i].kv[j]) kv[j,:512], j over the prefix and {j : bit j of ancestors[i]}
//   cost 2 N H L (576 + 512) FLOP for L keys, 1152 L bytes; a key is read once for 64 (row, head) pairs
//   how  101,376 bytes of shared memory hold no 64 queries (73,728) beside two key blocks, so the queries live in
//        registers: two groups of four warps take 32 pairs each, and the warps of a group divide the 576 columns of
//        the scores' sum. They exchange partial scores, each warp finishes 8 of 32 keys, and then each adds its 128 of
//        512 output columns. The groups run apart, so one computes while the other exchanges.
//   ref  kernels/reference.py:verify_attention | test tests/kernels/test_verify_attention_gpu.py | sm_80 and up
#include "mma.cuh"
#include "verify_schedule.cuh"

struct Config {
  static constexpr int C = 512, WIDTH = 576, PAGE = 64;
  static constexpr int TILE_ROWS = 64, BLOCK_KEYS = 32, STAGES = 2;
  static constexpr int GROUPS = 2, GROUP_WARPS = 4, GROUP_ROWS = TILE_ROWS / GROUPS;
  static constexpr int THREADS = GROUPS * GROUP_WARPS * WARP, GROUP_THREADS = GROUP_WARPS * WARP;
  static constexpr int SLICES = WIDTH / 64, VALUE_SLICES = C / 64;  // of 64 columns, 16 of them a warp of the group
  static constexpr int ROW_BYTES = 2 * WIDTH, CHUNKS = 8;           // 16-byte chunks of a slice of a row
  static constexpr int OWN_KEYS = BLOCK_KEYS / GROUP_WARPS;         // keys whose scores a warp finishes
  static constexpr float STALE = 8.0f;  // log2 by which a score may be above its row's reference
};
static_assert(Config::WIDTH % 64 == 0 && Config::C % 64 == 0, "slices of 64 columns");
static_assert(Config::GROUP_ROWS == 32 && Config::OWN_KEYS == 8, "two m16 tiles by one n8 tile a warp");
static_assert(Config::PAGE % Config::BLOCK_KEYS == 0, "a key block lies in one page");
static_assert(Config::BLOCK_KEYS * Config::CHUNKS == Config::THREADS, "a thread copies one chunk of each slice");
static_assert(sizeof(Scalar) == 2, "bf16 or half");
static_assert(Config::STALE < 15.0f, "weights up to 2^STALE fit half");

using Work = Schedule<Config::TILE_ROWS, Config::BLOCK_KEYS, CUT_TILE_UNITS, CUT_MIN_UNITS, CUT_FIXED_KEYS>;

struct Params {
  const Scalar* __restrict__ q;          // [S, N, H, 576]
  const Scalar* __restrict__ pages;      // [P, 64, 576]
  const i32* __restrict__ block_table;   // [S, M]
  const u32* __restrict__ ancestors;     // [S, N, W]
  Scalar* __restrict__ o;                // [S, N, H, 512]
  float* __restrict__ lse;               // [S, N, H]
  float* __restrict__ o_partial;         // [slots, 64, 512]
  float* __restrict__ lse_partial;       // [slots, 64]
  int num_words, table_width, num_pages;
  float scale_log2;
};

struct Plan {
  // Rows of 1,152 bytes; chunk c of a slice of row r stands at c ^ (r % 8), so that 8 rows of a column of chunks, which
  // ldmatrix reads together, lie in different banks. Queries pass through on their way to registers.
  alignas(128) u8 keys[Config::STAGES][Config::BLOCK_KEYS * Config::ROW_BYTES];
  union {
    float4 scores[Config::GROUP_WARPS - 1][2][WARP];  // what a warp is given of its 8 keys: [from][m tile][lane]
    uint2 weights[2][WARP];  // what it makes of them, half an A fragment: [m tile][lane]
  } exchange[Config::GROUPS][Config::GROUP_WARPS];
  float4 row_stats[Config::GROUPS][Config::GROUP_ROWS];  // a value of each warp: maximum, at the end the sum
  float reference[Config::TILE_ROWS];  // of each row: weights are 2^(score - reference)
  alignas(16) int is_above[Config::GROUPS][Config::GROUP_WARPS];  // a score of this warp is far above its reference
  alignas(8) u64 loaded[Config::STAGES], freed[Config::STAGES], weights_read[Config::GROUPS];
  Part part;
  StreamWork work;
  int has_part, cursor;
  int row_of[Config::TILE_ROWS];  // tree row of each (row, head) pair
};
static_assert(sizeof(Plan) == PLAN_BYTES, "the launch asks for as much");
static_assert(PLAN_BYTES <= 101376, "shared memory of a block on sm_89 and sm_120");

// Accumulators of a warp: 32 rows x 128 columns of the output, and its slice of the queries.
struct State {
  float o[2][2 * Config::VALUE_SLICES][4];  // [m tile][n tile][D fragment]
  u32 q[2][Config::SLICES][4];              // [m tile][slice][A fragment]
  float sum[4];                             // of rows 16 m + 8 h + lane / 4 at 2 m + h, over this lane's keys
};

struct Warp {
  int group, member, lane;
  u32 key_fragment, value_fragment;  // this lane's ldmatrix addresses within a key block, scores and values
};

DEVICE Warp this_warp() {
  Warp w;
  w.lane = lane_id();
  w.group = warp_id() / Config::GROUP_WARPS;
  w.member = warp_id() % Config::GROUP_WARPS;
  const int row = w.lane % 8, chunk = 2 * w.member;
  const int low = w.lane / 8 % 2, high = w.lane / 16;
  w.key_fragment = (row + 8 * high) * Config::ROW_BYTES + ((chunk + low) ^ row) * 16;
  w.value_fragment = (row + 8 * low) * Config::ROW_BYTES + ((chunk + high) ^ row) * 16;
  return w;
}

// Starts the copies of this thread's chunks of one row; `row` is null for a row of zeros.
DEVICE void copy_row(u32 destination, const Scalar* row, const Scalar* valid_address) {
  const Scalar* source = row != nullptr ? row : valid_address;
#pragma unroll
  for (int slice = 0; slice < Config::SLICES; ++slice)
    copy_async(destination + slice * 128, source + slice * 64, row != nullptr);
}

DEVICE u32 copy_destination(u32 stage) {
  const int row = threadIdx.x / Config::CHUNKS, chunk = threadIdx.x % Config::CHUNKS;
  return stage + row * Config::ROW_BYTES + (chunk ^ (row % 8)) * 16;
}

// Starts the copy of key block `block`, the number `count` of this grid block. Rows of keys beyond the last used one
// come as zeros, so that what stands there (NaN) meets no weight of 0.
DEVICE void start_copy(const Params& p, Plan& plan, int block, u32 count) {
  const int key = block * Config::BLOCK_KEYS + threadIdx.x / Config::CHUNKS;
  const int chunk = threadIdx.x % Config::CHUNKS;
  const Scalar* row = nullptr;
  if (key < plan.work.prefix + plan.work.nodes) {
    const int page = p.block_table[i64(plan.part.stream) * p.table_width + key / Config::PAGE];
    if (page >= 0 && page < p.num_pages)
      row = p.pages + (i64(page) * Config::PAGE + key % Config::PAGE) * Config::WIDTH + chunk * 8;
  }
  copy_row(copy_destination(shared_address(plan.keys[count % 2])), row, p.pages);
  copy_async_arrive(shared_address(&plan.loaded[count % 2]));
}

// Brings the tile's queries into registers by way of the key stages, which nobody uses at this time.
DEVICE void load_queries(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state) {
  const i64 first = (i64(plan.part.stream) * sizes.num_rows * sizes.num_heads) + plan.part.tile * Config::TILE_ROWS;
  const int used = plan.work.nodes * sizes.num_heads - plan.part.tile * Config::TILE_ROWS;
#pragma unroll
  for (int half = 0; half < Config::GROUPS; ++half) {
    const int row = half * Config::GROUP_ROWS + threadIdx.x / Config::CHUNKS;
    const Scalar* source = p.q + (first + row) * Config::WIDTH + threadIdx.x % Config::CHUNKS * 8;
    copy_row(copy_destination(shared_address(plan.keys[half])), row < used ? source : nullptr, p.q);
  }
  copy_async_commit();
  if (threadIdx.x < Config::TILE_ROWS) {
    plan.row_of[threadIdx.x] = (plan.part.tile * Config::TILE_ROWS + threadIdx.x) / sizes.num_heads;
    plan.reference[threadIdx.x] = -INFINITY_F32;
  }
  copy_async_wait<0>();
  __syncthreads();
  const u32 queries = shared_address(plan.keys[w.group]) + w.value_fragment;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int slice = 0; slice < Config::SLICES; ++slice)
      load_matrices(state.q[m][slice], queries + m * 16 * Config::ROW_BYTES + slice * 128);
  __syncthreads();
}

// This warp's part of the scores of 32 rows and 16 keys, of its 16 columns of each slice.
DEVICE void partial_scores(const Warp& w, const State& state, u32 keys, float (&scores)[2][2][4]) {
#pragma unroll
  for (int slice = 0; slice < Config::SLICES; ++slice) {
    u32 b[4];
    load_matrices(b, keys + w.key_fragment + slice * 128);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add<Scalar>(scores[n][m], state.q[m][slice], b[2 * n], b[2 * n + 1]);
  }
}

// Hands partial scores of 8 keys to the warp that finishes them.
DEVICE void send(Plan& plan, const Warp& w, int to, const float (&scores)[2][4]) {
  const int from = (w.member - to - 1) & 3;
#pragma unroll
  for (int m = 0; m < 2; ++m)
    plan.exchange[w.group][to].scores[from][m][w.lane] =
        make_float4(scores[m][0], scores[m][1], scores[m][2], scores[m][3]);
}

// Partial scores of all 32 keys; those of the 8 keys that this warp finishes stay in `own` [m tile][D fragment].
DEVICE void exchange_scores(Plan& plan, const Warp& w, const State& state, u32 keys, u32 count, float (&own)[2][4]) {
  const int half = w.member / 2, other = 1 - half;
  float scores[2][2][4] = {};  // [n tile][m tile]
  partial_scores(w, state, keys + other * 16 * Config::ROW_BYTES, scores);
  // The weights of the block before stand where partial scores go.
  barrier_wait(shared_address(&plan.weights_read[w.group]), (count + 1) % 2);
  send(plan, w, 2 * other, scores[0]);
  send(plan, w, 2 * other + 1, scores[1]);
  float rest[2][2][4] = {};
  partial_scores(w, state, keys + half * 16 * Config::ROW_BYTES, rest);
  const bool second = w.member % 2;
  float sent[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float first = rest[0][i / 4][i % 4], last = rest[1][i / 4][i % 4];
    own[i / 4][i % 4] = second ? last : first;
    sent[i / 4][i % 4] = second ? first : last;
  }
  send(plan, w, w.member ^ 1, sent);
}

DEVICE bool is_visible(const Params& p, const Sizes& sizes, const Plan& plan, int row, int key) {
  const int behind = key - plan.work.prefix;
  if (behind < 0) return !sizes.tail_only;
  if (behind >= plan.work.nodes || row >= plan.work.nodes) return false;
  const u32* bits = p.ancestors + (i64(plan.part.stream) * sizes.num_rows + row) * p.num_words;
  return bits[behind / 32] >> (behind % 32) & 1;
}

// Puts -inf where a row does not see a key; `own` is [m tile][2 h + key], rows as in State.
DEVICE void mask_scores(const Params& p, const Sizes& sizes, const Plan& plan, const Warp& w, int block,
                        float (&own)[2][4]) {
  const int key = block * Config::BLOCK_KEYS + w.member * Config::OWN_KEYS + w.lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = plan.row_of[w.group * Config::GROUP_ROWS + 8 * i + w.lane / 4];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (!is_visible(p, sizes, plan, row, key + j)) own[i / 2][i % 2 * 2 + j] = -INFINITY_F32;
  }
}

DEVICE void group_barrier(const Warp& w) { named_barrier(1 + w.group, Config::GROUP_THREADS); }

// Row of the tile of this lane's values i = 2 m + h.
DEVICE int row_of_value(const Warp& w, int i) { return w.group * Config::GROUP_ROWS + 8 * i + w.lane / 4; }

DEVICE float finite(float reference) { return reference == -INFINITY_F32 ? 0.0f : reference; }

// The weights of this warp's 8 keys, as the half of an A fragment; adds them to `sum`.
DEVICE void give_weights(Plan& plan, const Warp& w, const float (&own)[2][4], const float (&reference)[4],
                         float (&sum)[4]) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = exp2f(own[m][i] - reference[2 * m + i / 2]);
    sum[2 * m] += weight[0] + weight[1], sum[2 * m + 1] += weight[2] + weight[3];
    plan.exchange[w.group][w.member].weights[m][w.lane] =
        make_uint2(pack_pair<Scalar>(weight[0], weight[1]), pack_pair<Scalar>(weight[2], weight[3]));
  }
}

// Takes the maxima of all rows whose scores rose far above their references as new ones, and scales what was summed.
DEVICE void raise_references(Plan& plan, const Warp& w, State& state, const float (&own)[2][4],
                             const float (&old_sum)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float best = warp_max<4>(max(own[i / 2][i % 2 * 2], own[i / 2][i % 2 * 2 + 1]));
    if (w.lane % 4 == 0) reinterpret_cast<float*>(&plan.row_stats[w.group][8 * i + w.lane / 4])[w.member] = best;
  }
  group_barrier(w);  // maxima are there, and nobody reads weights before the next barrier
  float chosen[4], reference[4], shrink[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 each = plan.row_stats[w.group][8 * i + w.lane / 4];
    const float best = max(max(each.x, each.y), max(each.z, each.w)), old = plan.reference[row_of_value(w, i)];
    chosen[i] = best > old + Config::STALE ? best : old;
    reference[i] = finite(chosen[i]);
    shrink[i] = exp2f(old - reference[i]);
    state.sum[i] = old_sum[i] * shrink[i];
  }
  give_weights(plan, w, own, reference, state.sum);
  group_barrier(w);  // weights are there, and the old references have been read
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (w.member == 0 && w.lane % 4 == 0) plan.reference[row_of_value(w, i)] = chosen[i];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2 * Config::VALUE_SLICES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[m][n][i] *= shrink[2 * m + i / 2];
}

// Adds up the partial scores of this warp's 8 keys and gives their weights to the group.
DEVICE void softmax(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state, int block,
                    float (&own)[2][4]) {
  group_barrier(w);  // partial scores are there
#pragma unroll
  for (int from = 0; from < Config::GROUP_WARPS - 1; ++from)
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float4 s = plan.exchange[w.group][w.member].scores[from][m][w.lane];
      own[m][0] += s.x, own[m][1] += s.y, own[m][2] += s.z, own[m][3] += s.w;
    }
  __syncwarp();  // weights come to stand where these were
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i / 4][i % 4] *= p.scale_log2;
  if ((block + 1) * Config::BLOCK_KEYS > plan.work.prefix) mask_scores(p, sizes, plan, w, block, own);
  float reference[4], old_sum[4];
  bool above = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reference[i] = plan.reference[row_of_value(w, i)];
    above |= max(own[i / 2][i % 2 * 2], own[i / 2][i % 2 * 2 + 1]) > reference[i] + Config::STALE;
    reference[i] = finite(reference[i]);
    old_sum[i] = state.sum[i];
  }
  give_weights(plan, w, own, reference, state.sum);
  above = __any_sync(FULL_MASK, above);
  if (w.lane == 0) plan.is_above[w.group][w.member] = above;
  group_barrier(w);  // weights are there
  const int4 any = *reinterpret_cast<const int4*>(plan.is_above[w.group]);
  if (any.x | any.y | any.z | any.w) raise_references(plan, w, state, own, old_sum);
}

// Adds weights x values to this warp's 128 output columns: 16 of each slice of 64.
DEVICE void add_values(Plan& plan, const Warp& w, State& state, u32 keys) {
#pragma unroll
  for (int step = 0; step < Config::BLOCK_KEYS / 16; ++step) {
    u32 a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint2 low = plan.exchange[w.group][2 * step].weights[m][w.lane];
      const uint2 high = plan.exchange[w.group][2 * step + 1].weights[m][w.lane];
      a[m][0] = low.x, a[m][1] = low.y, a[m][2] = high.x, a[m][3] = high.y;
    }
#pragma unroll
    for (int slice = 0; slice < Config::VALUE_SLICES; ++slice) {
      u32 b[4];
      load_matrices_transposed(b, keys + w.value_fragment + step * 16 * Config::ROW_BYTES + slice * 128);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m)
          multiply_add<Scalar>(state.o[m][2 * slice + n], a[m], b[2 * n], b[2 * n + 1]);
    }
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
  for (int i = 0; i < 4; ++i) {
    const float sum = warp_sum<4>(state.sum[i]);
    if (w.lane % 4 == 0) reinterpret_cast<float*>(&plan.row_stats[w.group][8 * i + w.lane / 4])[w.member] = sum;
  }
  group_barrier(w);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 each = plan.row_stats[w.group][8 * i + w.lane / 4];
    const float sum = (each.x + each.y) + (each.z + each.w);
    const int row = w.group * Config::GROUP_ROWS + 8 * i + w.lane / 4;
    if (row < used) {
      if (w.member == 0 && w.lane % 4 == 0)
        lse[row] = sum > 0.0f ? (plan.reference[row] + log2f(sum)) * lse_unit : -INFINITY_F32;
      store_row(o + row * Config::C + w.member * 16 + w.lane % 4 * 2, state.o[i / 2], i % 2,
                sum > 0.0f ? 1.0f / sum : 0.0f);
    }
  }
}

// 0 and -inf for the rows that no stream uses.
DEVICE void clear_unused_rows(const Params& p, const Sizes& sizes) {
  for (int row = blockIdx.x; row < sizes.num_streams * sizes.num_rows; row += gridDim.x) {
    if (row % sizes.num_rows < Work::stream_work(sizes, row / sizes.num_rows).nodes) continue;
    const i64 first = i64(row) * sizes.num_heads;
    for (int i = threadIdx.x; i < sizes.num_heads * (Config::C / 8); i += Config::THREADS)
      reinterpret_cast<uint4*>(p.o + first * Config::C)[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < sizes.num_heads; i += Config::THREADS) p.lse[first + i] = -INFINITY_F32;
  }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) verify_attention_mma(
    const Scalar* q, const Scalar* pages, const i32* block_table, const i32* prefix_len, const u32* ancestors,
    const i32* num_nodes, Scalar* o, float* lse, float* o_partial, float* lse_partial, int num_streams, int num_rows,
    int num_heads, int num_words, int table_width, int num_pages, int fixed_parts, int tail_only,
    float scale_log2) {
  extern __shared__ __align__(128) u8 shared[];
  Plan& plan = *reinterpret_cast<Plan*>(shared);
  const Params p{q,         pages,     block_table, ancestors, o, lse, o_partial, lse_partial,
                 num_words, table_width, num_pages, scale_log2};
  const Sizes sizes{prefix_len, num_nodes, num_streams, num_rows, num_heads, table_width * Config::PAGE,
                    int(gridDim.x), fixed_parts, tail_only != 0};
  const Warp w = this_warp();
  if (threadIdx.x == 0) {
    plan.cursor = 0;
    for (int stage = 0; stage < Config::STAGES; ++stage) {
      barrier_init(shared_address(&plan.loaded[stage]), Config::THREADS);
      barrier_init(shared_address(&plan.freed[stage]), Config::THREADS / WARP);
    }
    for (int group = 0; group < Config::GROUPS; ++group)
      barrier_init(shared_address(&plan.weights_read[group]), Config::GROUP_WARPS);
  }
  clear_unused_rows(p, sizes);

  State state;
  u32 count = 0;  // key blocks so far: stage and phase of the barriers
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const Work work(sizes);
      plan.has_part = work.next(blockIdx.x, plan.cursor, plan.part);
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
    for (int i = 0; i < 4; ++i) state.sum[i] = 0.0f;

    // What stands in `plan` is read again where it is needed: no register is left to hold it.
    start_copy(p, plan, plan.part.first_block, count);
    if (plan.part.first_block + 1 < plan.part.end_block) start_copy(p, plan, plan.part.first_block + 1, count + 1);
    for (int block = plan.part.first_block; block < plan.part.end_block; ++block, ++count) {
      const u32 keys = shared_address(plan.keys[count % 2]);
      float own[2][4];
      barrier_wait(shared_address(&plan.loaded[count % 2]), count / 2 % 2);
      exchange_scores(plan, w, state, keys, count, own);
      // Into the stage of the block before, once both groups are through with it.
      if (block > plan.part.first_block && block + 1 < plan.part.end_block) {
        barrier_wait(shared_address(&plan.freed[(count + 1) % 2]), (count - 1) / 2 % 2);
        start_copy(p, plan, block + 1, count + 1);
      }
      softmax(p, sizes, plan, w, state, block, own);
      add_values(plan, w, state, keys);
      if (w.lane == 0) {
        barrier_arrive(shared_address(&plan.freed[count % 2]));
        barrier_arrive(shared_address(&plan.weights_read[w.group]));
      }
    }
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

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
//   ref  kernels/reference/ops.py:verify_attention | test tests/kernels/test_verify_attention_gpu.py | sm_80 and up
#include "mma.cuh"
#include "named_barriers.cuh"
#include "verify_schedule.cuh"

struct Config {
  static constexpr int C = 512, WIDTH = 576, PAGE = 64;
  static constexpr int TILE_ROWS = 64, BLOCK_KEYS = 32, STAGES = 2, PAGE_SLOTS = 4;
  static constexpr int GROUPS = 2, GROUP_WARPS = 4, GROUP_ROWS = TILE_ROWS / GROUPS;
  static constexpr int THREADS = GROUPS * GROUP_WARPS * WARP, GROUP_THREADS = GROUP_WARPS * WARP;
  static constexpr int SLICES = WIDTH / 64, VALUE_SLICES = C / 64;  // of 64 columns, 16 of them a warp of the group
  static constexpr int ROW_BYTES = 2 * WIDTH;
  // NOTE: lanes of a warp that say it has read a stage. One would do, behind a __syncwarp, but racecheck follows only a
  // thread's own arrivals and reports every copy that waits for them: 24 hazards, among which a real one would be lost.
  // On sm_100 the compiler spills registers with all.
  static constexpr int ARRIVING = __CUDA_ARCH__ == 1000 ? 1 : WARP;
  static constexpr float STALE = 8.0f;  // log2 by which a score may be above its row's reference
};
static_assert(Config::WIDTH % 64 == 0 && Config::C % 64 == 0, "slices of 64 columns");
static_assert(Config::GROUP_ROWS == 32 && Config::BLOCK_KEYS == 8 * Config::GROUP_WARPS, "8 keys of 32 rows a warp");
static_assert(Config::STAGES * Config::BLOCK_KEYS == Config::TILE_ROWS, "queries pass through the stages");
static_assert(Config::PAGE % Config::BLOCK_KEYS == 0, "a key block lies in one page");
static_assert(Config::BLOCK_KEYS * 8 == Config::THREADS, "a thread copies one chunk of each slice");
static_assert(Config::ROW_BYTES % 128 == 0, "a slice of a row is one line of banks");
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

constexpr int TILE_BYTES = sizeof(float4) * WARP;  // a D fragment of a warp
union Exchange {
  float4 scores[Config::GROUP_WARPS - 1][2][WARP];  // what a warp is given of its 8 keys: [from][m tile][lane]
  uint2 weights[2][WARP];                           // what it makes of them, halves of A fragments: [m tile][lane]
};

struct Plan {
  // Chunk c (16 bytes) of a slice of row r stands at c ^ (r % 8): 8 rows of a column of chunks, which ldmatrix reads
  // together, lie in different banks. Queries pass through on their way to registers.
  alignas(128) u8 keys[Config::STAGES][Config::BLOCK_KEYS * Config::ROW_BYTES];
  Exchange exchange[Config::GROUPS][Config::GROUP_WARPS];
  float4 row_stats[Config::GROUPS][Config::GROUP_ROWS];  // a value of each warp: maximum, at the end the sum
  float reference[Config::TILE_ROWS];                    // of each row: weights are 2^(score - reference)
  alignas(8) u64 loaded[Config::STAGES], freed[Config::STAGES];
  i32 pages[Config::PAGE_SLOTS];  // of the key blocks that are copied next; they come with the block two before
  Part part;
  StreamWork work;
  int cursor;
  int shift;  // key block minus its number among those of this grid block, which counts through all its parts
  u32 first, end, masked_from;  // numbers of the part's key blocks, and of its first with keys beyond the prefix
  int row_of[Config::TILE_ROWS];  // tree row of each (row, head) pair
};
static_assert(sizeof(Plan) == PLAN_BYTES, "the launch asks for as much");
static_assert(PLAN_BYTES <= 101376, "shared memory of a block on sm_89 and sm_120");

// What a warp holds: 32 rows x 128 columns of the output, and its columns of 32 queries.
struct State {
  float o[2][2 * Config::VALUE_SLICES][4];  // [m tile][n tile][D fragment]
  u32 q[2][Config::SLICES][4];              // [m tile][slice][A fragment]
  float sum[4];                             // of rows 16 m + 8 h + lane / 4 at 2 m + h, over this lane's keys
};

// Place of a thread, and addresses in shared memory that follow from it. Of a key block a warp takes the tiles of 8
// keys in the order member, member + 1, ... (mod 4), so that the first is the one it finishes.
struct Warp {
  int group, member, lane;
  u32 key_fragment[2], value_fragment;  // of stage 0, for ldmatrix: its first two tiles, its last two; values
  u32 exchange, reference;              // this lane's in the group's first exchange; of row lane / 4 of the group
};

DEVICE Warp this_warp(const Plan& plan) {
  Warp w;
  w.lane = lane_id();
  w.group = warp_id() / Config::GROUP_WARPS;
  w.member = warp_id() % Config::GROUP_WARPS;
  const int row = w.lane % 8, low = w.lane / 8 % 2, high = w.lane / 16;
  const u32 keys = shared_address(plan.keys);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int tile = (w.member + 2 * i + high) % Config::GROUP_WARPS;
    w.key_fragment[i] = keys + (row + 8 * tile) * Config::ROW_BYTES + ((2 * w.member + low) ^ row) * 16;
  }
  w.value_fragment = keys + (row + 8 * low) * Config::ROW_BYTES + ((2 * w.member + high) ^ row) * 16;
  w.exchange = shared_address(&plan.exchange[w.group]) + w.lane * sizeof(float4);
  w.reference = shared_address(&plan.reference[w.group * Config::GROUP_ROWS + w.lane / 4]);
#if __CUDA_ARCH__ >= 900
  // NOTE: hides how they came about; the compiler would find them anew in the loop and run out of registers there.
  asm volatile("" : "+r"(w.key_fragment[0]), "+r"(w.key_fragment[1]));
#endif
  return w;
}

DEVICE void group_barrier(const Warp& w) { named_barrier(1 + w.group, Config::GROUP_THREADS); }

// Row of the tile of a lane's accumulators at m = i / 2, and of its D fragment's halves h = i % 2.
DEVICE int row_of_value(const Warp& w, int i) { return w.group * Config::GROUP_ROWS + 8 * i + w.lane / 4; }

DEVICE u32 stage_offset(u32 count) { return count % Config::STAGES * (Config::BLOCK_KEYS * Config::ROW_BYTES); }

// ---- copies ------------------------------------------------------------------------------------------------------

// The entry of the block table for a key block.
DEVICE const i32* page_of(const Params& p, const Plan& plan, int block) {
  const int page = block / (Config::PAGE / Config::BLOCK_KEYS);
  return p.block_table + i64(plan.part.stream) * p.table_width + page;
}

// Starts the copy of key block number `count` and of the next but one's page. Rows beyond
// the last used one, and of pages that are none, come as zeros, so that what stands there (NaN) meets no weight of 0.
DEVICE void start_copy(const Params& p, Plan& plan, u32 count) {
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8, block = int(count) + plan.shift;
  const int page = plan.pages[count % Config::PAGE_SLOTS];
  const bool valid = page >= 0 && page < p.num_pages &&
                     block * Config::BLOCK_KEYS + row < plan.work.prefix + plan.work.nodes;
  const int place = page * Config::PAGE + block % (Config::PAGE / Config::BLOCK_KEYS) * Config::BLOCK_KEYS + row;
  const Scalar* source = p.pages + i64(valid ? place : 0) * Config::WIDTH + chunk * 8;
  const u32 stage = count % Config::STAGES;
  const u32 to = shared_address(plan.keys[stage]) + row * Config::ROW_BYTES + (chunk ^ (row % 8)) * 16;
#pragma unroll
  for (int slice = 0; slice < Config::SLICES; ++slice) copy_async(to + slice * 128, source + slice * 64, valid);
  if (threadIdx.x == 0 && count + 2 < plan.end)
    copy_async4(shared_address(&plan.pages[(count + 2) % Config::PAGE_SLOTS]), page_of(p, plan, block + 2));
  copy_async_arrive(shared_address(&plan.loaded[stage]));
}

// Brings the tile's queries into registers by way of the stages, which nobody uses at this time.
DEVICE void load_queries(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state,
                         u32 count) {
  const i64 first = (i64(plan.part.stream) * sizes.num_rows * sizes.num_heads) + plan.part.tile * Config::TILE_ROWS;
  const int used = plan.work.nodes * sizes.num_heads - plan.part.tile * Config::TILE_ROWS;
#pragma unroll
  for (int half = 0; half < Config::GROUPS; ++half) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8, pair = half * Config::GROUP_ROWS + row;
    const Scalar* source = p.q + (pair < used ? first + pair : 0) * Config::WIDTH + chunk * 8;
    const u32 to = shared_address(plan.keys[half]) + row * Config::ROW_BYTES + (chunk ^ (row % 8)) * 16;
#pragma unroll
    for (int slice = 0; slice < Config::SLICES; ++slice) copy_async(to + slice * 128, source + slice * 64, pair < used);
  }
  copy_async_commit();
  if (threadIdx.x < Config::TILE_ROWS) {
    plan.row_of[threadIdx.x] = (plan.part.tile * Config::TILE_ROWS + threadIdx.x) / sizes.num_heads;
    plan.reference[threadIdx.x] = -INFINITY_F32;
  }
  if (threadIdx.x < 2 && count + threadIdx.x < plan.end)
    plan.pages[(count + threadIdx.x) % Config::PAGE_SLOTS] = *page_of(p, plan, plan.part.first_block + threadIdx.x);
  copy_async_wait<0>();
  __syncthreads();
  const u32 queries = w.value_fragment + stage_offset(w.group);
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int slice = 0; slice < Config::SLICES; ++slice)
      load_matrices(state.q[m][slice], queries + m * 16 * Config::ROW_BYTES + slice * 128);
  __syncthreads();
}

// ---- scores ------------------------------------------------------------------------------------------------------

// This warp's part of the scores of 32 rows and two tiles of 8 keys, of its 16 columns of each slice.
DEVICE void partial_scores(const State& state, u32 keys, float (&scores)[2][2][4]) {
#pragma unroll
  for (int slice = 0; slice < Config::SLICES; ++slice) {
    u32 b[4];
    load_matrices(b, keys + slice * 128);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) multiply_add<Scalar>(scores[n][m], state.q[m][slice], b[2 * n], b[2 * n + 1]);
  }
}

// Hands partial scores of the tile `i` places on to the warp that finishes it.
DEVICE void send(const Warp& w, int i, const float (&scores)[2][4]) {
  const u32 to = w.exchange + (w.member + i) % Config::GROUP_WARPS * sizeof(Exchange);
#pragma unroll
  for (int m = 0; m < 2; ++m) store_shared(to + ((Config::GROUP_WARPS - 1 - i) * 2 + m) * TILE_BYTES, scores[m]);
}

// Partial scores of a key block; those of the 8 keys that this warp finishes stay in `own` [m tile].
DEVICE void exchange_scores(const Warp& w, const State& state, u32 count, float (&own)[2][4]) {
  float last[2][2][4] = {};
  partial_scores(state, w.key_fragment[1] + stage_offset(count), last);
  group_barrier(w);  // everybody has read the weights of the block before, which stand where scores go
  send(w, 2, last[0]);
  send(w, 3, last[1]);
  float first[2][2][4] = {};
  partial_scores(state, w.key_fragment[0] + stage_offset(count), first);
  send(w, 1, first[1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i / 4][i % 4] = first[0][i / 4][i % 4];
}

// Puts -inf where a row does not see a key.
DEVICE void mask_scores(const Params& p, const Sizes& sizes, const Plan& plan, const Warp& w, int block,
                        float (&own)[2][4]) {
  const int nodes = plan.work.nodes;
  const int first = block * Config::BLOCK_KEYS + w.member * 8 + w.lane % 4 * 2 - plan.work.prefix;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = plan.row_of[row_of_value(w, i)];
    const u32* bits = p.ancestors + (i64(plan.part.stream) * sizes.num_rows + row) * p.num_words;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int behind = first + j;
      bool visible = behind < 0 && !sizes.tail_only;
      if (behind >= 0 && behind < nodes && row < nodes) visible = bits[behind / 32] >> (behind % 32) & 1;
      if (!visible) own[i / 2][i % 2 * 2 + j] = -INFINITY_F32;
    }
  }
}

DEVICE float finite(float reference) { return reference == -INFINITY_F32 ? 0.0f : reference; }

// The weights of this warp's 8 keys for the group; adds them to `sum`.
DEVICE void give_weights(const Warp& w, const float (&own)[2][4], const float (&reference)[4], float (&sum)[4]) {
  // A uint2 a lane; `exchange` counts in float4.
  const u32 to = w.exchange - w.lane * 8 + w.member * sizeof(Exchange);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = exp2_fast(own[m][i] - reference[2 * m + i / 2]);
    sum[2 * m] += weight[0] + weight[1], sum[2 * m + 1] += weight[2] + weight[3];
    store_shared(to + m * sizeof(uint2) * WARP, pack_pair<Scalar>(weight[0], weight[1]),
                 pack_pair<Scalar>(weight[2], weight[3]));
  }
}

// Takes the maxima of all rows whose scores rose far above their references as new ones, scales what was summed, and
// gives the weights of this block anew.
DEVICE void raise_references(Plan& plan, const Warp& w, State& state, const float (&own)[2][4],
                             const float (&old_sum)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float best = warp_max<4>(max(own[i / 2][i % 2 * 2], own[i / 2][i % 2 * 2 + 1]));
    if (w.lane % 4 == 0) reinterpret_cast<float*>(&plan.row_stats[w.group][8 * i + w.lane / 4])[w.member] = best;
  }
  group_barrier(w);
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
  give_weights(w, own, reference, state.sum);
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
DEVICE void softmax(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state, u32 count,
                    float (&own)[2][4]) {
  group_barrier(w);  // partial scores are there
  const u32 scores = w.exchange + w.member * sizeof(Exchange);
#pragma unroll
  for (int i = 0; i < 2 * (Config::GROUP_WARPS - 1); ++i) {
    const float4 s = load_shared4(scores + i * TILE_BYTES);
    float(&sum)[4] = own[i % 2];
    sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i / 4][i % 4] *= p.scale_log2;
  if (count >= plan.masked_from) mask_scores(p, sizes, plan, w, int(count) + plan.shift, own);
  float reference[4], old_sum[4];
  bool above = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reference[i] = load_shared(w.reference + 8 * i * sizeof(float));
    above |= max(own[i / 2][i % 2 * 2], own[i / 2][i % 2 * 2 + 1]) > reference[i] + Config::STALE;
    reference[i] = finite(reference[i]);
    old_sum[i] = state.sum[i];
  }
  __syncwarp();  // weights come to stand where partial scores were
  give_weights(w, own, reference, state.sum);
  // Weights are there.
  if (named_barrier_or(1 + w.group, Config::GROUP_THREADS, above)) raise_references(plan, w, state, own, old_sum);
}

// ---- values ------------------------------------------------------------------------------------------------------

// Adds weights x values to this warp's 128 output columns: 16 of each slice of 64.
DEVICE void add_values(const Warp& w, State& state, u32 count) {
  const u32 keys = w.value_fragment + stage_offset(count), weights = w.exchange - w.lane * 8;
#pragma unroll
  for (int step = 0; step < Config::BLOCK_KEYS / 16; ++step) {
    u32 a[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_shared(weights + (2 * step + i % 2) * sizeof(Exchange) + i / 2 * sizeof(uint2) * WARP,
                  a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int slice = 0; slice < Config::VALUE_SLICES; ++slice) {
      u32 b[4];
      load_matrices_transposed(b, keys + step * 16 * Config::ROW_BYTES + slice * 128);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply_add<Scalar>(state.o[m][2 * slice + n], a[m], b[2 * n], b[2 * n + 1]);
    }
  }
}

// All key blocks of the part; `count` is the number of its first one and is moved past its last.
DEVICE void attend(const Params& p, const Sizes& sizes, Plan& plan, const Warp& w, State& state, u32& count) {
  // What stands in `plan` is read again where it is needed: no register is left to hold it.
  start_copy(p, plan, count);
  if (count + 1 < plan.end) start_copy(p, plan, count + 1);
  for (; count < plan.end; ++count) {
    float own[2][4];
    barrier_wait(shared_address(&plan.loaded[count % Config::STAGES]), count / Config::STAGES % 2);
    exchange_scores(w, state, count, own);
    // Into the stage of the block before, once both groups are through with it.
    if (count > plan.first && count + 1 < plan.end) {
      barrier_wait(shared_address(&plan.freed[(count + 1) % Config::STAGES]), (count - 1) / Config::STAGES % 2);
      start_copy(p, plan, count + 1);
    }
    softmax(p, sizes, plan, w, state, count, own);
    add_values(w, state, count);
    __syncwarp();
    if (w.lane < Config::ARRIVING) barrier_arrive(shared_address(&plan.freed[count % Config::STAGES]));
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
    for (int group = 0; group < Config::GROUPS; ++group) named_barrier_init(1 + group, Config::GROUP_THREADS);
    for (int stage = 0; stage < Config::STAGES; ++stage) {
      barrier_init(shared_address(&plan.loaded[stage]), Config::THREADS);
      barrier_init(shared_address(&plan.freed[stage]), Config::THREADS / WARP * Config::ARRIVING);
    }
  }

  State state;
  u32 count = 0;  // key blocks so far: stage and phase of the barriers
  for (;;) {
    __syncthreads();
    bool has_part = false;  // thread 0's; the barrier tells the others
    if (threadIdx.x == 0) {
      const Work work(sizes);
      has_part = work.next(blockIdx.x, plan.cursor, plan.part, cuts[blockIdx.x]);
      if (has_part) {
        plan.work = work.stream_work(plan.part.stream);
        plan.shift = plan.part.first_block - int(count);
        plan.first = count, plan.end = plan.part.end_block - plan.shift;
        plan.masked_from = max(plan.work.prefix / Config::BLOCK_KEYS - plan.shift, int(count));
      }
    }
    if (!__syncthreads_or(has_part)) break;
    load_queries(p, sizes, plan, w, state, count);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2 * Config::VALUE_SLICES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[m][n][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) state.sum[i] = 0.0f;
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

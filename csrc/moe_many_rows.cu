// csrc/moe_many_rows.cu: routed INT4 experts of many rows, by Hopper's warpgroup products of dequantised weights.
//   in   x [T,D] | expert_ids [T,k] i32 (an id outside 0..E-1 is no expert) | weights [T,k] f32 | gate_up [E,2I,D],
//        gate rows first, and down [E,D,I]: INT4 words i32 and scales | added [T,D] as x, or null
//   out  out [T,D] | between the kernels: order, tiles and turned x of moe_many_plan.cuh, hidden [T k,I] turned,
//        parts [T k,D], as x
//   math out[t] = added[t] + sum over s of weights[t,s] down_e(silu(gate_e x_t) * up_e x_t), e = expert_ids[t,s]; a
//        weight is rounded to x's dtype after its scale, as checkpoints are loaded; sums in float32
//   cost as moe_int4.cu: bound by bytes, from some 16 picks an expert on by 6 D I FLOP a pick
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_many_rows.py | sm_90a
//
// Items of work are a tile of picks of one expert by a run of feature tiles, first those of gate and up, then those of
// down, which wait for the hidden rows of their tile. A block takes the next item when it has copied the one before.
// COPIERS of its warps copy, STAGES slabs ahead, from item to item; the WORKERS have 16 weight rows each, over all
// inputs. Their words become 16-bit integers in registers, exactly, and are multiplied by their scale: the A side of
// wgmma. The tile's rows of x, in shared memory, are the B side, so that a warpgroup reads them once. A row's sums run
// in one order whatever the other rows are.
// Which input a place of K stands for is free as long as both sides agree: rows of x and of hidden are turned, so that
// a lane finds what it needs of 32 inputs in one word (turned_place). Which matrix rows the fragments hold is free too:
// gate and up of a feature meet in a lane, and stored features are neighbours.
//
// -D constants: DTYPE of x and SCALE_DTYPE, the same (1, 2) | MODEL_WIDTH D | INNER_WIDTH I | NUM_EXPERTS E |
// TILE_EIGHTS eights of picks in a tile | SLAB_INPUTS at most in a stage | STAGES, in RING_BYTES of shared memory
#include "hopper.cuh"
#include "int4_pairs.cuh"
#include "mma.cuh"
#include "moe_many_plan.cuh"
#include "moe_many_products.cuh"

constexpr int WORKERS = 16, COPIERS = 4;  // warps
constexpr int THREADS = (WORKERS + COPIERS) * WARP;
constexpr int TILE_PICKS = 8 * TILE_EIGHTS, TILE_ROWS = 16 * WORKERS, COPIED_ROWS = TILE_ROWS / COPIERS;
constexpr bool WIDE = TILE_EIGHTS > 3;  // by wgmma, which takes as long for 8 picks as for 32; else by mma.sync
constexpr int LEAST_SLABS = 7;  // of an item of work, where there are as many features
static_assert(SCALE_DTYPE == DTYPE, "a scale multiplies pairs of weights");

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

// One slab of a tile: TILE_ROWS rows of a matrix by SLAB inputs, and the same inputs of the picks' rows of x.
template <int INPUTS, int FEATURES_, bool GATED_>
struct Stage {
  static constexpr int K = INPUTS, FEATURES = FEATURES_;
  static constexpr bool GATED = GATED_;
  static constexpr int SLAB = power_of_two_divisor(K, SLAB_INPUTS), SLABS = K / SLAB, GROUPS = SLAB / GROUP;
  static constexpr int TILE_FEATURES = GATED ? TILE_ROWS / 2 : TILE_ROWS;
  static constexpr int TILES = FEATURES / TILE_FEATURES;
  static constexpr int RUN = min_of(TILES, cdiv(LEAST_SLABS, SLABS)), RUNS = cdiv(TILES, RUN);
  static constexpr int MATRIX_ROWS = GATED ? 2 * FEATURES : FEATURES;
  static constexpr int SCALE_BYTES = GROUPS * sizeof(Scalar);
  // A row's words, then its scales; 16 bytes more than the words put what a warp reads of 8 rows into different banks.
  static constexpr int PITCH = GROUPS * 16 + 16;
  // Eight rows of x: a box of 64 inputs (hopper.cuh) after the other.
  static constexpr int X_UNITS = SLAB * 2 / 16, EIGHT_BYTES = 8 * SLAB * 2;
  static constexpr int WEIGHTS_AT = TILE_EIGHTS * EIGHT_BYTES, BYTES = WEIGHTS_AT + TILE_ROWS * PITCH;
  static_assert(SLAB >= 128 && TILE_FEATURES % GROUP == 0 && FEATURES % TILE_FEATURES == 0, "see many_build");
  static_assert(BYTES % 1024 == 0, "a stage begins where boxes may");
};

using UpStage = Stage<MODEL_WIDTH, INNER_WIDTH, true>;
using DownStage = Stage<INNER_WIDTH, MODEL_WIDTH, false>;

// The rows of a tile that lane group g of a worker has in rows g and g + 8 of its fragments. Those of one g and those
// of one `half` lie in different banks.
template <bool GATED>
DEVICE u32 fragment_row(int worker, u32 g, u32 half) {
  if (GATED) return half * (TILE_ROWS / 2) + 8 * worker + g / 2 + g % 2 * 4;  // gate, up; features t, t + 4 pair up
  return 16 * worker + 4 * (g / 2) + 2 * (half ^ (g / 4)) + g % 2;
}

// ---- products ----------------------------------------------------------------------------------------------------

// What a worker's lane knows of a stage: offsets of its two rows of weights, and of its row of x, one of 8, and
// chunk, for groups of even and of odd numbers.
template <typename S>
struct Lane {
  u32 words[2], x[2];

  DEVICE Lane() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 row = fragment_row<S::GATED>(warp_id(), lane_id() / 4, h);
      words[h] = S::WEIGHTS_AT + row * S::PITCH;
      x[h] = lane_id() % 8 * 128 + ((h * 4 + lane_id() / 8) ^ lane_id() % 8) * 16;
    }
  }
};

DEVICE u32 multiply_pair(u32 a, u32 b) {
  u32 d;
#if DTYPE == 1
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
  return d;
}

// The lower or the upper value of a pair, twice.
DEVICE u32 twice(u32 pair, int upper) {
  u32 d;
  if (upper) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(pair));
  else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(pair));
  return d;
}

// Adds a slab's products of the worker's rows with the first 8 EIGHTS picks: total[4 n + ..] as they leave them.
template <typename S, int EIGHTS>
DEVICE void multiply(float (&total)[4 * EIGHTS], const u8* stage, const Lane<S>& lane) {
  constexpr int AT_ONCE = 4;  // groups whose scales are loaded together
  uint2 scales[2];
  u32 a[2][2][4], words[2];
  const auto load_words = [&](int j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      words[h] = *reinterpret_cast<const u32*>(stage + lane.words[h] + lane_id() % 4 * 4 + j * 16);
    }
  };
  load_words(0);
#pragma unroll
  for (int j = 0; j < S::GROUPS; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u8* its = stage + lane.words[h] + S::GROUPS * 16 + j * sizeof(Scalar);
      if (j % AT_ONCE == 0) scales[h] = *reinterpret_cast<const uint2*>(its);
      const u32 scale = twice(j % AT_ONCE < 2 ? scales[h].x : scales[h].y, j % 2);
      u32 pairs[4];
      widen<true>(pairs, words[h]);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[j % 2][i / 2][i % 2 * 2 + h] = multiply_pair(pairs[i], scale);
    }
    if (j + 1 < S::GROUPS) load_words(j + 1);
    if constexpr (WIDE) {
      const u64 b = descriptor(shared_address(stage) >> 4, 16, S::EIGHT_BYTES) + j / 2 * (1024 / 16) + j % 2 * 4;
      wgmma_fence();
      product<EIGHTS>(total, a[j % 2][0], b);
      product<EIGHTS>(total, a[j % 2][1], b + 2);
      wgmma_commit();
      if (j + 1 < S::GROUPS) products_wait<1>(total);  // of the group before: its registers are next
      else products_wait<0>(total);
    } else {
      const auto multiply_eight = [&](int n) {
        u32 b[4];
        load_matrices(b, shared_address(stage) + lane.x[j % 2] + n * S::EIGHT_BYTES + j / 2 * 1024);
        float(&sums)[4] = *reinterpret_cast<float(*)[4]>(&total[4 * n]);
        multiply_add<Scalar>(sums, a[j % 2][0], b[0], b[1]);
        multiply_add<Scalar>(sums, a[j % 2][1], b[2], b[3]);
      };
      multiply_eight(0);  // a loop of one turn would take the outer one's unrolling with it
#pragma unroll
      for (int n = 1; n < EIGHTS; ++n) multiply_eight(n);
    }
  }
}

// ---- what the warps of a block share ------------------------------------------------------------------------------

constexpr int STAGE_BYTES = UpStage::BYTES > DownStage::BYTES ? UpStage::BYTES : DownStage::BYTES;
static_assert(STAGES >= 2 && STAGES * STAGE_BYTES <= RING_BYTES, "dynamic shared memory of the launch");
constexpr int TICKETS = 16;  // a copier is never so many items ahead of anybody

// An item of work: a tile of picks by a run of feature tiles, of gate and up or of down.
struct Item {
  int tile, expert, size, run;
  bool up;
  int pick[TILE_PICKS], row[TILE_PICKS];  // row of x or of hidden
};

struct Shared {  // behind the stages
  u64 full[STAGES], empty[STAGES];  // of a stage: counts the copiers' lanes, the workers
  u64 taken[TICKETS];               // of an item: counts the taker's lanes
  Item items[TICKETS];
};

// A place that goes round a ring, and the parity of its barrier's phase.
template <int SIZE>
struct Turning {
  int at = 0;
  u32 parity = 0;
  DEVICE void turn() {
    if (++at < SIZE) return;
    at = 0;
    parity ^= 1;
  }
};

struct Work {
  u8* memory;
  Shared* shared;
  Turning<STAGES> stage = {};
  Turning<TICKETS> place = {};

  DEVICE u32 full() const { return shared_address(&shared->full[stage.at]); }
  DEVICE u32 empty() const { return shared_address(&shared->empty[stage.at]); }
  DEVICE u8* slab() const { return memory + stage.at * STAGE_BYTES; }

  // Waits for the block's next item, whose size is 0 when there is none.
  DEVICE const Item& next() {
    barrier_wait(shared_address(&shared->taken[place.at]), place.parity);
    const Item& item = shared->items[place.at];
    place.turn();
    return item;
  }
};

// Takes the block's next item; one warp. All items of gate and up come before those of down, so whoever waits for one
// of these waits for a block that has it.
struct Taker {
  Tile* tiles;  // the number of tiles and of items taken, then the tiles
  const i32* order;
  int top_k, num_tiles;
  Turning<TICKETS> place = {};

  DEVICE void take(Shared* shared) {
    Item& item = shared->items[place.at];
    int ticket = 0;
    if (lane_id() == 0) ticket = atomicAdd(&tiles->first, 1);
    ticket = __shfl_sync(FULL_MASK, ticket, 0);
    const bool up = ticket < num_tiles * UpStage::RUNS;
    if (!up) ticket -= num_tiles * UpStage::RUNS;
    const int runs = up ? UpStage::RUNS : DownStage::RUNS, tile = ticket / runs;
    const Tile picks = tile < num_tiles ? load_fresh(tiles + 1 + tile) : Tile{};
    for (int n = lane_id(); n < picks.size; n += WARP) {
      const int pick = load_fresh(order + picks.first + n);
      item.pick[n] = pick;
      item.row[n] = up ? pick / top_k : pick;
    }
    if (lane_id() == 0) {
      item.tile = tile;
      item.expert = picks.expert;
      item.size = picks.size;
      item.run = ticket % runs;
      item.up = up;
    }
    barrier_arrive(shared_address(&shared->taken[place.at]));  // every lane for itself: racecheck follows no __syncwarp
    place.turn();
  }
};

DEVICE int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void add_release(int* p) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(p) : "memory"); }

// ---- copiers ------------------------------------------------------------------------------------------------------

// Copies an item's slabs: a copier has its share of a tile's weight rows, and every COPIERS-th row of x.
template <typename S>
struct Copier {
  static constexpr int AT_ONCE = WARP / S::GROUPS, COPIES = COPIED_ROWS / AT_ONCE;  // rows of a warp's copy
  static constexpr i64 ROW_BYTES = S::K / 2, SCALE_ROW = S::K / GROUP * sizeof(Scalar);

  const Scalar* x;
  const Item& item;

  static DEVICE int copier() { return warp_id() - WORKERS; }

  DEVICE void copy(Work& work, const u8* all_weights, const u8* all_scales) const {
    const int run = item.run, last_tile = min((run + 1) * S::RUN, S::TILES);
#pragma unroll 1
    for (int tile = run * S::RUN; tile < last_tile; ++tile) {
      const int own = copier() * COPIED_ROWS;  // row of the tile
      const int in_matrix = tile * S::TILE_FEATURES +
                            (S::GATED ? own / S::TILE_FEATURES * S::FEATURES + own % S::TILE_FEATURES : own);
      const i64 first = static_cast<i64>(item.expert) * S::MATRIX_ROWS + in_matrix;
      const u8* weights = all_weights + (first + lane_id() / S::GROUPS) * ROW_BYTES + lane_id() % S::GROUPS * 16;
      const u8* scales = all_scales + (first + lane_id()) * SCALE_ROW;
#pragma unroll 1
      for (int slab = 0; slab < S::SLABS; ++slab) {
        barrier_wait(work.empty(), work.stage.parity ^ 1);
        copy_weights(work.slab(), weights + slab * (S::GROUPS * 16), scales + slab * S::SCALE_BYTES);
        copy_rows(work.slab(), slab);
        copy_async_arrive(work.full());
        work.stage.turn();
      }
    }
  }

 private:
  DEVICE void copy_weights(u8* stage, const u8* weights, const u8* scales) const {
    u8* own = stage + S::WEIGHTS_AT + copier() * COPIED_ROWS * S::PITCH;
    u8* to = own + lane_id() / S::GROUPS * S::PITCH + lane_id() % S::GROUPS * 16;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      copy_async(shared_address(to + i * AT_ONCE * S::PITCH), weights + i * AT_ONCE * ROW_BYTES);
    }
    to = own + lane_id() * S::PITCH + S::GROUPS * 16;
#pragma unroll
    for (int i = 0; i < COPIED_ROWS / WARP; ++i) {
      u8* piece = to + i * WARP * S::PITCH;
      if constexpr (S::SCALE_BYTES == 16) copy_async(shared_address(piece), scales + i * WARP * SCALE_ROW);
      else copy_less<S::SCALE_BYTES>(piece, scales + i * WARP * SCALE_ROW);
    }
  }

  // Rows past the last pick are not copied: what they hold reaches only columns that nobody reads.
  DEVICE void copy_rows(u8* stage, int slab) const {
    const u32 to = shared_address(stage) + lane_id() / 8 * 1024;
    const Scalar* from = x + slab * S::SLAB + lane_id() * 8;
#pragma unroll
    for (int i = 0; i < TILE_PICKS / COPIERS; ++i) {
      const int n = i * COPIERS + copier();
      if (n >= item.size) break;
      if (lane_id() >= S::X_UNITS) continue;
      const i64 its = item.row[n];
      copy_async(to + n / 8 * S::EIGHT_BYTES + n % 8 * 128 + (lane_id() % 8 ^ n % 8) * 16, from + its * S::K);
    }
  }
};

// ---- workers ------------------------------------------------------------------------------------------------------

// Multiplies an item of EIGHTS eights of picks: store(pick, first feature, sums of an eight) is called by all lanes,
// with the pick of lane group g, or -1.
template <typename S, int EIGHTS, typename Store>
DEVICE void run_item(Work& work, const Item& item, const Lane<S>& lane, Store store) {
  const int run = item.run, last_tile = min((run + 1) * S::RUN, S::TILES);
#pragma unroll 1
  for (int tile = run * S::RUN; tile < last_tile; ++tile) {
    float total[4 * EIGHTS] = {};
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS; ++slab) {
      barrier_wait(work.full(), work.stage.parity);
      if (WIDE) async_proxy_fence();  // x was copied by ordinary means
      multiply<S, EIGHTS>(total, work.slab(), lane);
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(work.empty());
      work.stage.turn();
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      const float(&sums)[4] = *reinterpret_cast<const float(*)[4]>(&total[4 * n]);
      const int i = 8 * n + lane_id() / 4;
      store(i < item.size ? item.pick[i] : -1, tile * S::TILE_FEATURES, sums);
    }
  }
}

template <typename S, int EIGHTS = 1, typename Store>
DEVICE void run_eights(Work& work, const Item& item, const Lane<S>& lane, Store store) {
  constexpr int MORE = EIGHTS < 4 ? EIGHTS + 1 : EIGHTS + 2;
  if (EIGHTS == TILE_EIGHTS || item.size <= 8 * EIGHTS) {
    run_item<S, EIGHTS>(work, item, lane, store);
  } else if constexpr (EIGHTS < TILE_EIGHTS) {
    run_eights<S, MORE>(work, item, lane, store);
  }
}

// Rows g, columns 2t and 2t + 1 of 8 x 8 values in, row 2t and 2t + 1, column g out.
DEVICE u32 transposed(u32 pair) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void moe_many_experts(
    const Scalar* turned,                    // [T, MODEL_WIDTH], of moe_many_plan
    Tile* tiles,                             // likewise
    const i32* order,                        // likewise
    const u8* __restrict__ gate_up,          // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH]
    const u8* __restrict__ gate_up_scale,    // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH / 32]
    const u8* __restrict__ down,             // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH]
    const u8* __restrict__ down_scale,       // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH / 32]
    Scalar* hidden,                          // [T * top_k, INNER_WIDTH], turned
    Scalar* parts,                           // [T * top_k, MODEL_WIDTH]
    int top_k) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared* shared = reinterpret_cast<Shared*>(memory + RING_BYTES);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(&shared->full[i]), COPIERS * WARP);
      barrier_init(shared_address(&shared->empty[i]), WORKERS);
    }
    for (int i = 0; i < TICKETS; ++i) barrier_init(shared_address(&shared->taken[i]), WARP);
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();
  Work work{memory, shared};
  if (warp_id() >= WORKERS) {
    Taker taker{tiles, order, top_k, load_fresh(&tiles->expert)};
    const bool takes = warp_id() == WORKERS;
    if (takes) taker.take(shared);
    while (true) {
      const Item& item = work.next();
      if (item.size == 0) break;
      if (takes) taker.take(shared);
      if (item.up) {
        Copier<UpStage>{turned, item}.copy(work, gate_up, gate_up_scale);
      } else {
        while (load_acquire(&tiles[1 + item.tile].done) < UpStage::RUNS * WORKERS) {}
        Copier<DownStage>{hidden, item}.copy(work, down, down_scale);
      }
    }
    copy_async_wait_all();
    return;
  }
  const auto store_hidden = [&](int pick, int tile_feature, const float(&sums)[4]) {
    const auto activate = [&](int i) {
      const float gate = sums[i] * INT4_VALUE, up = sums[2 + i] * INT4_VALUE;
      return __fdividef(gate, 1.0f + expf(-gate)) * up;
    };
    const u32 pair = transposed(pack_pair<Scalar>(activate(0), activate(1)));
    if (pick < 0) return;
    const int first = tile_feature + warp_id() * 8, t = lane_id() % 4;  // features first + t and t + 4
    Scalar* to = hidden + static_cast<i64>(pick) * INNER_WIDTH + first / GROUP * GROUP;
    *reinterpret_cast<u32*>(to + turned_place(first % GROUP + t)) = pair;
  };
  const auto store_part = [&](int pick, int tile_feature, const float(&sums)[4]) {
    u32 pairs[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pairs[h] = transposed(pack_pair<Scalar>(sums[2 * h] * INT4_VALUE, sums[2 * h + 1] * INT4_VALUE));
    }
    if (pick < 0) return;
    const int t = lane_id() % 4;  // has features 4t..4t+3; from t = 2 on the upper two came first
    const uint2 four = t < 2 ? uint2{pairs[0], pairs[1]} : uint2{pairs[1], pairs[0]};
    const int feature = tile_feature + warp_id() * 16 + 4 * t;
    *reinterpret_cast<uint2*>(parts + static_cast<i64>(pick) * MODEL_WIDTH + feature) = four;
  };
  while (true) {
    const Item& item = work.next();
    if (item.size == 0) break;
    if (item.up) {
      run_eights<UpStage>(work, item, Lane<UpStage>(), store_hidden);
      __syncwarp();
      if (lane_id() == 0) add_release(&tiles[1 + item.tile].done);
    } else {
      run_eights<DownStage>(work, item, Lane<DownStage>(), store_part);
    }
  }
}

// A block adds up 8 * SUM_THREADS features of one row.
constexpr int SUM_THREADS = 128;
extern "C" __global__ __launch_bounds__(SUM_THREADS) void moe_many_sum(
    const Scalar* parts,    // [T, top_k, MODEL_WIDTH]; that of a pick without an expert is not read
    const i32* expert_ids,  // [T, top_k]
    const float* weights,   // [T, top_k]
    const Scalar* added,    // [T, MODEL_WIDTH], or null
    Scalar* out,            // [T, MODEL_WIDTH]
    int top_k) {
  constexpr int WIDE = 8;
  static_assert(MODEL_WIDTH % WIDE == 0, "eight features a thread");
  grid_dependency_wait();
  grid_dependency_launch();
  const i64 row = blockIdx.x;
  const int feature = (blockIdx.y * SUM_THREADS + threadIdx.x) * WIDE;
  if (feature >= MODEL_WIDTH) return;
  float sum[WIDE] = {};
#pragma unroll 4
  for (int s = 0; s < top_k; ++s) {
    if (static_cast<u32>(load_fresh(expert_ids + row * top_k + s)) >= NUM_EXPERTS) continue;
    const float weight = load_fresh(weights + row * top_k + s);
    const Scalar* from = parts + (row * top_k + s) * MODEL_WIDTH + feature;
    const auto part = load_fresh(reinterpret_cast<const Vec<Scalar, WIDE>*>(from));
#pragma unroll
    for (int i = 0; i < WIDE; ++i) sum[i] = fmaf(weight, to_float(part.data[i]), sum[i]);
  }
  Vec<Scalar, WIDE> rounded;
  if (added) {
    const auto more = load_fresh(reinterpret_cast<const Vec<Scalar, WIDE>*>(added + row * MODEL_WIDTH + feature));
#pragma unroll
    for (int i = 0; i < WIDE; ++i) sum[i] += to_float(more.data[i]);
  }
#pragma unroll
  for (int i = 0; i < WIDE; ++i) rounded[i] = from_float<Scalar>(sum[i]);
  store_vec(out + row * MODEL_WIDTH + feature, rounded);
}

// csrc/moe_many_rows.cu: routed INT4 experts of many rows: weights are dequantised once a tile of an expert's picks.
//   in   x [T,D] | expert_ids [T,k] i32 (an id outside 0..E-1 is no expert) | weights [T,k] f32 | gate_up [E,2I,D],
//        gate rows first, and down [E,D,I]: INT4 words i32 and scales | added [T,D] as x, or null
//   out  out [T,D] | between the kernels: order and tiles of moe_many_plan.cuh, hidden [T k,I], parts [T k,D], as x
//   math out[t] = added[t] + sum over s of weights[t,s] down_e(silu(gate_e x_t) * up_e x_t), e = expert_ids[t,s]
//   cost as moe_int4.cu: bound by bytes, from some 16 picks an expert on by 6 D I FLOP a pick
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_many_rows.py | sm_80 and up; sm_90 overlaps
//
// Blocks take items of work in turns, an item being a tile of picks by a run of feature tiles; the copies run on from
// item to item, STAGES - 1 slabs ahead. A warp has WARP_ROWS weight rows over all inputs and all picks of the tile:
// every weight becomes a 16-bit integer in a register once, exactly, and meets up to TILE_EIGHTS mma.sync of 8 picks;
// the scale of 32 inputs multiplies sums in float32. A row's sums run in one order whatever the other rows are.
// Which inputs a fragment's register stands for is free as long as both sides agree: lane (g, t) has inputs 8t..8t+7 of
// a group of 32, one word, or 16 bytes of x. Which matrix rows the fragments hold is free too: a lane has neighbouring
// features, which it stores at once.
//
// -D constants: DTYPE of x (1, 2) | SCALE_DTYPE | MODEL_WIDTH D | INNER_WIDTH I | NUM_EXPERTS E | TILE_EIGHTS eights of
// picks in a tile | WARP_ROWS | WARPS of a block | SLAB_INPUTS at most in a stage | STAGES, in RING_BYTES of shared
// memory | BLOCKS_PER_SM
#include "int4_pairs.cuh"
#include "mma.cuh"
#include "moe_many_plan.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TILE_PICKS = 8 * TILE_EIGHTS;  // N of an mma is 8
constexpr int ROW_EIGHTS = WARP_ROWS / 8;    // a lane's weight rows: one of each eight
constexpr int LEAST_SLABS = 8;               // of an item of work, where there are as many features
using Scale = PackedScale;

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

// One slab of a tile: TILE_ROWS rows of a matrix by SLAB inputs, and the same inputs of the picks' rows of x.
template <int INPUTS, int FEATURES_, bool GATED_>
struct Stage {
  static constexpr int K = INPUTS, FEATURES = FEATURES_;
  static constexpr bool GATED = GATED_;
  static constexpr int SLAB = power_of_two_divisor(K, SLAB_INPUTS), SLABS = K / SLAB, GROUPS = SLAB / GROUP;
  static constexpr int TILE_ROWS = WARPS * WARP_ROWS;
  static constexpr int WARP_FEATURES = GATED ? WARP_ROWS / 2 : WARP_ROWS, TILE_FEATURES = WARPS * WARP_FEATURES;
  static constexpr int TILES = cdiv(FEATURES, TILE_FEATURES);
  static constexpr int RUN = min_of(TILES, cdiv(LEAST_SLABS, SLABS)), RUNS = cdiv(TILES, RUN);
  static constexpr int MATRIX_ROWS = GATED ? 2 * FEATURES : FEATURES;
  static constexpr int X_UNITS = SLAB * 2 / 16;  // of 16 bytes
  static constexpr int X_AT = TILE_ROWS * GROUPS * 16, BYTES = X_AT + TILE_PICKS * X_UNITS * 16;
  // Scales come for SPAN slabs at a time, where that makes a row's piece 16 bytes, and lie in a ring behind the stages.
  static constexpr int SPAN = SLABS % 2 == 0 && GROUPS * sizeof(Scale) == 8 ? 2 : 1;
  static constexpr int SCALE_BYTES = SPAN * GROUPS * sizeof(Scale);
  static constexpr int SCALE_STAGES = cdiv(STAGES - 1, SPAN) + 1, SCALE_STAGE = TILE_ROWS * SCALE_BYTES;
  static constexpr int SCALES_AT = STAGES * BYTES, ALL_BYTES = SCALES_AT + SCALE_STAGES * SCALE_STAGE;
  static_assert(K % GROUP == 0, "inputs come in groups of 32");

  // Row of the matrix that stands in row r of a tile; linear in the bits of r. Rows past the end repeat the last one.
  static DEVICE int matrix_row(int tile, u32 r) {
    const int warp = r / WARP_ROWS, eight = r / 8 % ROW_EIGHTS, g = r % 8;
    const int inside = GATED ? g * (ROW_EIGHTS / 2) + eight / 2 : g * ROW_EIGHTS + eight;
    const int feature = tile * TILE_FEATURES + warp * WARP_FEATURES + inside;
    const int row = FEATURES % TILE_FEATURES ? min(feature, FEATURES - 1) : feature;
    return GATED && eight % 2 ? FEATURES + row : row;
  }

  // Exclusive ors keep apart the banks that a warp reads at once: one word of eight rows, four units of two rows of x.
  static DEVICE u32 place(u32 r, u32 unit) { return (r * GROUPS + (unit ^ r / (8 / GROUPS) % GROUPS)) * 16; }
  static DEVICE u32 place_x(u32 r, u32 unit) { return X_AT + (r * X_UNITS + (unit ^ (r % 2 * 4 % X_UNITS))) * 16; }
};

using UpStage = Stage<MODEL_WIDTH, INNER_WIDTH, true>;
using DownStage = Stage<INNER_WIDTH, MODEL_WIDTH, false>;

// ---- products ----------------------------------------------------------------------------------------------------

DEVICE void load_if(uint4& v, u32 address, bool wanted) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "r"(address), "r"(u32(wanted))
               : "memory");
}

// d = A B, and d += A B.
DEVICE void multiply_first(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if DTYPE == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
DEVICE void multiply_next(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if DTYPE == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

using Totals = float[TILE_EIGHTS][ROW_EIGHTS / 2][4];  // 8 picks by 16 rows as an mma leaves them

// Adds a slab's products of the warp's rows with the first 8 `eights` picks.
template <typename S>
DEVICE void multiply(Totals& total, const u8* stage, const u8* scale_stage, int eights) {
  const int g = lane_id() / 4, t = lane_id() % 4, row = warp_id() * WARP_ROWS + g;
  // Units lie in a row by exclusive or: the place of unit j is the one of unit 0 with j's bits turned.
  const u32 words = S::place(row, 0) + 4 * t, x_units = S::place_x(g, t);
  const u8* all_scales = scale_stage + row * S::SCALE_BYTES;
  constexpr int AT_ONCE = min_of(2, S::GROUPS);  // groups whose scales are loaded together
  struct alignas(AT_ONCE * sizeof(Scale)) Scales {
    Scale of_group[AT_ONCE];
  } scales[ROW_EIGHTS];
#pragma unroll 2
  for (int j = 0; j < S::GROUPS; ++j) {
    if (j % AT_ONCE == 0) {
#pragma unroll
      for (int i = 0; i < ROW_EIGHTS; ++i) {
        scales[i] = *reinterpret_cast<const Scales*>(all_scales + 8 * i * S::SCALE_BYTES + j * sizeof(Scale));
      }
    }
    uint4 x[TILE_EIGHTS];
#pragma unroll
    for (int n = 0; n < TILE_EIGHTS; ++n) {
      load_if(x[n], shared_address(stage) + ((j * 64) ^ x_units) + n * (8 * S::X_UNITS * 16), n < eights);
    }
    u32 a[ROW_EIGHTS][4];
    float scale[ROW_EIGHTS];
#pragma unroll
    for (int i = 0; i < ROW_EIGHTS; ++i) {
      widen<true>(a[i], *reinterpret_cast<const u32*>(stage + ((j * 16) ^ words) + i * (8 * S::GROUPS * 16)));
      const Scale s = scales[i].of_group[j % AT_ONCE];
      scale[i] = to_float(s);
    }
#pragma unroll
    for (int n = 0; n < TILE_EIGHTS; ++n) {
      if (n >= eights) break;
      const u32 b[4] = {__byte_perm(x[n].x, x[n].z, 0x5410), __byte_perm(x[n].x, x[n].z, 0x7632),
                        __byte_perm(x[n].y, x[n].w, 0x5410), __byte_perm(x[n].y, x[n].w, 0x7632)};
      float d[ROW_EIGHTS / 2][4];
#pragma unroll
      for (int m = 0; m < ROW_EIGHTS / 2; ++m) {
        multiply_first(d[m], a[2 * m][0], a[2 * m + 1][0], a[2 * m][1], a[2 * m + 1][1], b[0], b[1]);
      }
#pragma unroll
      for (int m = 0; m < ROW_EIGHTS / 2; ++m) {
        multiply_next(d[m], a[2 * m][2], a[2 * m + 1][2], a[2 * m][3], a[2 * m + 1][3], b[2], b[3]);
      }
#pragma unroll
      for (int m = 0; m < ROW_EIGHTS / 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[n][m][i] = fmaf(scale[2 * m + i / 2], d[m][i], total[n][m][i]);
      }
    }
  }
}

// ---- the walk over a block's items -------------------------------------------------------------------------------

struct Item {  // a tile of picks by a run of feature tiles, in shared memory
  int pick[TILE_PICKS];
  int size, first_tile, end_tile;
};

// Where the copies of a block stand: STAGES - 1 slabs before the products.
template <typename S>
struct Stream {
  static constexpr int ROW_STEP = THREADS / S::GROUPS, COPIES = S::TILE_ROWS / ROW_STEP;
  static constexpr int SCALE_COPIES = S::TILE_ROWS / THREADS;
  static constexpr int X_STEP = THREADS / S::X_UNITS, X_COPIES = cdiv(TILE_PICKS, X_STEP);
  static constexpr i64 ROW_BYTES = S::K / 2, SCALE_ROW = S::K / GROUP * sizeof(Scale);
  static_assert(S::TILE_ROWS % THREADS == 0 && ROW_STEP % 8 == 0, "see matrix_row");

  const Scalar* x;
  const u8 *all_weights, *all_scales;  // [E] matrices
  const Tile* tiles;
  const i32* order;
  Item* items;
  u8* ring;
  int per_row;     // picks of a row of x
  int item, end;   // of all items; this block takes every gridDim.x-th
  Tile coming;     // of `item`
  const u8 *weights, *scales;
  const Scalar* rows[X_COPIES];  // null: nothing to copy
  int tile = 0, last_tile = 0, slab = 0, slot = 0, scale_slot = 0, list = 0;

  DEVICE void start(int num_tiles) {
    item = blockIdx.x;
    end = num_tiles * S::RUNS;
    fetch();
  }

  // All threads of the block: copies of the next slab's weights, or rows of x, or both.
  template <bool WEIGHTS, bool ROWS>
  DEVICE void next() {
    if (item < end) {
      if (slab == 0) {
        if (tile == last_tile) take_item();
        find_weights();
      }
      u8* stage = ring + slot * S::BYTES;
      if (WEIGHTS) copy_weights(stage);
#pragma unroll
      for (int i = 0; i < X_COPIES; ++i) {
        if (!ROWS || !rows[i]) continue;
        copy_async(shared_address(stage + S::place_x(x_row(i), x_unit())), rows[i] + slab * S::SLAB);
      }
      ++slab;
      if (slab % S::SPAN == 0) scale_slot = scale_slot + 1 == S::SCALE_STAGES ? 0 : scale_slot + 1;
      if (slab == S::SLABS) {
        slab = 0;
        if (++tile == last_tile) {
          item += gridDim.x;
          fetch();
        }
      }
    }
    copy_async_commit();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

 private:
  static DEVICE int x_row(int i) { return threadIdx.x / S::X_UNITS + i * X_STEP; }
  static DEVICE int x_unit() { return threadIdx.x % S::X_UNITS; }

  DEVICE void fetch() {
    if (item < end) coming = load_fresh(tiles + item / S::RUNS);
  }

  DEVICE void take_item() {
    Item& now = items[list];
    list = list + 1 == STAGES ? 0 : list + 1;
    tile = item % S::RUNS * S::RUN;
    last_tile = min(tile + S::RUN, S::TILES);
    if (threadIdx.x == 0) {
      now.size = coming.size;
      now.first_tile = tile;
      now.end_tile = last_tile;
    }
#pragma unroll
    for (int i = 0; i < X_COPIES; ++i) {
      rows[i] = nullptr;
      if (x_row(i) < coming.size) {
        const int pick = load_fresh(order + coming.first + x_row(i));
        rows[i] = x + static_cast<i64>(pick / per_row) * S::K + x_unit() * 8;
        if (x_unit() == 0) now.pick[x_row(i)] = pick;
      }
    }
  }

  DEVICE void find_weights() {
    const i64 first_row = static_cast<i64>(coming.expert) * S::MATRIX_ROWS;
    weights = all_weights + (first_row + S::matrix_row(tile, threadIdx.x / S::GROUPS)) * ROW_BYTES +
              threadIdx.x % S::GROUPS * 16;
    scales = all_scales + (first_row + S::matrix_row(tile, threadIdx.x)) * SCALE_ROW;
  }

  // Rows r + i ROW_STEP of a tile lie as far behind row r in the matrix as row i ROW_STEP behind row 0.
  DEVICE i64 further(u32 r, u32 step) const {
    if constexpr (S::FEATURES % S::TILE_FEATURES == 0) return S::matrix_row(0, step);
    return S::matrix_row(tile, r + step) - S::matrix_row(tile, r);
  }

  DEVICE void copy_weights(u8* stage) const {
    const u32 r = threadIdx.x / S::GROUPS, unit = threadIdx.x % S::GROUPS;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      copy_async(shared_address(stage + S::place(r + i * ROW_STEP, unit)),
                 weights + slab * (S::GROUPS * 16) + further(r, i * ROW_STEP) * ROW_BYTES);
    }
    if (slab % S::SPAN) return;
    u8* to = ring + S::SCALES_AT + scale_slot * S::SCALE_STAGE + threadIdx.x * S::SCALE_BYTES;
    const u8* from = scales + slab / S::SPAN * S::SCALE_BYTES;
#pragma unroll
    for (int i = 0; i < SCALE_COPIES; ++i) {
      u8* piece = to + i * THREADS * S::SCALE_BYTES;
      const u8* its = from + further(threadIdx.x, i * THREADS) * SCALE_ROW;
      if constexpr (S::SCALE_BYTES == 16) copy_async(shared_address(piece), its);
      else copy_less<S::SCALE_BYTES>(piece, its);
    }
  }
};

// Runs this block's items; ready() returns when x may be read. store(pick, first feature, sums, column) takes a lane's
// neighbouring features.
template <typename S, typename Ready, typename Store>
DEVICE void run(const Scalar* x, const void* weights, const void* scales, const Tile* tiles, const i32* order,
                int per_row, Ready ready, Store store) {
  static_assert(STAGES >= 2 && S::ALL_BYTES <= RING_BYTES, "dynamic shared memory of the launch");
  extern __shared__ __align__(128) u8 ring[];
  __shared__ Item items[STAGES];
  const int num_tiles = load_fresh(&tiles->expert);
  Stream<S> stream{x, static_cast<const u8*>(weights), static_cast<const u8*>(scales), tiles + 1, order, items, ring,
                   per_row};
  stream.start(num_tiles);
  auto early = stream;
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) early.template next<true, false>();
  ready();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) stream.template next<false, true>();
  int slot = 0, scale_slot = 0, list = 0;
#pragma unroll 1
  for (int left = blockIdx.x; left < num_tiles * S::RUNS; left += gridDim.x) {
    int tile = 0, end_tile = 1, eights = 0;
#pragma unroll 1
    for (bool first = true; tile < end_tile; ++tile) {
      Totals total = {};
#pragma unroll 1
      for (int slab = 0; slab < S::SLABS; ++slab) {
        copy_async_wait<STAGES - 2>();
        // This slab has come for all threads, and all have done with the one before: its place is next.
        __syncthreads();
        stream.template next<true, true>();
        if (first) {
          first = false;
          tile = items[list].first_tile;
          end_tile = items[list].end_tile;
          eights = cdiv(items[list].size, 8);
        }
        const u8* scale_stage = ring + S::SCALES_AT + scale_slot * S::SCALE_STAGE;
        multiply<S>(total, ring + slot * S::BYTES, scale_stage + slab % S::SPAN * (S::SCALE_BYTES / S::SPAN), eights);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (slab % S::SPAN == S::SPAN - 1) scale_slot = scale_slot + 1 == S::SCALE_STAGES ? 0 : scale_slot + 1;
      }
      const int g = lane_id() / 4, t = lane_id() % 4;
      const int feature = tile * S::TILE_FEATURES + warp_id() * S::WARP_FEATURES + g * (S::WARP_FEATURES / 8);
      if (feature < S::FEATURES) {
#pragma unroll
        for (int n = 0; n < TILE_EIGHTS; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = 8 * n + 2 * t + c;
            if (column < items[list].size) store(items[list].pick[column], feature, total[n], c);
          }
        }
      }
    }
    list = list + 1 == STAGES ? 0 : list + 1;
  }
  copy_async_wait<0>();
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_many_gate_up(
    const Scalar* x,                         // [T, MODEL_WIDTH]
    const Tile* tiles,                       // of moe_many_plan
    const i32* order,                        // likewise
    const void* __restrict__ gate_up,        // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH]
    const void* __restrict__ gate_up_scale,  // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH / 32]
    Scalar* hidden,                          // [T * top_k, INNER_WIDTH]
    int top_k) {
  constexpr int COUNT = ROW_EIGHTS / 2;
  grid_dependency_wait();
  grid_dependency_launch();
  run<UpStage>(x, gate_up, gate_up_scale, tiles, order, top_k, [] {},
               [&](int pick, int feature, const float(&total)[COUNT][4], int c) {
                 Vec<Scalar, COUNT> values;
#pragma unroll
                 for (int m = 0; m < COUNT; ++m) {
                   const float gate = total[m][c] * INT4_VALUE, up = total[m][2 + c] * INT4_VALUE;
                   values[m] = from_float<Scalar>(__fdividef(gate, 1.0f + expf(-gate)) * up);
                 }
                 store_vec(hidden + static_cast<i64>(pick) * INNER_WIDTH + feature, values);
               });
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_many_down(
    const Scalar* hidden,                 // [T * top_k, INNER_WIDTH], may still be written when this kernel starts
    const Tile* tiles,                    // of moe_many_plan, which ended before the first block of moe_many_gate_up
    const i32* order,                     // let this kernel start
    const void* __restrict__ down,        // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH]
    const void* __restrict__ down_scale,  // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH / 32]
    Scalar* parts) {                      // [T * top_k, MODEL_WIDTH]
  run<DownStage>(hidden, down, down_scale, tiles, order, 1,
                 [] {
                   grid_dependency_wait();
                   grid_dependency_launch();
                 },
                 [&](int pick, int feature, const float(&total)[ROW_EIGHTS / 2][4], int c) {
                   Vec<Scalar, ROW_EIGHTS> values;
#pragma unroll
                   for (int i = 0; i < ROW_EIGHTS; ++i) {
                     values[i] = from_float<Scalar>(total[i / 2][i % 2 * 2 + c] * INT4_VALUE);
                   }
                   store_vec(parts + static_cast<i64>(pick) * MODEL_WIDTH + feature, values);
                 });
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

// csrc/moe_one_row.cu: the routed experts of one row, INT4 weights of a narrow part of the model: what moe_int4.cu does
//   with as many bits equal, but every pick has its own blocks, so that few weights keep all multiprocessors busy.
//   in   x [D] | expert_ids [k] i32, an id outside 0..E-1 is no expert | weights [k] f32 | gate_up [E,2I,D] and down
//        [E,D,I], INT4 words and scales | shared [D] f32: the shared expert's result, or null
//   out  out [D] | between the kernels: hidden [k,I]
//   math out = sum over s of weights[s] down_e(silu(gate_e x) * up_e x) + shared, e = expert_ids[s]; sums in float32
//   cost k (3 D I / 2 + 3 D I / 32 scales) bytes, 6 D I FLOP a pick: bound by bytes and by the latency of two launches
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_int4.py | sm_80 and up; sm_90 overlaps
//
// A block of moe_row_gate_up streams a tile of one pick through a ring, CHUNK slabs at a time: alone, a slab is too
// short to hide what its products wait for. A block of moe_row_down holds its features' weights of all picks at once;
// they come while moe_row_gate_up still runs, and the picks are added up here, so that there is no third launch.
//
// -D constants: as moe_int4.cu, and CHUNK slabs, STAGES chunks in RING_BYTES, DOWN_BYTES of shared memory
#include "fresh.cuh"
#include "moe_weights.cuh"

using UpStage = Stage<Packed<WARP_ROWS>, MODEL_WIDTH, INNER_WIDTH, true, WARPS>;
using DownStage = Stage<Packed<WARP_ROWS>, INNER_WIDTH, MODEL_WIDTH, false, WARPS>;

constexpr int MOST_PICKS = 8;
constexpr int PICKS_AT_ONCE = 2;  // products of so many picks are under way together

static_assert(PACKED && DTYPE != 0 && X_ROWS == 1, "tensor cores, one row");
static_assert(UpStage::SLABS % CHUNK == 0 && STAGES * CHUNK * UpStage::BYTES <= RING_BYTES, "shared memory");
static_assert(DownStage::SLABS == 1 && MOST_PICKS * DownStage::BYTES <= DOWN_BYTES, "shared memory");

// Of one expert.
template <typename S>
constexpr i64 MATRIX_BYTES = static_cast<i64>(S::MATRIX_ROWS) * (S::K / S::UNIT_K * 16);
template <typename S>
constexpr i64 SCALES_BYTES = static_cast<i64>(S::MATRIX_ROWS) * (S::K / GROUP * sizeof(typename S::Scale));

// Grid k * tiles. beside: as in moe_int4.cu.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_row_gate_up(
    const Scalar* __restrict__ x, const i32* __restrict__ expert_ids, const u8* __restrict__ gate_up,
    const u8* __restrict__ gate_up_scale, Scalar* __restrict__ hidden, int beside) {
  using S = UpStage;
  extern __shared__ __align__(128) u8 ring[];
  constexpr int CHUNKS = S::SLABS / CHUNK, CHUNK_BYTES = CHUNK * S::BYTES, FIRST_ROW[1] = {0};
  const int pick = blockIdx.x / S::TILES, tile = blockIdx.x % S::TILES;
  if (!beside) grid_dependency_wait();
  const u32 id = load_fresh(expert_ids + pick), expert = id < NUM_EXPERTS ? id : 0;
  const bool used = id < NUM_EXPERTS;
  Copies<S> copies;
  copies.find(gate_up + expert * MATRIX_BYTES<S>, gate_up_scale + expert * SCALES_BYTES<S>, tile);
  RowCopies<S> rows;
  rows.find(x, FIRST_ROW, 1);
  int next = 0;
  const auto start = [&] {
    if (next < CHUNKS && used) {
#pragma unroll
      for (int c = 0; c < CHUNK; ++c) {
        u8* stage = ring + next % STAGES * CHUNK_BYTES + c * S::BYTES;
        copies.start(stage, tile, next * CHUNK + c);
        rows.start(stage, next * CHUNK + c);
      }
    }
    copy_async_commit();
    ++next;
  };
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) start();
  float total[S::TOTALS] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    start();
    if (next == max(CHUNKS, STAGES)) grid_dependency_launch();  // the copies of `down` shall come behind these
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) {
      multiply<S>(total, ring + chunk % STAGES * CHUNK_BYTES + c * S::BYTES, x, FIRST_ROW, 0);
    }
  }
  __syncthreads();
  finish<S>(ring, total, 1, [&](int, int feature, float gate, float up) {
    const int f = tile * S::TILE_FEATURES + feature;
    const float silu = __fdividef(gate, 1.0f + expf(-gate));
    if (used && f < S::FEATURES) hidden[pick * INNER_WIDTH + f] = from_float<Scalar>(silu * up);
  });
  if (beside) grid_dependency_wait();
}

// Grid tiles. Ids and weights are older than moe_row_gate_up; hidden and `shared` may still be written.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_row_down(
    const Scalar* hidden, const i32* __restrict__ expert_ids, const float* __restrict__ weights,
    const u8* __restrict__ down, const u8* __restrict__ down_scale, const float* shared, Scalar* __restrict__ out,
    int top_k) {
  using S = DownStage;
  extern __shared__ __align__(128) u8 stages[];  // of MOST_PICKS
  __shared__ float sums[MOST_PICKS][WARPS][WARP_ROWS];
  __shared__ int picks[MOST_PICKS], experts[MOST_PICKS];
  __shared__ float factors[MOST_PICKS];
  // The picks that have an expert, in the order of their slots.
  const u32 mine = lane_id() < top_k ? load_fresh(expert_ids + lane_id()) : NUM_EXPERTS;
  const u32 used = __ballot_sync(FULL_MASK, mine < NUM_EXPERTS);
  const int count = __popc(used), tile = blockIdx.x;
  if (warp_id() == 0 && mine < NUM_EXPERTS) {
    const int n = __popc(used & ((1u << lane_id()) - 1));
    picks[n] = lane_id();
    experts[n] = mine;
    factors[n] = load_fresh(weights + lane_id());
  }
  __syncthreads();
  Copies<S> first, copies;
  first.find(down, down_scale, tile);
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    copies.weights = first.weights + experts[n] * MATRIX_BYTES<S>;
    copies.scales = first.scales + experts[n] * SCALES_BYTES<S>;
    copies.start(stages + n * S::BYTES, tile, 0);
  }
  grid_dependency_wait();
  for (int u = threadIdx.x; u < count * S::X_UNITS; u += THREADS) {
    const int n = u / S::X_UNITS, unit = u % S::X_UNITS;
    const Scalar* from = hidden + picks[n] * S::K + unit * (16 / static_cast<int>(sizeof(Scalar)));
    copy_async(shared_address(stages + n * S::BYTES + S::place_x(0, unit)), from);
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int base = 0; base < count; base += PICKS_AT_ONCE) {
    float total[PICKS_AT_ONCE][S::TOTALS] = {};
#pragma unroll
    for (int i = 0; i < PICKS_AT_ONCE; ++i) {
      multiply<S>(total[i], stages + min(base + i, count - 1) * S::BYTES, hidden, picks, 0);
    }
#pragma unroll
    for (int i = 0; i < PICKS_AT_ONCE; ++i) {
      each_value<S>(total[i], [&](int row, int column, float value) {
        if (column == 0 && base + i < count) sums[base + i][warp_id()][row] = value;
      });
    }
  }
  __syncthreads();
  // As `finish` adds up warps, and moe_sum slots.
  for (int o = threadIdx.x; o < count * S::TILE_FEATURES; o += THREADS) {
    float(&of_pick)[WARPS][WARP_ROWS] = sums[o / S::TILE_FEATURES];
    const int feature = o % S::TILE_FEATURES, row = feature % WARP_ROWS, warp = feature / WARP_ROWS * S::K_WARPS;
    float value = 0;
#pragma unroll
    for (int w = 0; w < S::K_WARPS; ++w) value += of_pick[warp + w][row];
    of_pick[warp][row] = value * S::VALUE;
  }
  __syncthreads();
  for (int feature = threadIdx.x; feature < S::TILE_FEATURES; feature += THREADS) {
    const int f = tile * S::TILE_FEATURES + feature, row = feature % WARP_ROWS;
    if (f >= S::FEATURES) break;
    float sum = 0;
    for (int n = 0; n < count; ++n) sum = fmaf(factors[n], sums[n][feature / WARP_ROWS * S::K_WARPS][row], sum);
    if (shared) sum += shared[f];
    out[f] = from_float<Scalar>(sum);
  }
}

// csrc/moe_int4.cu: routed experts of a few rows: SwiGLU with INT4 or dense weights, each distinct expert read once.
//   in   x [T,D] | expert_ids [T,k] i32 (null: all rows to expert 0; an id outside 0..E-1 is no expert) | weights
//        [T,k] f32 | gate_up [E,2I,D], gate rows first, and down [E,D,I]: INT4 words i32 and scales, or as x
//   out  out [T,D] | between the kernels: hidden [T,k,I] as x, parts [T,slots,D] f32, slots = k + shared experts
//   math out[t] = sum over s of weights[t,s] down_e(silu(gate_e x_t) * up_e x_t), e = expert_ids[t,s]; sums in float32
//   cost U (3 D I / 2 + 3 D I / 32 scales) bytes for U distinct experts of INT4, 6 D I FLOP a pick: bound by bytes
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_int4.py | sm_80 and up; sm_90 overlaps
//
// Two kernels stream the weights (moe_gate_up, moe_down), a third adds up a row's picks in the order of its slots. The
// shared expert goes through the first two beside the routed ones. moe_one_row.cu has a single row, with equal bits.
// Blocks take equal runs of units of work, a unit being a tile of picks by TILE_FEATURES outputs over all inputs. The
// stream of a block runs on from unit to unit, STAGES - 1 slabs ahead. Nothing about a row's arithmetic depends on the
// other rows: the inputs are cut among warps by shape alone and partial sums are added in the order of the warps.
//
// -D constants: DTYPE of x | PACKED 1 (INT4, with SCALE_DTYPE) or 0 (dense, in x's dtype) | MODEL_WIDTH D |
// INNER_WIDTH I | NUM_EXPERTS E | STAGES slabs and, where they fit, partial sums in RING_BYTES of shared memory |
// BLOCKS_PER_SM, which divides the grid | WARP_ROWS and X_ROWS of moe_weights.cuh
#include "fresh.cuh"
#include "moe_weights.cuh"

using UpStage = Stage<MODEL_WIDTH, INNER_WIDTH, true, WARPS>;
using DownStage = Stage<INNER_WIDTH, MODEL_WIDTH, false, WARPS>;

struct List {  // picks of one expert
  int row[LISTED];     // of x or hidden; those past the last pick of a tile repeat a valid one
  int target[LISTED];  // where the results go
  int size;
};

struct Block {  // shared memory beside the ring of stages
  Tiles<NUM_EXPERTS> tiles;
  List lists[STAGES];  // each unit under way may have its own
};

struct Picks {
  const i32* expert_ids;
  int count;
};

// A walk over a block's units that knows which list holds a unit's picks.
template <typename S>
struct Walk {
  Unit<NUM_EXPERTS, S::TILES> at;
  int expert = -1, window = 0, list = STAGES - 1;

  // To be called for every unit; true when its list is another one than before.
  DEVICE bool turn() {
    const int needed = at.pick_tile * TILE_PICKS / LISTED * LISTED;
    if (at.expert == expert && needed == window) return false;
    expert = at.expert;
    window = needed;
    list = list + 1 == STAGES ? 0 : list + 1;
    return true;
  }
  DEVICE int first() const { return at.pick_tile * TILE_PICKS - window; }  // the tile's first pick in the list
};

// Where the copies of a block stand: STAGES - 1 slabs before the products.
template <typename S, typename ListPicks>
struct Stream {
  const u8 *weights, *scales;  // [E] matrices
  const Scalar* x;
  Block& block;
  u8* ring;
  int left;  // units to come
  Walk<S> walk;
  ListPicks list_picks;
  Copies<S> copies = {};
  RowCopies<S> rows = {};
  int slab = 0, slot = 0;

  // All threads of the block: copies of the next slab's weights, or rows of x, or both.
  template <bool WEIGHTS, bool ROWS>
  DEVICE void next() {
    if (left > 0) {
      if (slab == 0) find<WEIGHTS, ROWS>();
      u8* stage = ring + slot * S::BYTES;
      if (WEIGHTS) copies.start(stage, walk.at.feature_tile, slab);
      if (ROWS && STAGED_X) rows.start(stage, slab);
      if (++slab == S::SLABS) {
        slab = 0;
        --left;
        walk.at.next();
      }
    }
    copy_async_commit();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

 private:
  template <bool WEIGHTS, bool ROWS>
  DEVICE void find() {
    const auto& at = walk.at;
    if (walk.turn() && WEIGHTS) {
      if (warp_id() == 0) list_picks(block.lists[walk.list], at.expert, walk.window);
      __syncthreads();
    }
    if (WEIGHTS) {
      constexpr i64 MATRIX = static_cast<i64>(S::MATRIX_ROWS) * (S::K / UNIT_K * 16);
      constexpr i64 MATRIX_SCALES = static_cast<i64>(S::MATRIX_ROWS) * (S::K / GROUP * sizeof(Scale));
      copies.find(weights + at.expert * MATRIX, scales + at.expert * MATRIX_SCALES, at.feature_tile);
    }
    if (ROWS && STAGED_X) {
      const List& list = block.lists[walk.list];
      rows.find(x, list.row + walk.first(), min(list.size - walk.first(), TILE_PICKS));
    }
  }
};

// Runs this block's share of all units. x holds rows of K inputs, row(pick) is the one of a pick; ready() returns when
// x may be read; store(target(pick), feature, gate or value, up) takes the results.
template <typename S, typename Row, typename Target, typename Ready, typename Store>
DEVICE void run(const Scalar* x, const void* weights, const void* scales, const Picks& picks, Row row, Target target,
                Ready ready, Store store) {
  static_assert(STAGES >= 2 && STAGES * S::BYTES <= RING_BYTES, "dynamic shared memory of the launch");
  // Partial sums meet behind the ring, or, where there is no room, in the place of the last slab.
  constexpr bool ROOM = STAGES * S::BYTES + SUM_BYTES <= RING_BYTES;
  extern __shared__ __align__(128) u8 ring[];
  __shared__ Block block;
  block.tiles.build(picks.expert_ids, picks.count);
  const i64 units = static_cast<i64>(block.tiles.count()) * S::TILES;
  // Blocks go round the multiprocessors: those that share one take neighbouring shares, and few units spread over all.
  const int around = gridDim.x / BLOCKS_PER_SM;
  const int share = blockIdx.x % around * BLOCKS_PER_SM + blockIdx.x / around;
  const int first = static_cast<int>(units * share / gridDim.x);
  const int end = static_cast<int>(units * (share + 1) / gridDim.x);
  Walk<S> walk{{block.tiles}};
  if (first < end) walk.at.find(first);
  const auto list_picks = [&](List& list, int expert, int skip) {  // one warp
    const int size = block.tiles.list(picks.expert_ids, picks.count, expert, skip, [&](int n, int pick) {
      list.row[n] = row(pick);
      list.target[n] = target(pick);
    });
    __syncwarp();
    for (int n = size + lane_id(); n < round_up(size, TILE_PICKS); n += WARP) list.row[n] = list.row[0];
    if (lane_id() == 0) list.size = size;
  };
  Stream<S, decltype(list_picks)> stream{
      static_cast<const u8*>(weights), static_cast<const u8*>(scales), x, block, ring, end - first, walk, list_picks};
  // The weights are nobody's output, so their copies begin before x is there.
  auto early = stream;
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) early.template next<true, false>();
  ready();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) stream.template next<false, true>();
  stream.copies = early.copies;
  for (int unit = first, slot = 0; unit < end; ++unit, walk.at.next()) {
    walk.turn();
    const List& list = block.lists[walk.list];
    float total[TOTALS] = {};
    u8* stage = ring;
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS; ++slab) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();  // this slab has come for all threads, and all have done with the one before: its place is next
      stream.template next<true, true>();
      stage = ring + slot * S::BYTES;
      multiply<S>(total, stage, x, list.row + walk.first(), slab);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    if (!ROOM) __syncthreads();
    const int size = min(list.size - walk.first(), TILE_PICKS);
    finish<S>(ROOM ? ring + STAGES * S::BYTES : stage, total, size, [&](int n, int feature, float value, float up) {
      const int f = walk.at.feature_tile * S::TILE_FEATURES + feature;
      if (f < S::FEATURES) store(list.target[walk.first() + n], f, value, up);
    });
  }
  copy_async_wait<0>();
}

// A kernel lets the next one start when all that came before the op is there, so that one may run `beside` it: it reads
// nothing that the one ahead writes, waits for nothing at first, and ends after it.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_gate_up(
    const Scalar* __restrict__ x,            // [T, MODEL_WIDTH]
    const i32* __restrict__ expert_ids,      // [T, top_k], or null
    const void* __restrict__ gate_up,        // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH]
    const void* __restrict__ gate_up_scale,  // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH / 32], INT4 only
    Scalar* __restrict__ hidden,             // [T, top_k, INNER_WIDTH]
    int num_rows, int top_k, int beside) {
  const auto inputs_ready = [=] {
    if (!beside) grid_dependency_wait();
    grid_dependency_launch();
  };
  if (expert_ids) inputs_ready();  // ids decide what is copied; without them copies begin before x is there
  run<UpStage>(
      x, gate_up, gate_up_scale, Picks{expert_ids, num_rows * top_k}, [&](int pick) { return pick / top_k; },
      [](int pick) { return pick; },
      [&] {
        if (!expert_ids) inputs_ready();
      },
      [&](int pick, int feature, float gate, float up) {
        const float silu = __fdividef(gate, 1.0f + expf(-gate));
        hidden[static_cast<i64>(pick) * INNER_WIDTH + feature] = from_float<Scalar>(silu * up);
      });
  if (beside) grid_dependency_wait();
}

// expert_ids are older than moe_gate_up, whose blocks let this kernel start only after they waited for them.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_down(
    const Scalar* hidden,                 // [T, top_k, INNER_WIDTH], may still be written when this kernel starts
    const i32* __restrict__ expert_ids,   // [T, top_k], or null
    const void* __restrict__ down,        // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH]
    const void* __restrict__ down_scale,  // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH / 32], INT4 only
    float* __restrict__ parts,            // [T, slots, MODEL_WIDTH], of which slots first_slot.. are written
    int num_rows, int top_k, int slots, int first_slot, int beside) {
  run<DownStage>(
      hidden, down, down_scale, Picks{expert_ids, num_rows * top_k}, [](int pick) { return pick; },
      [&](int pick) { return pick / top_k * slots + first_slot + pick % top_k; },
      [=] {
        if (!beside) grid_dependency_wait();
        grid_dependency_launch();
      },
      [&](int target, int feature, float value, float) {
        parts[static_cast<i64>(target) * MODEL_WIDTH + feature] = value;
      });
  if (beside) grid_dependency_wait();
}

// A block adds up 4 * THREADS features of one row. Slots from top_k on hold the shared expert.
extern "C" __global__ __launch_bounds__(THREADS) void moe_sum(
    const float* parts,                  // [T, slots, MODEL_WIDTH]; a slot without an expert is not read
    const i32* __restrict__ expert_ids,  // [T, top_k]
    const float* __restrict__ weights,   // [T, top_k]
    Scalar* __restrict__ out,            // [T, MODEL_WIDTH]
    int top_k, int slots) {
  static_assert(MODEL_WIDTH % 4 == 0, "four features a thread");
  constexpr int AT_ONCE = 8;
  const i64 row = blockIdx.x;
  const int feature = (blockIdx.y * THREADS + threadIdx.x) * 4;
  if (feature >= MODEL_WIDTH) return;
  Vec<float, 4> sum = {};
  for (int first = 0; first < slots; first += AT_ONCE) {
    float weight[AT_ONCE];
    bool used[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int s = first + i;
      used[i] = s < slots && (s >= top_k || static_cast<u32>(load_fresh(expert_ids + row * top_k + s)) < NUM_EXPERTS);
      weight[i] = s < top_k ? load_fresh(weights + row * top_k + s) : 1.0f;
    }
    if (first == 0) grid_dependency_wait();  // ids and weights are older than the kernels that this one overlaps
    Vec<float, 4> part[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (used[i]) part[i] = load_vec<float, 4>(parts + (row * slots + first + i) * MODEL_WIDTH + feature);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
      for (int l = 0; l < 4; ++l) sum[l] = used[i] ? fmaf(weight[i], part[i][l], sum[l]) : sum[l];
    }
  }
  Vec<Scalar, 4> rounded;
#pragma unroll
  for (int i = 0; i < 4; ++i) rounded[i] = from_float<Scalar>(sum[i]);
  store_vec(out + row * MODEL_WIDTH + feature, rounded);
}

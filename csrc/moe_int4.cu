// csrc/moe_int4.cu: routed experts of a few rows: SwiGLU with INT4 or dense weights. A distinct expert's weights are
//   read once for every 8 of its picks, so once where rows are few; moe_many_rows.cu has many rows of INT4 experts.
//   in   x [T,D] | expert_ids [T,k] i32 (null: all rows to expert 0; an id outside 0..E-1 is no expert) | weights
//        [T,k] f32 | gate_up [E,2I,D], gate rows first, and down [E,D,I]: INT4 words i32 and scales, or as x | the
//        shared expert's, one dense expert of inner width SHARED_WIDTH, or null
//   out  out [T,D] | between the kernels: hidden [T,k,I] as x and the shared expert's, parts [T,slots,D] f32, slots = k
//        + shared experts
//   math out[t] = sum over s of weights[t,s] down_e(silu(gate_e x_t) * up_e x_t), e = expert_ids[t,s]; sums in float32
//   cost U (3 D I / 2 + 3 D I / 32 scales) bytes for U distinct experts of INT4, 6 D I FLOP a pick: bound by bytes
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_int4.py | sm_80 and up; sm_90 overlaps
//
// Two kernels stream the weights (moe_gate_up, moe_down), a third adds up a row's picks in the order of its slots. The
// shared expert's units stand beside the routed ones. moe_few_rows.cu has the first few rows of narrow INT4 experts.
// Blocks take equal runs of units of work, a unit being a tile of picks by TILE_FEATURES outputs over all inputs. The
// stream of a block runs on from unit to unit, STAGES - 1 slabs ahead. Nothing about a row's arithmetic depends on the
// other rows: the inputs are cut among warps by shape alone and partial sums are added in the order of the warps.
//
// -D constants: DTYPE of x | PACKED 1 (INT4, with SCALE_DTYPE) or 0 (dense, in x's dtype) | MODEL_WIDTH D |
// INNER_WIDTH I | NUM_EXPERTS E | SHARED_WIDTH, 0 without a shared expert | UP_ROWS, DOWN_ROWS, SHARED_UP_ROWS and
// SHARED_DOWN_ROWS weight rows of a warp, SHARED_PICKS rows of x that meet the shared expert's at once | UP_STAGES and
// so on: slabs, in RING_BYTES of shared memory with, where they fit, partial sums | WHOLE_DOWN: `down`'s stages are
// WHOLE | BLOCKS_PER_SM, which divides the grid
#include "fresh.cuh"
#include "moe_weights.cuh"

#if PACKED
template <int ROWS>
using Routed = Packed<ROWS>;
#else
template <int ROWS>
using Routed = Dense<ROWS>;
#endif
using UpStage = Stage<Routed<UP_ROWS>, MODEL_WIDTH, INNER_WIDTH, true, WARPS>;
using DownStage = Stage<Routed<DOWN_ROWS>, INNER_WIDTH, MODEL_WIDTH, false, WARPS, WHOLE_DOWN>;
constexpr bool SHARED = SHARED_WIDTH > 0;
constexpr int SHARED_INNER = SHARED ? SHARED_WIDTH : GROUP;
using SharedUp = Stage<Dense<SHARED_UP_ROWS, SHARED_PICKS>, MODEL_WIDTH, SHARED_INNER, true, WARPS>;
using SharedDown = Stage<Dense<SHARED_DOWN_ROWS, SHARED_PICKS>, SHARED_INNER, MODEL_WIDTH, false, WARPS>;
// A unit of the shared expert counts as so many eighths of a routed one: by their bytes.
template <typename S>
constexpr int UNIT_BYTES = S::SLABS * S::X_AT / S::PARTS;
constexpr int UP_EIGHTHS = 8 * UNIT_BYTES<SharedUp> / UNIT_BYTES<UpStage>;
constexpr int DOWN_EIGHTHS = 8 * UNIT_BYTES<SharedDown> / UNIT_BYTES<DownStage>;

struct List {  // picks of one expert
  int row[LISTED];     // of x or hidden; those past the last pick of a tile repeat a valid one
  int target[LISTED];  // where the results go
  int size;
};

template <int NUM, int PICKS, int STAGES>
struct Block {  // shared memory beside the ring of stages
  Tiles<NUM, PICKS> tiles;
  List lists[STAGES];  // each unit under way may have its own
};

// A share of units, of which a block takes those from `first` on and before `end`.
struct Share {
  int first, end;
};

// Blocks go round the multiprocessors: those that share one take neighbouring shares, and few units spread over all.
DEVICE int share_of_block() {
  const int around = gridDim.x / BLOCKS_PER_SM;
  return blockIdx.x % around * BLOCKS_PER_SM + blockIdx.x / around;
}

// Of units that all blocks divide alike.
DEVICE Share equal_share(i64 units) {
  const int share = share_of_block(), blocks = gridDim.x;
  return {static_cast<int>(units * share / blocks), static_cast<int>(units * (share + 1) / blocks)};
}

// Of `units` where all blocks have divided `others` alike, each of which counts as `eighths` of a unit, or as many as
// leave no block with more than the mean.
DEVICE Share rest_share(i64 units, i64 others, i64 eighths) {
  const int share = share_of_block(), blocks = gridDim.x;
  const i64 room = round_up(others, i64(blocks)) - others;
  if (room > 0) eighths = min(eighths, 8 * units / room);
  const i64 all = 8 * units + eighths * others;
  const auto before = [&](i64 n) {
    return static_cast<int>((all * n - eighths * (others * n / blocks) * blocks) / (8 * blocks));
  };
  return {before(share), before(share + 1)};
}

// A walk over a block's units that knows which list holds a unit's picks.
template <typename S, int NUM, int STAGES>
struct Walk {
  Unit<NUM, S::PICKS, S::TILES, S::PARTS> at;
  int expert = -1, window = 0, list = STAGES - 1;

  // To be called for every unit; true when its list is another one than before.
  DEVICE bool turn() {
    const int needed = at.pick_tile * S::PICKS / LISTED * LISTED;
    if (at.expert == expert && needed == window) return false;
    expert = at.expert;
    window = needed;
    list = list + 1 == STAGES ? 0 : list + 1;
    return true;
  }
  DEVICE int first() const { return at.pick_tile * S::PICKS - window; }  // the tile's first pick in the list
};

// Where the copies of a block stand: STAGES - 1 slabs before the products.
template <typename S, int NUM, int STAGES, typename ListPicks>
struct Stream {
  const u8 *weights, *scales;  // [E] matrices
  const Scalar* x;
  Block<NUM, S::PICKS, STAGES>& block;
  u8* ring;
  Walk<S, NUM, STAGES> walk;
  ListPicks list_picks;
  Copies<S> copies = {};
  RowCopies<S> rows = {};
  int slab = 0, slot = 0;

  // All threads of the block: copies of the next slab's weights, or rows of x, or both.
  template <bool WEIGHTS, bool ROWS>
  DEVICE void next() {
    if (walk.at.left > 0) {
      if (slab == 0) find<WEIGHTS, ROWS>();
      u8* stage = ring + slot * S::BYTES;
      if (WEIGHTS) {
        if (S::PARTS == 1 || walk.at.parts() == S::PARTS) copies.start(stage, walk.at.feature_tile, slab);
        else copies.template start<1>(stage, walk.at.feature_tile, slab);
      }
      if (ROWS && STAGED_X) rows.start(stage, slab);
      if (++slab == S::SLABS) {
        slab = 0;
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
      constexpr i64 MATRIX = static_cast<i64>(S::MATRIX_ROWS) * (S::K / S::UNIT_K * 16);
      constexpr i64 MATRIX_SCALES = static_cast<i64>(S::MATRIX_ROWS) * (S::K / GROUP * sizeof(typename S::Scale));
      copies.find(weights + at.expert * MATRIX, scales + at.expert * MATRIX_SCALES, at.feature_tile);
    }
    if (ROWS && STAGED_X) {
      const List& list = block.lists[walk.list];
      rows.find(x, list.row + walk.first(), min(list.size - walk.first(), S::PICKS));
    }
  }
};

// Runs units of this block. x holds rows of K inputs, row(pick) is the one of a pick; share(units) says which units;
// ready() returns when x may be read; store(target(pick), feature, gate or value, up) takes the results.
template <typename S, int NUM, int STAGES, typename Sharing, typename Row, typename Target, typename Ready,
          typename Store>
DEVICE void run(const Scalar* x, const void* weights, const void* scales, const Picks& picks, Sharing share, Row row,
                Target target, Ready ready, Store store) {
  static_assert(STAGES >= 2 && STAGES * S::BYTES <= RING_BYTES, "dynamic shared memory of the launch");
  // Partial sums meet behind the ring, or, where there is no room, in the place of the last slab.
  constexpr bool ROOM = STAGES * S::BYTES + S::SUM_BYTES <= RING_BYTES;
  extern __shared__ __align__(128) u8 ring[];
  __shared__ Block<NUM, S::PICKS, STAGES> block;
  block.tiles.build(picks);
  const auto [first, end] = share(static_cast<i64>(block.tiles.count()) * S::TILES);
  Walk<S, NUM, STAGES> walk{{block.tiles, end - first}};
  if (first < end) walk.at.find(first);
  const auto list_picks = [&](List& list, int expert, int skip) {  // one warp
    const int size = block.tiles.list(picks, expert, skip, [&](int n, int pick) {
      list.row[n] = row(pick);
      list.target[n] = target(pick);
    });
    __syncwarp();
    for (int n = size + lane_id(); n < round_up(size, S::PICKS); n += WARP) list.row[n] = list.row[0];
    if (lane_id() == 0) list.size = size;
  };
  Stream<S, NUM, STAGES, decltype(list_picks)> stream{
      static_cast<const u8*>(weights), static_cast<const u8*>(scales), x, block, ring, walk, list_picks};
  // The weights are nobody's output, so their copies begin before x is there.
  auto early = stream;
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) early.template next<true, false>();
  ready();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) stream.template next<false, true>();
  stream.copies = early.copies;
  for (int slot = 0; walk.at.left > 0; walk.at.next()) {
    walk.turn();
    const int parts = walk.at.parts();
    const List& list = block.lists[walk.list];
    float total[S::TOTALS] = {};
    u8* stage = ring;
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS; ++slab) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();  // this slab has come for all threads, and all have done with the one before: its place is next
      stream.template next<true, true>();
      stage = ring + slot * S::BYTES;
      multiply<S>(total, stage, x, list.row + walk.first(), slab, parts);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    const int size = min(list.size - walk.first(), S::PICKS);
    const auto target_of = [&](int n) { return list.target[walk.first() + n]; };
    const auto store_feature = [&](int to, int feature, float value, float up) {
      const int f = walk.at.feature_tile * S::TILE_FEATURES + feature;
      if (f < S::FEATURES) store(to, f, value, up);
    };
    if constexpr (S::WHOLE) {
      finish_whole<S>(total, size, target_of, store_feature);
    } else {
      if (!ROOM) __syncthreads();
      const auto store_pick = [&](int n, int feature, float value, float up) {
        store_feature(target_of(n), feature, value, up);
      };
      finish<S>(ROOM ? ring + STAGES * S::BYTES : stage, total, size, store_pick, parts);
    }
  }
  copy_async_wait<0>();
}

// The shared expert's units come first: what is copied for them does not depend on the ids. A kernel lets the next one
// start when all that came before the op is there.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_gate_up(
    const Scalar* __restrict__ x,             // [T, MODEL_WIDTH]
    const i32* expert_ids,                    // [T, top_k], or null
    const void* __restrict__ gate_up,         // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH]
    const void* __restrict__ gate_up_scale,   // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH / 32], INT4 only
    const void* __restrict__ shared_gate_up,  // [2 * SHARED_WIDTH, MODEL_WIDTH], or null
    Scalar* __restrict__ hidden,              // [T, top_k, INNER_WIDTH]
    Scalar* __restrict__ shared_hidden,       // [T, SHARED_WIDTH], or null
    int num_rows, int top_k) {
  const auto inputs_ready = [] {
    grid_dependency_wait();
    grid_dependency_launch();
  };
  const auto activate = [](float gate, float up) {
    return from_float<Scalar>(__fdividef(gate, 1.0f + expf(-gate)) * up);
  };
  const auto same = [](int pick) { return pick; };
  const i64 shared_units = SHARED ? static_cast<i64>(cdiv(num_rows, SHARED_PICKS)) * SharedUp::TILES : 0;
  const Share shared = equal_share(shared_units);
  bool waited = false;
  if constexpr (SHARED) {
    if (shared.first < shared.end) {
      run<SharedUp, 1, SHARED_UP_STAGES>(
          x, shared_gate_up, nullptr, Picks{nullptr, num_rows}, [&](i64) { return shared; }, same, same, inputs_ready,
          [&](int row, int feature, float gate, float up) {
            shared_hidden[static_cast<i64>(row) * SHARED_WIDTH + feature] = activate(gate, up);
          });
      waited = true;
    }
  }
  if (!waited && expert_ids) inputs_ready();
  run<UpStage, NUM_EXPERTS, UP_STAGES>(
      x, gate_up, gate_up_scale, Picks{expert_ids, num_rows * top_k},
      [&](i64 units) { return rest_share(units, shared_units, UP_EIGHTHS); }, [&](int pick) { return pick / top_k; },
      same,
      [&] {
        if (!waited && !expert_ids) inputs_ready();  // without ids copies begin before x is there
      },
      [&](int pick, int feature, float gate, float up) {
        hidden[static_cast<i64>(pick) * INNER_WIDTH + feature] = activate(gate, up);
      });
}

// expert_ids are older than moe_gate_up, whose blocks let this kernel start only after they waited for them.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_down(
    const Scalar* hidden,                  // [T, top_k, INNER_WIDTH], may still be written when this kernel starts
    const Scalar* shared_hidden,           // [T, SHARED_WIDTH], the same, or null
    const i32* expert_ids,                 // [T, top_k], or null
    const void* __restrict__ down,         // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH]
    const void* __restrict__ down_scale,   // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH / 32], INT4 only
    const void* __restrict__ shared_down,  // [MODEL_WIDTH, SHARED_WIDTH], or null
    float* __restrict__ parts,             // [T, slots, MODEL_WIDTH]; the shared expert's slot is top_k
    int num_rows, int top_k, int slots) {
  const i64 shared_units = SHARED ? static_cast<i64>(cdiv(num_rows, SHARED_PICKS)) * SharedDown::TILES : 0;
  const auto store = [&](int target, int feature, float value, float) {
    parts[static_cast<i64>(target) * MODEL_WIDTH + feature] = value;
  };
  run<DownStage, NUM_EXPERTS, DOWN_STAGES>(
      hidden, down, down_scale, Picks{expert_ids, num_rows * top_k},
      [&](i64 units) { return rest_share(units, shared_units, DOWN_EIGHTHS); }, [](int pick) { return pick; },
      [&](int pick) { return pick / top_k * slots + pick % top_k; },
      [] {
        grid_dependency_wait();
        grid_dependency_launch();
      },
      store);
  if constexpr (SHARED) {
    const Share shared = equal_share(shared_units);
    if (shared.first < shared.end) {
      run<SharedDown, 1, SHARED_DOWN_STAGES>(
          shared_hidden, shared_down, nullptr, Picks{nullptr, num_rows}, [&](i64) { return shared; },
          [](int row) { return row; }, [&](int row) { return row * slots + top_k; }, [] {}, store);
    }
  }
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

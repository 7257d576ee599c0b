// csrc/moe_int4.cu: routed experts of a few rows: SwiGLU with INT4 or dense weights. A distinct expert's weights are
//   read once for every 8 of its picks, so once where rows are few; moe_many_rows.cu has many rows of INT4 experts.
//   in   x [T,D] | expert_ids [T,k] i32, an id outside 0..E-1 is no expert | weights [T,k] f32 | gate_up [E,2I,D], gate
//        rows first, and down [E,D,I]: INT4 words i32 and scales, or as x | the shared expert's, one dense expert of
//        inner width SHARED_WIDTH, or null
//   out  out [T,D] | between the kernels: hidden [T,k,I] as x and the shared expert's, parts [T,slots,D] f32, slots = k
//        + shared experts
//   math out[t] = sum over s of weights[t,s] down_e(silu(gate_e x_t) * up_e x_t), e = expert_ids[t,s]; sums in float32
//   cost U (3 D I / 2 + 3 D I / 32 scales) bytes for U distinct experts of INT4, 6 D I FLOP a pick: bound by bytes
//   ref  kernels/reference/ops.py:moe_experts | test tests/kernels/test_moe_int4.py | sm_80 and up; sm_90 overlaps
//
// Two kernels stream the weights (moe_gate_up, moe_down), a third adds up a row's picks in the order of its slots. The
// shared expert's units stand beside the routed ones. moe_few_rows.cu has the first few rows of narrow INT4 experts.
// A unit of work is a tile of picks by TILE_FEATURES outputs over all inputs, in SLABS slabs. Blocks take equal runs of
// slabs (moe_shares.cuh), so a unit may be cut: the block that has its first slabs hands its sums over to the one that
// goes on.
// The stream of a block runs on from unit to unit, STAGES - 1 slabs ahead. Nothing about a row's arithmetic depends on
// the other rows: the inputs are cut among warps by shape alone, a warp adds up its slabs in their order whoever has
// them, and partial sums are added in the order of the warps.
//
// -D constants: DTYPE of x | PACKED 1 (INT4, with SCALE_DTYPE) or 0 (dense, in x's dtype) | MODEL_WIDTH D |
// INNER_WIDTH I | NUM_EXPERTS E | SHARED_WIDTH, 0 without a shared expert | UP_ROWS, DOWN_ROWS, SHARED_UP_ROWS and
// SHARED_DOWN_ROWS weight rows of a warp, SHARED_PICKS rows of x that meet the shared expert's at once | UP_STAGES and
// so on: slabs, in RING_BYTES of shared memory with partial sums | WHOLE_DOWN: `down`'s stages are WHOLE |
// BLOCKS_PER_SM, all of which a multiprocessor has at once
#include "fresh.cuh"
#include "moe_shares.cuh"
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
// A unit of the shared expert counts as so many eighths of a slab of a routed one: by their bytes.
template <typename S>
constexpr int UNIT_BYTES = S::SLABS * S::X_AT;
constexpr int UP_EIGHTHS = 8 * UNIT_BYTES<SharedUp> / UpStage::X_AT;
constexpr int DOWN_EIGHTHS = 8 * UNIT_BYTES<SharedDown> / DownStage::X_AT;

struct List {  // picks of one expert
  int row[LISTED];     // of x or hidden; those past the last pick of a tile repeat a valid one
  int target[LISTED];  // where the results go
  int size;
};

struct Under {  // a unit under way
  int feature_tile, list, first;  // first: of its picks, in the list
};

template <int NUM, int PICKS, int STAGES>
struct Block {  // shared memory beside the ring of stages
  Tiles<NUM, PICKS> tiles;
  Under units[STAGES];
  List lists[STAGES];  // each unit under way may have its own
};

// Running sums of a unit that blocks share: the one that has its first slabs gives them to the one that has the next. A
// block gives before it takes, but where one unit is all it has.
struct Handover {
  float* sums;  // [blocks, TOTALS / 4, THREADS, 4]
  int* counts;  // [blocks], of warps that gave, then took: the last one to take leaves zero for the next launch

  template <int TOTALS>
  DEVICE void give(const float (&total)[TOTALS], int to) const {
    static_assert(TOTALS % 4 == 0, "16 bytes at a time");
#pragma unroll
    for (int i = 0; i < TOTALS; i += 4) {
      store_vec(at<TOTALS>(to, i), Vec<float, 4>{{total[i], total[i + 1], total[i + 2], total[i + 3]}});
    }
    __syncwarp();
    if (lane_id() > 0) return;
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(counts + to) : "memory");
  }

  template <int TOTALS>
  DEVICE void take(float (&total)[TOTALS]) const {
    int* const count_at = counts + blockIdx.x;
    if (lane_id() == 0) {
      int count;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(count_at) : "memory");
      } while (count < WARPS);
      if (atomicAdd(count_at, 1) == 2 * WARPS - 1) *count_at = 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TOTALS; i += 4) {
      const uint4 v = load_fresh(reinterpret_cast<const uint4*>(at<TOTALS>(blockIdx.x, i)));
      total[i] = __uint_as_float(v.x);
      total[i + 1] = __uint_as_float(v.y);
      total[i + 2] = __uint_as_float(v.z);
      total[i + 3] = __uint_as_float(v.w);
    }
  }

 private:
  template <int TOTALS>
  DEVICE float* at(int block, int i) const {
    return sums + (static_cast<i64>(block) * (TOTALS / 4) + i / 4) * (4 * THREADS) + 4 * threadIdx.x;
  }
};

DEVICE int after(int n, int count) { return n + 1 == count ? 0 : n + 1; }

// 0, which ptxas cannot know to be every lane's. Of a lane's place and a uniform register it (13.0) makes copies that
// an H200 refuses as illegal instructions; what this is added to stays out of such registers.
DEVICE u32 lanes_zero() {
  u32 lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane ^ lane_id();
}

// Where in shared memory the slab behind the one at `stage` lies, in a ring of them.
template <typename S, int STAGES>
DEVICE u32 after_slab(u32 stage, u32 ring) {
  return stage + S::BYTES == ring + STAGES * S::BYTES ? ring : stage + S::BYTES;
}

// Where the copies of a block stand: STAGES - 1 slabs before the products.
template <typename S, int NUM, int STAGES, typename ListPicks>
struct Stream {
  const u8 *weights, *scales;  // [E] matrices
  const Scalar* x;
  Block<NUM, S::PICKS, STAGES>& block;
  u32 ring;  // in shared memory, like `stage`, where the next slab comes to
  ListPicks list_picks;
  Span span;
  Unit<NUM, S::PICKS, S::TILES> at{block.tiles};
  Copies<S> copies = {};
  RowCopies<S> rows = {};
  u32 stage = ring;
  int units = 0, slabs = 0;     // found so far; to come of the last of them
  int list = STAGES - 1;        // the last one made
  int expert = -1, window = 0;  // whose picks are listed

  // All threads of the block: copies of the next slab's weights, or rows of x, or both.
  template <bool WEIGHTS, bool ROWS>
  DEVICE void next() {
    if (slabs > 0 || units < span.units) {
      if (slabs == 0) find<WEIGHTS, ROWS>();
      if (WEIGHTS) copies.next(stage, at.feature_tile);
      if (ROWS && STAGED_X) rows.next(stage);
      --slabs;
    }
    copy_async_commit();
    stage = after_slab<S, STAGES>(stage, ring);
  }

 private:
  template <bool WEIGHTS, bool ROWS>
  DEVICE void find() {
    if (units == 0) at.find(span.last);
    else at.next();
    const int begin = span.begin(units), needed = at.pick_tile * S::PICKS / LISTED * LISTED;
    slabs = span.end(units, S::SLABS) - begin;
    if (at.expert != expert || needed != window) {
      expert = at.expert;
      window = needed;
      list = after(list, STAGES);
      if (ROWS) {
        if (warp_id() == 0) list_picks(block.lists[list], expert, window);
        __syncthreads();
      }
    }
    const int first = at.pick_tile * S::PICKS - window;
    if (WEIGHTS) {
      if (threadIdx.x == 0) block.units[units % STAGES] = {at.feature_tile, list, first};
      constexpr i64 MATRIX = static_cast<i64>(S::MATRIX_ROWS) * (S::K / S::UNIT_K * 16);
      constexpr i64 MATRIX_SCALES = static_cast<i64>(S::MATRIX_ROWS) * (S::K / GROUP * sizeof(typename S::Scale));
      copies.find(weights + expert * MATRIX, scales + expert * MATRIX_SCALES, at.feature_tile, begin);
    }
    if (ROWS && STAGED_X) {
      const List& picks = block.lists[list];
      rows.find(x, picks.row + first, min(picks.size - first, S::PICKS), begin);
    }
    ++units;
  }
};

// Runs slabs of this block. x holds rows of K inputs, row(pick) is the one of a pick; sharing(units) says which slabs;
// ready() returns when x may be read; store(target(pick), feature, gate or value, up) takes the results. Of its units a
// block has the last one first: whose last slabs are another's, which has that unit last and finds its sums there.
template <typename S, int NUM, int STAGES, typename Sharing, typename Row, typename Target, typename Ready,
          typename Store>
DEVICE void run(const Scalar* x, const void* weights, const void* scales, const Picks& picks, Sharing sharing, Row row,
                Target target, Ready ready, Store store, const Handover& handover) {
  constexpr int SUMS_AT = STAGES * S::BYTES;
  static_assert(STAGES >= 2 && SUMS_AT + (S::WHOLE ? 0 : S::SUM_BYTES) <= RING_BYTES, "see the launch");
  extern __shared__ __align__(128) u8 ring[];
  __shared__ Block<NUM, S::PICKS, STAGES> block;
  const u32 shared_ring = shared_address(ring) + lanes_zero();
  const auto own = block.tiles.build(picks);
  const Share share = sharing(static_cast<i64>(block.tiles.count()) * S::TILES);
  const Span span(share, S::SLABS);
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
      static_cast<const u8*>(weights), static_cast<const u8*>(scales), x, block, shared_ring, list_picks, span};
  // The weights are nobody's output: their copies begin before x is there, and before it is known whose rows they meet.
  auto early = stream;
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) early.template next<true, false>();
  block.tiles.sort(own);
  ready();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; ++i) stream.template next<false, true>();
  stream.copies = early.copies;
  Places<S> places;
  // Kept in registers: the compiler would rather work them out for each slab.
  asm volatile("" : "+r"(places.words), "+r"(places.scales), "+r"(places.x));
  asm volatile("" : "+r"(stream.copies.to), "+r"(stream.copies.scales_to), "+r"(stream.rows.to));
  u32 stage = shared_ring;
  for (int n = 0; n < span.units; ++n) {
    const Under& unit = block.units[n % STAGES];
    float total[S::TOTALS] = {};
    int slab = span.begin(n);
    const int end = span.end(n, S::SLABS);
    if (S::SLABS > 1 && slab > 0) handover.take(total);
#pragma unroll 1
    for (; slab < end; ++slab) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();  // this slab has come for all threads, and all have done with the one before: its place is next
      stream.template next<true, true>();
      const auto rows_of = [&] { return block.lists[unit.list].row + unit.first; };
      multiply<S>(total, ring + (stage - shared_ring), places, x, rows_of, slab);
      stage = after_slab<S, STAGES>(stage, shared_ring);
    }
    if (S::SLABS > 1 && end < S::SLABS) {
      handover.give(total, share.next);
      continue;
    }
    const List& list = block.lists[unit.list];
    const int* targets = list.target + unit.first;
    const int size = min(list.size - unit.first, S::PICKS), first_feature = unit.feature_tile * S::TILE_FEATURES;
    const auto store_pick = [&](int pick, int feature, float value, float up) {
      if (first_feature + feature < S::FEATURES) store(targets[pick], first_feature + feature, value, up);
    };
    if constexpr (S::WHOLE) finish_whole<S>(total, size, store_pick);
    else finish<S>(ring + SUMS_AT, total, size, store_pick);
  }
  copy_async_wait<0>();
}

// The shared expert's units come first: what is copied for them does not depend on the ids. A kernel lets the next one
// start when all that came before the op is there.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_gate_up(
    const Scalar* __restrict__ x,             // [T, MODEL_WIDTH]
    const i32* expert_ids,                    // [T, top_k]
    const void* __restrict__ gate_up,         // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH]
    const void* __restrict__ gate_up_scale,   // [NUM_EXPERTS, 2 * INNER_WIDTH, MODEL_WIDTH / 32], INT4 only
    const void* __restrict__ shared_gate_up,  // [2 * SHARED_WIDTH, MODEL_WIDTH], or null
    Scalar* __restrict__ hidden,              // [T, top_k, INNER_WIDTH]
    Scalar* __restrict__ shared_hidden,       // [T, SHARED_WIDTH], or null
    float* sums, int* counts,                 // of a Handover
    int num_rows, int top_k) {
  const Handover handover{sums, counts};
  const auto inputs_ready = [] {
    grid_dependency_wait();
    grid_dependency_launch();
  };
  const auto activate = [](float gate, float up) {
    return from_float<Scalar>(__fdividef(gate, 1.0f + expf(-gate)) * up);
  };
  const auto same = [](int pick) { return pick; };
  const i64 shared_units = SHARED ? static_cast<i64>(cdiv(num_rows, SHARED_PICKS)) * SharedUp::TILES : 0;
  const Share shared = equal_share<SharedUp>(shared_units);
  bool waited = false;
  if constexpr (SHARED) {
    if (shared.first < shared.end) {
      run<SharedUp, 1, SHARED_UP_STAGES>(
          x, shared_gate_up, nullptr, Picks{nullptr, num_rows}, [&](i64) { return shared; }, same, same, inputs_ready,
          [&](int row, int feature, float gate, float up) {
            shared_hidden[static_cast<i64>(row) * SHARED_WIDTH + feature] = activate(gate, up);
          },
          handover);
      waited = true;
    }
  }
  if (!waited) inputs_ready();
  run<UpStage, NUM_EXPERTS, UP_STAGES>(
      x, gate_up, gate_up_scale, Picks{expert_ids, num_rows * top_k},
      [&](i64 units) { return rest_share<UpStage>(units, shared_units, UP_EIGHTHS); },
      [&](int pick) { return pick / top_k; },
      same, [] {},
      [&](int pick, int feature, float gate, float up) {
        hidden[static_cast<i64>(pick) * INNER_WIDTH + feature] = activate(gate, up);
      },
      handover);
}

// expert_ids are older than moe_gate_up, whose blocks let this kernel start only after they waited for them.
extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void moe_down(
    const Scalar* hidden,                  // [T, top_k, INNER_WIDTH], may still be written when this kernel starts
    const Scalar* shared_hidden,           // [T, SHARED_WIDTH], the same, or null
    const i32* expert_ids,                 // [T, top_k]
    const void* __restrict__ down,         // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH]
    const void* __restrict__ down_scale,   // [NUM_EXPERTS, MODEL_WIDTH, INNER_WIDTH / 32], INT4 only
    const void* __restrict__ shared_down,  // [MODEL_WIDTH, SHARED_WIDTH], or null
    float* __restrict__ parts,             // [T, slots, MODEL_WIDTH]; the shared expert's slot is top_k
    float* sums, int* counts,              // of a Handover
    int num_rows, int top_k, int slots) {
  const Handover handover{sums, counts};
  const i64 shared_units = SHARED ? static_cast<i64>(cdiv(num_rows, SHARED_PICKS)) * SharedDown::TILES : 0;
  const auto store = [&](int target, int feature, float value, float) {
    parts[static_cast<i64>(target) * MODEL_WIDTH + feature] = value;
  };
  run<DownStage, NUM_EXPERTS, DOWN_STAGES>(
      hidden, down, down_scale, Picks{expert_ids, num_rows * top_k},
      [&](i64 units) { return rest_share<DownStage>(units, shared_units, DOWN_EIGHTHS); },
      [](int pick) { return pick; },
      [&](int pick) { return pick / top_k * slots + pick % top_k; },
      [] {
        grid_dependency_wait();
        grid_dependency_launch();
      },
      store, handover);
  if constexpr (SHARED) {
    const Share shared = equal_share<SharedDown>(shared_units);
    if (shared.first < shared.end) {
      run<SharedDown, 1, SHARED_DOWN_STAGES>(
          shared_hidden, shared_down, nullptr, Picks{nullptr, num_rows}, [&](i64) { return shared; },
          [](int row) { return row; }, [&](int row) { return row * slots + top_k; }, [] {}, store, handover);
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
    if (first == 0) {  // ids and weights are older than the kernels that this one overlaps
      grid_dependency_wait();
      grid_dependency_launch();
    }
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

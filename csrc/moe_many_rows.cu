// csrc/moe_many_rows.cu: routed INT4 experts of many rows, by matrix products of dequantised weights.
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
// COPIERS of its warps copy, two steps ahead, from item to item; the WORKERS have 2 x 16 weight rows each, over all
// inputs. Their words become 16-bit integers in registers, exactly, and are multiplied by their scale: the A side of
// mma.sync, or of wgmma. The tile's rows of x, in shared memory, are the B side. What bounds is the way from L2 to
// shared memory: x takes it once for 512 weight rows. A row's sums run in one order whatever the other rows are.
// Which input a place of K stands for is free as long as both sides agree: rows of x and of hidden are turned, so that
// a lane finds what it needs of 32 inputs in one word (turned_place). Which matrix rows the fragments hold is free too:
// gate and up of a feature meet in a lane, and stored features are neighbours.
//
// -D constants: DTYPE of x and SCALE_DTYPE, the same (1, 2) | MODEL_WIDTH D | INNER_WIDTH I | NUM_EXPERTS E |
// TILE_EIGHTS eights of picks in a tile | SLAB_INPUTS at most in a step | RING_BYTES of shared memory
#include "hopper.cuh"
#include "moe_many_plan.cuh"
#include "moe_many_products.cuh"

// ---- what the warps of a block share ------------------------------------------------------------------------------

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int PANEL_BYTES = max_of(UpStage::PANEL_BYTES, DownStage::PANEL_BYTES);
constexpr int SCALES_BYTES = max_of(UpStage::SCALES_BYTES, DownStage::SCALES_BYTES);
constexpr int X_BYTES = max_of(UpStage::X_BYTES, DownStage::X_BYTES);
constexpr int PANEL_PLACES = WIDE ? 4 : 5;  // what there is room for beside x
constexpr int SCALES_AT = PANEL_PLACES * PANEL_BYTES, X_AT = SCALES_AT + 2 * SCALES_BYTES;
static_assert(X_AT + 2 * X_BYTES <= RING_BYTES, "dynamic shared memory of the launch");
constexpr int TICKETS = 16;  // a copier is never so many items ahead of anybody

// An item of work: a tile of picks by a run of feature tiles, of gate and up or of down.
struct Item {
  int tile, expert, size, run;
  bool up;
  int pick[TILE_PICKS], row[TILE_PICKS];  // row of x or of hidden
};

struct Shared {  // behind the panels, scales and rows of x
  u64 full[2], empty[2];  // of a step: counts the copiers' lanes, the workers
  u64 taken[TICKETS];     // of an item: counts the taker's lanes
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

// The place in shared memory of what comes next. Two steps are there at a time, and of five panels one of a third.
struct Work {
  u8* memory;
  Shared* shared;
  int panel_at = 0, scales_at = 0, x_at = 0;
  Turning<2> step = {};
  Turning<TICKETS> place = {};

  DEVICE u32 full() const { return shared_address(&shared->full[step.at]); }
  DEVICE u32 empty() const { return shared_address(&shared->empty[step.at]); }
  // Offsets in `memory`.
  DEVICE u32 panel(int ahead = 0) const {
    const int at = panel_at + ahead;
    return (at < PANEL_PLACES ? at : at - PANEL_PLACES) * PANEL_BYTES;
  }
  DEVICE u32 scales() const { return SCALES_AT + scales_at * SCALES_BYTES; }
  DEVICE u32 x() const { return X_AT + x_at * X_BYTES; }

  // Behind a step.
  template <typename S>
  DEVICE void turn(int slab) {
    panel_at += S::PANELS;
    if (panel_at >= PANEL_PLACES) panel_at -= PANEL_PLACES;
    if (slab % S::SPAN == S::SPAN - 1) scales_at ^= 1;
    if (!S::X_STAYS) x_at ^= 1;
    step.turn();
  }
  // Behind an item.
  template <typename S>
  DEVICE void turn_item() {
    if (S::X_STAYS) x_at ^= 1;
  }

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

// Copies an item's steps: a copier has its share of a panel's weight rows, and every COPIERS-th row of x.
template <typename S>
struct Copier {
  static constexpr int AT_ONCE = WARP / S::GROUPS;  // rows of a warp's copy of words
  static constexpr i64 ROW_BYTES = S::K / 2, SCALE_ROW = S::K / GROUP * sizeof(Scalar);

  const Scalar* x;
  const Item& item;

  static DEVICE int copier() { return warp_id() - WORKERS; }

  DEVICE void copy(Work& work, const u8* all_weights, const u8* all_scales) const {
    const int run = item.run, last_tile = min((run + 1) * S::RUN, S::TILES);
#pragma unroll 1
    for (int tile = run * S::RUN; tile < last_tile; ++tile) {
      const int own = copier() * COPIED_ROWS;  // row of a panel
      const int in_matrix = tile * S::TILE_FEATURES +
                            (S::GATED ? own / S::PANEL_FEATURES * S::FEATURES + own % S::PANEL_FEATURES : own);
      const i64 first = static_cast<i64>(item.expert) * S::MATRIX_ROWS + in_matrix;
      const u8* weights = all_weights + (first + lane_id() / S::GROUPS) * ROW_BYTES + lane_id() % S::GROUPS * 16;
      const u8* scales = all_scales + (first + lane_id() / S::SPAN) * SCALE_ROW + lane_id() % S::SPAN * S::SCALE_BYTES;
#pragma unroll 1
      for (int slab = 0; slab < S::SLABS; ++slab) {
        const u8* words = weights + slab * S::PITCH;
        if (WIDE) barrier_wait(work.empty(), work.step.parity ^ 1);
        copy_words(work.memory + work.panel(), words);
        if (!WIDE) barrier_wait(work.empty(), work.step.parity ^ 1);  // a panel has room before its step has
        if (slab % S::SPAN == 0) copy_scales(work.memory + work.scales(), scales + slab * S::SCALE_BYTES);
        if (!S::X_STAYS || tile == run * S::RUN) copy_rows(work.memory + work.x(), slab);
        if (S::PANELS == 2) copy_words(work.memory + work.panel(1), words + S::PANEL_FEATURES * ROW_BYTES);
        copy_async_arrive(work.full());
        work.turn<S>(slab);
      }
    }
    work.turn_item<S>();
  }

 private:
  DEVICE void copy_words(u8* panel, const u8* words) const {
    const u32 row = lane_id() / S::GROUPS, chunk = lane_id() % S::GROUPS ^ swapped<S>(row);
    const u32 to = shared_address(panel) + (copier() * COPIED_ROWS + row) * S::PITCH + chunk * 16;
#pragma unroll
    for (int i = 0; i < COPIED_ROWS / AT_ONCE; ++i) {
      const u32 swap = swapped<S>(i * AT_ONCE) * 16;  // the lane's row is that of one of the first 8
      copy_async((to ^ swap) + i * AT_ONCE * S::PITCH, words + i * AT_ONCE * ROW_BYTES);
    }
  }

  DEVICE void copy_scales(u8* to, const u8* scales) const {
    constexpr int ROWS = WARP / S::SPAN;  // of a warp's copy
    to += (copier() * COPIED_ROWS + lane_id() / S::SPAN) * S::SCALE_PITCH + lane_id() % S::SPAN * S::SCALE_BYTES;
#pragma unroll
    for (int p = 0; p < S::PANELS; ++p) {
#pragma unroll
      for (int i = 0; i < COPIED_ROWS / ROWS; ++i) {
        u8* piece = to + (p * PANEL_ROWS + i * ROWS) * S::SCALE_PITCH;
        const u8* from = scales + (p * S::PANEL_FEATURES + i * ROWS) * SCALE_ROW;
        if constexpr (S::SCALE_BYTES == 16) copy_async(shared_address(piece), from);
        else copy_less<S::SCALE_BYTES>(shared_address(piece), from);
      }
    }
  }

  // Rows past the last pick are not copied: what they hold reaches only columns that nobody reads.
  DEVICE void copy_rows(u8* rows, int slab) const {
    const u32 to = shared_address(rows) + lane_id() / 8 * 1024;
    const Scalar* from = x + slab * S::SLAB + lane_id() * 8;
    const int size = lane_id() < S::X_UNITS ? item.size : 0;
#pragma unroll
    for (int i = 0; i < TILE_PICKS / COPIERS; ++i) {
      const int n = i * COPIERS + copier();
      if (n >= size) break;
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
    float total[S::PANELS][4 * EIGHTS] = {};
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS; ++slab) {
      barrier_wait(work.full(), work.step.parity);
      if (WIDE) async_proxy_fence();  // x was copied by ordinary means
      Operands<S> step;
      const u32 memory = shared_address(work.memory);
      step.scales = memory + work.scales() + slab % S::SPAN * S::SCALE_BYTES + lane.scales;
      step.x = memory + work.x() + (WIDE ? 0 : lane.x);  // wgmma reads all of it
#pragma unroll
      for (int p = 0; p < S::PANELS; ++p) step.panel[p] = memory + work.panel(p) + lane.words;
      multiply<S, EIGHTS>(total, step);
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(work.empty());
      work.turn<S>(slab);
    }
#pragma unroll
    for (int p = 0; p < S::PANELS; ++p) {
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) {
        const float(&sums)[4] = *reinterpret_cast<const float(*)[4]>(&total[p][4 * n]);
        const int i = 8 * n + lane_id() / 4;
        store(i < item.size ? item.pick[i] : -1, tile * S::TILE_FEATURES + p * S::PANEL_FEATURES, sums);
      }
    }
  }
  work.turn_item<S>();
}

// In as few eights as hold the picks; wgmma takes as long for one as for four.
template <typename S, int EIGHTS = WIDE ? 4 : 1, typename Store>
DEVICE void run_eights(Work& work, const Item& item, const Lane<S>& lane, Store store) {
  constexpr int MORE = WIDE ? EIGHTS + 2 : EIGHTS + 1;
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
    for (int i = 0; i < 2; ++i) {
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
    if (WIDE) give_registers<COPIER_REGISTERS>();
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
  if (WIDE) take_registers<WORKER_REGISTERS>();
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

// Sums of the shared expert's gate_up, which the library makes in parts: hidden = silu(gate) * up, a value a thread.
constexpr int ACTIVATE_THREADS = 256;
extern "C" __global__ __launch_bounds__(ACTIVATE_THREADS) void moe_many_activate(
    const float* products,  // [parts, T, 2 * inner], which add up; gate first
    Scalar* activated,      // [T, inner]
    int values, int inner, int parts) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int at = blockIdx.x * ACTIVATE_THREADS + threadIdx.x;
  if (at >= values) return;
  const float* its = products + at + static_cast<i64>(at / inner) * inner;
  float gate = 0, up = 0;
#pragma unroll 4
  for (int part = 0; part < parts; ++part, its += static_cast<i64>(2) * values) {
    gate += load_fresh(its);
    up += load_fresh(its + inner);
  }
  activated[at] = from_float<Scalar>(__fdividef(gate, 1.0f + expf(-gate)) * up);
}

// A block adds up 8 * SUM_THREADS features of one row. All parts of AT_ONCE picks are under way together: loads to
// registers would wait for one another, as ptxas puts sums between them.
constexpr int SUM_THREADS = 128;
extern "C" __global__ __launch_bounds__(SUM_THREADS) void moe_many_sum(
    const Scalar* parts,    // [T, top_k, MODEL_WIDTH]; that of a pick without an expert is not read
    const i32* expert_ids,  // [T, top_k]
    const float* weights,   // [T, top_k]
    const Scalar* added,    // [T, MODEL_WIDTH], or null
    Scalar* out,            // [T, MODEL_WIDTH]
    int top_k) {
  constexpr int EACH = 8, AT_ONCE = 8;
  using Values = Vec<Scalar, EACH>;
  __shared__ Values own[AT_ONCE][SUM_THREADS];  // each thread its own
  static_assert(MODEL_WIDTH % (EACH * WARP) == 0, "whole warps");
  grid_dependency_wait();
  grid_dependency_launch();
  const i64 row = blockIdx.x;
  const int feature = (blockIdx.y * SUM_THREADS + threadIdx.x) * EACH;
  if (feature >= MODEL_WIDTH) return;
  float sum[EACH] = {};
  Values more = {};
  if (added) more = load_fresh(reinterpret_cast<const Values*>(added + row * MODEL_WIDTH + feature));
  for (int first = 0; first < top_k; first += WARP) {  // a lane has a pick
    const i64 at = row * top_k + first;
    const bool has = first + lane_id() < top_k;
    const u32 expert = has ? load_fresh(expert_ids + at + lane_id()) : -1;
    const float weight = has ? load_fresh(weights + at + lane_id()) : 0.0f;
    for (int s = 0; s < min(top_k - first, WARP); s += AT_ONCE) {
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (__shfl_sync(FULL_MASK, expert, s + i) >= NUM_EXPERTS) continue;
        copy_async(shared_address(&own[i][threadIdx.x]), parts + (at + s + i) * MODEL_WIDTH + feature);
      }
      copy_async_wait_all();
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (__shfl_sync(FULL_MASK, expert, s + i) >= NUM_EXPERTS) continue;
        const Values part = own[i][threadIdx.x];
        const float its = __shfl_sync(FULL_MASK, weight, s + i);
#pragma unroll
        for (int n = 0; n < EACH; ++n) sum[n] = fmaf(its, to_float(part[n]), sum[n]);
      }
    }
  }
  Values rounded;
#pragma unroll
  for (int i = 0; i < EACH; ++i) rounded[i] = from_float<Scalar>(sum[i] + to_float(more[i]));
  store_vec(out + row * MODEL_WIDTH + feature, rounded);
}

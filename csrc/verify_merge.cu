// csrc/verify_merge.cu: last step of a tree attention whose tiles were cut along the keys: adds up a tile's parts.
//   in   o_partial [slots,64,C] f32, normalised | lse_partial [slots,64] f32, log2 | cuts [grid] of the balanced
//        division (verify_schedule.cuh) | prefix_len [S] i32 | num_nodes [S] i32, from which the fixed cuts follow
//        verify_merge_prefix: o_prefix [S,N,H,C] and lse_prefix [S,H,N] f32, nats, of another kernel (FlashMLA; +inf
//        where the prefix is empty), and one part a tile for the tree
//   out  o [S,N,H,C] bf16 or half (-DDTYPE) | lse [S,N,H] f32, nats; rows of cut tiles, and 0 and -inf for unused
//        rows; verify_merge_prefix writes all rows
//   math w_i = 2^(lse_i - max lse), o = sum_i w_i o_i / sum_i w_i, lse = max + log2(sum_i w_i), in order of the parts
//   cost the bytes of the parts, read once
//   ref  kernels/reference/ops.py:verify_attention | test tests/kernels/test_verify_attention_gpu.py | sm_80 and up
#include "verify_schedule.cuh"

struct Config {
  static constexpr int C = LATENT, TILE_ROWS = 64, VALUES = 8;  // values a thread
  static constexpr int ROW_THREADS = C / VALUES, PART_GROUPS = 4, THREADS = ROW_THREADS * PART_GROUPS;
};
static_assert(Config::C % (Config::VALUES * WARP) == 0 && Config::THREADS <= 1024, "whole warps share a row");

using Work = Schedule<Config::TILE_ROWS, CUT_BLOCK_KEYS, CUT_TILE_UNITS, CUT_MIN_UNITS, CUT_FIXED_KEYS>;

// A sum under way: its weights are relative to 2^best.
struct Partial {
  float best = -INFINITY_F32, sum = 0.0f, values[Config::VALUES] = {};

  DEVICE void add(float other_best, float other_sum, const float (&other)[Config::VALUES]) {
    if (other_sum == 0.0f) return;  // nothing was visible there
    const float new_best = max(best, other_best);
    const float mine = exp2f(best - new_best), theirs = exp2f(other_best - new_best);
    sum = sum * mine + other_sum * theirs;
#pragma unroll
    for (int i = 0; i < Config::VALUES; ++i) values[i] = values[i] * mine + other[i] * theirs;
    best = new_best;
  }
};

// 0 and -inf for the rows that no stream uses, shared by all blocks. It may run before grid_dependency_wait: the kernel
// before is launched without overlap, so that whatever read these rows earlier has ended, and writes none of them.
DEVICE void clear_unused_rows(const Sizes& sizes, Scalar* o, float* lse) {
  const int all = sizes.num_streams * sizes.num_rows;
  for (int i = blockIdx.y * gridDim.x + blockIdx.x; i < all; i += gridDim.x * gridDim.y) {
    if (i % sizes.num_rows < Work::stream_work(sizes, i / sizes.num_rows).nodes) continue;
    const i64 first = i64(i) * sizes.num_heads;
    for (int j = threadIdx.x; j < sizes.num_heads * (Config::C / 8); j += Config::THREADS)
      reinterpret_cast<uint4*>(o + first * Config::C)[j] = make_uint4(0, 0, 0, 0);
    for (int j = threadIdx.x; j < sizes.num_heads; j += Config::THREADS) lse[first + j] = -INFINITY_F32;
  }
}

// Block (x, y) does rows y, y + gridDim.y, ... of cut tile x; groups of threads share the parts of a row.
extern "C" __global__ void __launch_bounds__(Config::THREADS, 2) verify_merge(
    const float* __restrict__ o_partial, const float* __restrict__ lse_partial, const Cut* __restrict__ cuts,
    const i32* __restrict__ prefix_len, const i32* __restrict__ num_nodes, Scalar* __restrict__ o,
    float* __restrict__ lse, int num_streams, int num_rows, int num_heads, int capacity, int fixed_parts) {
  __shared__ float shared[Config::PART_GROUPS - 1][Config::C + 2];
  const Sizes sizes{prefix_len, num_nodes, num_streams, num_rows, num_heads, capacity, 1, fixed_parts, false};
  clear_unused_rows(sizes, o, lse);
  grid_dependency_wait();
  Cut cut;
  if (fixed_parts) {
    const Work work(sizes);
    cut = work.fixed_cut(blockIdx.x / work.max_tiles(), blockIdx.x % work.max_tiles());
  } else {
    cut = cuts[blockIdx.x];
  }
  if (cut.num_parts == 0) return;
  const int column = threadIdx.x % Config::ROW_THREADS * Config::VALUES, group = threadIdx.x / Config::ROW_THREADS;
  for (int row = blockIdx.y; row < cut.pairs; row += gridDim.y) {
    Partial total;
#pragma unroll 4
    for (int part = group; part < cut.num_parts; part += Config::PART_GROUPS) {
      const int slot = part == 0 ? cut.first_slot : cut.next_slot + (part - 1) * cut.slot_step;
      const i64 place = i64(slot) * Config::TILE_ROWS + row;
      const float part_lse = lse_partial[place];
      float values[Config::VALUES];
#pragma unroll
      for (int i = 0; i < Config::VALUES; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(o_partial + place * Config::C + column + i);
        values[i] = v.x, values[i + 1] = v.y, values[i + 2] = v.z, values[i + 3] = v.w;
      }
      total.add(part_lse, part_lse == -INFINITY_F32 ? 0.0f : 1.0f, values);
    }
    __syncthreads();  // the row before has been added up
    if (group > 0) {
      float* to = shared[group - 1];
#pragma unroll
      for (int i = 0; i < Config::VALUES; ++i) to[column + i] = total.values[i];
      if (column == 0) to[Config::C] = total.best, to[Config::C + 1] = total.sum;
    }
    __syncthreads();
    if (group > 0) continue;
#pragma unroll
    for (int other = 0; other < Config::PART_GROUPS - 1; ++other) {
      const float* from = shared[other];
      float values[Config::VALUES];
#pragma unroll
      for (int i = 0; i < Config::VALUES; ++i) values[i] = from[column + i];
      total.add(from[Config::C], from[Config::C + 1], values);
    }
    const i64 place = i64(cut.stream) * num_rows * num_heads + cut.tile * Config::TILE_ROWS + row;
    Vec<Scalar, Config::VALUES> out;
#pragma unroll
    for (int i = 0; i < Config::VALUES; ++i)
      out[i] = from_float<Scalar>(total.sum > 0.0f ? total.values[i] / total.sum : 0.0f);
    store_vec(o + place * Config::C + column, out);
    if (column == 0) lse[place] = total.sum > 0.0f ? (total.best + log2f(total.sum)) * LN_2 : -INFINITY_F32;
  }
}

// One warp a (row, head) pair.
extern "C" __global__ void __launch_bounds__(Config::THREADS, 2) verify_merge_prefix(
    const Scalar* __restrict__ o_prefix, const float* __restrict__ lse_prefix, const float* __restrict__ o_partial,
    const float* __restrict__ lse_partial, const i32* __restrict__ prefix_len, const i32* __restrict__ num_nodes,
    Scalar* __restrict__ o, float* __restrict__ lse, int num_rows, int num_heads, int capacity) {
  const int stream = blockIdx.y, pair = blockIdx.x * (Config::THREADS / WARP) + warp_id();
  if (pair >= num_rows * num_heads) return;
  const int row = pair / num_heads, head = pair % num_heads;
  const i64 place = i64(stream) * num_rows * num_heads + pair;
  const int tile = stream * cdiv(num_rows * num_heads, Config::TILE_ROWS) + pair / Config::TILE_ROWS;
  const i64 part = i64(tile) * Config::TILE_ROWS + pair % Config::TILE_ROWS;
  const int prefix = prefix_len[stream];
  const bool used = row < min(num_nodes[stream], capacity - prefix), with_prefix = used && prefix > 0;
  const float prefix_lse = with_prefix ? lse_prefix[(i64(stream) * num_heads + head) * num_rows + row] * LOG2_E : 0.0f;
  const float part_lse = used ? lse_partial[part] : -INFINITY_F32;
  float both = -INFINITY_F32;
  for (int column = lane_id() * Config::VALUES; column < Config::C; column += WARP * Config::VALUES) {
    Partial total;
    float values[Config::VALUES];
    if (with_prefix) {
      const Vec<Scalar, Config::VALUES> v = load_vec<Scalar, Config::VALUES>(o_prefix + place * Config::C + column);
#pragma unroll
      for (int i = 0; i < Config::VALUES; ++i) values[i] = to_float(v[i]);
      total.add(prefix_lse, 1.0f, values);
    }
    if (part_lse > -INFINITY_F32) {
#pragma unroll
      for (int i = 0; i < Config::VALUES; ++i) values[i] = o_partial[part * Config::C + column + i];
      total.add(part_lse, 1.0f, values);
    }
    Vec<Scalar, Config::VALUES> out;
#pragma unroll
    for (int i = 0; i < Config::VALUES; ++i)
      out[i] = from_float<Scalar>(total.sum > 0.0f ? total.values[i] / total.sum : 0.0f);
    store_vec(o + place * Config::C + column, out);
    if (total.sum > 0.0f) both = (total.best + log2f(total.sum)) * LN_2;
  }
  if (lane_id() == 0) lse[place] = both;
}

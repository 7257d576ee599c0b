// csrc/verify_parts.cu: last step of a tree attention whose tiles go in parts: adds them up. Behind
//   csrc/verify_attention_wgmma.cu with -DPARTS=1.
//   in   partial, partial_lse as verify_attention_wgmma.cu leaves them | prefix_len [S] i32 and num_nodes [S] i32, from
//        which the division follows as there
//   out  o [S,N,H,512] bf16 or half (-DDTYPE) | lse [S,N,H] f32, nats; rows of tiles that have more than one part
//   math w_i = 2^(lse_i - max lse), o = sum_i w_i o_i / sum_i w_i, lse = max + log2(sum_i w_i)
//   cost the bytes of the parts, read once, from the L2 cache
//   how  A block of threads [32, 2, shares] adds 16 rows of 64 columns of one tile: y is the group of warps that wrote
//        those columns, and z shares out the parts. It starts while the parts are under way and waits for their end.
//   ref  kernels/reference/ops.py:verify_attention | test tests/kernels/test_verify_wgmma.py | sm_90a
#include "fresh.cuh"
#include "verify_wgmma_merge.cuh"

constexpr int SLICES = 8, WORDS = Config::WORDS / SLICES, AHEAD = 4;  // blocks that share a tile's columns; parts ahead
constexpr int GROUPS = 2, VALUES = 8 * WORDS + 4;                     // of the threads; of an Added

// Block (x, y, z): tile y of stream z.
extern "C" __global__ void __launch_bounds__(WARP * GROUPS * MAX_SHARES)
    verify_parts(const i32* prefix_len, const i32* num_nodes, uint4* partial, float* partial_lse, Scalar* o, float* lse,
                 int num_streams, int num_rows, int num_heads, int table_width, int most, int fixed_split) {
  extern __shared__ float shared[];  // [shares - 1, VALUES, GROUPS, WARP]
  const Params p = {nullptr,     prefix_len, nullptr,   num_nodes, o,           lse, partial,     partial_lse, nullptr,
                    num_streams, num_rows,   num_heads, 0,         table_width, 0,   fixed_split, 0.0f};
  grid_dependency_launch();
  const int slice = blockIdx.x % SLICES, warp = blockIdx.x / SLICES, row = warp * 16 + lane_id() / 4;
  const int stream = blockIdx.z, group = threadIdx.y, share = threadIdx.z, shares = blockDim.z;
  // Lengths are read before the wait: the kernel ahead has let this one begin after its own wait, so they are final.
  const int prefix = load_fresh(prefix_len + stream), nodes = load_fresh(num_nodes + stream);
  const Segment seg = part_of_tile(p, stream, blockIdx.y, 0, most, last_row(blockIdx.y, num_heads), prefix, nodes);
  grid_dependency_wait();
  if (seg.parts <= 1) return;  // the block that did the tile has written it
  Added<WORDS> sum;
  if (warp < used_warps(p, seg)) {
    const int tile = stream * gridDim.y + blockIdx.y;
    const auto slot_of = [&](int part) { return part_slot(tile, part, most); };
    add_parts<WORDS, AHEAD>(p, sum, share, shares, seg.parts, slot_of, slice * WORDS, group, warp);
  }
  float* mine = shared + group * WARP + lane_id();  // and GROUPS * WARP further on the next value
  constexpr int STEP = GROUPS * WARP;
  if (share > 0) {
    float* to = mine + (share - 1) * VALUES * STEP;
#pragma unroll
    for (int i = 0; i < 8 * WORDS; ++i) to[i * STEP] = sum.o[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) to[(8 * WORDS + r) * STEP] = sum.top[r], to[(8 * WORDS + 2 + r) * STEP] = sum.total[r];
  }
  __syncthreads();
  if (share > 0) return;
#pragma unroll 1
  for (int other = 0; other < shares - 1; ++other) {
    const float* from = mine + other * VALUES * STEP;
    float values[8 * WORDS];
#pragma unroll
    for (int i = 0; i < 8 * WORDS; ++i) values[i] = from[i * STEP];
    const float top[2] = {from[8 * WORDS * STEP], from[(8 * WORDS + 1) * STEP]};
    const float total[2] = {from[(8 * WORDS + 2) * STEP], from[(8 * WORDS + 3) * STEP]};
    sum.add(top, total, values);
  }
  write_added(p, seg, sum, slice * WORDS, group, row);
}

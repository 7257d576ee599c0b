// csrc/router_gate.cu: the router's product, x W^T with sums in float32, left in parts over the inputs for router.cu.
//   in   x [T,D], rows with a stride | w [E,D]; D by BLOCK_INPUTS, E by BLOCK_FEATURES
//   out  parts [D / BLOCK_INPUTS, T, E] f32: their sum is the logits
//   math sums in float32; their order depends on D alone, not on T
//   cost 2 D (E + T) bytes, and the parts, which stay in L2; bound by latency up to some 16 rows, then by L2
//   ref  kernels/reference/layer.py:router | test tests/kernels/test_router.py | sm_90 and up (bulk copies)
//
// A block takes BLOCK_FEATURES outputs and BLOCK_INPUTS inputs and asks for all of them at once: W, into registers,
// before the kernel ahead in the stream has ended, and then x, a copy a row; blocks of a cluster have the same inputs,
// and each sends its share of the rows to all. No block waits for another's sums: whoever adds up the parts comes next
// anyway. Weights are the M side of mma.sync, rows of x the N side. A lane loads 8 neighbouring inputs, which are its
// fragments of two products: x and W have their inputs in one other order then, and a sum does not mind. The two warps
// that share outputs meet in shared memory.
//
// -D constants: DTYPE 1 or 2 | ROWS of a block, a multiple of 8.
#include "fresh.cuh"
#include "hopper.cuh"
#include "mma.cuh"

#if !defined(DTYPE) || !defined(ROWS)
#error "DTYPE (see common.cuh) and ROWS"
#endif

constexpr int BLOCK_FEATURES = 64, BLOCK_INPUTS = 448, K_WARPS = 2;
constexpr int M_TILES = ROWS > 8 ? 2 : 1;  // of a warp, of 16 outputs: more of them, and fewer warps read the rows
constexpr int FEATURE_WARPS = BLOCK_FEATURES / 16 / M_TILES, WARPS = FEATURE_WARPS * K_WARPS, THREADS = WARPS * WARP;
constexpr int INPUTS = BLOCK_INPUTS / K_WARPS, STEPS = INPUTS / 32, N_TILES = ROWS / 8;
constexpr int ROW_BYTES = 2 * BLOCK_INPUTS, PITCH = round_up(ROW_BYTES, 128) + 64;  // of a row of x, and of two
static_assert(2 * INPUTS % 64 == 0, "8 lanes of 16 bytes, of two rows, meet all banks");
constexpr int X_BYTES = ROWS * PITCH;

// Shared memory: x [ROWS][PITCH], then this.
struct Rest {
  float4 sums[FEATURE_WARPS][M_TILES][N_TILES][WARP];  // of a tile, by the warp that leaves it to the other
  u64 barrier;
};

// `bytes`, a multiple of 16, from global to shared memory of the first `count` blocks of the cluster, where they arrive
// at the barrier in the same place.
DEVICE void copy_bytes(u32 shared, const void* global, u32 bytes, u32 barrier, int count) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
      :
      : "r"(shared), "l"(global), "r"(bytes), "r"(barrier), "h"(u16((1 << count) - 1))
      : "memory");
}

// Says yes to one lane of a warp. What stands under it is no loop over lanes, as under lane_id() == 0.
DEVICE bool elected() {
  u32 one;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(one));
  return one;
}

// Grid (E / BLOCK_FEATURES, D / BLOCK_INPUTS, T by ROWS), clusters along x.
extern "C" __global__ void __launch_bounds__(THREADS)
    router_gate(const Scalar* __restrict__ x,  // [num_rows, D]
                const Scalar* __restrict__ w,  // [num_features, D]
                float* __restrict__ parts,     // [gridDim.y, num_rows, num_features]
                int num_rows, int num_features, i64 x_row, i64 w_row) {
  extern __shared__ __align__(128) u8 shared[];
  Rest& rest = *reinterpret_cast<Rest*>(shared + X_BYTES);
  const u32 rows_at = shared_address(shared), barrier = shared_address(&rest.barrier);
  const int lane = lane_id(), g = lane / 4, t = lane % 4, warp = __shfl_sync(FULL_MASK, warp_id(), 0);
  const int feature_warp = warp % FEATURE_WARPS, k_warp = warp / FEATURE_WARPS;
  const int first_row = blockIdx.z * ROWS, rows = min(ROWS, num_rows - first_row);
  const int first = blockIdx.y * BLOCK_INPUTS;
  // The 2 M_TILES outputs that a lane stores side by side; rows g and g + 8 of a tile.
  const int feature = blockIdx.x * BLOCK_FEATURES + (feature_warp * 8 + g) * 2 * M_TILES;
  grid_dependency_launch();
  Vec16<u32> loaded[STEPS][M_TILES][2];
  const Scalar* from = w + feature * w_row + first + k_warp * INPUTS + t * 8;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        loaded[s][m][h] = load_fresh(reinterpret_cast<const Vec16<u32>*>(from + (2 * m + h) * w_row + s * 32));
      }
    }
  }
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  // The blocks of a cluster share the rows: each asks for some and sends them to all.
  const int split = cluster_size(), at = warp * split + cluster_rank(), step = WARPS * split;
  u32 to_row = rows_at + at * PITCH;
  const u32 row_end = rows_at + rows * PITCH;
  const Scalar* x_from = x + (first_row + at) * x_row + first;
  cluster_arrive();
  cluster_wait();  // all have made their barriers
  grid_dependency_wait();
  if (elected()) {
    if (warp == 0) mbarrier_expect(barrier, rows * ROW_BYTES);
#pragma unroll 1
    for (; to_row < row_end; to_row += step * PITCH, x_from += step * x_row) {
      copy_bytes(to_row, x_from, ROW_BYTES, barrier, split);
    }
  }
  // Fragments of A. The zero, which the compiler does not know, makes them values of their own: ptxas would else gather
  // them anew for every product.
  u32 a[STEPS][M_TILES][2][4];
  const u32 zero = num_rows >> 31;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) a[s][m][i / 4][i % 4] = loaded[s][m][i % 2][i / 2] ^ zero;
    }
  }
  float total[M_TILES][N_TILES][4] = {};
  const u32 mine = rows_at + g * PITCH + k_warp * (2 * INPUTS) + t * 16;
  mbarrier_wait(barrier, 0);
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      const float4 word = load_shared4(mine + n * 8 * PITCH + s * 64);
      const uint4& b = reinterpret_cast<const uint4&>(word);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        multiply_add<Scalar>(total[m][n], a[s][m][0], b.x, b.y);
        multiply_add<Scalar>(total[m][n], a[s][m][1], b.z, b.w);
      }
    }
  }
  const auto sum_of = [&](int m, int n) -> float4& { return reinterpret_cast<float4&>(total[m][n]); };
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
      if (n % K_WARPS != k_warp) rest.sums[feature_warp][m][n][lane] = sum_of(m, n);
    }
  }
  __syncthreads();
  float* to = parts + (i64(blockIdx.y) * num_rows + first_row) * num_features + feature;
#pragma unroll
  for (int n = 0; n < N_TILES; ++n) {
    if (n % K_WARPS != k_warp) continue;
    Vec<float, 2 * M_TILES> out[2];  // of rows 2 t and 2 t + 1
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      const float4 own = sum_of(m, n), other = rest.sums[feature_warp][m][n][lane];
      out[0][2 * m] = own.x + other.x, out[0][2 * m + 1] = own.z + other.z;
      out[1][2 * m] = own.y + other.y, out[1][2 * m + 1] = own.w + other.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = n * 8 + t * 2 + i;
      if (row < rows) store_vec(to + i64(row) * num_features, out[i]);
    }
  }
}

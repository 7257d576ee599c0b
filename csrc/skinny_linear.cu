// csrc/skinny_linear.cu: y = x W^T for a few rows, bound by the bytes of W: a cluster shares the inputs of a tile.
//   in   x [B,T,K], w [B,N,K] (or [B,K,N] for skinny_linear_columns), rows with strides; B matrices, often one
//   out  y [B,T,N] in x's dtype or float32; gated: y [B,T,N/2] = silu(x G^T) * (x U^T), W = [G; U]
//   math sums in float32, one rounding; their order depends on N, K and the cluster alone, not on T
//   cost 2 N K bytes, 2 T N K FLOP: bound by bytes up to some 60 rows
//   ref  kernels/reference/layer.py:skinny_linear | test tests/kernels/test_skinny_linear.py | sm_90 and up (clusters)
//
// A block takes TILE outputs and its part of the inputs, SLAB at a time, STAGES - 1 slabs ahead of the products. W is
// nobody's output, so its copies begin before the kernel ahead in the stream has ended. Weights are the M side of
// mma.sync and rows of x the N side: one row and eight cost the same. The warps of a block share its slabs; their sums
// meet in shared memory, then those of the cluster's blocks in the block that owns the row (row % cluster), and are
// added in a fixed order.
//
// -D constants: DTYPE 1 or 2 | ROWS, a multiple of 8 that T does not exceed | TILE outputs of a block, FEATURE_WARPS
// that share them | SLAB_INPUTS | STAGES. The cluster is 1, 2, 4 or 8 blocks.
#include "hopper.cuh"
#include "mma.cuh"

#if !defined(DTYPE) || !defined(ROWS) || !defined(TILE) || !defined(FEATURE_WARPS)
#error "DTYPE (see common.cuh), ROWS, TILE and FEATURE_WARPS"
#endif
#if !defined(SLAB_INPUTS) || !defined(STAGES)
#error "SLAB_INPUTS and STAGES"
#endif

constexpr int THREADS = 256, WARPS = THREADS / WARP, MAX_CLUSTER = 8;
constexpr int SLAB = SLAB_INPUTS;                  // inputs of a stage
constexpr int WARP_FEATURES = TILE / FEATURE_WARPS, K_WARPS = WARPS / FEATURE_WARPS;
constexpr int M_TILES = WARP_FEATURES / 16, N_TILES = ROWS / 8, K_STEPS = SLAB / K_WARPS / 16;
constexpr int CHUNK = 8;                           // values in 16 bytes
constexpr int PAD = TILE + 4;                      // floats a row of sums: a warp's stores meet 32 banks
constexpr int WEIGHT_BYTES = TILE * SLAB * 2, X_BYTES = ROWS * SLAB * 2, STAGE_BYTES = WEIGHT_BYTES + X_BYTES;
constexpr int QUADS = TILE / 4;                    // four outputs are added at once,
constexpr int ROW_STEP = THREADS / QUADS, ROWS_EACH = cdiv(ROWS, ROW_STEP);  // by a thread for rows so far apart
static_assert(TILE % (16 * FEATURE_WARPS) == 0 && ROWS % 8 == 0 && ROWS >= 8 && K_STEPS >= 1, "whole fragments");
static_assert(K_WARPS * ROWS * PAD * 4 <= STAGES * STAGE_BYTES, "the warps' sums take the place of the slabs");

// Shared memory: the stages, then what the cluster's blocks send.
struct Inbox {
  alignas(16) float sums[ROWS][QUADS][4];  // [cluster][rows of this block]
  alignas(8) u64 barrier;
};

enum Epilogue { PLAIN = 0, FLOAT = 1, GATED = 2 };

struct Problem {
  const Scalar* x;
  const Scalar* w;
  void* y;
  int num_rows, features, inputs;
  i64 x_row, x_matrix, w_row, w_matrix, y_row, y_matrix;  // strides in values
  int epilogue;
};

// 16 bytes to shared memory of a block of the cluster; they count as arrived at its barrier.
DEVICE void send(u32 address, const float4& v, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
               :
               : "r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

DEVICE float4 add(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Where 16-byte chunk c of a row of a stage stands, so that ldmatrix meets all banks.
template <int ROW_BYTES>
DEVICE u32 place(u32 base, int row, int c) {
  constexpr int CHUNKS = ROW_BYTES / 16 < 8 ? ROW_BYTES / 16 : 8;
  return base + row * ROW_BYTES + ((c ^ (row / (8 / CHUNKS) % CHUNKS)) << 4);
}

// The copies that a thread makes of each slab: 16-byte chunks of COUNT rows, CHUNKS a row.
template <int COUNT, int CHUNKS>
struct Copies {
  static constexpr int EACH = cdiv(COUNT * CHUNKS, THREADS), STEP = THREADS / CHUNKS;
  static DEVICE int row(int i) { return threadIdx.x / CHUNKS + i * STEP; }
  static DEVICE int chunk() { return threadIdx.x % CHUNKS; }
};

// The whole kernel. COLUMNS: W is [K, N].
template <bool COLUMNS>
DEVICE void run(const Problem& p) {
  extern __shared__ __align__(128) u8 shared[];
  Inbox& inbox = *reinterpret_cast<Inbox*>(shared + STAGES * STAGE_BYTES);
  const u32 ring = shared_address(shared), barrier = shared_address(&inbox.barrier);
  const int split = cluster_size(), rank = cluster_rank(), shift = __ffs(split) - 1;
  const int tile = blockIdx.x >> shift, matrix = blockIdx.y;
  const int slabs = p.inputs / SLAB, first = slabs * rank >> shift, end = slabs * (rank + 1) >> shift;
  // Rows owner, owner + split, ...
  const auto rows_of = [&](int owner) { return (p.num_rows - owner + split - 1) >> shift; };
  const int own_rows = rows_of(rank);
  if (!COLUMNS) grid_dependency_launch();
  if (split > 1) {
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_init_fence();
      if (own_rows > 0) mbarrier_expect(barrier, own_rows * split * QUADS * 16);
    }
    cluster_arrive();
  }

  using W = Copies<COLUMNS ? SLAB : TILE, COLUMNS ? TILE / CHUNK : SLAB / CHUNK>;
  using X = Copies<ROWS, SLAB / CHUNK>;
  const bool halves = p.epilogue == GATED;
  const int outputs = halves ? TILE / 2 : TILE, limit = halves ? p.features / 2 : p.features;  // of y: a tile's, all
  // A thread's rows of W: outputs, or inputs for COLUMNS.
  const Scalar* w = p.w + matrix * p.w_matrix + i64(first) * SLAB * (COLUMNS ? p.w_row : 1);
  const Scalar* from[W::EACH];
  bool valid[W::EACH];
#pragma unroll
  for (int i = 0; i < W::EACH; ++i) {
    if (COLUMNS) {
      const int n = tile * TILE + W::chunk() * CHUNK;
      valid[i] = n < p.features;
      from[i] = w + (valid[i] ? W::row(i) * p.w_row + n : 0);
    } else {
      const int row = W::row(i), half = row < outputs ? 0 : 1;
      const int n = tile * outputs + row - half * outputs;
      valid[i] = row < TILE && n < limit;
      from[i] = w + (valid[i] ? (half * limit + n) * p.w_row + W::chunk() * CHUNK : 0);
    }
  }
  const i64 w_step = COLUMNS ? SLAB * p.w_row : SLAB;
  auto copy_weights = [&](int slab, int slot) {
#pragma unroll
    for (int i = 0; i < W::EACH; ++i) {
      const u32 to = ring + slot * STAGE_BYTES;
      constexpr int ROW_BYTES = (COLUMNS ? TILE : SLAB) * 2;
      if (W::EACH * THREADS == TILE * SLAB / CHUNK || W::row(i) < (COLUMNS ? SLAB : TILE)) {
        copy_async(place<ROW_BYTES>(to, W::row(i), W::chunk()), from[i] + (slab - first) * w_step, valid[i]);
      }
    }
  };
  // All addresses are made before the wait: what stands behind it is a chain that nothing hides.
  const Scalar* x_from[X::EACH];
#pragma unroll
  for (int i = 0; i < X::EACH; ++i) {
    x_from[i] = p.x + matrix * p.x_matrix + X::row(i) * p.x_row + first * SLAB + X::chunk() * CHUNK;
  }
  auto copy_rows = [&](int slab, int slot) {
#pragma unroll
    for (int i = 0; i < X::EACH; ++i) {
      if (X::row(i) < p.num_rows) {
        copy_async(place<SLAB * 2>(ring + slot * STAGE_BYTES + WEIGHT_BYTES, X::row(i), X::chunk()),
                   x_from[i] + (slab - first) * SLAB);
      }
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (first + s < end) copy_weights(first + s, s);
  }
  grid_dependency_wait();
  // Behind W_UK comes norm_rope, whose inputs are older than this kernel: from here on it may read them.
  if (COLUMNS) grid_dependency_launch();
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (first + s < end) copy_rows(first + s, s);
    copy_async_commit();  // the first one's group holds all of W's copies as well
  }

  float total[M_TILES][N_TILES][4] = {};
  const int lane = lane_id(), feature_warp = warp_id() % FEATURE_WARPS, k_warp = warp_id() / FEATURE_WARPS;
  int slot = 0;
#pragma unroll 1
  for (int slab = first; slab < end; ++slab) {
    copy_async_wait<STAGES - 2>();
    __syncthreads();  // this slab has come for all threads, and all have done with the one before: its place is next
    const int ahead = slab + STAGES - 1;
    if (ahead < end) {
      const int to = slot == 0 ? STAGES - 1 : slot - 1;
      copy_weights(ahead, to);
      copy_rows(ahead, to);
    }
    copy_async_commit();
    const u32 weights = ring + slot * STAGE_BYTES, rows = weights + WEIGHT_BYTES;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      const int k = (k_warp * K_STEPS + step) * 16;
      u32 b[2 * cdiv(N_TILES, 2)][2];
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        const int row = min(n + lane / 16, N_TILES - 1) * 8 + lane % 8;
        u32 r[4];
        load_matrices(r, place<SLAB * 2>(rows, row, k / CHUNK + lane / 8 % 2));
        b[n][0] = r[0], b[n][1] = r[1], b[n + 1][0] = r[2], b[n + 1][1] = r[3];
      }
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        u32 a[4];
        const int f = feature_warp * WARP_FEATURES + m * 16;
        if (COLUMNS) {
          load_matrices_transposed(a, place<TILE * 2>(weights, k + lane / 16 * 8 + lane % 8, f / CHUNK + lane / 8 % 2));
        } else {
          load_matrices(a, place<SLAB * 2>(weights, f + lane % 16, k / CHUNK + lane / 16));
        }
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) multiply_add<Scalar>(total[m][n], a, b[n][0], b[n][1]);
      }
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  copy_async_wait<0>();
  __syncthreads();

  auto sums = reinterpret_cast<float(*)[ROWS][PAD]>(shared);  // [K_WARPS]
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int feature = feature_warp * WARP_FEATURES + m * 16 + lane / 4 + i / 2 * 8;
        sums[k_warp][n * 8 + lane % 4 * 2 + i % 2][feature] = total[m][n][i];
      }
    }
  }
  __syncthreads();
  auto block_sum_of = [&](int row, int quad) {
    float4 sum = *reinterpret_cast<const float4*>(&sums[0][row][quad * 4]);
#pragma unroll
    for (int k = 1; k < K_WARPS; ++k) sum = add(sum, *reinterpret_cast<const float4*>(&sums[k][row][quad * 4]));
    return sum;
  };
  const int quad = threadIdx.x % QUADS, first_row = threadIdx.x / QUADS;
  if (split > 1) {
    cluster_wait();  // all blocks have made their barriers
#pragma unroll
    for (int i = 0; i < ROWS_EACH; ++i) {
      const int row = first_row + i * ROW_STEP, owner = row & (split - 1);
      if (row >= p.num_rows) break;
      const u32 to = shared_address(inbox.sums[rank * rows_of(owner) + (row >> shift)][quad]);
      send(remote_address(to, owner), block_sum_of(row, quad), remote_address(barrier, owner));
    }
    if (own_rows == 0) return;
    mbarrier_wait_cluster(barrier, 0);
  }
  const auto sum_of = [&](int own, int quad) {
    if (split == 1) return block_sum_of(own, quad);
    float4 sum = *reinterpret_cast<const float4*>(inbox.sums[own][quad]);
#pragma unroll
    for (int r = 1; r < MAX_CLUSTER; ++r) {
      if (r < split) sum = add(sum, *reinterpret_cast<const float4*>(inbox.sums[r * own_rows + own][quad]));
    }
    return sum;
  };
  const int n = tile * outputs + quad * 4;
  if (quad * 4 >= outputs || n >= limit) return;
#pragma unroll
  for (int i = 0; i < ROWS_EACH; ++i) {
    const int own = first_row + i * ROW_STEP;
    if (own >= own_rows) break;
    float4 v = sum_of(own, quad);
    const i64 at = matrix * p.y_matrix + (own * split + rank) * p.y_row + n;
    if (p.epilogue == FLOAT) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.y) + at) = v;
      continue;
    }
    if (halves) {
      const float4 up = sum_of(own, quad + QUADS / 2);
      const auto gated = [](float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; };
      v = make_float4(gated(v.x, up.x), gated(v.y, up.y), gated(v.z, up.z), gated(v.w, up.w));
    }
    const Vec<u32, 2> packed = {{pack_pair<Scalar>(v.x, v.y), pack_pair<Scalar>(v.z, v.w)}};
    store_vec(reinterpret_cast<u32*>(static_cast<Scalar*>(p.y) + at), packed);
  }
}

#define ARGUMENTS                                                                                                    \
  const Scalar *x, const Scalar *w, void *y, int num_rows, int features, int inputs, i64 x_row, i64 x_matrix,        \
      i64 w_row, i64 w_matrix, i64 y_row, i64 y_matrix, int epilogue

// Grid (tiles of N * cluster, B), clusters along x.
extern "C" __global__ void __launch_bounds__(THREADS) skinny_linear(ARGUMENTS) {
  run<false>({x, w, y, num_rows, features, inputs, x_row, x_matrix, w_row, w_matrix, y_row, y_matrix, epilogue});
}

// W is [B, K, N].
extern "C" __global__ void __launch_bounds__(THREADS) skinny_linear_columns(ARGUMENTS) {
  run<true>({x, w, y, num_rows, features, inputs, x_row, x_matrix, w_row, w_matrix, y_row, y_matrix, epilogue});
}

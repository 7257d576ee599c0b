// csrc/norm_rope.cu: what stands between a layer's projections and its attention, in one launch: the latent is normed,
//   the shared key and all heads' queries are rotated, and the row goes into the paged latent cache.
//   in   kv [S,N,C+R] raw kv_a output, row strides | q_rope [S,N,H,R] strides | norm_weight [C] | cos, sin [S,N,R/2] f32
//        block_table [S,M] i32 | prefix_len, num_nodes [S] i32
//   out  pages [P,64,C+R]: row prefix_len + i = norm(kv[i,:C]) | rotate(kv[i,C:]) for i < num_nodes
//        q [S,N,H,C+R]: q[i,h,C:] = rotate(q_rope[i,h]) for i < num_nodes; rows from num_nodes on stay untouched
//   math norm(x) = round(x rsqrt(mean(x^2) + eps)) weight, the mean in f32, rounded before the weight as torch does it;
//        rotate: (a, b) -> (a cos - b sin, b cos + a sin) in f32, pairs (2j, 2j+1) if interleaved, else (j, j + R/2)
//   bad  a row that the block table or `pages` does not hold is not written
//   cost 2 (C + R) + 2 H R values a row; bound by latency at the rows of a tree
//   ref  kernels/reference_cache.py:norm_rope | test tests/kernels/test_norm_rope.py | archs all
#include "common.cuh"

#if !defined(DTYPE) || !defined(LATENT) || !defined(ROPE)
#error "DTYPE (see common.cuh), LATENT = C and ROPE = R"
#endif

constexpr int PAGE = 64, THREADS = 128;
constexpr int HEADS = 8;  // heads a block
constexpr int PAIRS = ROPE / 2, WIDTH = LATENT + ROPE;
constexpr int LATENT_EACH = cdiv(LATENT, THREADS);
static_assert(ROPE % 2 == 0 && ROPE >= 2 && LATENT >= 1, "pairs, and a latent to norm");

// Products and sum are rounded one by one, as in torch: no fused multiply-add.
DEVICE void rotate_pair(const Scalar* __restrict__ from, Scalar* __restrict__ to, int pair, const float* cos,
                        const float* sin, int interleaved) {
  const int first = interleaved ? 2 * pair : pair, second = interleaved ? first + 1 : pair + PAIRS;
  const float a = to_float(from[first]), b = to_float(from[second]), c = cos[pair], s = sin[pair];
  to[first] = from_float<Scalar>(__fadd_rn(__fmul_rn(a, c), __fmul_rn(b, -s)));
  to[second] = from_float<Scalar>(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
}

DEVICE void norm_latent(const Scalar* __restrict__ from, Scalar* __restrict__ to, const Scalar* __restrict__ weight, float eps, float* scratch) {
  float value[LATENT_EACH], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < LATENT_EACH; ++i) {
    const int column = i * THREADS + threadIdx.x;
    value[i] = column < LATENT ? to_float(from[column]) : 0.0f;
    squares += value[i] * value[i];
  }
  const float factor = rsqrtf(block_sum<THREADS>(squares, scratch) / LATENT + eps);
#pragma unroll
  for (int i = 0; i < LATENT_EACH; ++i) {
    const int column = i * THREADS + threadIdx.x;
    if (column >= LATENT) continue;
    const float normed = to_float(from_float<Scalar>(__fmul_rn(value[i], factor)));
    to[column] = from_float<Scalar>(__fmul_rn(normed, to_float(weight[column])));
  }
}

// Grid (1 + blocks of HEADS heads, N, S): block 0 of a row makes its cache row, the others rotate its queries.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_rope(const Scalar* __restrict__ kv,      // [S, N, WIDTH]
              const Scalar* __restrict__ q_rope,  // [S, N, H, ROPE]
              const Scalar* __restrict__ weight,  // [LATENT]
              const float* __restrict__ cos,      // [S, N, PAIRS]
              const float* __restrict__ sin,      // [S, N, PAIRS]
              Scalar* __restrict__ pages,         // [num_pages, PAGE, WIDTH]
              const i32* __restrict__ block_table,  // [S, table_width]
              const i32* __restrict__ prefix_len,   // [S]
              const i32* __restrict__ num_nodes,    // [S]
              Scalar* __restrict__ q,               // [S, N, H, WIDTH]
              i64 kv_stream, i64 kv_row, i64 q_stream, i64 q_row, i64 q_head, int num_heads, int num_pages,
              int table_width, float eps, int interleaved) {
  __shared__ float scratch[THREADS / WARP];
  grid_dependency_wait();
  const int row = blockIdx.y, stream = blockIdx.z;
  if (row >= num_nodes[stream]) return;
  const i64 flat = i64(stream) * gridDim.y + row;
  cos += flat * PAIRS;
  sin += flat * PAIRS;
  if (blockIdx.x == 0) {
    const i64 index = i64(prefix_len[stream]) + row;
    if (index < 0 || index >= i64(table_width) * PAGE) return;
    const i32 page = block_table[i64(stream) * table_width + index / PAGE];
    if (page < 0 || page >= num_pages) return;
    const Scalar* from = kv + stream * kv_stream + row * kv_row;
    Scalar* to = pages + (i64(page) * PAGE + index % PAGE) * WIDTH;
    for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS)
      rotate_pair(from + LATENT, to + LATENT, pair, cos, sin, interleaved);
    norm_latent(from, to, weight, eps, scratch);
    return;
  }
  const int first_head = (blockIdx.x - 1) * HEADS, heads = min(HEADS, num_heads - first_head);
  q_rope += stream * q_stream + row * q_row + first_head * q_head;
  q += (flat * num_heads + first_head) * WIDTH + LATENT;
#pragma unroll 2
  for (int i = threadIdx.x; i < heads * PAIRS; i += THREADS)
    rotate_pair(q_rope + i / PAIRS * q_head, q + i64(i / PAIRS) * WIDTH, i % PAIRS, cos, sin, interleaved);
}

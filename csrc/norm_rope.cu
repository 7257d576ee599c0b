// csrc/norm_rope.cu: what stands between a layer's projections and its attention, in one launch: the latent is normed,
//   the shared key and all heads' queries are rotated, and the row goes into the paged latent cache.
//   in   kv [S,N,C+R] raw kv_a output, q_rope [S,N,H,R], both with strides | norm_weight [C] | cos, sin [S,N,R/2] f32
//        block_table [S,M] i32 | prefix_len, num_nodes [S] i32
//   out  pages [P,64,C+R]: row prefix_len + i = norm(kv[i,:C]) | rotate(kv[i,C:]) for i < num_nodes
//        q [S,N,H,C+R]: q[i,h,C:] = rotate(q_rope[i,h]) for i < num_nodes; rows from num_nodes on stay untouched
//   math norm(x) = round(x rsqrt(mean(x^2) + eps)) weight, the mean in f32, rounded before the weight as torch does it;
//        rotate: (a, b) -> (a cos - b sin, b cos + a sin) in f32, pairs (2j, 2j+1) if interleaved, else (j, j + R/2)
//   bad  a row that the block table or `pages` does not hold is not written
//   cost 2 (C + R) + 2 H R values a row; bound by latency at the rows of a tree
//   ref  kernels/reference/cache.py:norm_rope | test tests/kernels/test_norm_rope.py | archs all
#include "fresh.cuh"

#if !defined(DTYPE) || !defined(LATENT) || !defined(ROPE)
#error "DTYPE (see common.cuh), LATENT = C and ROPE = R"
#endif

constexpr int PAGE = 64, THREADS = 128;
constexpr int HEADS = 8;  // heads a block
constexpr int PAIRS = ROPE / 2, WIDTH = LATENT + ROPE;
static_assert(ROPE % 2 == 0 && ROPE >= 2 && LATENT >= 1, "pairs, and a latent to norm");

// Item i of a thread is number i * THREADS + threadIdx.x of the block.
DEVICE int item_of(int i) { return i * THREADS + threadIdx.x; }

// Pairs of COUNT / PAIRS heads, all loads in flight before the first store: the reads are this kernel's time.
template <int COUNT>
struct Rotation {
  static constexpr int EACH = cdiv(COUNT, THREADS);
  float a[EACH], b[EACH], c[EACH], s[EACH];

  static DEVICE int first(int pair, int interleaved) { return interleaved ? 2 * pair : pair; }
  static DEVICE int second(int pair, int interleaved) { return interleaved ? 2 * pair + 1 : pair + PAIRS; }

  DEVICE void load(const Scalar* from, i64 head_stride, int count, const float* cos, const float* sin,
                   int interleaved) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (item_of(i) >= count) continue;
      const int pair = item_of(i) % PAIRS;
      const Scalar* head = from + item_of(i) / PAIRS * head_stride;
      a[i] = to_float(load_fresh(head + first(pair, interleaved)));
      b[i] = to_float(load_fresh(head + second(pair, interleaved)));
      c[i] = load_fresh(cos + pair);
      s[i] = load_fresh(sin + pair);
    }
  }

  // Products and sum are rounded one by one, as in torch: no fused multiply-add.
  DEVICE void store(Scalar* to, i64 head_stride, int count, int interleaved) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (item_of(i) >= count) continue;
      const int pair = item_of(i) % PAIRS;
      Scalar* head = to + item_of(i) / PAIRS * head_stride;
      head[first(pair, interleaved)] = from_float<Scalar>(__fadd_rn(__fmul_rn(a[i], c[i]), __fmul_rn(b[i], -s[i])));
      head[second(pair, interleaved)] = from_float<Scalar>(__fadd_rn(__fmul_rn(b[i], c[i]), __fmul_rn(a[i], s[i])));
    }
  }
};

struct Latent {
  static constexpr int EACH = cdiv(LATENT, THREADS);
  float value[EACH], weight[EACH];

  DEVICE static void load(float (&to)[EACH], const Scalar* from) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) to[i] = item_of(i) < LATENT ? to_float(load_fresh(from + item_of(i))) : 0.0f;
  }

  // All threads of the block call.
  DEVICE float factor(float eps, float* scratch) const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares += value[i] * value[i];
    return rsqrtf(block_sum<THREADS>(squares, scratch) / LATENT + eps);
  }

  DEVICE void store(Scalar* to, float factor) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (item_of(i) >= LATENT) continue;
      const float normed = to_float(from_float<Scalar>(__fmul_rn(value[i], factor)));
      to[item_of(i)] = from_float<Scalar>(__fmul_rn(normed, weight[i]));
    }
  }
};

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
              int table_width, float eps, int interleaved, int inputs_are_old) {
  __shared__ float scratch[THREADS / WARP];
  grid_dependency_launch();
  Latent latent;
  if (blockIdx.x == 0) Latent::load(latent.weight, weight);
  if (!inputs_are_old) grid_dependency_wait();
  const int row = blockIdx.y, stream = blockIdx.z;
  const i64 flat = i64(stream) * gridDim.y + row;
  cos += flat * PAIRS;
  sin += flat * PAIRS;
  // Rows that are not in use are read all the same: waiting for num_nodes first would double the time.
  const int used = load_fresh(num_nodes + stream);
  if (blockIdx.x == 0) {
    const Scalar* from = kv + stream * kv_stream + row * kv_row;
    Rotation<PAIRS> key;
    // Before the page is asked for: one read waits for the other there, and the norm is done meanwhile.
    Latent::load(latent.value, from);
    key.load(from + LATENT, 0, PAIRS, cos, sin, interleaved);
    const i64 index = i64(load_fresh(prefix_len + stream)) + row;
    const bool inside = index >= 0 && index < i64(table_width) * PAGE;
    const i32 page = inside ? load_fresh(block_table + i64(stream) * table_width + index / PAGE) : -1;
    const float factor = latent.factor(eps, scratch);
    if (row < used && page >= 0 && page < num_pages) {
      Scalar* to = pages + (i64(page) * PAGE + index % PAGE) * WIDTH;
      key.store(to + LATENT, 0, PAIRS, interleaved);
      latent.store(to, factor);
    }
  } else {
    const int first_head = (blockIdx.x - 1) * HEADS, count = min(HEADS, num_heads - first_head) * PAIRS;
    Rotation<HEADS * PAIRS> query;
    query.load(q_rope + stream * q_stream + row * q_row + first_head * q_head, q_head, count, cos, sin, interleaved);
    if (row < used) {
      query.store(q + (flat * num_heads + first_head) * WIDTH + LATENT, WIDTH, count, interleaved);
    }
  }
  if (inputs_are_old) grid_dependency_wait();  // who waits for this kernel counts on the one ahead as well
}

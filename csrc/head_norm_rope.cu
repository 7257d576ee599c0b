// csrc/head_norm_rope.cu: a drafter's queries and keys between projection and attention: each head is normed, then
//   rotated by its absolute position. append_context also puts those of all layers where the context keeps them.
//   in   head_norm_rope: x [S,n,H,d] with strides | weights [d] of queries (heads below num_queries) and of keys
//        append_context: k, v [layers,S,n,G,d] with strides | key weights [layers,d]
//        both: cos, sin [M,d/2] f32 by absolute position | start [S] i32; Scalar is -DDTYPE, d is -DHEAD_DIM
//   out  head_norm_rope: y [S,n,H,d] | append_context: keys, values [layers,S,P,G,d], row start + i of a stream for
//        i < count; rows that are not real or have no place are not written
//   math y = rotate(round(x rsqrt(mean(x^2) + eps)) weight), the mean in f32, rounded before and after the weight as
//        torch does it; rotate: (a, b) -> (a cos - b sin, b cos + a sin) in f32, pairs (j, j + d/2)
//   cost its bytes once; a warp holds one head, so nothing is read twice
//   ref  kernels/reference/draft.py:head_norm_rope, append_context | test tests/kernels/test_head_norm_rope.py | sm_80
#include "fresh.cuh"

constexpr int D = HEAD_DIM, PAIRS = D / 2, EACH = cdiv(PAIRS, WARP);  // pairs a lane
constexpr int WARPS = 4, THREADS = WARPS * WARP;
static_assert(D % 2 == 0 && D >= 2, "pairs");

struct Head {
  float a[EACH], b[EACH];  // pair i * 32 + lane: values j and j + d/2

  DEVICE explicit Head(const Scalar* from) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int pair = i * WARP + lane_id();
      a[i] = pair < PAIRS ? to_float(load_fresh(from + pair)) : 0.0f;
      b[i] = pair < PAIRS ? to_float(load_fresh(from + pair + PAIRS)) : 0.0f;
    }
  }

  DEVICE void store(Scalar* to) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int pair = i * WARP + lane_id();
      if (pair >= PAIRS) continue;
      to[pair] = from_float<Scalar>(a[i]);
      to[pair + PAIRS] = from_float<Scalar>(b[i]);
    }
  }

  // Products and sums are rounded one by one, as in torch: no fused multiply-add.
  DEVICE void norm_and_rotate(const Head& weight, const float* cos, const float* sin, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares += a[i] * a[i] + b[i] * b[i];
    const float factor = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int pair = min(i * WARP + lane_id(), PAIRS - 1);
      const float x = rounded(rounded(__fmul_rn(a[i], factor)) * weight.a[i]);
      const float y = rounded(rounded(__fmul_rn(b[i], factor)) * weight.b[i]);
      const float c = cos[pair], s = sin[pair];
      a[i] = __fadd_rn(__fmul_rn(x, c), __fmul_rn(y, -s));
      b[i] = __fadd_rn(__fmul_rn(y, c), __fmul_rn(x, s));
    }
  }

  static DEVICE float rounded(float x) { return to_float(from_float<Scalar>(x)); }
};

// The head of this warp: grid (heads in blocks of WARPS, n, S).
DEVICE int this_head() { return blockIdx.x * WARPS + warp_id(); }

// Where a position stands in the tables; a stream at rest may hold any start.
DEVICE i64 table_row(i64 position, int num_positions) {
  return min(max(position, i64(0)), i64(num_positions) - 1) * PAIRS;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    head_norm_rope(const Scalar* __restrict__ x,         // [S, n, H, d]
                   const Scalar* __restrict__ q_weight,  // [d]
                   const Scalar* __restrict__ k_weight,  // [d]
                   const float* __restrict__ cos,        // [M, d/2]
                   const float* __restrict__ sin,        // [M, d/2]
                   const i32* __restrict__ start,        // [S]
                   Scalar* __restrict__ y,               // [S, n, H, d]
                   i64 x_stream, i64 x_row, int num_heads, int num_queries, int num_positions, float eps) {
  const int head = this_head(), row = blockIdx.y, stream = blockIdx.z;
  if (head >= num_heads) return;
  const Head weight(head < num_queries ? q_weight : k_weight);  // nobody's output: it comes before the wait
  grid_dependency_wait();
  grid_dependency_launch();
  const i64 angle = table_row(i64(load_fresh(start + stream)) + row, num_positions);
  Head values(x + stream * x_stream + row * x_row + head * D);
  values.norm_and_rotate(weight, cos + angle, sin + angle, eps);
  values.store(y + ((i64(stream) * gridDim.y + row) * num_heads + head) * D);
}

// Grid (2 G heads in blocks of WARPS, n, layers * S).
extern "C" __global__ void __launch_bounds__(THREADS)
    append_context(const Scalar* __restrict__ k,        // [layers, S, n, G, d]
                   const Scalar* __restrict__ v,        // [layers, S, n, G, d]
                   const Scalar* __restrict__ weights,  // [layers, d]
                   const float* __restrict__ cos,       // [M, d/2]
                   const float* __restrict__ sin,       // [M, d/2]
                   const i32* __restrict__ start,       // [S]
                   const i32* __restrict__ count,       // [S]
                   Scalar* __restrict__ keys,           // [layers, S, P, G, d]
                   Scalar* __restrict__ values,         // [layers, S, P, G, d]
                   i64 k_layer, i64 k_stream, i64 k_row, i64 v_layer, i64 v_stream, i64 v_row, i64 context_layer,
                   i64 context_stream, int num_streams, int num_heads, int num_rows, int num_positions, float eps) {
  const int item = this_head(), head = item % num_heads, row = blockIdx.y;
  const int layer = blockIdx.z / num_streams, stream = blockIdx.z % num_streams;
  if (item >= 2 * num_heads) return;
  const Head weight(weights + layer * D);
  grid_dependency_wait();
  grid_dependency_launch();
  const i64 position = i64(load_fresh(start + stream)) + row;
  const bool kept = row < load_fresh(count + stream) && position >= 0 && position < num_rows;
  const i64 to = layer * context_layer + stream * context_stream + (position * num_heads + head) * D;
  if (item < num_heads) {
    Head key(k + layer * k_layer + stream * k_stream + row * k_row + head * D);
    const i64 angle = table_row(position, num_positions);
    key.norm_and_rotate(weight, cos + angle, sin + angle, eps);
    if (kept) key.store(keys + to);
  } else {
    const Head value(v + layer * v_layer + stream * v_stream + row * v_row + head * D);
    if (kept) value.store(values + to);
  }
}

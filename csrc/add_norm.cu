// csrc/add_norm.cu: residual addition and RMSNorm of a few rows in one launch, or the norm alone.
//   in   x [T,D] with a row stride | update [T,D], or null | weight [D]
//   out  sum [T,D] = x + update, rounded (not written without update) | out [T,D] = norm(sum)
//   math norm(x) = round(x rsqrt(mean(x^2) + eps)) weight, the mean in f32 of the rounded sum, rounded before the
//        weight as torch does it
//   cost 4 T D values with update, 2 T D without; bound by latency at the rows of a tree
//   ref  kernels/reference/layer.py:add_norm | test tests/kernels/test_add_norm.py | archs all
//
// A block takes a row, each thread VECTORS times 16 bytes of it, and holds them from the first read to the last write.
#include "fresh.cuh"

#if !defined(DTYPE) || !defined(ROW_WIDTH) || !defined(NUM_THREADS)
#error "DTYPE (see common.cuh), ROW_WIDTH = D and NUM_THREADS, whole warps"
#endif

using Word = Vec16<Scalar>;
constexpr int WIDTH = ROW_WIDTH, THREADS = NUM_THREADS;
constexpr int VALUES = 16 / sizeof(Scalar), WORDS = WIDTH / VALUES, VECTORS = cdiv(WORDS, THREADS);
static_assert(WIDTH % VALUES == 0 && THREADS % WARP == 0, "rows of whole 16-byte words, whole warps");

// Grid T.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm(const Scalar* __restrict__ x,       // [T, WIDTH], rows x_row values apart
             const Scalar* __restrict__ update,  // [T, WIDTH] or null, rows update_row apart
             const Scalar* __restrict__ weight,  // [WIDTH]
             Scalar* __restrict__ sum,           // [T, WIDTH], null without update
             Scalar* __restrict__ out,           // [T, WIDTH]
             i64 x_row, i64 update_row, float eps) {
  __shared__ float scratch[THREADS / WARP];
  grid_dependency_launch();
  Word values[VECTORS], weights[VECTORS];
  const auto place = [](int i) { return (i * THREADS + threadIdx.x) * VALUES; };
  const auto inside = [&](int i) { return WORDS % THREADS == 0 || i * THREADS + threadIdx.x < WORDS; };
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (inside(i)) weights[i] = load_fresh(reinterpret_cast<const Word*>(weight + place(i)));
  }
  grid_dependency_wait();
  const i64 row = blockIdx.x;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (inside(i)) values[i] = load_fresh(reinterpret_cast<const Word*>(x + row * x_row + place(i)));
  }
  if (update) {
    Word updates[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (inside(i)) updates[i] = load_fresh(reinterpret_cast<const Word*>(update + row * update_row + place(i)));
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!inside(i)) continue;
#pragma unroll
      for (int v = 0; v < VALUES; ++v) {
        values[i][v] = from_float<Scalar>(to_float(values[i][v]) + to_float(updates[i][v]));
      }
      store_vec(sum + row * WIDTH + place(i), values[i]);
    }
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (!inside(i)) continue;
#pragma unroll
    for (int v = 0; v < VALUES; ++v) squares += to_float(values[i][v]) * to_float(values[i][v]);
  }
  const float factor = rsqrtf(block_sum<THREADS>(squares, scratch) / WIDTH + eps);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (!inside(i)) continue;
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
      const float normed = to_float(from_float<Scalar>(__fmul_rn(to_float(values[i][v]), factor)));
      values[i][v] = from_float<Scalar>(__fmul_rn(normed, to_float(weights[i][v])));
    }
    store_vec(out + row * WIDTH + place(i), values[i]);
  }
}

// csrc/add_norm.cu: residual addition and RMSNorm of a few rows in one launch, or the norm alone.
//   in   x [T,D] with a row stride | update [T,D] (add_norm alone) | weight [D]
//   out  sum [T,D] = x + update, rounded (add_norm) | out [T,D] = norm(sum)
//   math norm(x) = round(x rsqrt(mean(x^2) + eps)) weight, the mean in f32 of the rounded sum, rounded before the
//        weight as torch does it
//   cost 4 T D values (add_norm), 2 T D (norm_rows); bound by latency at the rows of a tree
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

// ADD: a row's update is asked for in the same breath as the row, so that neither read waits for the other.
template <bool ADD>
DEVICE void run(const Scalar* x, const Scalar* update, const Scalar* weight, Scalar* sum, Scalar* out, i64 x_row,
                i64 update_row, float eps) {
  __shared__ float scratch[THREADS / WARP];
  grid_dependency_launch();
  Word values[VECTORS], updates[VECTORS], weights[VECTORS];
  const auto place = [](i64 row) { return row + threadIdx.x * VALUES; };  // of a thread's first word
  const auto inside = [&](int i) { return WORDS % THREADS == 0 || i * THREADS + threadIdx.x < WORDS; };
  const auto load = [&](Word (&to)[VECTORS], const Scalar* from) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (inside(i)) to[i] = load_fresh(reinterpret_cast<const Word*>(from + i * THREADS * VALUES));
    }
  };
  load(weights, weight + place(0));
  grid_dependency_wait();
  const i64 row = blockIdx.x;
  load(values, x + place(row * x_row));
  if constexpr (ADD) {
    load(updates, update + place(row * update_row));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      if (!inside(i)) continue;
#pragma unroll
      for (int v = 0; v < VALUES; ++v) {
        values[i][v] = from_float<Scalar>(to_float(values[i][v]) + to_float(updates[i][v]));
      }
      store_vec(sum + place(row * WIDTH) + i * THREADS * VALUES, values[i]);
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
    store_vec(out + place(row * WIDTH) + i * THREADS * VALUES, values[i]);
  }
}

// Grid T. One block a multiprocessor is asked for, so that registers suffice for all loads to be under way at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    add_norm(const Scalar* x,       // [T, WIDTH], rows x_row values apart
             const Scalar* update,  // [T, WIDTH], rows update_row apart
             const Scalar* weight,  // [WIDTH]
             Scalar* sum,           // [T, WIDTH]
             Scalar* out,           // [T, WIDTH]
             i64 x_row, i64 update_row, float eps) {
  run<true>(x, update, weight, sum, out, x_row, update_row, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    norm_rows(const Scalar* x, const Scalar* weight, Scalar* out, i64 x_row, float eps) {
  run<false>(x, nullptr, weight, nullptr, out, x_row, 0, eps);
}

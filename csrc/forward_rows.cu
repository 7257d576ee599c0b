// csrc/forward_rows.cu: what a forward asks of its rows before the first layer: which are in use, what token stands in
//   them, and how far their queries and keys are turned.
//   in   tokens, positions [S,N], i32 or i64 each | num_rows [S] i32, rows in use | frequencies [P] f64, in radians
//   out  masked [S,N]: the tokens, 0 in rows not in use | used [S,N] u8 | cos, sin [S,N,P] f32
//   math cos(position frequency) amplitude, formed in f64 as torch does it (positions reach 262,143), rounded once
//   cost 8 P bytes a row; the time is a launch
//   ref  kernels/forward_rows.py | test tests/kernels/test_forward_rows.py | archs all
#include "fresh.cuh"

DEVICE i64 load_integer(const void* from, i64 at, int wide) {
  return wide ? load_fresh(static_cast<const i64*>(from) + at) : load_fresh(static_cast<const i32*>(from) + at);
}

// Grid (N, S), a thread a pair.
extern "C" __global__ void __launch_bounds__(1024)
forward_rows(const void* tokens, const void* positions, const i32* __restrict__ num_rows,
             const double* __restrict__ frequencies, void* masked, u8* __restrict__ used, float* __restrict__ cosines,
             float* __restrict__ sines, double amplitude, int wide_tokens, int wide_positions) {
  const double frequency = frequencies[threadIdx.x];
  grid_dependency_wait();
  grid_dependency_launch();
  const i64 row = i64(blockIdx.y) * gridDim.x + blockIdx.x;
  const bool in_use = int(blockIdx.x) < load_fresh(num_rows + blockIdx.y);
  if (threadIdx.x == 0) {
    const i64 token = in_use ? load_integer(tokens, row, wide_tokens) : 0;
    if (wide_tokens) static_cast<i64*>(masked)[row] = token;
    else static_cast<i32*>(masked)[row] = i32(token);
    used[row] = in_use;
  }
  const double angle = double(load_integer(positions, row, wide_positions)) * frequency;
  const i64 at = row * blockDim.x + threadIdx.x;
  cosines[at] = float(cos(angle) * amplitude);
  sines[at] = float(sin(angle) * amplitude);
}

// csrc/round_rows.cu: before a round's verification: each tree's root gets its token, each row its place in the text.
//   in   depth [S,N] i32 | num_nodes, start, anchor, running [S] i32, running 1 or 0
//   out  token [S,N] i32, column 0 only | positions [S,N] i32 | behind [S,N] i64 | num_rows [S] i32
//   math position = start + depth, behind = position + 1, num_rows = num_nodes running, token[0] = anchor
//   cost 16 N bytes a stream; the time is a launch
//   ref  kernels/reference/streams.py:round_rows | test tests/kernels/test_round_rows.py | archs all
#include "fresh.cuh"

constexpr int THREADS = 128;

// Grid S.
extern "C" __global__ void __launch_bounds__(THREADS)
round_rows(const i32* depth, const i32* num_nodes, const i32* start, const i32* anchor, const i32* running, i32* token,
           i32* positions, i64* behind, i32* num_rows, int rows) {
  const int stream = blockIdx.x;
  const i64 first = i64(stream) * rows;
  grid_dependency_wait();
  grid_dependency_launch();
  const i32 begin = load_fresh(start + stream);
  for (int row = threadIdx.x; row < rows; row += THREADS) {
    const i32 position = begin + load_fresh(depth + first + row);
    positions[first + row] = position;
    behind[first + row] = i64(position) + 1;
  }
  if (threadIdx.x > 0) return;
  token[first] = load_fresh(anchor + stream);
  num_rows[stream] = load_fresh(num_nodes + stream) * load_fresh(running + stream);
}

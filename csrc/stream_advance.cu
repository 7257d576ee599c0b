// csrc/stream_advance.cu: after a round, take over what each stream accepted; it rests where all its tokens are there.
//   in   token [S,N] i32, of the trees | path [S,L+1] i32, rows, root first, -1 padded | length, bonus, status [S] i32
//        is_stop [V] u8, tokens that end an output | cap [S] i32
//   i/o  start, anchor, running, num_tokens, stop [S] i32, as kdlab.decode.streams explains them
//   out  start_before [S] i32 | committed [S,L+1] i32, the path, or -1 throughout | num_rows [S] i32, rows of it
//   math new tokens are token[path[1..length]], then the bonus; place i of the output is a stop if is_stop and i < cap
//   bad  a status, a bonus below 0, or a stream at rest: nothing is committed, and it rests as it was. Rows outside the
//        tree and tokens outside the vocabulary stop nothing
//   cost 4 (2 L + 14) bytes a stream; the time is a launch and three dependent reads
//   ref  kdlab/kernels/reference/streams.py | test tests/kernels/test_stream_advance.py | archs all
#include "common.cuh"

constexpr i32 NO_STOP = 1 << 30;  // NO_STOP in stream_advance.py

// One warp a stream.
extern "C" __global__ void __launch_bounds__(WARP)
stream_advance(const i32* __restrict__ token, const i32* __restrict__ path, const i32* __restrict__ length,
               const i32* __restrict__ bonus, const i32* __restrict__ status, const u8* __restrict__ is_stop,
               const i32* __restrict__ cap, i32* start, i32* anchor, i32* running, i32* num_tokens, i32* stop,
               i32* start_before, i32* committed, i32* num_rows, int rows, int path_len, int vocab, int tail) {
  const int stream = blockIdx.x, lane = threadIdx.x;
  grid_dependency_wait();
  grid_dependency_launch();
  const i32 last = bonus[stream], accepted = length[stream], before = num_tokens[stream], limit = cap[stream];
  const bool good = running[stream] != 0 && status[stream] == 0 && last >= 0;
  i32 first = NO_STOP;
  for (int d = lane; d < path_len; d += WARP) {
    const i64 at = i64(stream) * path_len + d;
    committed[at] = good ? path[at] : -1;
    if (!good || d > accepted || before + d >= limit) continue;
    i32 fresh = last;
    if (d < accepted) {
      const i32 row = d + 1 < path_len ? path[at + 1] : -1;
      fresh = row >= 0 && row < rows ? token[i64(stream) * rows + row] : -1;
    }
    if (fresh >= 0 && fresh < vocab && is_stop[fresh]) first = min(first, before + d);
  }
  first = min(-warp_max(-first), stop[stream]);
  if (lane > 0) return;
  const i32 begin = start[stream], count = good ? accepted + 1 : 0, now = before + count;
  start_before[stream] = begin;
  num_rows[stream] = count;
  start[stream] = begin + count;
  num_tokens[stream] = now;
  stop[stream] = first;
  if (good) anchor[stream] = last;
  // As in Transcript.done: no further round counts, and the tail is there.
  const bool wants_round = now - 1 < min(limit, first), wants_tail = now < min(limit, first + 1) + tail;
  running[stream] = good && (wants_round || wants_tail);
}

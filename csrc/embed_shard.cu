// csrc/embed_shard.cu: the rows of a vocabulary shard that tokens name, and zeros for tokens of other shards.
//   in   tokens [T / each] i32, or i64 if `wide`: rows 0, each, 2 each, .. of T; `filler` stands in the rows between
//        weight [Vs,D], rows of whole 16-byte words, any dtype | first_id of row 0
//   out  out [T,D]: the shards' results add up to the embedding
//   math out[t] = weight[token of t - first_id], 0 where there is no such row
//   cost 2 T D sizeof(value) bytes; the time is a launch
//   ref  kernels/embed_shard.py | test tests/kernels/test_embed_shard.py | archs all
#include "fresh.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
embed_shard(const void* tokens, i32 wide, i32 each, i64 filler, const uint4* __restrict__ weight, i32 num_rows,
            i64 first_id, i32 words, uint4* __restrict__ out) {  // words: of 16 bytes, in a row
  const i32 at = blockIdx.x / each;
  grid_dependency_wait();
  grid_dependency_launch();
  const i64 token = blockIdx.x % each != 0 ? filler
                    : wide                 ? load_fresh(static_cast<const i64*>(tokens) + at)
                                           : load_fresh(static_cast<const i32*>(tokens) + at);
  const i64 row = token - first_id;
  const bool own = row >= 0 && row < num_rows;
  for (i32 i = threadIdx.x; i < words; i += THREADS)
    out[static_cast<i64>(blockIdx.x) * words + i] = own ? weight[row * words + i] : uint4{0, 0, 0, 0};
}

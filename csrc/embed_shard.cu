// csrc/embed_shard.cu: the rows of a vocabulary shard that tokens name, and zeros for tokens of other shards.
//   in   tokens [T] i32, or i64 if `wide` | weight [Vs,D], rows of whole 16-byte words, any dtype | first_id of row 0
//   out  out [T,D]: the shards' results add up to the embedding
//   math out[t] = weight[tokens[t] - first_id], 0 where there is no such row
//   cost 2 T D sizeof(value) bytes; the time is a launch
//   ref  kernels/embed_shard.py | test tests/kernels/test_embed_shard.py | archs all
#include "common.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
embed_shard(const void* tokens, i32 wide, const uint4* __restrict__ weight, i32 num_rows, i64 first_id, i32 words,
            uint4* __restrict__ out) {  // words: of 16 bytes, in a row
  grid_dependency_wait();
  const i64 token = wide ? static_cast<const i64*>(tokens)[blockIdx.x] : static_cast<const i32*>(tokens)[blockIdx.x];
  const i64 row = token - first_id;
  const bool own = row >= 0 && row < num_rows;
  for (i32 i = threadIdx.x; i < words; i += THREADS)
    out[static_cast<i64>(blockIdx.x) * words + i] = own ? weight[row * words + i] : uint4{0, 0, 0, 0};
}

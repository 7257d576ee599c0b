// csrc/top_p_mass.cu: the probability mass of a shard above each candidate of a row, for the exact top-p set.
//   op   target_sample, one vocabulary shard
//   in   logits [S,N,Vs] float | bf16 | half, a shard's rows | candidates of all shards: values [S,N,F] f32,
//        token_ids [S,N,F] i32 global, -1 behind the last, by rising probability | top [S,N] f32, the largest logit
//   out  mass [S,N,F+1] f64: sum of exp((logit - top) / T) over what is more probable than the candidate; the last is
//        the sum over all
//   math more probable: the larger logit, then the smaller id; all in float64
//   cost V * sizeof(Scalar) bytes a row; one float64 exponential a token
//   ref  kernels/reference/shards.py:top_p_mass_shard | test tests/kernels/test_sample_shards.py | archs all
#include "logits.cuh"

constexpr int MAX_CANDIDATES = 64;
// Most tokens pass few candidates: a thread adds those up itself, as float64 atomics to one place wait for one another.
constexpr int OWN_SUMS = 4;

struct MassScratch {
  u64 ranks[MAX_CANDIDATES];  // ascending: candidates come by falling score, so each is more probable than the last
  double mass[MAX_CANDIDATES + 1];
  u64 of_block[MAX_CLUSTER][MAX_CANDIDATES + 1];  // float64 bits
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
top_p_mass(const Scalar* logits, i64 stream_stride, i64 row_stride, i32 rows_per_stream, i32 num_ids, i32 first_id,
           i32 cluster, const float* values, const i32* token_ids, const float* top, i32 capacity, double temperature,
           double* mass) {  // values, token_ids [S,N,F], top [S,N] of all shards; mass [S,N,F+1], all mass last
  __shared__ MassScratch scratch;
  const Rows rows = {logits, stream_stride, row_stride, rows_per_stream, num_ids, first_id, cluster};
  const Row row = rows.row();
  cluster_begin();
  grid_dependency_wait();
  const i64 place = rows.index() * capacity;
  for (i32 i = threadIdx.x; i < capacity; i += THREADS) {
    const i32 id = token_ids[place + i];
    scratch.ranks[i] = id < 0 ? ~u64(0) : rank_key(values[place + i], id);
  }
  for (i32 i = threadIdx.x; i <= capacity; i += THREADS) scratch.mass[i] = 0;
  __syncthreads();
  const float largest = top[rows.index()];
  double own[OWN_SUMS] = {};
  for (i32 chunk = rows.block(); chunk < rows.num_chunks(); chunk += cluster) {
    for (i32 id = chunk * CHUNK - row.shift + threadIdx.x; id < min((chunk + 1) * CHUNK - row.shift, num_ids);
         id += THREADS) {
      if (id < 0) continue;
      const float value = to_float(row.logits[id]);
      const u64 rank = rank_key(value, first_id + id);
      i32 passed = 0;  // candidates that this token is more probable than
      while (passed < capacity && rank > scratch.ranks[passed]) ++passed;
      const double mass_of = exp((double(value) - largest) / temperature);
#pragma unroll
      for (i32 i = 0; i < OWN_SUMS; ++i) own[i] += passed == i ? mass_of : 0.0;
      if (passed >= OWN_SUMS) atomicAdd(&scratch.mass[passed], mass_of);
    }
  }
#pragma unroll
  for (i32 i = 0; i < OWN_SUMS; ++i) {
    const double sum = warp_sum(own[i]);
    if (lane_id() == 0) atomicAdd(&scratch.mass[i], sum);
  }
  __syncthreads();
  cluster_wait();
  for (i32 i = threadIdx.x; i <= capacity; i += THREADS) {
    double sum = 0;  // above candidate i: what passed more than i of them; the last entry holds all
    for (i32 passed = i < capacity ? i + 1 : 0; passed <= capacity; ++passed) sum += scratch.mass[passed];
    store_remote(&scratch.of_block[rows.block()][i], 0, static_cast<u64>(__double_as_longlong(sum)));
  }
  cluster_arrive();
  if (rows.block() != 0) return;
  cluster_wait();
  for (i32 i = threadIdx.x; i <= capacity; i += THREADS) {
    double sum = 0;
    for (i32 b = 0; b < cluster; ++b) sum += __longlong_as_double(scratch.of_block[b][i]);
    mass[rows.index() * (capacity + 1) + i] = sum;
  }
}

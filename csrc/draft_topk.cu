// csrc/draft_topk.cu: the best K tokens of every draft row with their log-probabilities, in one pass and one launch.
//   in   logits [S,L,V] float | bf16 | half, rows anywhere, V values one after the other
//   out  values [S,L,K] f32: log-probabilities, or the logits themselves for a shard | token_ids [S,L,K] i32, -1 where
//        a shard has fewer | nonfinite [S,L] bool | lse [S,L] f64, for a shard only
//   math order by logit, exact ties to the smaller id; log p = logit - m - log(sum exp(logit - m)), m the row's largest
//   how  A thread keeps its part of a chunk in registers. The K-th largest of the threads' own maxima bounds the K-th
//        largest logit from below, and at most K threads have anything at or above it: a handful of candidates is left,
//        whatever the data, ranked by counting. The first block of a row merges the blocks' sorted lists.
//   bad  a row with NaN or +inf, or with nothing above -inf: log-probabilities NaN, ids 0..K-1, nonfinite set
//   cost V * sizeof(Scalar) bytes a row; exp at 16 a cycle and multiprocessor is half of that on an H200
//   ref  kernels/reference.py:draft_topk | test tests/kernels/test_draft_topk.py | archs all
#include "logits.cuh"

constexpr int MAX_K = 256;
constexpr int SPREAD = 4;  // lanes that rank one candidate
static_assert(MAX_K <= THREADS, "a thread's own maximum is one slot");

// A slot's key: the value, then the smaller vector index. Two threads never have the same one; 0 is an empty slot.
constexpr u32 VECTOR_BITS = 13;
static_assert(CHUNK_VECTORS <= 1 << VECTOR_BITS, "the index fits");
constexpr u32 VECTOR_MASK = (1u << VECTOR_BITS) - 1;
#if DTYPE == 0
using Slot = u64;
DEVICE Slot slot_key(float x, u32 vector) { return u64(order_key(x)) << VECTOR_BITS | (VECTOR_MASK - vector); }
#else
using Slot = u32;  // a 16-bit float has 19 bits at most when widened: sign, 8 of exponent, 10 of mantissa
DEVICE Slot slot_key(float x, u32 vector) { return (order_key(x) & ~VECTOR_MASK) | (VECTOR_MASK - vector); }
#endif

struct Params {
  const Scalar* logits;
  i64 stream_stride, row_stride;  // in values
  i32 rows_per_stream;            // L
  i32 num_ids;                    // columns that are tokens
  i32 first_id;                   // the global id of column 0
  i32 k, cluster;
  float* values;                  // [S, L, K]
  i32* token_ids;                 // [S, L, K]
  bool* nonfinite;                // [S, L]
  double* lse;                    // [S, L], or null: a whole vocabulary
};

constexpr float LEAST = -3.4028234663852886e38f;
constexpr float NAN_F32 = __builtin_bit_cast(float, 0x7fc00000);

struct Total {  // sum = sum of exp(logit - top); NaN as soon as a NaN or +inf was among them
  float top, sum;
};

struct Scratch {
  Slot high[WARPS], low[WARPS];
  float top[WARPS], sum[WARPS];
  u32 num_candidates;
  u64 totals[MAX_CLUSTER];  // Total of each block, written by that block
};

// Dynamic shared memory.
struct Plan {
  u64* lists;       // [cluster][k], the sorted list of each block, written by that block; 0 where it ends
  u64* candidates;  // [k of the chunk before + k * logits of a thread and chunk]
};

// Adds a thread's vectors to its total and returns its slot.
DEVICE Slot scan(const Row& row, i32 first, const Logits (&logits)[VECTORS], Total& total) {
  Slot best = 0;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const i32 vector = first + v * THREADS;
    const float top = max_of(logits[v]);
    if (vector * PER_VECTOR < row.num_ids) best = max(best, slot_key(top, v * THREADS + threadIdx.x));
    const float old = total.top;
    total.top = fmaxf(old, top);
    float sum = total.sum * exp_scaled(old - total.top, LOG2_E);
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) sum += exp_scaled(logits[v][i] - total.top, LOG2_E);
    total.sum = sum;
  }
  return best;
}

// The largest key that k slots at least reach, or a little below it: 1 where fewer slots hold anything.
DEVICE Slot find_threshold(Slot slot, i32 k, Scratch& scratch) {
  const Slot high = warp_max_key(slot), low = warp_min_key(slot ? slot : ~Slot(0));
  if (lane_id() == 0) scratch.high[warp_id()] = high, scratch.low[warp_id()] = low;
  if (__syncthreads_count(slot != 0) < k) return 1;
  Slot reached = warp_min_key(scratch.low[lane_id() % WARPS]);     // by all slots
  Slot missed = warp_max_key(scratch.high[lane_id() % WARPS]) + 1;  // by all
  const i32 enough = k + min(k / 4, MAX_K - k);  // stop there: the candidates stay few, and the room is for MAX_K
  while (missed - reached > 1) {
    const Slot middle = reached + (missed - reached) / 2;
    const i32 count = __syncthreads_count(slot >= middle);
    if (count >= k) reached = middle;
    else missed = middle;
    if (count >= k && count <= enough) break;
  }
  return reached;
}

DEVICE bool is_candidate(const Row& row, i32 vector, const Logits& logits, int i, u32 local, Slot threshold) {
  return vector * PER_VECTOR + i < row.num_ids && slot_key(fmaxf(logits[i], -INFINITY_F32), local) >= threshold;
}

// Appends every logit of the thread that reaches the threshold: only slots that reach it have any.
DEVICE void collect(const Row& row, i32 first, const Logits (&logits)[VECTORS], Slot threshold, u64* candidates,
                    u32& num_candidates) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const i32 vector = first + v * THREADS;
    const u32 local = v * THREADS + threadIdx.x;
    if (vector * PER_VECTOR >= row.num_ids || slot_key(max_of(logits[v]), local) < threshold) continue;
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) count += is_candidate(row, vector, logits[v], i, local, threshold);
    u32 place = atomicAdd(&num_candidates, count);
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (!is_candidate(row, vector, logits[v], i, local, threshold)) continue;
      candidates[place++] = rank_key(fmaxf(logits[v][i], -INFINITY_F32), vector * PER_VECTOR + i);
    }
  }
}

// Sorts the k largest of `count` keys, descending, into the list of this block at block `target`.
DEVICE void rank_candidates(const u64* keys, i32 count, i32 k, u64* list, int target) {
  const i32 part = threadIdx.x % SPREAD;
  for (i32 first = 0; first < count; first += THREADS / SPREAD) {
    const i32 index = first + threadIdx.x / SPREAD;
    const u64 key = index < count ? keys[index] : 0;
    i32 rank = 0;
#pragma unroll 8
    for (i32 other = part; other < count; other += SPREAD) rank += keys[other] > key;
    rank = warp_sum<SPREAD>(rank);
    if (part == 0 && index < count && rank < k) store_remote(list + rank, target, key);
  }
  for (i32 rank = count + threadIdx.x; rank < k; rank += THREADS) store_remote(list + rank, target, 0);
}

// A warp's total, where the block finds it.
DEVICE void publish(Total total, Scratch& scratch) {
  const float top = value_of(warp_max_key(order_key(total.top)));
  const float sum = warp_sum(total.sum * exp_scaled(total.top - top, LOG2_E));
  if (lane_id() == 0) scratch.top[warp_id()] = top, scratch.sum[warp_id()] = sum;
}

// The block's total in the shared memory of the row's first block.
DEVICE void send_total(Scratch& scratch, int block) {
  if (warp_id() != WARPS - 1) return;
  const bool holds = lane_id() < WARPS;
  const Total mine = {holds ? scratch.top[lane_id()] : LEAST, holds ? scratch.sum[lane_id()] : 0.0f};
  const float top = value_of(warp_max_key(order_key(mine.top)));
  const float sum = warp_sum(mine.sum * exp_scaled(mine.top - top, LOG2_E));
  const u64 packed = u64(__float_as_uint(top)) << 32 | __float_as_uint(sum);
  if (lane_id() == 0) store_remote(&scratch.totals[block], 0, packed);
}

// Log-sum-exp of the row, NaN for a bad one; -inf where there is nothing above -inf.
DEVICE double row_lse(const Scratch& scratch, i32 cluster) {
  float top = LEAST;
  double sum = 0;
  for (i32 b = 0; b < cluster; ++b) top = fmaxf(top, __uint_as_float(scratch.totals[b] >> 32));
  for (i32 b = 0; b < cluster; ++b) {
    const Total part = {__uint_as_float(scratch.totals[b] >> 32), __uint_as_float(scratch.totals[b])};
    sum += double(part.sum) * exp_scaled(part.top - top, LOG2_E);
  }
  return top + log(sum);
}

// How many of a descending list are larger than the key.
DEVICE i32 count_larger(const u64* list, i32 k, u64 key) {
  i32 low = 0, high = k;
  while (low < high) {
    const i32 middle = (low + high) / 2;
    if (list[middle] > key) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Writes the k best of the row from the blocks' lists.
DEVICE void write_row(const u64* lists, const Scratch& scratch, const Params& p, i64 row) {
  __shared__ double shared_lse;
  if (threadIdx.x == 0) shared_lse = row_lse(scratch, p.cluster);
  float* values = p.values + row * p.k;
  i32* token_ids = p.token_ids + row * p.k;
  __syncthreads();
  const double lse = shared_lse;
  const bool shard = p.lse != nullptr, bad = isnan(lse) || (!shard && isinf(lse));
  for (i32 index = threadIdx.x; index < p.cluster * p.k; index += THREADS) {
    const i32 list = index / p.k;
    const u64 key = lists[index];
    i32 rank = index - list * p.k;
    for (i32 other = 0; other < p.cluster; ++other) {
      if (other != list) rank += count_larger(lists + other * p.k, p.k, key);
    }
    if (key == 0 || rank >= p.k) continue;
    const float value = value_of(key);
    values[rank] = shard ? value : bad ? NAN_F32 : static_cast<float>(value - lse);
    token_ids[rank] = bad && !shard ? rank : p.first_id + static_cast<i32>(id_of(key));
  }
  for (i32 rank = p.num_ids + threadIdx.x; rank < p.k; rank += THREADS) {
    values[rank] = -INFINITY_F32;
    token_ids[rank] = -1;
  }
  if (threadIdx.x == 0) {
    p.nonfinite[row] = bad;
    if (shard) p.lse[row] = lse;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
draft_topk(const Scalar* logits, i64 stream_stride, i64 row_stride, i32 rows_per_stream, i32 num_ids, i32 first_id,
           i32 k, i32 cluster, float* values, i32* token_ids, bool* nonfinite, double* lse) {
  extern __shared__ u64 memory[];
  __shared__ Scratch scratch;
  const Params p = {logits, stream_stride, row_stride, rows_per_stream, num_ids, first_id,
                    k,      cluster,       values,     token_ids,       nonfinite, lse};
  const Plan plan = {memory, memory + cluster * k};
  const i32 block = blockIdx.x % cluster, num_chunks = max(cdiv(num_ids, CHUNK), 1);
  const i64 index = blockIdx.x / cluster, stream = index / rows_per_stream;
  const Row row = row_of(logits, stream * stream_stride + (index - stream * rows_per_stream) * row_stride, num_ids, 0);
  cluster_arrive();  // waited for before the first write into another block: until then it may not have begun
  grid_dependency_wait();
  Total total = {LEAST, 0.0f};
  i32 kept = 0;  // keys of the chunks before, at the front of the candidates
  for (i32 chunk = block; chunk < num_chunks; chunk += cluster) {
    const i32 first = chunk * CHUNK_VECTORS + threadIdx.x;
    Logits values_here[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) values_here[v] = load_logits(row, first + v * THREADS);
    grid_dependency_launch();
    if (threadIdx.x == 0) scratch.num_candidates = kept;
    const Slot threshold = find_threshold(scan(row, first, values_here, total), k, scratch);
    publish(total, scratch);
    collect(row, first, values_here, threshold, plan.candidates, scratch.num_candidates);
    __syncthreads();
    const i32 count = scratch.num_candidates;
    if (chunk + cluster < num_chunks) {
      u64* sorted = plan.lists + block * k;  // this block's place here is its own
      rank_candidates(plan.candidates, count, k, sorted, block);
      __syncthreads();
      kept = min(count, k);
      for (i32 i = threadIdx.x; i < kept; i += THREADS) plan.candidates[i] = sorted[i];
    } else {
      cluster_wait();
      send_total(scratch, block);
      rank_candidates(plan.candidates, count, k, plan.lists + block * k, 0);
    }
  }
  cluster_arrive();
  if (block != 0) return;
  cluster_wait();
  write_row(plan.lists, scratch, p, index);
}

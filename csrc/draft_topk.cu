// csrc/draft_topk.cu: the best K tokens of every draft row with their log-probabilities, in one pass and one launch.
//   in   logits [S,L,V] float | bf16 | half, rows anywhere, V values one after the other
//   out  values [S,L,K] f32: log-probabilities, or the logits themselves for a shard | token_ids [S,L,K] i32, -1 where
//        a shard has fewer | nonfinite [S,L] bool | lse [S,L] f64, for a shard only
//   math order by logit, exact ties to the smaller id; log p = logit - m - log(sum exp(logit - m)), m the row's largest
//   how  The blocks of a row keep it in registers and exchange the maxima of 2 K groups of threads: the K-th largest of
//        these bounds the K-th largest logit from below, and few logits reach it (1.4 K of random ones). Each block
//        sends its own to the first block, which ranks them by counting. A block that finds more than K (sorted rows,
//        rows of ties) first ranks its own: there the threads' maxima are the bound, which leaves it
//        K times a thread's logits at most, whatever the data.
//   bad  a row with NaN or +inf, or with nothing above -inf: log-probabilities NaN, ids 0..K-1, nonfinite set
//   cost V * sizeof(Scalar) bytes a row; exp at 16 a cycle and multiprocessor is half of that on an H200
//   ref  kernels/reference.py:draft_topk | test tests/kernels/test_draft_topk.py | archs all
#include "logits.cuh"

constexpr int MAX_K = 256;
constexpr int MAX_GROUPS = 512;  // of a row; at least MAX_K for every cluster size
constexpr int SPREAD = 4;        // lanes that rank one candidate
constexpr float LEAST = -3.4028234663852886e38f;
static_assert(MAX_K <= THREADS && MAX_GROUPS <= THREADS, "a thread holds one of them");

// Bits of an order key that say nothing, because Scalar is narrower than float.
constexpr int BLANK_BITS = sizeof(Scalar) == 4 ? 0 : DTYPE == 1 ? 16 : 13;
DEVICE u32 level_of(float x) { return order_key(x) >> BLANK_BITS; }  // 0 is below every logit

// A thread's best vector of a chunk: the value, then the smaller index. No two are equal; 0 is nothing.
constexpr int VECTOR_BITS = 13;
static_assert(CHUNK_VECTORS <= 1 << VECTOR_BITS, "the index fits");
using Slot = u64;
DEVICE Slot slot_of(float x, u32 vector) {
  return u64(level_of(x)) << VECTOR_BITS | ((1u << VECTOR_BITS) - 1 - vector);
}

struct Params {
  const Scalar* logits;
  i64 stream_stride, row_stride;  // in values
  i32 rows_per_stream;            // L
  i32 num_ids;                    // columns that are tokens
  i32 first_id;                   // the global id of column 0
  i32 k, cluster;
  i32 groups_per_warp;            // a power of two
  float* values;                  // [S, L, K]
  i32* token_ids;                 // [S, L, K]
  bool* nonfinite;                // [S, L]
  double* lse;                    // [S, L], or null: a whole vocabulary
};

struct Total {  // sum = sum of exp(logit - top); NaN as soon as a NaN or +inf was among them
  float top, sum;
};

struct Scratch {
  u64 high[WARPS], low[WARPS];
  u32 num_candidates;
  // Written by the other blocks of the row:
  u32 levels[MAX_GROUPS];
  u64 totals[MAX_CLUSTER * WARPS];  // a Total each; of the first block alone, as all that follows
  u32 counts[MAX_CLUSTER];
  double lse;
};

// Dynamic shared memory.
struct Plan {
  u64* lists;       // [cluster][k], what each block found; counts says how many
  u64* candidates;  // [k of the chunk before + k * logits of a thread and chunk]
};

// Adds a thread's vectors to its total; `top` becomes its largest logit, which may be -inf.
DEVICE void add_exps(const Logits (&logits)[VECTORS], Total& total, float& top) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const float old = total.top;
    top = fmaxf(top, max_of(logits[v]));
    total.top = fmaxf(old, top);
    float sum = total.sum * exp_scaled(old - total.top, LOG2_E);
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) sum += exp_scaled(logits[v][i] - total.top, LOG2_E);
    total.sum = sum;
  }
}

// The largest key that k threads at least reach, or a little below it; 0 or 1 where fewer hold anything but 0.
template <typename Key>
DEVICE Key find_bound(Key key, i32 k, Scratch& scratch) {
  const Key high = warp_max_key(key), low = warp_min_key(key ? key : ~Key(0));
  if (lane_id() == 0) scratch.high[warp_id()] = high, scratch.low[warp_id()] = low;
  if (__syncthreads_count(key != 0) < k) return 1;
  Key reached = warp_min_key(static_cast<Key>(scratch.low[lane_id() % WARPS]));     // by all that hold anything
  Key missed = warp_max_key(static_cast<Key>(scratch.high[lane_id() % WARPS])) + 1;  // by all
  const i32 enough = k + min(k / 8, MAX_K - k);  // it may stop there: few candidates more; the room is for MAX_K
  while (missed - reached > 1) {
    const Key middle = reached + (missed - reached) / 2;
    const i32 count = __syncthreads_count(key >= middle);
    if (count >= k) reached = middle;
    else missed = middle;
    if (count >= k && count <= enough) break;
  }
  return reached;
}

// Sorts the k largest of `count` keys, descending; all threads but the last warp's work.
template <typename Write>
DEVICE void rank_keys(const u64* keys, i32 count, i32 k, Write write) {
  constexpr int WORKERS = (THREADS - WARP) / SPREAD;
  if (warp_id() == WARPS - 1) return;
  const i32 part = threadIdx.x % SPREAD;
  for (i32 first = 0; first < count; first += WORKERS) {
    const i32 index = first + threadIdx.x / SPREAD;
    const u64 key = index < count ? keys[index] : 0;
    i32 rank = 0;
#pragma unroll 8
    for (i32 other = part; other < count; other += SPREAD) rank += keys[other] > key;
    rank = warp_sum<SPREAD>(rank);
    if (part == 0 && index < count && rank < k) write(rank, key);
  }
}

DEVICE u64 candidate_key(const Logits& logits, i32 vector, int i) {
  return rank_key(fmaxf(logits[i], -INFINITY_F32), vector * PER_VECTOR + i);
}

// Sends every logit of the thread at or above the level to the first block, as long as there is room. Few threads have
// any; they find them in L1 again.
DEVICE void send_candidates(const Row& row, i32 first, u32 level, u64* list, i32 k, u32& count) {
  Logits logits[VECTORS];
  load_chunk(row, first, logits);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const i32 vector = first + v * THREADS;
    if (level_of(max_of(logits[v])) < level) continue;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      const u64 key = candidate_key(logits[v], vector, i);
      if (vector * PER_VECTOR + i >= row.num_ids || key >> (32 + BLANK_BITS) < level) continue;
      const u32 place = atomicAdd(&count, 1);
      if (place < k) store_remote(list + place, 0, key);
    }
  }
}

// Appends every logit of the thread that reaches the bound: only threads whose slot reaches it have any.
DEVICE void collect(const Row& row, i32 first, const Logits (&logits)[VECTORS], Slot bound, u64* candidates,
                    u32& count) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const i32 vector = first + v * THREADS;
    const u32 local = v * THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      const bool inside = vector * PER_VECTOR + i < row.num_ids;
      if (!inside || slot_of(fmaxf(logits[v][i], -INFINITY_F32), local) < bound) continue;
      candidates[atomicAdd(&count, 1)] = candidate_key(logits[v], vector, i);
    }
  }
}

// The block's k best, however many logits reach the row's bound, chunk after chunk; sends them to the first block.
DEVICE void send_ranked(const Row& row, const Params& p, i32 block, i32 num_chunks, const Plan& plan,
                        Scratch& scratch) {
  __syncthreads();  // all have read the number of candidates, which is counted anew
  i32 kept = 0;     // keys of the chunks before, at the front of the candidates
  for (i32 chunk = block; chunk < num_chunks; chunk += p.cluster) {
    const i32 first = chunk * CHUNK_VECTORS + threadIdx.x;
    Logits logits[VECTORS];
    load_chunk(row, first, logits);
    Slot slot = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const bool inside = (first + v * THREADS) * PER_VECTOR < row.num_ids;
      if (inside) slot = max(slot, slot_of(max_of(logits[v]), v * THREADS + threadIdx.x));
    }
    if (threadIdx.x == 0) scratch.num_candidates = kept;
    const Slot bound = find_bound(slot, p.k, scratch);
    collect(row, first, logits, bound, plan.candidates, scratch.num_candidates);
    __syncthreads();
    const i32 count = scratch.num_candidates;
    kept = min(count, p.k);
    u64* own = plan.lists + block * p.k;  // no other block writes this place here
    const int target = chunk + p.cluster < num_chunks ? block : 0;
    rank_keys(plan.candidates, count, p.k, [&](i32 rank, u64 key) { store_remote(own + rank, target, key); });
    __syncthreads();
    if (target == block && chunk + p.cluster < num_chunks) {
      for (i32 i = threadIdx.x; i < kept; i += THREADS) plan.candidates[i] = own[i];
    }
  }
}

// Log-sum-exp of the row by one warp: NaN for a bad row, -inf where there is nothing above -inf.
DEVICE double row_lse(const u64* totals, i32 count) {
  float top = LEAST;
  for (i32 i = lane_id(); i < count; i += WARP) top = fmaxf(top, __uint_as_float(totals[i] >> 32));
  top = value_of(warp_max_key(order_key(top)));
  double sum = 0;
  for (i32 i = lane_id(); i < count; i += WARP) {
    const Total part = {__uint_as_float(totals[i] >> 32), __uint_as_float(totals[i])};
    sum += part.sum * exp_scaled(part.top - top, LOG2_E);
  }
  return top + log(warp_sum(sum));
}

// Writes the k best of the row, from what the blocks sent.
DEVICE void write_row(const Plan& plan, const Scratch& scratch, const Params& p, i64 row) {
  i32 count = 0;
  for (i32 b = 0; b < p.cluster; ++b) {
    for (i32 i = threadIdx.x; i < scratch.counts[b]; i += THREADS) plan.candidates[count + i] = plan.lists[b * p.k + i];
    count += scratch.counts[b];
  }
  float* values = p.values + row * p.k;
  i32* token_ids = p.token_ids + row * p.k;
  __syncthreads();
  const double lse = scratch.lse;
  const bool shard = p.lse != nullptr, bad = isnan(lse) || (!shard && isinf(lse));
  rank_keys(plan.candidates, count, p.k, [&](i32 rank, u64 key) {
    const float value = value_of(key);
    values[rank] = shard ? value : bad ? NAN_F32 : static_cast<float>(value - lse);
    token_ids[rank] = bad && !shard ? rank : p.first_id + static_cast<i32>(id_of(key));
  });
  for (i32 rank = p.num_ids + threadIdx.x; rank < p.k; rank += THREADS) {
    values[rank] = -INFINITY_F32;
    token_ids[rank] = -1;
  }
  if (threadIdx.x == 0) {
    p.nonfinite[row] = bad;
    if (shard) p.lse[row] = lse;
  }
}

// Tells all blocks the maxima of this warp's groups, and the first one the warp's total.
DEVICE void exchange(const Params& p, i32 block, const Total& total, u32 level, Scratch& scratch) {
  const int width = WARP / p.groups_per_warp;
  for (int offset = 1; offset < width; offset *= 2) level = max(level, __shfl_xor_sync(FULL_MASK, level, offset));
  const int group = lane_id() / p.cluster, target = lane_id() % p.cluster;
  level = __shfl_sync(FULL_MASK, level, group * width % WARP);
  const float warp_top = value_of(warp_max_key(order_key(total.top)));
  const float warp_total = warp_sum(total.sum * exp_scaled(total.top - warp_top, LOG2_E));
  const int warp = block * WARPS + warp_id();
  if (group < p.groups_per_warp) {
    store_remote_u32(&scratch.levels[warp * p.groups_per_warp + group], target, level);
  }
  if (lane_id() == 0) {
    store_remote(&scratch.totals[warp], 0, u64(__float_as_uint(warp_top)) << 32 | __float_as_uint(warp_total));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
draft_topk(const Scalar* logits, i64 stream_stride, i64 row_stride, i32 rows_per_stream, i32 num_ids, i32 first_id,
           i32 k, i32 cluster, i32 groups_per_warp, float* values, i32* token_ids, bool* nonfinite, double* lse) {
  extern __shared__ u64 memory[];
  __shared__ Scratch scratch;
  const Params p = {logits, stream_stride,   row_stride, rows_per_stream, num_ids,   first_id, k,
                    cluster, groups_per_warp, values,     token_ids,       nonfinite, lse};
  const Plan plan = {memory, memory + cluster * k};
  const i32 block = blockIdx.x % cluster, num_chunks = max(cdiv(num_ids, CHUNK), 1);
  const i64 index = blockIdx.x / cluster, stream = index / rows_per_stream;
  const Row row = row_of(logits, stream * stream_stride + (index - stream * rows_per_stream) * row_stride, num_ids, 0);
  cluster_begin();
  if (threadIdx.x == 0) scratch.num_candidates = 0;
  grid_dependency_wait();
  Total total = {LEAST, 0.0f};
  float top = -INFINITY_F32;
  for (i32 chunk = block; chunk < num_chunks; chunk += cluster) {
    Logits logits_here[VECTORS];
    load_chunk(row, chunk * CHUNK_VECTORS + threadIdx.x, logits_here);
    add_exps(logits_here, total, top);
  }
  grid_dependency_launch();
  cluster_wait();
  const bool holds = (block * CHUNK_VECTORS + static_cast<i32>(threadIdx.x)) * PER_VECTOR < num_ids;
  exchange(p, block, total, holds ? level_of(top) : 0u, scratch);
  cluster_arrive();
  cluster_wait();
  const i32 num_groups = cluster * WARPS * groups_per_warp;
  const u32 level = find_bound(threadIdx.x < num_groups ? scratch.levels[threadIdx.x] : 0u, k, scratch);
  if (level_of(top) >= level) {
    for (i32 chunk = block; chunk < num_chunks; chunk += cluster) {
      send_candidates(row, chunk * CHUNK_VECTORS + threadIdx.x, level, plan.lists + block * k, k,
                      scratch.num_candidates);
    }
  }
  __syncthreads();
  const i32 count = scratch.num_candidates;
  if (count > k) send_ranked(row, p, block, num_chunks, plan, scratch);
  if (threadIdx.x == 0) store_remote_u32(&scratch.counts[block], 0, min(count, k));
  if (block == 0 && warp_id() == WARPS - 1) {
    const double row_total = row_lse(scratch.totals, cluster * WARPS);
    if (lane_id() == 0) scratch.lse = row_total;
  }
  cluster_arrive();
  if (block != 0) return;
  cluster_wait();
  write_row(plan, scratch, p, index);
}

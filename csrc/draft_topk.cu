// csrc/draft_topk.cu: the best K tokens of every draft row with their log-probabilities, in one pass and one launch.
//   in   logits [S,L,V] float | bf16 | half, rows anywhere, V values one after the other
//   out  values [S,L,K] f32: log-probabilities, or the logits themselves for a shard | token_ids [S,L,K] i32, -1 where
//        a shard has fewer | nonfinite [S,L] bool | lse [S,L] f64, for a shard only
//   math order by logit, exact ties to the smaller id; log p = logit - m - log(sum exp(logit - m)), m the row's largest
//   how  The blocks of a row read it once and exchange the maxima of 2 K groups of threads: the K-th largest of these
//        bounds the K-th largest logit from below, and few logits reach it (1.4 K of random ones). Each block sends its
//        own to the first block, which ranks them by counting. A block that finds more than K (sorted rows, rows of
//        ties) first ranks its own: there the threads' maxima are the bound, which leaves it K times a thread's logits
//        at most, whatever the data.
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
  u32 num_candidates;
  u32 level;
  // Written by the other blocks of the row:
  u32 levels[MAX_GROUPS];           // of groups of threads, 0 for none
  u64 totals[MAX_CLUSTER * WARPS];  // a Total each; of the first block alone, as all that follows
  u32 counts[MAX_CLUSTER];
  double lse;
};

// Dynamic shared memory.
struct Plan {
  u64* lists;       // [cluster][k], what each block found; counts says how many
  u64* candidates;  // [k of the chunk before + k * logits of a thread and chunk]
};

// Adds a thread's vectors to its total; tops = the largest logit of each, which may be -inf.
DEVICE void add_exps(const Logits (&logits)[VECTORS], Total& total, float (&tops)[VECTORS]) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const float old = total.top;
    tops[v] = max_of(logits[v]);
    total.top = fmaxf(old, tops[v]);
    float sum = total.sum * exp_scaled(old - total.top, LOG2_E);
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) sum += exp_scaled(logits[v][i] - total.top, LOG2_E);
    total.sum = sum;
  }
}

// The largest key that k threads at least reach; 0 where fewer hold anything.
DEVICE Slot find_slot(Slot key, i32 k) {
  Slot reached = 0;
#pragma unroll 1
  for (Slot bit = Slot(1) << (32 - BLANK_BITS + VECTOR_BITS - 1); bit != 0; bit /= 2) {
    const i32 count = __syncthreads_count(key >= (reached | bit));
    if (count >= k) reached |= bit;
    if (count == k) break;
  }
  return reached;
}

// The largest of the levels that k of them at least reach, or a little below it; every warp works it out for itself.
DEVICE u32 find_level(const u32* levels, i32 count, i32 k) {
  u32 high = 0, low = ~0u;
#pragma unroll 1
  for (i32 i = lane_id(); i < count; i += WARP) high = max(high, levels[i]), low = min(low, levels[i]);
  u32 reached = warp_min_key(low), missed = warp_max_key(high) + 1;  // by all of them, by none
  const i32 enough = k + k / 4;                                      // it may stop there
#pragma unroll 1
  while (missed - reached > 1) {
    const u32 middle = reached + (missed - reached) / 2;
    i32 reaching = 0;
#pragma unroll 4
    for (i32 first = 0; first < count; first += WARP) {
      const i32 i = first + lane_id();
      reaching += __popc(__ballot_sync(FULL_MASK, i < count && levels[i] >= middle));
    }
    if (reaching >= k) reached = middle;
    else missed = middle;
    if (reaching >= k && reaching <= enough) break;
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

// Which of a thread's vectors hold a logit whose slot reaches the bound.
DEVICE u32 find_hits(const float (&tops)[VECTORS], Slot bound) {
  u32 hits = 0;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    if (slot_of(tops[v], v * THREADS + threadIdx.x) >= bound) hits |= 1u << v;
  }
  return hits;
}

// The same of a chunk that is no longer at hand.
DEVICE void load_tops(const Row& row, i32 first, float (&tops)[VECTORS]) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) tops[v] = max_of(load_vector(row, first + v * THREADS));
}

// Lists every logit of these vectors whose slot reaches the bound, as long as there is room. Few threads have any.
DEVICE void collect(const Row& row, i32 first, u32 hits, Slot bound, u64* list, u32 room, u32& count) {
#pragma unroll 1
  for (; hits != 0; hits &= hits - 1) {
    const int v = __ffs(hits) - 1;
    const Logits hit = load_vector(row, first + v * THREADS);
    const i32 start = (first + v * THREADS) * PER_VECTOR;
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      const bool reaches = slot_of(fmaxf(hit[i], -INFINITY_F32), v * THREADS + threadIdx.x) >= bound;
      if (reaches && start + i < row.num_ids) mask |= 1u << i;
    }
    u32 place = atomicAdd(&count, __popc(mask));
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if ((mask >> i & 1) && place < room) list[place++] = rank_key(fmaxf(hit[i], -INFINITY_F32), start + i);
    }
  }
}

// The block's k best, however many logits reach the row's bound, chunk after chunk.
DEVICE void rank_block(const Row& row, const Params& p, i32 block, i32 num_chunks, const Plan& plan, Scratch& scratch) {
  __syncthreads();  // all have read the number of candidates, which is counted anew
  u64* own = plan.lists + block * p.k;  // no other block writes this place here
  i32 kept = 0;                         // keys of the chunks before, at the front of the candidates
  for (i32 chunk = block; chunk < num_chunks; chunk += p.cluster) {
    const i32 first = chunk * CHUNK_VECTORS + threadIdx.x;
    float tops[VECTORS];
    load_tops(row, first, tops);
    Slot slot = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const bool inside = (first + v * THREADS) * PER_VECTOR < row.num_ids;
      if (inside) slot = max(slot, slot_of(tops[v], v * THREADS + threadIdx.x));
    }
    if (threadIdx.x == 0) scratch.num_candidates = kept;
    __syncthreads();
    const Slot bound = find_slot(slot, p.k);
    const u32 room = p.k * (1 + VECTORS * PER_VECTOR);  // always enough: k slots reach the bound
    collect(row, first, find_hits(tops, bound), bound, plan.candidates, room, scratch.num_candidates);
    __syncthreads();
    const i32 count = scratch.num_candidates;
    kept = min(count, p.k);
    rank_keys(plan.candidates, count, p.k, [&](i32 rank, u64 key) { own[rank] = key; });
    __syncthreads();
    for (i32 i = threadIdx.x; i < kept; i += THREADS) plan.candidates[i] = own[i];
  }
  __syncthreads();
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
  for (i32 b = 0; b < p.cluster; ++b) {  // a warp a list, to where the lists before it end
    const i32 sent = scratch.counts[b];
    const u64* list = plan.lists + b * p.k;
    for (i32 i = lane_id(); b == warp_id() && i < sent; i += WARP) plan.candidates[count + i] = list[i];
    count += sent;
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
    store_remote(&scratch.levels[warp * p.groups_per_warp + group], target, level);
  }
  if (lane_id() == 0) {
    const u64 packed = u64(__float_as_uint(warp_top)) << 32 | __float_as_uint(warp_total);
    store_remote(&scratch.totals[warp], 0, packed);
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
  if (threadIdx.x == 0) scratch.num_candidates = 0;
  cluster_begin();
  grid_dependency_wait();
  Total total = {LEAST, 0.0f};
  float tops[VECTORS], top = -INFINITY_F32;  // of the chunk that came last, and of all
  i32 last = block;
  for (i32 chunk = block; chunk < num_chunks; chunk += cluster) {
    Logits logits_here[VECTORS];
    load_chunk(row, chunk * CHUNK_VECTORS + threadIdx.x, logits_here);
    add_exps(logits_here, total, tops);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) top = fmaxf(top, tops[v]);
    last = chunk;
  }
  grid_dependency_launch();
  cluster_wait();
  const bool holds = (block * CHUNK_VECTORS + static_cast<i32>(threadIdx.x)) * PER_VECTOR < num_ids;
  exchange(p, block, total, holds ? level_of(top) : 0u, scratch);
  cluster_arrive();
  cluster_wait();
  if (warp_id() == 0) {
    const u32 found = find_level(scratch.levels, cluster * WARPS * groups_per_warp, k);
    if (lane_id() == 0) scratch.level = found;
  }
  __syncthreads();
  const u32 level = scratch.level;
  const Slot bound = u64(level) << VECTOR_BITS;
  for (i32 chunk = last; chunk >= 0 && level_of(top) >= level; chunk -= cluster) {
    const i32 first = chunk * CHUNK_VECTORS + threadIdx.x;
    if (chunk != last) load_tops(row, first, tops);
    collect(row, first, find_hits(tops, bound), bound, plan.candidates, k, scratch.num_candidates);
  }
  __syncthreads();
  const i32 count = scratch.num_candidates;
  if (count > k) rank_block(row, p, block, num_chunks, plan, scratch);
  for (i32 i = threadIdx.x; i < min(count, k); i += THREADS) {
    store_remote(plan.lists + block * k + i, 0, plan.candidates[i]);
  }
  if (threadIdx.x == 0) store_remote(&scratch.counts[block], 0, static_cast<u32>(min(count, k)));
  cluster_arrive();
  if (block != 0) return;
  if (warp_id() == WARPS - 1) {
    const double row_total = row_lse(scratch.totals, cluster * WARPS);
    if (lane_id() == 0) scratch.lse = row_total;
  }
  cluster_wait();
  write_row(plan, scratch, p, index);
}

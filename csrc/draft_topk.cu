// csrc/draft_topk.cu: the best K tokens of every draft row with their log-probabilities, in one pass and one launch.
//   in   logits [S,L,V] float | bf16 | half, rows anywhere, V values one after the other
//   out  values [S,L,K] f32: log-probabilities, or the logits themselves for a shard | token_ids [S,L,K] i32, -1 where
//        a shard has fewer | nonfinite [S,L] bool | lse [S,L] f64, for a shard only
//   math order by logit, exact ties to the smaller id; log p = logit - m - log(sum exp(logit - m)), m the row's largest
//   how  The blocks of a row read it once and exchange the maxima of 2 K groups of threads: the K-th largest of these
//        bounds the K-th largest logit from below, and few logits reach it (1.4 K of random ones). Each block tells all
//        others its own, counts for each how many of all are better and writes it to that place. A block that finds
//        more than 2 K (sorted rows, rows of ties) first ranks its own: there the maxima of single reads are the bound,
//        which leaves it K times a read's logits at most, whatever the data.
//        Sums are taken warp by warp and chunk by chunk, then over these in order: the same bits whatever K, the batch
//        and the number of blocks.
//   bad  a row with NaN or +inf, or with nothing above -inf: log-probabilities NaN, ids 0..K-1, nonfinite set
//   cost V * sizeof(Scalar) bytes a row; exp at 16 a cycle and multiprocessor is half of that on an H200
//   ref  kernels/reference/ops.py:draft_topk | test tests/kernels/test_draft_topk.py | archs all
#include "logits.cuh"

constexpr int MAX_K = 256;
constexpr int MAX_GROUPS = 512;  // of a row; at least MAX_K for every cluster size
constexpr int ROOM = 2;          // times K candidates of a block: of two blocks each finds 0.8 K, of random logits
constexpr int SPREAD = 4;        // lanes that rank one candidate of a crowded block
constexpr float LEAST = -3.4028234663852886e38f;
static_assert(ROOM * MAX_K <= THREADS && MAX_GROUPS <= THREADS, "a thread holds one of them");

// Bits of an order key that say nothing, because Scalar is narrower than float.
constexpr int BLANK_BITS = sizeof(Scalar) == 4 ? 0 : DTYPE == 1 ? 16 : 13;
constexpr int LEVEL_BITS = 32 - BLANK_BITS;
DEVICE u32 level_of(float x) { return order_key(x) >> BLANK_BITS; }  // 0 is below every logit

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
  u32 num_items, num_candidates;
  u32 reaching[2][WARPS];  // groups that reach a warp's guess of the level
  u32 ranks[ROOM * MAX_K];
  double lse;
  // Written by all blocks of the row:
  u32 levels[MAX_GROUPS];  // of groups of threads, 0 for none
  u32 counts[MAX_CLUSTER];
};

// Dynamic shared memory.
struct Plan {
  u64* lists;       // [cluster][ROOM * k], what each block found; counts says how many
  u64* totals;      // [chunks][WARPS], a Total each
  u64* candidates;  // [k of the reads before + k * logits of a read]
  u32* items;       // [ROOM * k], a thread and chunk that hold a candidate: place in tops
  Scalar* tops;     // [chunks of this block][THREADS], the largest logit of each
};

// Adds a vector to a thread's total; returns its largest logit, which may be -inf.
DEVICE float add_exps(const Logits& logits, Total& total) {
  const float old = total.top, top = max_of(logits);
  total.top = fmaxf(old, top);
  float sum = total.sum * exp_scaled(old - total.top, LOG2_E);
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) sum += exp_scaled(logits[i] - total.top, LOG2_E);
  total.sum = sum;
  return top;
}

DEVICE u64 warp_total(const Total& total) {
  const float top = value_of(warp_max_key(order_key(total.top)));
  const float sum = warp_sum(total.sum * exp_scaled(total.top - top, LOG2_E));
  return u64(__float_as_uint(top)) << 32 | __float_as_uint(sum);
}

// Reads this block's chunks once; returns the thread's largest logit.
DEVICE float read_row(const Row& row, i32 block, i32 num_chunks, i32 cluster, const Plan& plan) {
  Total total;
  float top = -INFINITY_F32, chunk_top = -INFINITY_F32;
  i32 place = threadIdx.x;
  for_row(row, block, num_chunks, cluster, [&](const Logits& logits, i32 chunk, int v) {
    if (v == 0) total = {LEAST, 0.0f}, chunk_top = -INFINITY_F32;
    chunk_top = fmaxf(chunk_top, add_exps(logits, total));
    if (v != VECTORS - 1) return;
    plan.tops[place] = from_float<Scalar>(chunk_top);
    place += THREADS;
    top = fmaxf(top, chunk_top);
    const u64 packed = warp_total(total);
    if (lane_id() == 0) plan.totals[chunk * WARPS + warp_id()] = packed;
  });
  return top;
}

// The k-th largest of the groups' levels, or one a little below it: every warp tries another level at a time.
DEVICE u32 find_level(Scratch& scratch, i32 num_groups, i32 k) {
  u32 levels[MAX_GROUPS / WARP], low = ~0u, high = 0;
#pragma unroll
  for (int i = 0; i < MAX_GROUPS / WARP; ++i) {
    const i32 group = i * WARP + lane_id();
    levels[i] = group < num_groups ? scratch.levels[group] : 0;
    if (group < num_groups) low = min(low, levels[i]);
    high = max(high, levels[i]);
  }
  low = warp_min_key(low), high = warp_max_key(high) + 1;  // what all of them reach, what none does
#pragma unroll 1
  for (int turn = 0; high - low > 1; turn ^= 1) {
    const u32 step = (high - low + WARPS) / (WARPS + 1), level = low + step * (warp_id() + 1);
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < MAX_GROUPS / WARP; ++i) count += levels[i] >= level;
    count = __reduce_add_sync(FULL_MASK, count);
    if (lane_id() == 0) scratch.reaching[turn][warp_id()] = count;
    __syncthreads();
    count = scratch.reaching[turn][lane_id() % WARPS];
    const int enough = __popc(__ballot_sync(FULL_MASK, count >= k) << (WARP - WARPS));  // warps with k or more
    high = min(high, low + step * (enough + 1)), low += step * enough;
    if (enough > 0 && __shfl_sync(FULL_MASK, count, enough - 1) <= k + k / 8) break;
  }
  return low;
}

// The largest key that k threads at least reach, 0 where fewer hold anything.
DEVICE u64 find_bound(u64 key, int bits, i32 k) {
  u64 reached = 0;
#pragma unroll 1
  for (u64 bit = u64(1) << (bits - 1); bit != 0; bit /= 2) {
    const i32 count = __syncthreads_count(key >= (reached | bit));
    if (count >= k) reached |= bit;
    if (count == k) break;
  }
  return reached;
}

// Lists the logits of a vector that pass, as long as there is room. Few threads have any.
template <typename Passes>
DEVICE void collect(const Logits& logits, i32 start, i32 num_ids, u64* list, u32 room, u32& count, Passes passes) {
  u32 mask = 0;
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) {
    if (start + i < num_ids && passes(rank_key(fmaxf(logits[i], -INFINITY_F32), start + i))) mask |= 1u << i;
  }
  if (mask == 0) return;
  u32 place = atomicAdd(&count, __popc(mask));
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) {
    if ((mask >> i & 1) && place < room) list[place++] = rank_key(fmaxf(logits[i], -INFINITY_F32), start + i);
  }
}

// Lists the block's logits that reach the level: first the threads and chunks that hold any, then what these hold, all
// read again at once. Returns how many; more than there is room for say only that.
DEVICE i32 collect_row(const Row& row, i32 block, i32 num_chunks, i32 cluster, float top, u32 level, i32 room,
                       const Plan& plan, Scratch& scratch) {
  if (level_of(top) >= level) {
    i32 place = threadIdx.x;
#pragma unroll 1
    for (i32 chunk = block; chunk < num_chunks; chunk += cluster, place += THREADS) {
      if (level_of(to_float(plan.tops[place])) < level) continue;
      const u32 item = atomicAdd(&scratch.num_items, 1);
      if (item < room) plan.items[item] = place;
    }
  }
  __syncthreads();
  const i32 num_items = scratch.num_items;
  if (num_items > room) return num_items;  // each holds a candidate
  for (i32 i = threadIdx.x; i < num_items * VECTORS; i += THREADS) {
    const u32 item = plan.items[i / VECTORS], chunk = block + item / THREADS * cluster;
    const i32 index = (chunk * VECTORS + i % VECTORS) * THREADS + item % THREADS;
    collect(load_vector(row, index), index * PER_VECTOR, row.num_ids, plan.candidates, room, scratch.num_candidates,
            [&](u64 key) { return static_cast<u32>(key >> (32 + BLANK_BITS)) >= level; });
  }
  __syncthreads();
  return scratch.num_candidates;
}

// Sorts the k largest of `count` keys, descending.
DEVICE void rank_keys(const u64* keys, i32 count, i32 k, u64* sorted) {
  const i32 part = threadIdx.x % SPREAD;
  for (i32 first = 0; first < count; first += THREADS / SPREAD) {
    const i32 index = first + threadIdx.x / SPREAD;
    const u64 key = index < count ? keys[index] : 0;
    i32 rank = 0;
#pragma unroll 8
    for (i32 other = part; other < count; other += SPREAD) rank += keys[other] > key;
    rank = warp_sum<SPREAD>(rank);
    if (part == 0 && index < count && rank < k) sorted[rank] = key;
  }
}

// The k best of a crowded block, sorted, one read of all threads after the other; returns how many there are. A read's
// largest logits tell how good its k best are: of two equal ones the thread with the smaller ids counts more, so that
// exactly k threads reach the bound.
DEVICE i32 rank_block(const Row& row, const Params& p, i32 block, i32 num_chunks, const Plan& plan, Scratch& scratch) {
  constexpr int THREAD_BITS = 10;
  static_assert(THREADS <= 1 << THREAD_BITS, "the thread fits");
  u64* own = plan.lists + block * ROOM * p.k;  // no other block writes this place here
  i32 kept = 0;                         // keys of the reads before, at the front of the candidates
  __syncthreads();                      // all have read the number of candidates, which is counted anew
  for (i32 read = block * VECTORS; read < num_chunks * VECTORS;) {
    const i32 index = read * THREADS + threadIdx.x, start = index * PER_VECTOR;
    const Logits logits = load_vector(row, index);
    const u64 least = kept == p.k ? own[kept - 1] : 0;
    u64 slot = u64(level_of(max_of(logits))) << THREAD_BITS | (THREADS - 1 - threadIdx.x);
    if (start >= row.num_ids) slot = 0;
    if (threadIdx.x == 0) scratch.num_candidates = kept;
    const u64 bound = find_bound(slot, LEVEL_BITS + THREAD_BITS, p.k);
    const u32 room = p.k * (1 + PER_VECTOR);  // always enough
    collect(logits, start, row.num_ids, plan.candidates, room, scratch.num_candidates, [&](u64 key) {
      const u64 own_slot = key >> (32 + BLANK_BITS) << THREAD_BITS | (THREADS - 1 - threadIdx.x);
      return own_slot >= bound && key > least;
    });
    __syncthreads();
    const i32 count = scratch.num_candidates;
    if (count > kept) {
      rank_keys(plan.candidates, count, p.k, own);
      kept = min(count, p.k);
      __syncthreads();
      for (i32 i = threadIdx.x; i < kept; i += THREADS) plan.candidates[i] = own[i];
    }
    __syncthreads();
    ++read;
    if (read % VECTORS == 0) read += (p.cluster - 1) * VECTORS;
  }
  return kept;
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

// Tells all blocks what this one found: some warps for each of them.
DEVICE void send(const Params& p, i32 block, i32 count, const Plan& plan, Scratch& scratch) {
  const i32 parts = WARPS / p.cluster, part = warp_id() / p.cluster, target = warp_id() % p.cluster;
  if (part >= parts) return;
  for (i32 i = part * WARP + lane_id(); i < count; i += parts * WARP) {
    store_remote(plan.lists + block * ROOM * p.k + i, target, plan.candidates[i]);
  }
  if (part == 0 && lane_id() == 0) store_remote(&scratch.counts[block], target, static_cast<u32>(count));
}

// Writes what this block found to its places among what all blocks found: a lane counts for one of them, a warp over a
// part of one block's list.
DEVICE void write_row(const Plan& plan, Scratch& scratch, const Params& p, i32 block, i32 count, i64 row) {
  const u64* own = plan.lists + block * ROOM * p.k;
  const i32 parts = WARPS / p.cluster, part = warp_id() / p.cluster, other = warp_id() % p.cluster;
  const u64* list = plan.lists + other * ROOM * p.k;
  const i32 length = part < parts ? scratch.counts[other] : 0;
  for (i32 first = 0; first < count; first += WARP) {
    const u64 key = first + lane_id() < count ? own[first + lane_id()] : ~u64(0);
    u32 better = 0;
#pragma unroll 4
    for (i32 i = part; i < length; i += parts) better += list[i] > key;
    if (better > 0) atomicAdd(&scratch.ranks[first + lane_id()], better);
  }
  __syncthreads();
  const double lse = scratch.lse;
  const bool shard = p.lse != nullptr, bad = isnan(lse) || (!shard && isinf(lse));
  float* values = p.values + row * p.k;
  i32* token_ids = p.token_ids + row * p.k;
  if (threadIdx.x < count) {
    const u64 key = own[threadIdx.x];
    const i32 rank = scratch.ranks[threadIdx.x];
    const float value = value_of(key);
    if (rank < p.k) {
      values[rank] = shard ? value : bad ? NAN_F32 : static_cast<float>(value - lse);
      token_ids[rank] = bad && !shard ? rank : p.first_id + static_cast<i32>(id_of(key));
    }
  }
  if (block != 0) return;
  for (i32 rank = p.num_ids + threadIdx.x; rank < p.k; rank += THREADS) {
    values[rank] = -INFINITY_F32;
    token_ids[rank] = -1;
  }
  if (threadIdx.x == 0) {
    p.nonfinite[row] = bad;
    if (shard) p.lse[row] = lse;
  }
}

// Tells all blocks the maxima of this warp's groups and its totals.
DEVICE void exchange(const Params& p, i32 block, i32 num_chunks, u32 level, const Plan& plan, Scratch& scratch) {
  const int width = WARP / p.groups_per_warp;
  for (int offset = 1; offset < width; offset *= 2) level = max(level, __shfl_xor_sync(FULL_MASK, level, offset));
  const int group = lane_id() / p.cluster, target = lane_id() % p.cluster;
  level = __shfl_sync(FULL_MASK, level, group * width % WARP);
  if (group < p.groups_per_warp) {
    store_remote(&scratch.levels[(block * WARPS + warp_id()) * p.groups_per_warp + group], target, level);
  }
  __syncwarp();
  for (i32 i = lane_id(); block + i / p.cluster * p.cluster < num_chunks; i += WARP) {
    u64* total = &plan.totals[(block + i / p.cluster * p.cluster) * WARPS + warp_id()];
    if (i % p.cluster != block) store_remote(total, i % p.cluster, *total);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
draft_topk(const Scalar* logits, i64 stream_stride, i64 row_stride, i32 rows_per_stream, i32 num_ids, i32 first_id,
           i32 k, i32 cluster, i32 groups_per_warp, float* values, i32* token_ids, bool* nonfinite, double* lse) {
  extern __shared__ u64 memory[];
  __shared__ Scratch scratch;
  const Params p = {logits, stream_stride,   row_stride, rows_per_stream, num_ids,   first_id, k,
                    cluster, groups_per_warp, values,     token_ids,       nonfinite, lse};
  const i32 block = blockIdx.x % cluster, num_chunks = max(cdiv(num_ids, CHUNK), 1);
  u64* totals = memory + cluster * ROOM * k;
  u64* candidates = totals + num_chunks * WARPS;
  u32* items = reinterpret_cast<u32*>(candidates + k * (1 + PER_VECTOR));
  const Plan plan = {memory, totals, candidates, items, reinterpret_cast<Scalar*>(items + ROOM * k)};
  const i64 index = blockIdx.x / cluster, stream = index / rows_per_stream;
  const Row row = row_of(logits, stream * stream_stride + (index - stream * rows_per_stream) * row_stride, num_ids, 0);
  if (threadIdx.x == 0) scratch.num_items = scratch.num_candidates = 0;
  if (threadIdx.x < ROOM * MAX_K) scratch.ranks[threadIdx.x] = 0;
  cluster_begin();
  grid_dependency_wait();
  grid_dependency_launch();  // it waits for this one's end, but its blocks are there by then
  const float top = read_row(row, block, num_chunks, cluster, plan);
  cluster_wait();
  const bool holds = (block * CHUNK_VECTORS + static_cast<i32>(threadIdx.x)) * PER_VECTOR < num_ids;
  exchange(p, block, num_chunks, holds ? level_of(top) : 0u, plan, scratch);
  cluster_arrive();
  cluster_wait();
  const u32 level = find_level(scratch, cluster * WARPS * groups_per_warp, k);
  i32 count = collect_row(row, block, num_chunks, cluster, top, level, ROOM * k, plan, scratch);
  if (count > ROOM * k) count = rank_block(row, p, block, num_chunks, plan, scratch);
  send(p, block, count, plan, scratch);
  cluster_arrive();
  if (warp_id() == WARPS - 1) {
    const double row_total = row_lse(plan.totals, num_chunks * WARPS);
    if (lane_id() == 0) scratch.lse = row_total;
  }
  cluster_wait();
  write_row(plan, scratch, p, block, count, index);
}

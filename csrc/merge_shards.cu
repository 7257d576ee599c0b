// csrc/merge_shards.cu: put together what the ranks gathered of their vocabulary shards, one block a row.
//   op   draft_topk and target_sample over shards, after their one exchange
//   in   R shards, each field at its own stride between ranks: [rows,K] of merge_topk, [rows,F] of merge_candidates,
//        by falling value or score; token_ids global, -1 behind the last | mass [rows,F+1] f64 of choose_token
//   out  merge_topk: log_probs [rows,K] f32, token_ids [rows,K] i32, nonfinite [rows] | merge_candidates: one shard's
//        fields of the whole vocabulary | choose_token, and best_candidate of F = 1: tokens [rows] i32, -1 where a row
//        is not finite or empty
//   math merge_topk: an entry's place is the number of entries before it, found by bisection of each list; K / R
//        entries of each list already tell a bound that few of the others reach.
//        merge_candidates: one stays if no other has both a better score and a better value; its place is the number
//        of such with a better score. Ties go to the smaller id.
//   cost R * K * 8 or R * F * 16 bytes a row; the time is a launch
//   ref  kernels/draft_topk.py:merge_topk, sample_shards.py:merge_candidates | test tests/kernels/test_merge_shards.py
//        | archs all
#include "logits.cuh"

constexpr double INFINITY_F64 = __builtin_bit_cast(double, 0x7ff0000000000000ull);

// The log-sum-exp of all shards, a shard a lane, the same in every warp; NaN where nothing or no number was added up.
DEVICE double total_lse(const double* lse, i64 rank_stride, i32 num_ranks) {
  const double own = lane_id() < num_ranks ? lse[lane_id() * rank_stride] : -INFINITY_F64;
  const double largest = warp_max(own);
  return largest + log(warp_sum(lane_id() < num_ranks ? exp(own - largest) : 0.0));
}

constexpr int SEARCHERS = 8;  // lanes that place one entry, each in every eighth list

// Dynamic shared memory: entries [K][R], 0 where the shard has no token; the lists stand side by side.
extern "C" __global__ void __launch_bounds__(THREADS)
merge_topk(const float* values, i64 values_stride, const i32* token_ids, i64 ids_stride, const double* lse,
           i64 lse_stride, const u8* nonfinite, i64 nonfinite_stride, i32 num_ranks, i32 k, float* log_probs,
           i32* top_ids, u8* row_nonfinite) {
  extern __shared__ u64 keys[];
  const i64 row = blockIdx.x;
  const i32 count = num_ranks * k;
  grid_dependency_wait();
  grid_dependency_launch();
  for (i32 i = threadIdx.x; i < count; i += THREADS) {
    const i32 r = i / k, place = i - r * k, id = token_ids[r * ids_stride + row * k + place];
    const float value = values[r * values_stride + row * k + place];
    keys[place * num_ranks + r] = id < 0 ? 0 : rank_key(value, id);
  }
  const double total = total_lse(lse + row, lse_stride, num_ranks);
  const bool flagged = lane_id() < num_ranks && nonfinite[lane_id() * nonfinite_stride + row] != 0;
  const bool bad = __any_sync(FULL_MASK, flagged) || !(total < INFINITY_F64 && total > -INFINITY_F64);
  if (threadIdx.x == 0) row_nonfinite[row] = bad;
  if (bad) {
    for (i32 i = threadIdx.x; i < k; i += THREADS) log_probs[row * k + i] = NAN_F32, top_ids[row * k + i] = i;
    return;
  }
  __syncthreads();
  // Where every list holds this many entries that reach the lowest of their last ones, K do: what is below is out.
  const i32 each = cdiv(k, num_ranks);
  const u64 least = warp_min_key(lane_id() < num_ranks ? keys[(each - 1) * num_ranks + lane_id()] : ~u64(0));
  for (i32 item = threadIdx.x; item < round_up(count * SEARCHERS, WARP); item += THREADS) {
    const i32 i = item / SEARCHERS, own = i % num_ranks;
    const u64 key = i < count ? keys[i] : 0;
    const bool stays = key != 0 && key >= least;
    if (!__any_sync(FULL_MASK, stays)) continue;
    i32 before = 0;
    for (i32 r = item % SEARCHERS; r < num_ranks; r += SEARCHERS) {
      i32 begin = 0, end = stays && r != own ? k : 0;  // entries of list r before this one: keys fall
      while (begin < end) {
        const i32 middle = (begin + end) / 2;
        if (keys[middle * num_ranks + r] > key) begin = middle + 1;
        else end = middle;
      }
      before += begin;
    }
    const i32 place = i / num_ranks + warp_sum<SEARCHERS>(before);
    if (!stays || item % SEARCHERS != 0 || place >= k) continue;
    log_probs[row * k + place] = static_cast<float>(static_cast<double>(value_of(key)) - total);
    top_ids[row * k + place] = static_cast<i32>(id_of(key));
  }
}

struct Candidates {  // of all shards, in shared memory; lists stay together, and end where a shard has no more
  double* score;
  u64* key;  // value, then the smaller id
  DEVICE bool before(i32 a, i32 b) const {  // by score
    return score[a] > score[b] || (score[a] == score[b] && id_of(key[a]) < id_of(key[b]));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
merge_candidates(const double* scores, i64 scores_stride, const i32* token_ids, i64 ids_stride, const float* values,
                 i64 values_stride, const float* top, i64 top_stride, i32 num_ranks, i32 capacity, double* out_scores,
                 i32* out_ids, float* out_values, float* out_top) {
  extern __shared__ u64 memory[];  // [R * F] scores, [R * F] keys, [R * F] what stays, [R] lengths
  const i64 row = blockIdx.x;
  const i32 count = num_ranks * capacity;
  const Candidates all = {reinterpret_cast<double*>(memory), memory + count};
  i32* stays = reinterpret_cast<i32*>(memory + 2 * count);
  i32* length = stays + count;
  grid_dependency_wait();
  grid_dependency_launch();
  for (i32 i = threadIdx.x; i < count; i += THREADS) {
    const i32 r = i / capacity, place = i % capacity, id = token_ids[r * ids_stride + row * capacity + place];
    all.score[i] = scores[r * scores_stride + row * capacity + place];
    all.key[i] = id < 0 ? 0 : rank_key(values[r * values_stride + row * capacity + place], id);
  }
  for (i32 i = threadIdx.x; i < capacity; i += THREADS) {
    out_scores[row * capacity + i] = -INFINITY_F64;
    out_ids[row * capacity + i] = -1;
    out_values[row * capacity + i] = -INFINITY_F32;
  }
  __syncthreads();
  for (i32 r = threadIdx.x; r < num_ranks; r += THREADS) {
    i32 end = 0;
    while (end < capacity && all.key[r * capacity + end] != 0) ++end;
    length[r] = end;
  }
  if (threadIdx.x == 0) {
    float largest = -INFINITY_F32;
    for (i32 r = 0; r < num_ranks; ++r) {
      const float one = top[r * top_stride + row];
      largest = one > largest || one != one ? one : largest;  // a NaN stays: nothing is larger
      if (largest != largest) break;
    }
    out_top[row] = largest;
  }
  __syncthreads();
  for (i32 i = threadIdx.x; i < count; i += THREADS) {
    bool kept = all.key[i] != 0;
    for (i32 r = 0; r < num_ranks && kept; ++r)
      for (i32 j = r * capacity; j < r * capacity + length[r] && kept; ++j)
        kept = !(all.key[j] > all.key[i] && all.before(j, i));
    stays[i] = kept;
  }
  __syncthreads();
  for (i32 i = threadIdx.x; i < count; i += THREADS) {
    if (!stays[i]) continue;
    i32 place = 0;
    for (i32 r = 0; r < num_ranks; ++r)
      for (i32 j = r * capacity; j < r * capacity + length[r]; ++j) place += stays[j] && all.before(j, i);
    if (place >= capacity) continue;
    out_scores[row * capacity + place] = all.score[i];
    out_ids[row * capacity + place] = static_cast<i32>(id_of(all.key[i]));
    out_values[row * capacity + place] = value_of(all.key[i]);
  }
}

// A warp a row, a rank a lane: of one candidate a shard the best is the draw, if no top-p can refuse it.
extern "C" __global__ void __launch_bounds__(THREADS)
best_candidate(const double* scores, i64 scores_stride, const i32* token_ids, i64 ids_stride, const float* top,
               i64 top_stride, i32 num_ranks, i32 num_rows, i32* tokens) {
  const i32 row = blockIdx.x * WARPS + warp_id(), r = lane_id();
  grid_dependency_wait();
  grid_dependency_launch();
  if (row >= num_rows) return;
  const bool holds = r < num_ranks;
  const i32 id = holds ? token_ids[r * ids_stride + row] : -1;
  const u64 score = id < 0 ? 0 : order_key(scores[r * scores_stride + row]);
  const float largest = holds ? top[r * top_stride + row] : 0.0f;
  const u64 best = warp_max_key(score);
  const u32 first = warp_min_key(score == best ? static_cast<u32>(id) : ~0u);
  const bool bad = __any_sync(FULL_MASK, largest != largest);
  if (r == 0) tokens[row] = bad || best == 0 ? -1 : static_cast<i32>(first);
}

// One thread a row. `reached` is top_p as the sums of masses are compared with it; mass is null without top-p.
extern "C" __global__ void __launch_bounds__(THREADS)
choose_token(const i32* token_ids, const float* top, const double* mass, i32 num_rows, i32 capacity, double reached,
             i32* tokens) {
  const i32 row = blockIdx.x * THREADS + threadIdx.x;
  grid_dependency_wait();
  grid_dependency_launch();
  if (row >= num_rows) return;
  const i32* ids = token_ids + static_cast<i64>(row) * capacity;
  i32 token = mass == nullptr ? ids[0] : -1;
  if (mass != nullptr) {
    const double* above = mass + static_cast<i64>(row) * (capacity + 1);
    for (i32 i = 0; i < capacity && token < 0; ++i)
      if (above[i] < reached * above[capacity]) token = ids[i];
  }
  tokens[row] = top[row] != top[row] ? -1 : token;
}

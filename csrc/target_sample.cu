// csrc/target_sample.cu: the target's token at every row: argmax, or argmax(logit / T + Gumbel noise) in the top-p set.
//   in   logits [S,N,V] float | bf16 | half, rows anywhere, V values one after the other | stream [S] i64
//        position [S,N] i64 | T, top_p f64 | seed u64 | first_id: the global id of column 0
//   out  tokens [S,N] i32, -1 for a row with NaN or +inf, or with nothing above -inf; or, for a vocabulary shard,
//        F candidates a row: scores f64, token_ids i32, values f32 (the logits), top f32 (NaN for a bad row)
//   math top-p set: the fewest tokens, from the most probable down (ties: smaller id), whose probabilities reach top_p
//   how  The largest logit and the largest noise of each 16-byte vector bound all its scores from above, with one
//        logarithm a vector; noise needs no logits, so it is made while they are on their way. A lower bound of the
//        best score comes from the vectors with the largest bounds; the few vectors that reach it are worked out in
//        float64.
//        Top-p needs no sort: the winner c among all tokens is the answer if the mass above c is below top_p. If not,
//        c and all below it are outside; the winner among the tokens above c is next. It ends after 1 + log(1 / top_p)
//        or so. A shard cannot know the others' mass: it lists all its winners (64 are enough but for 1 row in 10^20),
//        the merge keeps those that are winners of the whole, and top_p_mass adds up the mass above each.
//   cost V * sizeof(Scalar) bytes a row; noise takes 18 multiplications of 32 by 32 bits for 4 tokens
//   ref  kernels/reference/ops.py:target_sample | test tests/kernels/test_target_sample.py | archs all
#include "logits.cuh"
#include "philox.cuh"

// (logit - top) / T below -27 cannot win, because noise spans 22.88 + 3.14. The bound of what can is off by the noise's
// error and five roundings of at most (27 + 23) log2(e), and so is the lower bound that it is held against.
constexpr float MARGIN = 3 * BOUND_ERROR + 10 * 0x1p-24f * 80.0f;
constexpr int FULL = 512;  // vectors that may win, before they are worked out
constexpr float MASS_MARGIN = 0x1p-14f;  // relative; the float32 sums are within 2^-16 (see mass_is_below)
constexpr double REACHED = 1 - 0x1p-32;  // as kernels/reference/ops.py:TOP_P_REACHED

// Largest key of the block for every thread; `scratch` is free again after the next barrier.
DEVICE u32 block_max_key(u32 key, u32* scratch) {
  key = warp_max_key(key);
  if (lane_id() == 0) scratch[warp_id()] = key;
  __syncthreads();
  return warp_max_key(scratch[lane_id() % WARPS]);
}

// The same of values that may be NaN.
DEVICE float block_max_or_nan(float value, u32* scratch) { return value_of(block_max_key(order_key(value), scratch)); }

// ---- greedy ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 2)
target_greedy(const Scalar* logits, i64 stream_stride, i64 row_stride, i32 rows_per_stream, i32 num_ids, i32 first_id,
              i32 cluster, i32* token_ids, double* scores, float* values, float* top) {
  __shared__ u64 warp_best[WARPS], block_best[MAX_CLUSTER];
  const Rows rows = {logits, stream_stride, row_stride, rows_per_stream, num_ids, first_id, cluster};
  const Row row = rows.row();
  cluster_begin();
  grid_dependency_wait();
  grid_dependency_launch();  // it waits for this one's end, but its blocks are there by then
  float best = -INFINITY_F32;
  i32 best_vector = 0;
  Logits winner = {};
  for_row(row, rows.block(), rows.num_chunks(), cluster, [&](const Logits& values, i32 chunk, int v) {
    const float top = max_or_nan(values);
    if (top <= best) return;  // vectors come in the order of their ids
    best = max_or_nan(best, top);
    best_vector = chunk * CHUNK_VECTORS + v * THREADS + threadIdx.x, winner = values;
  });
  const i32 start = best_vector * PER_VECTOR - row.shift;
  u64 rank = 0;
#pragma unroll
  for (int i = PER_VECTOR - 1; i >= 0; --i) {
    if (winner[i] == best) rank = rank_key(best, start + i);
  }
  if (best == -INFINITY_F32) rank = 0;
  if (!(best < INFINITY_F32)) rank = ~u64(0);  // NaN or +inf
  rank = warp_max_key(rank);
  if (lane_id() == 0) warp_best[warp_id()] = rank;
  __syncthreads();
  cluster_wait();
  if (warp_id() == 0) {
    rank = warp_max_key(warp_best[lane_id() % WARPS]);
    if (lane_id() == 0) store_remote(&block_best[rows.block()], 0, rank);
  }
  cluster_arrive();
  if (rows.block() != 0) return;
  cluster_wait();
  if (threadIdx.x != 0) return;
  for (i32 b = 0; b < cluster; ++b) rank = b == 0 ? block_best[0] : max(rank, block_best[b]);
  const bool bad = rank == ~u64(0), none = rank == 0;
  const i64 at = rows.index();
  token_ids[at] = bad || none ? -1 : first_id + static_cast<i32>(id_of(rank));
  if (scores != nullptr) scores[at] = values[at] = top[at] = bad ? NAN_F32 : none ? -INFINITY_F32 : value_of(rank);
}

// ---- noise -------------------------------------------------------------------------------------------------------

DEVICE u32 word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

struct Draw {
  NoiseKey key;
  double temperature, top_p;
  float log2_scale;  // log2(e) / T
  DEVICE u32 word(i32 token) const { return word_of(philox(key, static_cast<u32>(token) / 4), token % 4); }
};

struct Threshold {  // only tokens above this one are in play; at first all above -inf
  float value;
  i32 id;  // a column
  DEVICE bool is_below(float x, i32 column) const { return x > value || (x == value && column < id); }
};

DEVICE double value_of_score(u64 key) {
  return __longlong_as_double(static_cast<i64>(key ^ (key >> 63 ? u64(1) << 63 : ~u64(0))));
}

struct Winner {
  u64 score;  // order_key of the float64 score, 0: none
  i32 id;     // a column
  float value;
  DEVICE bool loses_to(const Winner& other) const {
    return other.score > score || (other.score == score && other.id < id);
  }
};

#define NO_WINNER (Winner{0, 0, 0.0f})

struct Message {  // what one block tells all others
  u64 words[4];   // score, id and value, mass, top; or the mass above the threshold, and all mass
};

struct Scratch {
  u32 warp_keys[3][WARPS];
  double warp_sums[2][WARPS];
  Winner winners[WARPS];
  i32 num_vectors;
  i32 vectors[FULL + CHUNK_VECTORS];  // of the row, whose tokens may win
  i32 full[2];                        // the last even and odd chunk of this block after which there were FULL or more
  // By the parity of the turn, as a fast block may be one ahead of a slow one; the third for masses in float64.
  Message inbox[3][MAX_CLUSTER];
};

// What a thread knows of its vectors of a chunk.
struct Screen {
  float tops[VECTORS];   // the largest logit of each
  float noise[VECTORS];  // the bound of the largest noise of each (log2)
  float top;             // of all tops, then of the block's; NaN if any logit is
};

// After VECTORS of these the first one stands first: an index that a loop counts would need memory.
DEVICE void push(float (&values)[VECTORS], float value) {
#pragma unroll
  for (int v = 0; v + 1 < VECTORS; ++v) values[v] = values[v + 1];
  values[VECTORS - 1] = value;
}

DEVICE void make_noise(const NoiseKey& key, u32 quad, float (&noise)[VECTORS]) {
#pragma unroll 1  // little machine code; and the compiler leaves the loads before it
  for (int v = 0; v < VECTORS; ++v, quad += THREADS * PER_VECTOR / 4) {
    u32 largest = 0;
#pragma unroll
    for (int q = 0; q < PER_VECTOR / 4; ++q) {
      const uint4 words = philox(key, quad + q);
      largest = max(max(largest, max(words.x, words.y)), max(words.z, words.w));
    }
    push(noise, gumbel_bound_log2(largest));
  }
}

// Noise needs no logits: it is made while they are on their way.
DEVICE void scan(const Row& row, const Rows& rows, const Draw& draw, i32 chunk, Screen& screen) {
  const u32 quad = (rows.first_id - row.shift + chunk * CHUNK) / 4 + threadIdx.x * (PER_VECTOR / 4);
  if (is_plain(row, chunk)) {
    Logits logits[VECTORS];
    load_plain(row, chunk, logits);
    make_noise(draw.key, quad, screen.noise);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) screen.tops[v] = max_or_nan(logits[v]);
  } else {
    make_noise(draw.key, quad, screen.noise);
#pragma unroll 1
    for (int v = 0; v < VECTORS; ++v) {
      push(screen.tops, max_or_nan(load_vector(row, chunk * CHUNK_VECTORS + v * THREADS + threadIdx.x)));
    }
  }
  screen.top = -INFINITY_F32;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) screen.top = max_or_nan(screen.top, screen.tops[v]);
}

// What is above the threshold in this thread's part of a chunk weighs, relative to `top`.
DEVICE float mass_above(const Row& row, const Draw& draw, i32 chunk, float top, const Threshold& threshold) {
  const float next = value_of(order_key(threshold.value) + 1);  // the next larger float
  float mass = 0.0f;
  for_vectors(row, chunk, [&](const Logits& values, int v) {
    if (max_of(values) < threshold.value) return;
    const i32 start = (chunk * CHUNK_VECTORS + v * THREADS + threadIdx.x) * PER_VECTOR - row.shift;
    const i32 before = threshold.id - start;  // how many of these have a smaller id than the threshold
    const float least = before >= PER_VECTOR ? threshold.value : next;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      const float part = exp_scaled(values[i] - top, draw.log2_scale);
      if (values[i] >= least) mass += part;
    }
    if (before <= 0 || before >= PER_VECTOR) return;
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {  // the threshold's own vector
      const bool first = i < before && values[i] == threshold.value;
      if (first) mass += exp_scaled(values[i] - top, draw.log2_scale);
    }
  });
  return mass;
}

// One token of a vector for each of PER_VECTOR lanes: its logit and random word; -inf where it is not in play.
struct Token {
  i32 id;  // a column
  float value;
  u32 word;
};

DEVICE Token token_of(const Row& row, const Rows& rows, const Draw& draw, i32 index, const Threshold& threshold) {
  Token token = {index * PER_VECTOR - row.shift + lane_id() % PER_VECTOR, -INFINITY_F32, 0};
  if (token.id < 0 || token.id >= row.num_ids) return token;
  const float value = to_float(row.logits[token.id]);
  if (threshold.is_below(value, token.id)) token.value = value;
  token.word = draw.word(rows.first_id + token.id);
  return token;
}

DEVICE Winner warp_winner(Winner mine) {
  const u64 score = warp_max_key(mine.score);
  const u32 id = warp_min_key(mine.score == score ? static_cast<u32>(mine.id) : ~0u);
  const u32 holder = __ballot_sync(FULL_MASK, mine.score == score && static_cast<u32>(mine.id) == id);
  return {score, static_cast<i32>(id), __shfl_sync(FULL_MASK, mine.value, __ffs(holder) - 1)};
}

// What all blocks found: the winner of everything in play, the largest logit, and the mass in play relative to it.
struct Found {
  Winner winner;
  float top;
  double mass;
};

// Every block gets every block's message.
DEVICE const Message* exchange_words(Scratch& scratch, const Rows& rows, const Message& mine, int inbox) {
  Message* messages = scratch.inbox[inbox];
  const u32 word = threadIdx.x % 4, target = threadIdx.x / 4;
  if (target < rows.cluster) {
    const u64 low = word == 0 ? mine.words[0] : mine.words[1], high = word == 2 ? mine.words[2] : mine.words[3];
    store_remote(&messages[rows.block()].words[word], target, word < 2 ? low : high);
  }
  cluster_arrive();
  cluster_wait();
  return messages;
}

DEVICE Found exchange(Scratch& scratch, const Rows& rows, const Draw& draw, const Found& mine, i32 turn) {
  const Message message = {mine.winner.score,
                           u64(static_cast<u32>(mine.winner.id)) << 32 | __float_as_uint(mine.winner.value),
                           static_cast<u64>(__double_as_longlong(mine.mass)), __float_as_uint(mine.top)};
  if (turn == 0) cluster_wait();  // the other blocks have begun
  const Message* messages = exchange_words(scratch, rows, message, turn % 2);
  Found block = {NO_WINNER, -INFINITY_F32, 0.0};  // a lane for each
  if (lane_id() < rows.cluster) {
    const u64* words = messages[lane_id()].words;
    block.winner = {words[0], static_cast<i32>(words[1] >> 32), __uint_as_float(words[1])};
    block.mass = __longlong_as_double(words[2]), block.top = __uint_as_float(words[3]);
  }
  const float top = value_of(warp_max_key(order_key(block.top))), gap = block.top - top;  // NaN for a bad row
  return {warp_winner(block.winner), top, warp_sum(gap <= 0 ? block.mass * exp_scaled(gap, draw.log2_scale) : 0.0)};
}

// The best of all threads' winners, for every thread; there must be another barrier between two calls.
DEVICE Winner block_winner(Scratch& scratch, const Winner& mine) {
  const Winner winner = warp_winner(mine);
  if (lane_id() == 0) scratch.winners[warp_id()] = winner;
  __syncthreads();
  return warp_winner(scratch.winners[lane_id() % WARPS]);
}

DEVICE double block_sum(double value, double* scratch) {
  value = warp_sum(value);
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  return warp_sum<WARPS>(scratch[lane_id() % WARPS]);
}

// A lower bound of the score of some token of the chunk in play, near the best one's: each warp looks at the tokens of
// its vector with the largest bound. -inf if none of those is in play. Scores are relative to `origin` (log2) here.
DEVICE float lower_bound(Scratch& scratch, const Row& row, const Rows& rows, const Draw& draw, i32 chunk,
                         const float (&bounds)[VECTORS], float origin, const Threshold& threshold) {
  float best = bounds[0];
  i32 index = 0;
#pragma unroll
  for (int v = 1; v < VECTORS; ++v) {
    if (bounds[v] > best) best = bounds[v], index = v;
  }
  index = chunk * CHUNK_VECTORS + index * THREADS + threadIdx.x;
  const float largest = value_of(warp_max_key(order_key(best)));
  float low = -INFINITY_F32;
  if (largest > -INFINITY_F32) {
    const i32 found = __shfl_sync(FULL_MASK, index, __ffs(__ballot_sync(FULL_MASK, best == largest)) - 1);
    const Token token = token_of(row, rows, draw, found, threshold);
    low = fmaf(token.value - origin, draw.log2_scale, gumbel_least_log2(token.word));
  }
  return block_max_or_nan(low, scratch.warp_keys[2]);
}

// The best of `known` and the exact winner among the vectors that were listed.
DEVICE Winner settle(Scratch& scratch, const Row& row, const Rows& rows, const Draw& draw, const Threshold& threshold,
                     const Winner& known) {
  __syncthreads();
  Winner best = NO_WINNER;
  const i32 count = scratch.num_vectors;
  for (i32 i = threadIdx.x / PER_VECTOR; i < count; i += THREADS / PER_VECTOR) {
    const Token token = token_of(row, rows, draw, scratch.vectors[i], threshold);
    if (token.value == -INFINITY_F32) continue;
    const double score = token.value / draw.temperature + gumbel_exact(token.word);
    const Winner mine = {order_key(score), token.id, token.value};
    if (best.loses_to(mine)) best = mine;
  }
  best = block_winner(scratch, best);
  return known.loses_to(best) ? best : known;
}

// What is in play is bounded relative to `origin`, the first chunk's largest logit or that of a chunk much above it.
struct Limit {
  float origin = 0.0f, low = -INFINITY_F32;
  // At extreme temperatures float64 itself rounds the noise away: what may be equal then is settled as well.
  DEVICE float value(const Draw& draw) const {
    return low - MARGIN - fabsf(low) * 0x1p-20f - fabsf(origin) * 0x1p-46f * draw.log2_scale;
  }
};

// Lists the vectors of a chunk that may hold the winner.
DEVICE void list_vectors(Scratch& scratch, const Row& row, const Rows& rows, const Draw& draw, i32 chunk, int turn,
                         const Screen& screen, const Threshold& threshold, Limit& limit) {
  float bounds[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const float bound = fmaf(screen.tops[v] - limit.origin, draw.log2_scale, screen.noise[v]);
    bounds[v] = screen.tops[v] >= threshold.value ? bound : -INFINITY_F32;
  }
  if (limit.low == -INFINITY_F32) {
    limit.low = lower_bound(scratch, row, rows, draw, chunk, bounds, limit.origin, threshold);
  }
  const float least = limit.value(draw);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    if (bounds[v] > -INFINITY_F32 && bounds[v] >= least) {
      const i32 place = atomicAdd(&scratch.num_vectors, 1);
      scratch.vectors[place] = chunk * CHUNK_VECTORS + v * THREADS + threadIdx.x;
      if (place >= FULL - 1) scratch.full[turn % 2] = chunk;
    }
  }
}

// One pass of the cluster over its row: the winner among what is below the threshold, all mass, the largest logit.
DEVICE Found find_winner(Scratch& scratch, const Row& row, const Rows& rows, const Draw& draw,
                         const Threshold& threshold, bool with_mass, i32 pass, Screen& screen) {
  Found found = {NO_WINNER, -INFINITY_F32, 0.0};
  Limit limit;
  float mass = 0.0f;  // of this thread, relative to found.top
  if (threadIdx.x == 0) scratch.num_vectors = 0, scratch.full[0] = scratch.full[1] = -1;
  int turn = 0;
  for (i32 chunk = rows.block(); chunk < rows.num_chunks(); chunk += rows.cluster, ++turn) {
    if (pass == 0 || rows.num_chunks() > rows.cluster) {  // else it is known from the pass before
      scan(row, rows, draw, chunk, screen);
      screen.top = block_max_or_nan(screen.top, scratch.warp_keys[turn % 2]);
    } else {
      __syncthreads();
    }
    const float old = found.top, top = screen.top;
    found.top = max_or_nan(old, top);
    if (!(found.top < INFINITY_F32)) break;  // bad; all threads alike
    if (turn > 0 && scratch.full[(turn - 1) % 2] == chunk - rows.cluster) {
      found.winner = settle(scratch, row, rows, draw, threshold, found.winner);
      if (threadIdx.x == 0) scratch.num_vectors = 0;
      __syncthreads();
    }
    if (top == -INFINITY_F32 || top < threshold.value) continue;
    if (with_mass) {
      const float before = old == -INFINITY_F32 ? 0.0f : mass * exp_scaled(old - found.top, draw.log2_scale);
      mass = before + mass_above(row, draw, chunk, top, threshold) * exp_scaled(top - found.top, draw.log2_scale);
    }
    // Noise spans 33 + 4.6: nothing of the chunks before can win then.
    if (limit.low == -INFINITY_F32 || (top - old) * draw.log2_scale > 40.0f) limit = {top, -INFINITY_F32};
    list_vectors(scratch, row, rows, draw, chunk, turn, screen, threshold, limit);
  }
  found.winner = settle(scratch, row, rows, draw, threshold, found.winner);
  if (with_mass) found.mass = block_sum(mass, scratch.warp_sums[0]);
  return found;
}

// This block's mass above the threshold, relative to `top`.
DEVICE double find_mass(Scratch& scratch, const Row& row, const Rows& rows, const Draw& draw, float top,
                        const Threshold& threshold) {
  double mass = 0;
  for (i32 chunk = rows.block(); chunk < rows.num_chunks(); chunk += rows.cluster) {
    mass += mass_above(row, draw, chunk, top, threshold);
  }
  return block_sum(mass, scratch.warp_sums[0]);
}

// ---- the top-p set -----------------------------------------------------------------------------------------------

// In float64: the mass above the threshold is below top_p of all mass.
DEVICE bool exact_mass_is_below(Scratch& scratch, const Row& row, const Rows& rows, const Draw& draw, float top,
                                const Threshold& threshold) {
  double above = 0, all = 0;
  for (i32 chunk = rows.block(); chunk < rows.num_chunks(); chunk += rows.cluster) {
    for (i32 id = chunk * CHUNK - row.shift + threadIdx.x; id < min((chunk + 1) * CHUNK - row.shift, row.num_ids);
         id += THREADS) {
      if (id < 0) continue;
      const float value = to_float(row.logits[id]);
      const double mass = exp((double(value) - top) / draw.temperature);
      all += mass;
      if (threshold.is_below(value, id)) above += mass;
    }
  }
  above = block_sum(above, scratch.warp_sums[0]), all = block_sum(all, scratch.warp_sums[1]);
  const Message message = {static_cast<u64>(__double_as_longlong(above)),
                           static_cast<u64>(__double_as_longlong(all))};
  const Message* messages = exchange_words(scratch, rows, message, 2);
  above = all = 0;
  for (i32 b = 0; b < rows.cluster; ++b) {
    above += __longlong_as_double(messages[b].words[0]);
    all += __longlong_as_double(messages[b].words[1]);
  }
  return above < draw.top_p * REACHED * all;
}

// `mass` and `all` are float32 sums of the same kind: exp and its argument are within 2^-18 where they matter (gaps up
// to 30; what lies below weighs under 2^-25 together), a thread's 40 to 80 additions within 2^-18.
DEVICE int mass_is_below(double mass, double all, double top_p) {
  const double gap = mass - top_p * all;
  return gap < -MASS_MARGIN * all ? 1 : gap > MASS_MARGIN * all ? 0 : -1;  // -1: too near to say
}

// What `target_draw` writes: tokens, or for a shard the winners of the row and of what is above each of them.
struct Output {
  i32* token_ids;   // [S, N], or [S, N, F] global, -1 behind the last
  double* scores;   // [S, N, F] descending, -inf behind the last; null: no shard
  float* values;    // [S, N, F]
  float* top;       // [S, N], NaN for a bad row
  i32 capacity;     // F
  DEVICE void write(i64 place, const Winner& winner, i32 first_id) const {
    const bool none = winner.score == 0;
    scores[place] = none ? -INFINITY_F32 : value_of_score(winner.score);
    token_ids[place] = none ? -1 : first_id + winner.id;
    values[place] = none ? -INFINITY_F32 : winner.value;
  }
};

DEVICE void run_passes(Scratch& scratch, const Row& row, const Rows& rows, const Draw& draw, const Output& out) {
  const bool lists = out.scores != nullptr, writes = rows.block() == 0 && threadIdx.x == 0;
  Threshold threshold = {-INFINITY_F32, -4};  // below every column, those before the row too
  Screen screen;
  double all = 0;
  float top = 0.0f;
  i32 token = -1, turn = 0;
#pragma unroll 1
  for (i32 pass = 0;; ++pass) {
    const bool with_mass = pass == 0 && !lists && draw.top_p < 1;
    Found found = find_winner(scratch, row, rows, draw, threshold, with_mass, pass, screen);
    found = exchange(scratch, rows, draw, found, turn++);
    if (pass == 0) all = found.mass, top = found.top;
    const bool bad = !(top < INFINITY_F32);
    if (bad) found.winner = NO_WINNER;
    const Winner& winner = found.winner;
    if (lists) {
      if (writes && pass == 0) out.top[rows.index()] = bad ? NAN_F32 : top;
      const bool ends = winner.score == 0 || pass + 1 == out.capacity;
      const i32 last = ends ? out.capacity : pass + 1;
      for (i32 i = pass; writes && i < last; ++i) {
        out.write(rows.index() * out.capacity + i, i == pass ? winner : NO_WINNER, rows.first_id);
      }
      if (ends) return;
    } else {
      if (winner.score == 0) break;
      token = rows.first_id + winner.id;
    }
    threshold = {winner.value, winner.id};
    if (lists) continue;
    if (draw.top_p >= 1) break;
    const Found mine = {NO_WINNER, top, find_mass(scratch, row, rows, draw, top, threshold)};
    int below = mass_is_below(exchange(scratch, rows, draw, mine, turn++).mass, all, draw.top_p);
    if (below < 0) below = exact_mass_is_below(scratch, row, rows, draw, top, threshold);
    if (below) break;
  }
  if (writes) out.token_ids[rows.index()] = token;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
target_draw(const Scalar* logits, i64 stream_stride, i64 row_stride, i32 rows_per_stream, i32 num_ids, i32 first_id,
            i32 cluster, const i64* stream, const i64* position, u64 seed, double temperature, double top_p,
            float log2_scale, i32* token_ids, double* scores, float* values, float* top, i32 capacity) {
  __shared__ Scratch scratch;
  const Rows rows = {logits, stream_stride, row_stride, rows_per_stream, num_ids, first_id, cluster};
  const Row row = rows.row();
  cluster_begin();
  grid_dependency_wait();
  grid_dependency_launch();  // it waits for this one's end, but its blocks are there by then
  const NoiseKey key = {static_cast<u32>(seed), static_cast<u32>(seed >> 32),
                        static_cast<u32>(position[rows.index()]), static_cast<u32>(stream[rows.stream()])};
  const Draw draw = {key, temperature, top_p, log2_scale};
  run_passes(scratch, row, rows, draw, {token_ids, scores, values, top, capacity});
}

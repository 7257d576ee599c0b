// csrc/verify_attention_naive.cu: tree attention over a paged MLA cache, one warp a (row, head), straight from memory.
//   The teaching baseline: every head reads the whole cache again, 64 times the bytes that are needed; see the `mma`
//   kernel for the one that reads a key once for 64 (row, head) pairs.
//   in   q [S,N,H,C+R] | pages [P,64,C+R] | block_table [S,M] i32 | prefix_len [S] i32 | ancestors [S,N,W] u32 |
//        num_nodes [S] i32; q and pages f32, bf16 or half (-DDTYPE), C = LATENT, R = ROPE
//   out  o [S,N,H,C] in q's dtype | lse [S,N,H] f32, nats; 0 and -inf where a row is unused or sees no key
//   math o[i] = sum_j softmax_j(scale q[i].kv[j]) kv[j,:C], j over the prefix and {j : bit j of ancestors[i]}; f32 sums
//   cost 2 N H L (2 C + R) FLOP on plain cores for L keys; N H L (C+R) values through the caches
//   ref  kernels/reference/ops.py:verify_attention | test tests/kernels/test_verify_attention_gpu.py | archs all
#include "common.cuh"

struct Config {
  static constexpr int C = LATENT, WIDTH = LATENT + ROPE, PAGE = 64, WARPS = 4;
  static constexpr int KEY_PARTS = cdiv(WIDTH, WARP), VALUE_PARTS = cdiv(C, WARP);  // values a lane holds
};
static_assert(Config::C >= 1 && Config::WIDTH >= Config::C && Config::KEY_PARTS <= 32, "a row fits a warp's registers");

extern "C" __global__ void __launch_bounds__(Config::WARPS * WARP, 1) verify_attention_naive(
    const Scalar* __restrict__ q, const Scalar* __restrict__ pages, const i32* __restrict__ block_table,
    const i32* __restrict__ prefix_len, const u32* __restrict__ ancestors, const i32* __restrict__ num_nodes,
    Scalar* __restrict__ o, float* __restrict__ lse, int num_rows, int num_heads, int num_words, int table_width,
    int num_pages, float scale_log2) {
  const int stream = blockIdx.y, lane = lane_id();
  const int pair = blockIdx.x * Config::WARPS + warp_id();  // row * H + head
  if (pair >= num_rows * num_heads) return;
  const int row = pair / num_heads;
  const i64 place = i64(stream) * num_rows * num_heads + pair;

  const int capacity = table_width * Config::PAGE;
  const int prefix = min(max(prefix_len[stream], 0), capacity);
  const bool used = row < min(num_nodes[stream], capacity - prefix);
  const int num_keys = used ? min(prefix + row + 1, capacity) : 0;  // a row never sees rows behind itself

  float query[Config::KEY_PARTS];
#pragma unroll
  for (int i = 0; i < Config::KEY_PARTS; ++i) {
    const int column = i * WARP + lane;
    query[i] = used && column < Config::WIDTH ? to_float(q[place * Config::WIDTH + column]) : 0.0f;
  }
  const i32* table = block_table + i64(stream) * table_width;
  const u32* bits = ancestors + (i64(stream) * num_rows + row) * num_words;

  float sum = 0.0f, best = -INFINITY_F32, value[Config::VALUE_PARTS] = {};
  for (int key = 0; key < num_keys; ++key) {
    const int behind = key - prefix;  // row of the tree, or negative: a key of the prefix
    if (behind >= 0 && !(bits[behind / 32] >> (behind % 32) & 1)) continue;
    const int page = table[key / Config::PAGE];
    const bool exists = page >= 0 && page < num_pages;  // else zeros, as everywhere
    const Scalar* kv = pages + (i64(exists ? page : 0) * Config::PAGE + key % Config::PAGE) * Config::WIDTH;
    float loaded[Config::KEY_PARTS], score = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::KEY_PARTS; ++i) {
      const int column = i * WARP + lane;
      loaded[i] = exists && column < Config::WIDTH ? to_float(kv[column]) : 0.0f;
      score += query[i] * loaded[i];
    }
    score = warp_sum(score) * scale_log2;
    const float new_best = max(best, score);
    const float shrink = exp2f(best - new_best), weight = exp2f(score - new_best);
    best = new_best;
    sum = sum * shrink + weight;
#pragma unroll
    for (int i = 0; i < Config::VALUE_PARTS; ++i) value[i] = value[i] * shrink + weight * loaded[i];
  }

#pragma unroll
  for (int i = 0; i < Config::VALUE_PARTS; ++i) {
    const int column = i * WARP + lane;
    if (column < Config::C) o[place * Config::C + column] = from_float<Scalar>(sum > 0.0f ? value[i] / sum : 0.0f);
  }
  if (lane == 0) lse[place] = sum > 0.0f ? best * LN_2 + logf(sum) : -INFINITY_F32;
}

// csrc/verify_wgmma_merge.cuh: from the sums of a segment to the output, or, of a part of a tile, to global memory and
//   from there to the output. Part of csrc/verify_attention_wgmma.cu and csrc/verify_parts.cu.
#pragma once

#include "mma.cuh"
#include "verify_wgmma_shares.cuh"

// Exchanges within a quad so that thread t ends with the four words of its quad's word t: 8 consecutive columns.
DEVICE void transpose_quad(u32 (&v)[4]) {
  const int t = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(FULL_MASK, t & 1 ? v[i] : v[i + 1], 1);
    (t & 1 ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 got = __shfl_xor_sync(FULL_MASK, t & 2 ? v[i] : v[i + 2], 2);
    (t & 2 ? v[i] : v[i + 2]) = got;
  }
}

// Four pieces, 32 columns of the thread's quad: `part` is which of the 8 groups of four.
DEVICE void write_columns(const Params& p, const Segment& seg, const float* o, int group, int part, int row) {
  const int t = lane_id() % 4, num_pairs = p.num_rows * p.num_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int pair = seg.first_pair + row + 8 * r;
    const bool used = pair < seg.nodes * p.num_heads;
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = used ? pack_pair<Scalar>(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]) : 0;
    transpose_quad(v);
    Scalar* out = p.o + (i64(seg.stream) * num_pairs + pair) * Config::LATENT + 256 * group + 32 * part + 8 * t;
    if (pair < num_pairs) __stcg(reinterpret_cast<uint4*>(out), uint4{v[0], v[1], v[2], v[3]});
  }
}

DEVICE void write_lse(const Params& p, const Segment& seg, const float (&lse)[2], bool first, int row) {
  if (!first || lane_id() % 4 != 0) return;  // of the warps of a row, the one with its first columns
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int pair = seg.first_pair + row + 8 * r, num_pairs = p.num_rows * p.num_heads;
    const bool used = pair < seg.nodes * p.num_heads;
    if (pair < num_pairs) p.lse[i64(seg.stream) * num_pairs + pair] = used ? lse[r] * LN_2 : -INFINITY_F32;
  }
}

// Two values of Scalar as floats.
DEVICE float2 unpack_pair(u32 pair) {
#if DTYPE == 1
  return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
#else
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
#endif
}

// Eight values of two pieces, as one thread rounds and packs them: even words are of its row g, odd ones of row g + 8.
DEVICE uint4 pack_pieces(const float* o, const float (&factor)[2]) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = pack_pair<Scalar>(o[2 * i] * factor[i % 2], o[2 * i + 1] * factor[i % 2]);
  return uint4{v[0], v[1], v[2], v[3]};
}

// 1 / x within 1 ulp, without the branch of exact division.
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Within 2^-22.
DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 of a sum relative to 2^top.
DEVICE float log_sum(float top, float sum) { return sum > 0.0f ? top + log2_fast(sum) : -INFINITY_F32; }

DEVICE void inverse_of(const float (&sum)[2], float (&inverse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) inverse[r] = sum[r] > 0.0f ? reciprocal(sum[r]) : 0.0f;
}

// A whole tile that no other block has a part of.
DEVICE void write_tile(const Params& p, const Segment& seg, const float (&o)[128], const float (&max)[2],
                       const float (&sum)[2], int row) {
  float inverse[2];
  inverse_of(sum, inverse);
#pragma unroll
  for (int part = 0; part < 8; ++part) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = o[16 * part + i] * inverse[i / 2 % 2];
    write_columns(p, seg, v, threadIdx.x / 128, part, row);
  }
  const float lse[2] = {log_sum(max[0], sum[0]), log_sum(max[1], sum[1])};
  write_lse(p, seg, lse, threadIdx.x < 128, row);
}

// Warps of 16 rows that hold used rows of the tile, of the four.
DEVICE int used_warps(const Params& p, const Segment& seg) {
  return min(4, (seg.nodes * p.num_heads - seg.first_pair + 15) / 16);
}

// Where a part of a tile goes. With -DPARTS=1 every tile has room for `most` parts; a block of the persistent grid ends
// one tile at most and begins one at most.
DEVICE int part_slot(int tile, int part, int most) { return tile * most + part; }
DEVICE int part_slot(const Segment& seg, int part) { return 2 * (seg.first_block + part) + (part == 0 ? 1 : 0); }

// Counts a block in, after all of its writes (a barrier came before) and before its reads of what the others wrote.
DEVICE u32 count_in(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Puts a part of a tile into global memory, normalised and rounded to Scalar: one rounding more of each part, of the
// size of P's and the output's.
DEVICE void hand_in(const Params& p, const Segment& seg, int slot, const float (&o)[128], const float (&max)[2],
                    const float (&sum)[2], int row) {
  float inverse[2];
  inverse_of(sum, inverse);
  if (threadIdx.x % 128 / WARP < used_warps(p, seg)) {
    uint4* out = p.partial + i64(slot) * Config::WORDS * Config::THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < Config::WORDS; ++i) __stcg(out + i * Config::THREADS, pack_pieces(o + 8 * i, inverse));
  }
  if (threadIdx.x < 128 && lane_id() % 4 == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) __stcg(p.partial_lse + slot * Config::TILE + row + 8 * r, log_sum(max[r], sum[r]));
  }
}

// Whether this block is the last to come of those that share a tile; it sees all parts.
DEVICE bool is_last(const Params& p, Plan& plan, const Segment& seg) {
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* counter = p.counters + seg.first_block;
    plan.arrived = count_in(counter);
    if (plan.arrived == seg.parts - 1) *counter = 0;
  }
  __syncthreads();
  return plan.arrived == seg.parts - 1;
}

// Sums of a thread over parts: of its rows g and g + 8, 8 columns each of N words.
template <int N>
struct Added {
  float o[8 * N] = {}, top[2] = {NO_KEY, NO_KEY}, total[2] = {0.0f, 0.0f};

  // Of another sum, or of a part, whose total is 1: `top` and log2-sum-exp are in log2.
  DEVICE void add(const float (&other_top)[2], const float (&other_total)[2], const float (&other)[8 * N]) {
    float keep[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = fmaxf(top[r], other_top[r]);
      keep[r] = exp2_fast(top[r] - now), weight[r] = exp2_fast(other_top[r] - now);
      total[r] = fmaf(total[r], keep[r], weight[r] * other_total[r]), top[r] = now;
    }
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) o[i] = fmaf(weight[i / 2 % 2], other[i], keep[i / 2 % 2] * o[i]);
  }
  DEVICE void add(const uint4 (&words)[N], const float (&lse)[2]) {
    constexpr float ONE[2] = {1.0f, 1.0f};
    float values[8 * N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const u32 pairs[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair(pairs[i]);
        values[8 * j + 2 * i] = pair.x, values[8 * j + 2 * i + 1] = pair.y;
      }
    }
    add(lse, ONE, values);
  }
};

// Adds parts first, first + stride, ... of a tile, AHEAD of which are under way at a time: N words from `word` on, by
// the thread of this lane in this warp of this group. `slot_of` says where a part is.
template <int N, int AHEAD, typename SlotOf>
DEVICE void add_parts(const Params& p, Added<N>& sum, int first, int stride, int parts, SlotOf slot_of, int word,
                      int group, int warp) {
  const int row = warp * 16 + lane_id() / 4, thread = group * 128 + warp * WARP + lane_id();
#pragma unroll 1
  for (; first < parts; first += AHEAD * stride) {
    uint4 words[AHEAD][N];
    float lse[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int part = first + i * stride, slot = slot_of(min(part, parts - 1));
      const uint4* in = p.partial + (i64(slot) * Config::WORDS + word) * Config::THREADS + thread;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse[i][r] = part < parts ? __ldcg(p.partial_lse + slot * Config::TILE + row + 8 * r) : -INFINITY_F32;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) words[i][j] = __ldcg(in + j * Config::THREADS);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) sum.add(words[i], lse[i]);
  }
}

template <int N>
DEVICE void write_added(const Params& p, const Segment& seg, Added<N>& sum, int word, int group, int row) {
  float inverse[2];
  inverse_of(sum.total, inverse);
#pragma unroll
  for (int i = 0; i < 8 * N; ++i) sum.o[i] *= inverse[i / 2 % 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) write_columns(p, seg, sum.o + 16 * i, group, word / 2 + i, row);
  const float lse[2] = {log_sum(sum.top[0], sum.total[0]), log_sum(sum.top[1], sum.total[1])};
  write_lse(p, seg, lse, word == 0 && group == 0, row);
}

// The last block to come adds all parts of a tile in order.
DEVICE void merge_tile(const Params& p, const Segment& seg, int row) {
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / WARP;
  const auto slot_of = [&](int part) { return part_slot(seg, part); };
#pragma unroll 1
  for (int word = 0; word < Config::WORDS; word += 4) {
    Added<4> sum;
    if (warp < used_warps(p, seg)) add_parts<4, 4>(p, sum, 0, 1, seg.parts, slot_of, word, group, warp);
    write_added(p, seg, sum, word, group, row);
  }
}

// Tiles without a used row get zeros.
DEVICE void clear_tile(const Params& p, int stream, int first_pair) {
  const int num_pairs = p.num_rows * p.num_heads, pairs = min(num_pairs - first_pair, Config::TILE);
  const i64 place = i64(stream) * num_pairs + first_pair;
  uint4* out = reinterpret_cast<uint4*>(p.o + place * Config::LATENT);
#pragma unroll 1
  for (int j = threadIdx.x; j < pairs * Config::LATENT / 8; j += Config::THREADS) out[j] = uint4{0, 0, 0, 0};
  if (threadIdx.x < pairs) p.lse[place + threadIdx.x] = -INFINITY_F32;
}
DEVICE void clear_unused(const Params& p) {
  const int tiles = cdiv(p.num_rows * p.num_heads, Config::TILE);
  for (int i = blockIdx.x; i < p.num_streams * tiles; i += gridDim.x) {
    const int stream = i / tiles, first_pair = i % tiles * Config::TILE;
    const int prefix = legal_prefix(p, p.prefix_len[stream]), nodes = legal_nodes(p, p.num_nodes[stream], prefix);
    if (first_pair >= nodes * p.num_heads) clear_tile(p, stream, first_pair);
  }
}

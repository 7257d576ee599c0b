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

// Where columns 256 group + 32 part + 8 t and on of a row of the tile go, by the thread t of its quad; whether there is
// such a row, and whether it is in use.
struct Place {
  Scalar* out;
  bool exists, used;
};
DEVICE Place place_of(const Params& p, const Segment& seg, int group, int part, int row) {
  const int pair = seg.first_pair + row, num_pairs = p.num_rows * p.num_heads;
  const i64 first = (i64(seg.stream) * num_pairs + pair) * Config::LATENT + 256 * group + 32 * part;
  return {p.o + first + lane_id() % 4 * 8, pair < num_pairs, pair < seg.nodes * p.num_heads};
}

// Four pieces, 32 columns of a row by the threads of its quad.
DEVICE void write_columns(const Params& p, const Segment& seg, u32 (&v)[4], int group, int part, int row) {
  const Place place = place_of(p, seg, group, part, row);
  transpose_quad(v);
  const uint4 word = place.used ? uint4{v[0], v[1], v[2], v[3]} : uint4{0, 0, 0, 0};
  if (place.exists) __stcg(reinterpret_cast<uint4*>(place.out), word);
}

// Of the threads of a row, one with its first columns.
DEVICE void write_lse(const Params& p, const Segment& seg, float lse, int row) {
  const int pair = seg.first_pair + row, num_pairs = p.num_rows * p.num_heads;
  const bool used = pair < seg.nodes * p.num_heads;
  if (pair < num_pairs) p.lse[i64(seg.stream) * num_pairs + pair] = used ? lse * LN_2 : -INFINITY_F32;
}

// Two values of Scalar as floats.
DEVICE float2 unpack_pair(u32 pair) {
#if DTYPE == 1
  return float2{__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
#else
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
#endif
}

// Of a thread's 128 sums the eight of pieces 4 part and on in its row g or (r = 1) g + 8, times `factor`, rounded.
DEVICE void pack_pieces(const float* o, int part, int r, float factor, u32 (&v)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* pair = o + 16 * part + 4 * j + 2 * r;
    v[j] = pack_pair<Scalar>(pair[0] * factor, pair[1] * factor);
  }
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

DEVICE float inverse_of(float sum) { return sum > 0.0f ? reciprocal(sum) : 0.0f; }

// A whole tile that no other block has a part of.
DEVICE void write_tile(const Params& p, const Segment& seg, const float (&o)[128], const float (&max)[2],
                       const float (&sum)[2], int row) {
  const float inverse[2] = {inverse_of(sum[0]), inverse_of(sum[1])};
  const int group = threadIdx.x / 128;
#pragma unroll
  for (int part = 0; part < 8; ++part) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 v[4];
      pack_pieces(o, part, r, inverse[r], v);
      write_columns(p, seg, v, group, part, row + 8 * r);
    }
  }
  if (group != 0 || lane_id() % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) write_lse(p, seg, log_sum(max[r], sum[r]), row + 8 * r);
}

// Whether any of the 8 rows from 8 `eighth` on is in use.
DEVICE bool is_used(const Params& p, const Segment& seg, int eighth) {
  return seg.first_pair + 8 * eighth < seg.nodes * p.num_heads;
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

// Within a part a thread's word of 8 values: of every quad 32 columns of its row g (r = 0) or g + 8. Words go in steps.
constexpr int WORD_STEP = 2 * Config::THREADS, PART_WORDS = Config::WORDS * Config::THREADS;
DEVICE int place_of_word(int word, int r, int thread) { return word * WORD_STEP + r * Config::THREADS + thread; }

// Puts a part of a tile into global memory, normalised and rounded to Scalar: one rounding more of each part, of the
// size of P's and the output's.
DEVICE void hand_in(const Params& p, const Segment& seg, int slot, const float (&o)[128], const float (&max)[2],
                    const float (&sum)[2], int row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!is_used(p, seg, threadIdx.x % 128 / WARP * 2 + r)) continue;
    const float inverse = inverse_of(sum[r]);
    uint4* out = p.partial + i64(slot) * PART_WORDS + place_of_word(0, r, threadIdx.x);
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      u32 v[4];
      pack_pieces(o, part, r, inverse, v);
      __stcg(out + part * WORD_STEP, uint4{v[0], v[1], v[2], v[3]});
    }
    const bool first = threadIdx.x < 128 && lane_id() % 4 == 0;
    if (first) __stcg(p.partial_lse + slot * Config::TILE + row + 8 * r, log_sum(max[r], sum[r]));
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

// A thread's sums over parts: N words of one row.
template <int N>
struct Added {
  float o[8 * N] = {}, top = NO_KEY, total = 0.0f;

  // Of parts with these log2-sum-exp; -inf for none.
  template <int PARTS_AT_ONCE>
  DEVICE void add(const uint4 (&words)[PARTS_AT_ONCE][N], const float (&lse)[PARTS_AT_ONCE]) {
    float now = top;
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; ++i) now = fmaxf(now, lse[i]);
    const float keep = exp2_fast(top - now);
    top = now, total *= keep;
#pragma unroll
    for (int j = 0; j < 8 * N; ++j) o[j] *= keep;
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; ++i) {
      const float weight = exp2_fast(lse[i] - now);
      total += weight;
#pragma unroll
      for (int word = 0; word < N; ++word) {
        const u32 pairs[4] = {words[i][word].x, words[i][word].y, words[i][word].z, words[i][word].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_pair(pairs[j]);
          float* sum = o + 8 * word + 2 * j;
          sum[0] = fmaf(weight, pair.x, sum[0]), sum[1] = fmaf(weight, pair.y, sum[1]);
        }
      }
    }
  }
};

// Adds all parts of a tile, AHEAD of which are under way at a time: N words from `word` on of the thread's row g
// (r = 0) or g + 8. `slot_of` says where a part is.
template <int N, int AHEAD, typename SlotOf>
DEVICE void add_parts(const Params& p, Added<N>& sum, int parts, SlotOf slot_of, int word, int r) {
  const uint4* in = p.partial + place_of_word(word, r, threadIdx.x);
  const int row = threadIdx.x % 128 / WARP * 16 + lane_id() / 4 + 8 * r;
#pragma unroll 1
  for (int first = 0; first < parts; first += AHEAD) {
    uint4 words[AHEAD][N];
    float lse[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int part = first + i, slot = slot_of(min(part, parts - 1));
#pragma unroll
      for (int j = 0; j < N; ++j) words[i][j] = __ldcg(in + i64(slot) * PART_WORDS + j * WORD_STEP);
      lse[i] = __ldcg(p.partial_lse + slot * Config::TILE + row);
      if (part >= parts) lse[i] = -INFINITY_F32;
    }
    sum.add(words, lse);
  }
}

// Words `word` and on of a row by its quad.
template <int N>
DEVICE void write_added(const Params& p, const Segment& seg, const Added<N>& sum, int word, int group, int row) {
  const float inverse = inverse_of(sum.total);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* pair = sum.o + 8 * i + 2 * j;
      v[j] = pack_pair<Scalar>(pair[0] * inverse, pair[1] * inverse);
    }
    write_columns(p, seg, v, group, word + i, row);
  }
  if (word == 0 && group == 0 && lane_id() % 4 == 0) write_lse(p, seg, log_sum(sum.top, sum.total), row);
}

// The last block to come adds all parts of a tile in order.
DEVICE void merge_tile(const Params& p, const Segment& seg, int row) {
  constexpr int WORDS = 8;  // at once
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / WARP;
  const auto slot_of = [&](int part) { return part_slot(seg, part); };
#pragma unroll 1
  for (int i = 0; i < Config::WORDS / WORDS; ++i) {
    const int r = i % 2, word = i / 2 * WORDS;
    Added<WORDS> sum;
    if (is_used(p, seg, 2 * warp + r)) add_parts<WORDS, 2>(p, sum, seg.parts, slot_of, word, r);
    write_added(p, seg, sum, word, group, row + 8 * r);
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

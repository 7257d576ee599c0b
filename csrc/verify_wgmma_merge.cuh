// csrc/verify_wgmma_merge.cuh: from the sums of a segment to the output. Within the cluster they are merged through
//   distributed shared memory, then over the units that share the tile through global memory, where the last to come
//   adds the others' parts. Part of csrc/verify_attention_wgmma.cu.
//   A thread's 128 sums are 32 pieces of 4. In a cluster block r merges PIECES of them from r * PIECES on, the same
//   columns for all of its threads.
#pragma once

#include "mma.cuh"
#include "verify_wgmma_shares.cuh"

// A thread's sums of its two rows (g and g + 8 of its warp's 16) in the pieces that its block merges.
struct Slice {
  float o[4 * Config::PIECES];
  float lse[2];  // log2
};

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
DEVICE void write_columns(const Params& p, const Segment& seg, const float* o, int part, int row) {
  const int group = threadIdx.x / 128, t = lane_id() % 4, num_pairs = p.num_rows * p.num_heads;
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

DEVICE void write_lse(const Params& p, const Segment& seg, const float (&lse)[2], int rank, int row) {
  if (rank != 0 || threadIdx.x >= 128 || lane_id() % 4 != 0) return;
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

// sums[0..7] = keep sums + weight values, by rows.
DEVICE void add_pieces(float* sums, const uint4& values, const float (&keep)[2], const float (&weight)[2]) {
  const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair(words[i]);
    sums[2 * i] = fmaf(weight[i % 2], pair.x, keep[i % 2] * sums[2 * i]);
    sums[2 * i + 1] = fmaf(weight[i % 2], pair.y, keep[i % 2] * sums[2 * i + 1]);
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

DEVICE void inverse_of(const float (&sum)[2], float (&inverse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) inverse[r] = sum[r] > 0.0f ? reciprocal(sum[r]) : 0.0f;
}

// A whole tile that no other block has a part of.
DEVICE void write_tile(const Params& p, const Segment& seg, const float (&o)[128], const float (&max)[2],
                       const float (&sum)[2], int row) {
  float inverse[2], lse[2];
  inverse_of(sum, inverse);
#pragma unroll
  for (int r = 0; r < 2; ++r) lse[r] = sum[r] > 0.0f ? max[r] + log2_fast(sum[r]) : -INFINITY_F32;
#pragma unroll
  for (int part = 0; part < 8; ++part) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = o[16 * part + i] * inverse[i / 2 % 2];
    write_columns(p, seg, v, part, row);
  }
  write_lse(p, seg, lse, 0, row);
}

// Warps of 16 rows that hold used rows of the tile, of the four.
DEVICE int used_warps(const Params& p, const Segment& seg) {
  return min(4, (seg.nodes * p.num_heads - seg.first_pair + 15) / 16);
}
DEVICE u32 used_slice_bytes(const Params& p, const Segment& seg) {
  return used_warps(p, seg) * (Config::SLICE_BYTES / 4);
}

// This block is through with q and p and waits for the others' slices; all of its threads call.
DEVICE void open_merge(const Params& p, Plan& plan, const Segment& seg) {
  if (CLUSTER == 1) return;
  if (threadIdx.x == 0) {
    const int others = seg.senders - (block_index() % CLUSTER < seg.senders ? 1 : 0);
    const u32 stats_bytes = used_warps(p, seg) * 16 * sizeof(float2);
    mbarrier_expect(shared_address(&plan.received), others * used_slice_bytes(p, seg) + seg.senders * stats_bytes);
  }
  __syncwarp();
  cluster_barrier_arrive();
}

// Sums of all blocks of the cluster over their key blocks; `max` (log2) and `sum` of this block's. All blocks call.
// Every block sends each other one its slice of the columns, normalised and rounded to Scalar: one rounding more of
// each part, of the size of P's and the output's. The time is that of the way there, some 20 bytes a cycle.
// cluster_barrier_wait has to follow before q or p are written again.
DEVICE void merge_cluster(const Params& p, Plan& plan, const Segment& seg, const float (&o)[128],
                          const float (&max)[2], const float (&sum)[2], u32 parity, int row, Slice& slice) {
  float total[2] = {sum[0], sum[1]}, top[2] = {max[0], max[1]}, inverse[2];
  inverse_of(sum, inverse);
  if constexpr (CLUSTER == 1) {
#pragma unroll
    for (int j = 0; j < 4 * Config::PIECES; ++j) slice.o[j] = o[j % 128] * inverse[j / 2 % 2];
  } else {
    constexpr int WORDS = Config::WORDS, SLICE_WORDS = Config::SLICE_BYTES / 16;
    const int rank = block_index() % CLUSTER, warp = warp_id() % 4, group = threadIdx.x / 128;
    const bool used = warp < used_warps(p, seg);
    const int place = (warp * 2 + group) * WORDS * WARP + lane_id();  // within a slice, in words
    float2* stats = reinterpret_cast<float2*>(plan.p[1]);  // [CLUSTER, TILE] of maximum and sum
    cluster_barrier_wait();                                // the others are through with q and p
    if (used && rank < seg.senders) {
      const u32 slices = shared_address(plan.q) + rank * Config::SLICE_BYTES + place * sizeof(uint4);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint4 word = pack_pieces(o + 8 * i, inverse);
        if (i / WORDS == rank) {  // which this thread itself reads
          reinterpret_cast<uint4*>(plan.q)[rank * SLICE_WORDS + place + i % WORDS * WARP] = word;
        } else {
          const u32 full = remote_address(shared_address(&plan.received), i / WORDS);
          send_to_block(remote_address(slices, i / WORDS) + i % WORDS * WARP * sizeof(uint4), word, full);
        }
      }
      if (group == 0) {
        for (int to = lane_id() % 4; to < CLUSTER; to += 4) {
          const u32 full = remote_address(shared_address(&plan.received), to);
          const u32 own = remote_address(shared_address(stats + rank * Config::TILE + row), to);
          send_to_block(own, float2{max[0], sum[0]}, full);
          send_to_block(own + 8 * sizeof(float2), float2{max[1], sum[1]}, full);
        }
      }
    }
    __syncwarp();
    mbarrier_wait(shared_address(&plan.received), parity);
    // A quad shares out its two rows' weights. The loop is not unrolled: machine code that runs once comes slowly.
    constexpr int EACH = CLUSTER < 4 ? 1 : CLUSTER / 4;
    const int t = lane_id() % 4;
    float weights[EACH][2];
    float2 stat[EACH][2];
    top[0] = top[1] = NO_KEY, total[0] = total[1] = 0.0f;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool there = 4 * k + t < seg.senders;
        stat[k][r] = there ? stats[(4 * k + t) * Config::TILE + row + 8 * r] : float2{NO_KEY, 0.0f};
        top[r] = fmaxf(top[r], stat[k][r].x);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = warp_reduce<4>(top[r], [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
      for (int k = 0; k < EACH; ++k) {
        weights[k][r] = exp2_fast(stat[k][r].x - top[r]) * stat[k][r].y;
        total[r] += weights[k][r];
      }
      total[r] = warp_sum<4>(total[r]);
    }
    inverse_of(total, inverse);
#pragma unroll
    for (int i = 0; i < 4 * Config::PIECES; ++i) slice.o[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const float own[2] = {weights[k][0] * inverse[0], weights[k][1] * inverse[1]};
#pragma unroll 1
      for (int i = 4 * k; i < min(int(seg.senders), 4 * k + 4); ++i) {
        constexpr float KEEP[2] = {1.0f, 1.0f};
        const float weight[2] = {__shfl_sync(FULL_MASK, own[0], i, 4), __shfl_sync(FULL_MASK, own[1], i, 4)};
        const uint4* from = reinterpret_cast<uint4*>(plan.q) + place + i * SLICE_WORDS;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) add_pieces(slice.o + 8 * j, from[j * WARP], KEEP, weight);
      }
    }
    __syncwarp();
    cluster_barrier_arrive();  // what the others sent has come and was read
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) slice.lse[r] = total[r] > 0.0f ? top[r] + log2_fast(total[r]) : -INFINITY_F32;
}

// A part of a tile: number of its slice in `partial`.
DEVICE int slice_number(const Segment& seg, int part, int rank) {
  const int unit = seg.first_unit + part * seg.stride;
  return (2 * unit + (part == 0 ? 1 : 0)) * CLUSTER + rank;  // a unit ends at most one tile and begins at most one
}

// Counts a block in, after all of its writes (a barrier came before) and before its reads of what the others wrote.
DEVICE u32 count_in(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Puts this unit's part of a tile into global memory; true for the last unit to come, which sees all parts.
DEVICE bool hand_in(const Params& p, Plan& plan, const Segment& seg, const Slice& slice, bool used, int row) {
  const int unit = block_index() / CLUSTER, rank = block_index() % CLUSTER;
  const int number = slice_number(seg, (unit - seg.first_unit) / seg.stride, rank);
  if (used) {
    uint4* out = p.partial + i64(number) * Config::WORDS * Config::THREADS + threadIdx.x;
    constexpr float ONE[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < Config::WORDS; ++i) __stcg(out + i * Config::THREADS, pack_pieces(slice.o + 8 * i, ONE));
  }
  if (threadIdx.x < 128 && lane_id() % 4 == 0) {
    __stcg(p.partial_lse + number * Config::TILE + row, slice.lse[0]);
    __stcg(p.partial_lse + number * Config::TILE + row + 8, slice.lse[1]);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* counter = p.counters + seg.first_unit * CLUSTER + rank;
    plan.arrived = count_in(counter);
    if (plan.arrived == seg.parts - 1) *counter = 0;
  }
  __syncthreads();
  return plan.arrived == seg.parts - 1;
}

// The last unit of a tile's to come adds all parts in order, AHEAD of them at a time.
DEVICE void merge_units(const Params& p, const Segment& seg, bool used, int row) {
  constexpr int WORDS = Config::WORDS < 4 ? Config::WORDS : 4, AHEAD = 16 / WORDS;  // 16 words are under way
  const int rank = block_index() % CLUSTER;
#pragma unroll 1
  for (int word = 0; word < Config::WORDS; word += WORDS) {
    float o[8 * WORDS] = {}, top[2] = {NO_KEY, NO_KEY}, total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < seg.parts; first += AHEAD) {
      float lse[AHEAD][2];
      uint4 values[AHEAD][WORDS];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int number = slice_number(seg, min(first + i, seg.parts - 1), rank);
        const float* from = p.partial_lse + number * Config::TILE + row;
        const uint4* in = p.partial + (i64(number) * Config::WORDS + word) * Config::THREADS + threadIdx.x;
        const bool there = first + i < seg.parts;
#pragma unroll
        for (int r = 0; r < 2; ++r) lse[i][r] = there ? __ldcg(from + 8 * r) : -INFINITY_F32;
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
          values[i][j] = there && used ? __ldcg(in + j * Config::THREADS) : uint4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        float keep[2], weight[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float now = fmaxf(top[r], lse[i][r]);
          keep[r] = exp2_fast(top[r] - now), weight[r] = exp2_fast(lse[i][r] - now);
          total[r] = fmaf(total[r], keep[r], weight[r]), top[r] = now;
        }
#pragma unroll
        for (int j = 0; j < WORDS; ++j) add_pieces(o + 8 * j, values[i][j], keep, weight);
      }
    }
    float inverse[2], lse[2];
    inverse_of(total, inverse);
#pragma unroll
    for (int i = 0; i < 8 * WORDS; ++i) o[i] *= inverse[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < WORDS / 2; ++i) write_columns(p, seg, o + 16 * i, (rank * Config::WORDS + word) / 2 + i, row);
#pragma unroll
    for (int r = 0; r < 2; ++r) lse[r] = total[r] > 0.0f ? top[r] + log2_fast(total[r]) : -INFINITY_F32;
    if (word == 0) write_lse(p, seg, lse, rank, row);
  }
}

DEVICE void write_slice(const Params& p, const Segment& seg, const Slice& slice, int row) {
  const int rank = block_index() % CLUSTER;
#pragma unroll
  for (int group = 0; group < Config::PIECES / 4; ++group) {
    write_columns(p, seg, slice.o + 16 * group, rank * (Config::PIECES / 4) + group, row);
  }
  write_lse(p, seg, slice.lse, rank, row);
}

// Tiles without a used row get zeros.
DEVICE void clear_unused(const Params& p) {
  const int num_pairs = p.num_rows * p.num_heads, tiles = cdiv(num_pairs, Config::TILE);
  for (int i = blockIdx.x; i < p.num_streams * tiles; i += gridDim.x) {
    const int stream = i / tiles, first_pair = i % tiles * Config::TILE;
    const int prefix = legal_prefix(p, p.prefix_len[stream]), nodes = legal_nodes(p, p.num_nodes[stream], prefix);
    if (first_pair < nodes * p.num_heads) continue;
    const int pairs = min(num_pairs - first_pair, Config::TILE);
    const i64 place = i64(stream) * num_pairs + first_pair;
    uint4* out = reinterpret_cast<uint4*>(p.o + place * Config::LATENT);
    for (int j = threadIdx.x; j < pairs * Config::LATENT / 8; j += Config::THREADS) out[j] = uint4{0, 0, 0, 0};
    if (threadIdx.x < pairs) p.lse[place + threadIdx.x] = -INFINITY_F32;
  }
}

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
    if (pair < num_pairs) *reinterpret_cast<uint4*>(out) = uint4{v[0], v[1], v[2], v[3]};
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

// A whole tile that no other block has a part of: by way of plan.q, which both groups have done with.
DEVICE void write_tile(const Params& p, Plan& plan, const TensorMap& map, const Segment& seg, const float (&o)[128],
                       const float (&max)[2], const float (&sum)[2], int row) {
  const int group = threadIdx.x / 128, lane = lane_id(), matrix = lane / 8;
  float inverse[2], lse[2];
  u32 keep[2];  // rows without a node are zero, whatever their sums
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    inverse[r] = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
    lse[r] = sum[r] > 0.0f ? max[r] + log2f(sum[r]) : -INFINITY_F32;
    keep[r] = seg.first_pair + row + 8 * r < seg.nodes * p.num_heads ? ~0u : 0;
  }
  const int box_row = row - lane / 4 + lane % 8 + 8 * (matrix % 2);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = pack_pair<Scalar>(o[8 * i + 2 * j] * inverse[j % 2], o[8 * i + 2 * j + 1] * inverse[j % 2]) & keep[j % 2];
    }
    const int chunk = (2 * (i % 4) + matrix / 2) ^ (box_row % 8);
    store_matrices(shared_address(plan.q[4 * group + i / 4]) + box_row * 128 + chunk * 16, v[0], v[1], v[2], v[3]);
  }
  async_proxy_fence();
  barrier_wait(GROUP0 + group, 128);
  if (threadIdx.x % 128 == 0) {
    for (int box = 4 * group; box < 4 * group + 4; ++box) {
      copy_box_out(map, box * 64, seg.first_pair, seg.stream, shared_address(plan.q[box]));
    }
  }
  write_lse(p, seg, lse, 0, row);
}

// Two values of Scalar as floats.
DEVICE float2 unpack_pair(u32 pair) {
#if DTYPE == 1
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
#else
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
#endif
}

// Sums of all blocks of the cluster over their key blocks; `max` (log2) and `sum` of this block's. All blocks call.
// What the blocks exchange is normalised and rounded to Scalar, because distributed shared memory gives a block
// some 14 bytes a clock: one rounding more of each part, of the size of P's and the output's.
DEVICE void merge_cluster(Plan& plan, const float (&o)[128], const float (&max)[2], const float (&sum)[2], bool used,
                          int row, Slice& slice) {
  float total[2] = {sum[0], sum[1]}, top[2] = {max[0], max[1]};
  if constexpr (CLUSTER == 1) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float inverse = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
#pragma unroll
      for (int j = 0; j < 4 * Config::PIECES; ++j) {
        if (j / 2 % 2 == r) slice.o[j] = o[j % 128] * inverse;
      }
    }
  } else {
    constexpr int WORDS = Config::PIECES / 2;  // uint4 of two pieces
    const int rank = block_index() % CLUSTER;
    uint4* mine = reinterpret_cast<uint4*>(plan.k) + threadIdx.x;
    if (used) {
      const float inverse[2] = {sum[0] > 0.0f ? 1.0f / sum[0] : 0.0f, sum[1] > 0.0f ? 1.0f / sum[1] : 0.0f};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        u32 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[j] = pack_pair<Scalar>(o[8 * i + 2 * j] * inverse[j % 2], o[8 * i + 2 * j + 1] * inverse[j % 2]);
        }
        mine[i * Config::THREADS] = uint4{v[0], v[1], v[2], v[3]};
      }
    }
    if (threadIdx.x < 128 && lane_id() % 4 == 0) {
      plan.last_max[row] = max[0], plan.last_max[row + 8] = max[1];
      plan.last_sum[row] = sum[0], plan.last_sum[row + 8] = sum[1];
    }
    async_proxy_fence();
    cluster_barrier();
    // Every block begins with itself, so that they do not all read from one.
    float weight[CLUSTER][2];
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) {
      const u32 other = remote_address(shared_address(plan.last_max + row), (rank + i) % CLUSTER);
      weight[i][0] = load_remote(other), weight[i][1] = load_remote(other + 8 * sizeof(float));
      top[0] = fmaxf(top[0], weight[i][0]), top[1] = fmaxf(top[1], weight[i][1]);
    }
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) {
      const u32 other = remote_address(shared_address(plan.last_sum + row), (rank + i) % CLUSTER);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        weight[i][r] = exp2_fast(weight[i][r] - top[r]) * load_remote(other + 8 * sizeof(float) * r);
        total[r] += weight[i][r];
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * Config::PIECES; ++i) slice.o[i] = 0.0f;
    if (used) {
      const float inverse[2] = {total[0] > 0.0f ? 1.0f / total[0] : 0.0f, total[1] > 0.0f ? 1.0f / total[1] : 0.0f};
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) {
        const uint4* from = mine + rank * WORDS * Config::THREADS;
        const u32 other = remote_address(shared_address(from), (rank + i) % CLUSTER);
        const float scale[2] = {weight[i][0] * inverse[0], weight[i][1] * inverse[1]};
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
          const uint4 v = i == 0 ? from[j * Config::THREADS]
                                 : load_remote_vec(other + j * Config::THREADS * sizeof(uint4));
          const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float2 pair = unpack_pair(words[k]);
            slice.o[8 * j + 2 * k] = fmaf(scale[k % 2], pair.x, slice.o[8 * j + 2 * k]);
            slice.o[8 * j + 2 * k + 1] = fmaf(scale[k % 2], pair.y, slice.o[8 * j + 2 * k + 1]);
          }
        }
      }
    }
    cluster_barrier_relaxed();  // the others are through with this block's sums
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) slice.lse[r] = total[r] > 0.0f ? top[r] + log2f(total[r]) : -INFINITY_F32;
}

// A part of a tile: number of its slice in `partial`.
DEVICE int slice_number(const Segment& seg, int part, int rank) {
  const int unit = seg.first_unit + part * seg.stride;
  return (2 * unit + (part == 0 ? 1 : 0)) * CLUSTER + rank;  // a unit ends at most one tile and begins at most one
}

DEVICE bool hand_in(const Params& p, Plan& plan, const Segment& seg, const Slice& slice, bool used, int row) {
  const int unit = block_index() / CLUSTER, rank = block_index() % CLUSTER;
  const int number = slice_number(seg, (unit - seg.first_unit) / seg.stride, rank);
  float4* out = reinterpret_cast<float4*>(p.partial) + i64(number) * Config::PIECES * Config::THREADS + threadIdx.x;
  if (used) {
#pragma unroll
    for (int j = 0; j < Config::PIECES; ++j) {
      out[j * Config::THREADS] = float4{slice.o[4 * j], slice.o[4 * j + 1], slice.o[4 * j + 2], slice.o[4 * j + 3]};
    }
  }
  if (threadIdx.x < 128 && lane_id() % 4 == 0) {
    p.partial_lse[number * Config::TILE + row] = slice.lse[0];
    p.partial_lse[number * Config::TILE + row + 8] = slice.lse[1];
  }
  async_proxy_fence_all();
  __threadfence();
  __syncthreads();
  u32* counter = p.counters + seg.first_unit * CLUSTER + rank;
  if (threadIdx.x == 0) {
    plan.arrived = atomicAdd(counter, 1);
    if (plan.arrived == seg.parts - 1) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  async_proxy_fence_all();
  return plan.arrived == seg.parts - 1;
}

// Weight of every part for every row, [parts, 64], and the row's lse; four threads a row.
DEVICE void part_weights(const Params& p, Plan& plan, const Segment& seg, int rank) {
  float* weights = reinterpret_cast<float*>(plan.q);
  const int row = threadIdx.x / 4, first = threadIdx.x % 4;
  float top = -INFINITY_F32, total = 0.0f;
  for (int i = first; i < seg.parts; i += 4) {
    const float lse = __ldcg(p.partial_lse + slice_number(seg, i, rank) * Config::TILE + row);
    weights[i * Config::TILE + row] = lse;
    top = fmaxf(top, lse);
  }
  top = fmaxf(warp_max<4>(top), -1e30f);  // a row may see no key at all
  for (int i = first; i < seg.parts; i += 4) {
    const float weight = exp2_fast(weights[i * Config::TILE + row] - top);
    weights[i * Config::TILE + row] = weight;
    total += weight;
  }
  total = warp_sum<4>(total);
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  for (int i = first; i < seg.parts; i += 4) weights[i * Config::TILE + row] *= inverse;
  if (first == 0) plan.last_max[row] = total > 0.0f ? top + log2f(total) : -INFINITY_F32;
  __syncthreads();
}
static_assert(sizeof(Plan::q) >= 132 * Config::TILE * sizeof(float), "weights of as many parts as there are SMs");

// The last block of a tile's to come adds all parts in order; groups of four pieces stream through plan.k.
DEVICE void merge_units(const Params& p, Plan& plan, const Segment& seg, bool used, int row) {
  const int rank = block_index() % CLUSTER;
  constexpr int BYTES = 4 * Config::THREADS * sizeof(float4);
  part_weights(p, plan, seg, rank);
  const float* weights = reinterpret_cast<const float*>(plan.q) + row;
  const int items = Config::PIECES / 4 * seg.parts;
  u32 slot_parity = plan.slot_parity;
  float o[16];
  for (int first = 0; first < items; first += Config::SLOTS) {
    const int count = min(items - first, Config::SLOTS);
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < count; ++slot) {
        const int group = (first + slot) / seg.parts, part = (first + slot) % seg.parts;
        const u32 full = shared_address(&plan.slot_full[slot]);
        mbarrier_expect(full, BYTES);
        const i64 place = i64(slice_number(seg, part, rank)) * Config::PIECES + 4 * group;
        copy_bytes(shared_address(plan.k) + slot * BYTES, p.partial + place * Config::THREADS * 4, BYTES, full);
      }
    }
    for (int slot = 0; slot < count; ++slot) {
      const int group = (first + slot) / seg.parts, part = (first + slot) % seg.parts;
      mbarrier_wait(shared_address(&plan.slot_full[slot]), slot_parity >> slot & 1);
      slot_parity ^= 1u << slot;
      const float4* in = reinterpret_cast<const float4*>(plan.k) + slot * 4 * Config::THREADS + threadIdx.x;
      const float weight[2] = {weights[part * Config::TILE], weights[part * Config::TILE + 8]};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 v = used ? in[j * Config::THREADS] : float4{0.0f, 0.0f, 0.0f, 0.0f};
        o[4 * j] = fmaf(weight[0], v.x, part == 0 ? 0.0f : o[4 * j]);
        o[4 * j + 1] = fmaf(weight[0], v.y, part == 0 ? 0.0f : o[4 * j + 1]);
        o[4 * j + 2] = fmaf(weight[1], v.z, part == 0 ? 0.0f : o[4 * j + 2]);
        o[4 * j + 3] = fmaf(weight[1], v.w, part == 0 ? 0.0f : o[4 * j + 3]);
      }
      if (part == seg.parts - 1) write_columns(p, seg, o, rank * (Config::PIECES / 4) + group, row);
    }
    async_proxy_fence();
    __syncthreads();
  }
  if (threadIdx.x == 0) plan.slot_parity = slot_parity;
  write_lse(p, seg, {plan.last_max[row], plan.last_max[row + 8]}, rank, row);
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
    if (first_pair < stream_nodes(p, stream, stream_prefix(p, stream)) * p.num_heads) continue;
    const int pairs = min(num_pairs - first_pair, Config::TILE);
    const i64 place = i64(stream) * num_pairs + first_pair;
    uint4* out = reinterpret_cast<uint4*>(p.o + place * Config::LATENT);
    for (int j = threadIdx.x; j < pairs * Config::LATENT / 8; j += Config::THREADS) out[j] = uint4{0, 0, 0, 0};
    if (threadIdx.x < pairs) p.lse[place + threadIdx.x] = -INFINITY_F32;
  }
}

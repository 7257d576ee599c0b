// csrc/verify_attention_wgmma.cu: tree attention over a paged MLA cache with Hopper's warpgroup products and TMA.
//   in   q [S,N,H,576] | pages [P,64,576], 512 latent then 64 rope, both bf16 or half (-DDTYPE), as tensor maps |
//        block_table [S,M] i32 | prefix_len [S] i32 | ancestors [S,N,W] u32 | num_nodes [S] i32
//   out  o [S,N,H,512] in q's dtype | lse [S,N,H] f32, nats; 0 and -inf where a row is unused or sees no key
//   math o[i] = sum_j softmax_j(scale q[i].kv[j]) kv[j,:512], j over the prefix and {j : bit j of ancestors[i]}; f32 sums
//   cost 2 N H L (576 + 512) FLOP for L keys, 1152 L bytes; a tile is 64 consecutive (row, head) pairs
//   how  One block of two warpgroups an SM. The blocks of 64 keys of all tiles are one long list, of which every block
//        of the grid takes an equal share; what it has of a tile that others share is merged by the last of them.
//        Keys go by in pairs. Group 0 finds the scores of the first block of a pair, group 1 those of the second, and
//        each gives its probabilities P to the other through shared memory; group 0 sums P V of columns 0..255, group 1
//        of columns 256..511, so that one group's products run under the other's softmax. A box of 64 columns is
//        fetched again as soon as its last reader is through.
//   ref  kernels/reference.py:verify_attention | test tests/kernels/test_verify_attention.py | sm_90a
#include "hopper.cuh"
#include "mma.cuh"

static_assert(DTYPE == 1 || DTYPE == 2, "bf16 or half");

struct Config {
  static constexpr int LATENT = 512, PAGE = 64, TILE = 64, THREADS = 256;
  static constexpr int Q_BOXES = LATENT / 64, K_BOXES = Q_BOXES + 1, ROPE_BOX = Q_BOXES;  // of 64 columns
  static constexpr int OVERHEAD = 3;   // what a share of a tile costs beside its key blocks, in key blocks
  static constexpr int MIN_SHARE = 2;  // key blocks that make one more block of the grid worth its merge
  static constexpr float STALE = 8.0f;  // log2 by which a row's maximum may grow before its sums are rescaled
};
static_assert(Config::PAGE == 64 && Config::TILE == 64, "a page is one block of keys, and a box has 64 rows");
static_assert(Config::STALE < 15.0f, "probabilities up to 2^STALE must fit half");

struct Plan {                                      // shared memory
  alignas(1024) u8 q[Config::Q_BOXES][BOX_BYTES];
  u8 p[2][BOX_BYTES];                              // P of either block of a pair; p[0] first brings the rope box of q
  u8 k[2][Config::K_BOXES][BOX_BYTES];             // keys of either block of a pair
  float max[2][Config::TILE], sum[2][Config::TILE];
  u64 q_full[Config::K_BOXES], k_full[2][Config::K_BOXES];
  int arrived;
};
static_assert(sizeof(Plan) <= 227 * 1024, "dynamic shared memory of one sm_90 block");

struct Params {
  const i32* block_table;  // [S, M]
  const i32* prefix_len;   // [S]
  const u32* ancestors;    // [S, N, W]
  const i32* num_nodes;    // [S]
  Scalar* o;               // [S, N, H, 512]
  float* lse;              // [S, N, H]
  float* partial;          // [2 * gridDim, 32, THREADS, 4], normalised, in the order of the accumulators
  float* partial_lse;      // [2 * gridDim, 64], log2
  u32* counters;           // [gridDim], zero before and after
  int num_streams, num_rows, num_heads, num_words, table_width;
  float scale_log2;
};

// One block's share of a tile.
struct Segment {
  int stream, prefix, nodes;  // of the stream
  int first_pair;             // of the tile, row * H + head
  int begin, end;             // key blocks, taken from the end backwards
  int first_share, parts;     // blocks of the grid that share the tile: first_share, first_share + 1, ...
};

enum Barrier { P0_READY = 1, P1_READY, GROUP0, GROUP1 };  // numbers; 0 is __syncthreads

DEVICE int stream_prefix(const Params& p, int stream) {
  return min(max(p.prefix_len[stream], 0), p.table_width * Config::PAGE);
}
DEVICE int stream_nodes(const Params& p, int stream) { return min(max(p.num_nodes[stream], 0), p.num_rows); }
DEVICE int used_tiles(const Params& p, int nodes) { return cdiv(nodes * p.num_heads, Config::TILE); }
DEVICE int key_blocks(const Params& p, int prefix, int rows) {
  return min(cdiv(prefix + rows, Config::PAGE), p.table_width);
}

// Length of the list: every used tile counts the blocks of its stream's last tile and the overhead.
DEVICE int list_length(const Params& p) {
  int total = 0;
  for (int stream = lane_id(); stream < p.num_streams; stream += WARP) {
    const int nodes = stream_nodes(p, stream);
    if (nodes > 0) {
      total += used_tiles(p, nodes) * (key_blocks(p, stream_prefix(p, stream), nodes) + Config::OVERHEAD);
    }
  }
  return __shfl_sync(FULL_MASK, warp_sum(total), 0);  // what the compiler knows to be uniform: wgmma needs that
}

// The next segment of the share [place, share_end) of the list; false where there is none.
DEVICE bool next_segment(const Params& p, int total, int num_shares, int& place, int share_end, Segment& segment) {
  int start = 0;
  for (int stream = 0; stream < p.num_streams && place < share_end; ++stream) {
    const int nodes = stream_nodes(p, stream), prefix = stream_prefix(p, stream), tiles = used_tiles(p, nodes);
    const int length = key_blocks(p, prefix, nodes) + Config::OVERHEAD;
    while (place < share_end && place < start + tiles * length) {
      const int tile = (place - start) / length, tile_start = start + tile * length;
      const int first_pair = tile * Config::TILE;
      const int rows = min(nodes, (first_pair + Config::TILE - 1) / p.num_heads + 1);
      const int blocks = key_blocks(p, prefix, rows);
      const int begin = max(place - tile_start - Config::OVERHEAD, 0);
      const int end = min(share_end - tile_start - Config::OVERHEAD, blocks);
      place = min(share_end, tile_start + length);
      if (begin < end) {
        const auto share_of = [&](int block) {
          return int((i64(tile_start + Config::OVERHEAD + block + 1) * num_shares - 1) / total);
        };
        const int first = share_of(0);
        segment = {stream, prefix, nodes, first_pair, begin, end, first, share_of(blocks - 1) - first + 1};
        return true;
      }
    }
    start += tiles * length;
  }
  return false;
}

// Bit c: the row sees key c of a block whose key 0 is tree row `first` (negative: still in the prefix).
DEVICE u64 visible_keys(const u32* words, int num_words, int first, int num_nodes) {
  const int word = max(first, 0) / 32;
  const u32 w0 = word < num_words ? words[word] : 0, w1 = word + 1 < num_words ? words[word + 1] : 0;
  const u32 w2 = word + 2 < num_words ? words[word + 2] : 0;
  u64 bits = u64(w1) << 32 | w0;
  if (first < 0) {
    bits = first > -64 ? bits << -first | ((u64(1) << -first) - 1) : ~u64(0);
  } else if (first % 32 != 0) {
    bits = bits >> first % 32 | u64(w2) << (64 - first % 32);
  }
  return num_nodes - first < 64 ? bits & ((u64(1) << (num_nodes - first)) - 1) : bits;
}

// A thread's two rows of the tile, g and g + 8 of its warp: softmax state.
struct Rows {
  float max[2];  // log2; of what was summed, at most STALE below the true maximum
  float sum[2];  // of this thread's columns of this group's blocks
};

DEVICE void rescale(float (&o)[128], Rows& rows, const float (&new_max)[2]) {
  if (!__any_sync(FULL_MASK, new_max[0] != rows.max[0] || new_max[1] != rows.max[1])) return;
  const float factor[2] = {exp2f(rows.max[0] - new_max[0]), exp2f(rows.max[1] - new_max[1])};
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.sum[r] *= factor[r], rows.max[r] = new_max[r];
}

// Whoever computes the scores of block `block` of a segment masks them here.
DEVICE void mask_scores(const Params& p, const Segment& seg, int block, int row, float (&s)[32]) {
  const int first = block * Config::PAGE - seg.prefix;
  if (first + Config::PAGE <= 0) return;
  const int shift = 2 * (lane_id() % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int node = min((seg.first_pair + row + 8 * r) / p.num_heads, p.num_rows - 1);
    const u32* words = p.ancestors + (i64(seg.stream) * p.num_rows + node) * p.num_words;
    const u64 bits = visible_keys(words, p.num_words, first, seg.nodes) >> shift;
    const u32 half_bits[2] = {u32(bits), u32(bits >> 32)};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(half_bits[j / 4] >> (8 * (j % 4) + e) & 1)) s[4 * j + 2 * r + e] = -INFINITY_F32;
      }
    }
  }
}

// The maximum that the sums go on with once this block's scores are in.
DEVICE void next_max(const Params& p, const float (&s)[32], const float (&old_max)[2], float (&new_max)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = s[2 * r];
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    top = warp_reduce<4>(top, [](float a, float b) { return fmaxf(a, b); }) * p.scale_log2;
    new_max[r] = top > old_max[r] + Config::STALE ? top : old_max[r];
  }
}

// s becomes exp2(scale s - max) as A fragments of 16 keys each.
DEVICE void exponentials(const Params& p, float (&s)[32], const float (&max)[2], float (&sum)[2], u32 (&prob)[16]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    s[i] = exp2f(fmaf(s[i], p.scale_log2, -max[i / 2 % 2]));
    sum[i / 2 % 2] += s[i];
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) prob[i] = pack_pair<Scalar>(s[2 * i], s[2 * i + 1]);
}

// P to shared memory, for the other group.
DEVICE void publish(u8* box, const u32 (&prob)[16], float* max_out, const float (&max)[2], int row) {
  const int lane = lane_id(), matrix = lane / 8;
  const int box_row = row - lane / 4 + lane % 8 + 8 * (matrix % 2);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int chunk = (2 * k + matrix / 2) ^ (box_row % 8);
    store_matrices(shared_address(box) + box_row * 128 + chunk * 16, prob[4 * k], prob[4 * k + 1], prob[4 * k + 2],
                   prob[4 * k + 3]);
  }
  if (lane % 4 == 0) max_out[row] = max[0], max_out[row + 8] = max[1];
  async_proxy_fence();
}

DEVICE void load_max(const float* max, int row, float (&value)[2]) { value[0] = max[row], value[1] = max[row + 8]; }

// Rows of the last block of a stream behind its last key may hold NaN, and 0 times NaN is NaN.
DEVICE void clear_values(u8 (*boxes)[BOX_BYTES], int first_row, int group) {
  const int thread = threadIdx.x % 128;
  for (int i = first_row * 8 + thread; i < 64 * 8; i += 128) {
#pragma unroll
    for (int box = 0; box < 4; ++box) reinterpret_cast<uint4*>(boxes[4 * group + box])[i] = uint4{0, 0, 0, 0};
  }
  async_proxy_fence();
  barrier_wait(GROUP0 + group, 128);
}

// What both groups know while they work on one segment.
struct Work {
  const Params& p;
  Plan& plan;
  const TensorMap& key_map;
  const Segment& seg;
  const u32 (&q_rope)[16];
  int row;          // of the thread within the tile
  u32 parity[2];    // of the next use of k[0] and k[1]
  bool leader;      // one thread of the group
};

DEVICE int page_of(const Work& w, int block) {
  return block >= w.seg.begin ? w.p.block_table[i64(w.seg.stream) * w.p.table_width + block] : 0;
}

template <int FIRST, int LAST>
DEVICE void fetch(const Params& p, Plan& plan, const TensorMap& map, int buffer, int page) {
#pragma unroll
  for (int box = FIRST; box <= LAST; ++box) {
    const u32 full = shared_address(&plan.k_full[buffer][box]);
    mbarrier_expect(full, BOX_BYTES);
    copy_box(shared_address(plan.k[buffer][box]), map, box * 64, page * Config::PAGE, full);
  }
}

template <int BUFFER, int BOX>
DEVICE void score_box(Work& w, float (&s)[32], int accumulate) {
  mbarrier_wait(shared_address(&w.plan.k_full[BUFFER][BOX]), w.parity[BUFFER]);
  wgmma_fence();
  const u64 k = descriptor_k_major(shared_address(w.plan.k[BUFFER][BOX]));
  const u64 q = descriptor_k_major(shared_address(w.plan.q[BOX % Config::Q_BOXES]));
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    if constexpr (BOX == Config::ROPE_BOX) {
      wgmma_n64(s, w.q_rope + 4 * step, k + 2 * step, accumulate || step > 0);
    } else {
      wgmma_n64(s, q + 2 * step, k + 2 * step, accumulate || step > 0);
    }
  }
}

// O += P V of one block: P of the group's own block from registers, the other's from shared memory.
template <int BUFFER>
DEVICE void add_values(Plan& plan, float (&o)[128], const u32 (&prob)[16], int group) {
  const u64 v = descriptor_n_major(shared_address(plan.k[BUFFER][4 * group]));
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma_n256(o, prob + 4 * step, v + 128 * step);
  wgmma_commit();
}
template <int BUFFER>
DEVICE void add_values(Plan& plan, float (&o)[128], int group) {
  const u64 v = descriptor_n_major(shared_address(plan.k[BUFFER][4 * group]));
  const u64 prob = descriptor_k_major(shared_address(plan.p[BUFFER]));
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma_n256(o, prob + 2 * step, v + 128 * step);
  wgmma_commit();
}

// Group 0 on the first block of a pair, or on a last block that has no partner: scores, P, values of its columns.
DEVICE void first_block(Work& w, int block, float (&o)[128], Rows& rows) {
  Plan& plan = w.plan;
  float s[32];
  u32 prob[16];
  const int last_key = w.seg.prefix + w.seg.nodes;
  const int page_second = page_of(w, block - 1), page_next = page_of(w, block - 2);
  wgmma_wait<0>(o);  // the values of the pair before
  if (w.leader && block > w.seg.begin && block < w.seg.end - 1) fetch<0, 3>(w.p, plan, w.key_map, 1, page_second);
  score_box<0, 0>(w, s, 0);
  score_box<0, 1>(w, s, 1);
  score_box<0, 2>(w, s, 1);
  score_box<0, 3>(w, s, 1);
  score_box<0, 8>(w, s, 1);
  score_box<0, 4>(w, s, 1);
  score_box<0, 5>(w, s, 1);
  score_box<0, 6>(w, s, 1);
  score_box<0, 7>(w, s, 1);
  wgmma_commit();
  w.parity[0] ^= 1;
  if ((block + 1) * Config::PAGE > last_key) clear_values(plan.k[0], last_key - block * Config::PAGE, 0);
  wgmma_wait<0>(s);
  mask_scores(w.p, w.seg, block, w.row, s);
  float new_max[2];
  next_max(w.p, s, rows.max, new_max);
  rescale(o, rows, new_max);
  exponentials(w.p, s, rows.max, rows.sum, prob);
  publish(plan.p[0], prob, plan.max[0], rows.max, w.row);
  barrier_arrive(P0_READY, Config::THREADS);
  wgmma_fence();
  add_values<0>(plan, o, prob, 0);
  wgmma_wait<0>(o);
  if (w.leader && block - 2 >= w.seg.begin) {
    fetch<0, 3>(w.p, plan, w.key_map, 0, page_next);
    fetch<8, 8>(w.p, plan, w.key_map, 0, page_next);
  }
}

DEVICE void group_0(Work& w, float (&o)[128], Rows& rows) {
  int block = w.seg.end - 1;
  for (; block > w.seg.begin; block -= 2) {
    first_block(w, block, o, rows);
    barrier_wait(P1_READY, Config::THREADS);
    float new_max[2];
    load_max(w.plan.max[1], w.row, new_max);
    rescale(o, rows, new_max);
    wgmma_fence();
    add_values<1>(w.plan, o, 0);
    w.parity[1] ^= 1;
  }
  if (block == w.seg.begin) first_block(w, block, o, rows);
  wgmma_wait<0>(o);
}

// Group 1 on the first block of a pair: the values of its columns.
DEVICE void first_block_values(Work& w, int block, float (&o)[128], Rows& rows) {
  const int last_key = w.seg.prefix + w.seg.nodes;
  if ((block + 1) * Config::PAGE > last_key) {
#pragma unroll
    for (int box = 4; box < 8; ++box) mbarrier_wait(shared_address(&w.plan.k_full[0][box]), w.parity[0]);
    clear_values(w.plan.k[0], last_key - block * Config::PAGE, 1);
  }
  w.parity[0] ^= 1;
  barrier_wait(P0_READY, Config::THREADS);
  float new_max[2];
  load_max(w.plan.max[0], w.row, new_max);
  rescale(o, rows, new_max);
  wgmma_fence();
  add_values<0>(w.plan, o, 1);
}

DEVICE void group_1(Work& w, float (&o)[128], Rows& rows) {
  Plan& plan = w.plan;
  float s[32];
  u32 prob[16];
  int block = w.seg.end - 1;
  for (; block > w.seg.begin; block -= 2) {
    const int page_next = page_of(w, block - 2), page_second = page_of(w, block - 3);
    score_box<1, 4>(w, s, 0);
    score_box<1, 5>(w, s, 1);
    score_box<1, 6>(w, s, 1);
    score_box<1, 7>(w, s, 1);
    score_box<1, 8>(w, s, 1);
    score_box<1, 0>(w, s, 1);
    score_box<1, 1>(w, s, 1);
    score_box<1, 2>(w, s, 1);
    score_box<1, 3>(w, s, 1);
    wgmma_commit();
    w.parity[1] ^= 1;
    wgmma_wait<0>(s);  // ptxas would put it before the first touch of o anyway
    first_block_values(w, block, o, rows);
    mask_scores(w.p, w.seg, block - 1, w.row, s);
    float new_max[2], sum[2] = {0.0f, 0.0f};
    next_max(w.p, s, rows.max, new_max);
    exponentials(w.p, s, new_max, sum, prob);
    publish(plan.p[1], prob, plan.max[1], new_max, w.row);
    barrier_arrive(P1_READY, Config::THREADS);
    wgmma_wait<0>(o);
    if (w.leader && block - 2 >= w.seg.begin) fetch<4, 7>(w.p, plan, w.key_map, 0, page_next);
    rescale(o, rows, new_max);
    rows.sum[0] += sum[0], rows.sum[1] += sum[1];
    wgmma_fence();
    add_values<1>(plan, o, prob, 1);
    wgmma_wait<0>(o);
    if (w.leader && block - 3 >= w.seg.begin) fetch<4, 8>(w.p, plan, w.key_map, 1, page_second);
  }
  if (block == w.seg.begin) {
    first_block_values(w, block, o, rows);
    wgmma_wait<0>(o);
  }
}

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

// o is normalised.
DEVICE void write_output(const Params& p, const Segment& seg, const float (&o)[128], const float (&lse)[2], int row) {
  const int group = threadIdx.x / 128, t = lane_id() % 4, num_pairs = p.num_rows * p.num_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int pair = seg.first_pair + row + 8 * r;
    const bool used = pair < seg.nodes * p.num_heads;
    const i64 place = i64(seg.stream) * num_pairs + pair;
    Scalar* out = p.o + place * Config::LATENT + 256 * group + 8 * t;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      u32 v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int d = 4 * (4 * i + j) + 2 * r;
        v[j] = used ? pack_pair<Scalar>(o[d], o[d + 1]) : 0;
      }
      transpose_quad(v);
      if (pair < num_pairs) *reinterpret_cast<uint4*>(out + 32 * i) = uint4{v[0], v[1], v[2], v[3]};
    }
    if (group == 0 && t == 0 && pair < num_pairs) p.lse[place] = used ? lse[r] * LN_2 : -INFINITY_F32;
  }
}

// The last of a tile's blocks to come adds the others' parts to its own.
DEVICE bool merge(const Params& p, Plan& plan, const Segment& seg, float (&o)[128], float (&lse)[2], int row) {
  const int slot = 2 * blockIdx.x + (int(blockIdx.x) == seg.first_share);
  float4* part = reinterpret_cast<float4*>(p.partial) + i64(slot) * 32 * Config::THREADS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    part[i * Config::THREADS] = float4{o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
  }
  if (threadIdx.x < 128 && lane_id() % 4 == 0) {
    p.partial_lse[slot * Config::TILE + row] = lse[0];
    p.partial_lse[slot * Config::TILE + row + 8] = lse[1];
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) plan.arrived = atomicAdd(p.counters + seg.first_share, 1);
  __syncthreads();
  if (plan.arrived != seg.parts - 1) return false;
  __threadfence();
  if (threadIdx.x == 0) p.counters[seg.first_share] = 0;
  const auto slot_of = [&](int i) { return 2 * (seg.first_share + i) + (i == 0); };
  float top[2] = {lse[0], lse[1]}, total[2] = {0.0f, 0.0f};
  for (int i = 0; i < seg.parts; ++i) {
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __ldcg(p.partial_lse + slot_of(i) * Config::TILE + row + 8 * r));
    }
  }
  const float floor[2] = {fmaxf(top[0], -1e30f), fmaxf(top[1], -1e30f)};
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0.0f;
  for (int i = 0; i < seg.parts; ++i) {
    float weight[2];
    for (int r = 0; r < 2; ++r) {
      weight[r] = exp2f(__ldcg(p.partial_lse + slot_of(i) * Config::TILE + row + 8 * r) - floor[r]);
      total[r] += weight[r];
    }
    const float4* other = reinterpret_cast<const float4*>(p.partial) + i64(slot_of(i)) * 32 * Config::THREADS +
                          threadIdx.x;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float4 v = __ldcg(other + j * Config::THREADS);
      o[4 * j] += weight[0] * v.x, o[4 * j + 1] += weight[0] * v.y;
      o[4 * j + 2] += weight[1] * v.z, o[4 * j + 3] += weight[1] * v.w;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float inverse = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
    lse[r] = total[r] > 0.0f ? top[r] + log2f(total[r]) : -INFINITY_F32;
#pragma unroll
    for (int j = 0; j < 32; ++j) o[4 * j + 2 * r] *= inverse, o[4 * j + 2 * r + 1] *= inverse;
  }
  return true;
}

// Tiles without a used row get zeros.
DEVICE void clear_unused(const Params& p) {
  const int num_pairs = p.num_rows * p.num_heads, tiles = cdiv(num_pairs, Config::TILE);
  for (int i = blockIdx.x; i < p.num_streams * tiles; i += gridDim.x) {
    const int stream = i / tiles, first_pair = i % tiles * Config::TILE;
    if (first_pair < stream_nodes(p, stream) * p.num_heads) continue;
    const int pairs = min(num_pairs - first_pair, Config::TILE);
    const i64 place = i64(stream) * num_pairs + first_pair;
    uint4* out = reinterpret_cast<uint4*>(p.o + place * Config::LATENT);
    for (int j = threadIdx.x; j < pairs * Config::LATENT / 8; j += Config::THREADS) out[j] = uint4{0, 0, 0, 0};
    if (threadIdx.x < pairs) p.lse[place + threadIdx.x] = -INFINITY_F32;
  }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
    verify_attention_wgmma(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                           const i32* block_table, const i32* prefix_len, const u32* ancestors, const i32* num_nodes,
                           Scalar* o_out, float* lse_out, float* partial, float* partial_lse, u32* counters,
                           int num_streams, int num_rows, int num_heads, int num_words, int table_width,
                           float scale_log2) {
  extern __shared__ __align__(1024) u8 memory[];
  Plan& plan = *reinterpret_cast<Plan*>(memory);
  const Params p = {block_table, prefix_len, ancestors, num_nodes, o_out,     lse_out,   partial,    partial_lse,
                    counters,    num_streams, num_rows, num_heads, num_words, table_width, scale_log2};
  const int group = __shfl_sync(FULL_MASK, threadIdx.x / 128, 0);
  const bool leader = threadIdx.x % 128 == 0;
  const int row = warp_id() % 4 * 16 + lane_id() / 4;
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    for (int i = 0; i < Config::K_BOXES; ++i) {
      mbarrier_init(shared_address(&plan.q_full[i]), 1);
      mbarrier_init(shared_address(&plan.k_full[0][i]), 1);
      mbarrier_init(shared_address(&plan.k_full[1][i]), 1);
    }
    mbarrier_init_fence();
  }
  grid_dependency_wait();
  __syncthreads();
  const int total = list_length(p);
  const int num_shares = min(int(gridDim.x), max(total / (Config::MIN_SHARE + Config::OVERHEAD), 1));
  int place = int(i64(blockIdx.x) * total / num_shares);
  const int share_end = int(blockIdx.x) < num_shares ? int(i64(blockIdx.x + 1) * total / num_shares) : place;
  u32 q_parity = 0, k_parity[2] = {0, 0};
  Segment seg;
  while (next_segment(p, total, num_shares, place, share_end, seg)) {
    if (threadIdx.x == 0) {
      const int page = p.block_table[i64(seg.stream) * p.table_width + seg.end - 1];
      const auto fetch_query = [&](int box, void* to) {
        const u32 full = shared_address(&plan.q_full[box]);
        mbarrier_expect(full, BOX_BYTES);
        copy_box(shared_address(to), query_map, box * 64, seg.first_pair, seg.stream, full);
      };
      fetch_query(Config::ROPE_BOX, plan.p[0]);
      for (int box = 0; box < Config::Q_BOXES; ++box) fetch_query(box, plan.q[box]);
      fetch<0, 8>(p, plan, key_map, 0, page);
      if (seg.end - seg.begin > 1) {
        fetch<0, 8>(p, plan, key_map, 1, p.block_table[i64(seg.stream) * p.table_width + seg.end - 2]);
      }
    }
    u32 q_rope[16];
    mbarrier_wait(shared_address(&plan.q_full[Config::ROPE_BOX]), q_parity);
    {
      const int box_row = warp_id() % 4 * 16 + lane_id() % 16;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int chunk = (2 * step + lane_id() / 16) ^ (box_row % 8);
        load_matrices(reinterpret_cast<u32(&)[4]>(q_rope[4 * step]),
                      shared_address(plan.p[0]) + box_row * 128 + chunk * 16);
      }
    }
    __syncthreads();  // p[0] is free
    for (int box = 0; box < Config::Q_BOXES; ++box) mbarrier_wait(shared_address(&plan.q_full[box]), q_parity);
    q_parity ^= 1;
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    Rows rows = {{-1e30f, -1e30f}, {0.0f, 0.0f}};
    Work work = {p, plan, key_map, seg, q_rope, row, {k_parity[0], k_parity[1]}, leader};
    if (group == 0) {
      group_0(work, o, rows);
    } else {
      group_1(work, o, rows);
    }
    k_parity[0] = work.parity[0], k_parity[1] = work.parity[1];
    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = warp_sum<4>(rows.sum[r]);
      if (lane_id() % 4 == 0) plan.sum[group][row + 8 * r] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = plan.sum[0][row + 8 * r] + plan.sum[1][row + 8 * r];
      const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      lse[r] = sum > 0.0f ? rows.max[r] + log2f(sum) : -INFINITY_F32;
#pragma unroll
      for (int j = 0; j < 32; ++j) o[4 * j + 2 * r] *= inverse, o[4 * j + 2 * r + 1] *= inverse;
    }
    if (seg.parts == 1 || merge(p, plan, seg, o, lse, row)) write_output(p, seg, o, lse, row);
    __syncthreads();
  }
  clear_unused(p);
}

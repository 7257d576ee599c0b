// csrc/verify_attention_wgmma.cu: tree attention over a paged MLA cache with Hopper's warpgroup products and TMA.
//   in   q [S,N,H,576] | pages [P,64,576], 512 latent then 64 rope, both bf16 or half (-DDTYPE), as tensor maps |
//        block_table [S,M] i32 | prefix_len [S] i32 | ancestors [S,N,W] u32 | num_nodes [S] i32
//   out  o [S,N,H,512] in q's dtype | lse [S,N,H] f32, nats; 0 and -inf where a row is unused or sees no key
//   math o[i] = sum_j softmax_j(scale q[i].kv[j]) kv[j,:512], j over the prefix and {j : bit j of ancestors[i]}
//   cost 2 N H L (576 + 512) FLOP for L keys, 1152 L bytes; a tile is 64 consecutive (row, head) pairs
//   how  One block of two warpgroups an SM; -DKEYS=64 keys are a block of keys, or 32, and those go by in pairs. Group
//        0 finds the scores of the first of a pair, group 1 those of the second, and each gives its probabilities P to
//        the other through shared memory. Group 0 sums P V of columns 0..255, group 1 of columns 256..511, so that one
//        group's products run under the other's softmax. A box of 64 columns is fetched again after its last reader.
//        -DPARTS=1: the keys of a tile go to several blocks, and verify_parts.cu adds up what they found. -DPARTS=0: a
//        persistent grid for many tiles (verify_wgmma_shares.cuh).
//   ref  kernels/reference/ops.py:verify_attention | test tests/kernels/test_verify_wgmma.py | sm_90a
#include "fresh.cuh"
#include "mma.cuh"
#include "named_barriers.cuh"
#include "verify_wgmma_merge.cuh"
#include "verify_wgmma_shares.cuh"
#include "verify_wgmma_softmax.cuh"

static_assert(DTYPE == 1 || DTYPE == 2, "bf16 or half");

// Rows of the last block of a stream behind its last key may hold NaN, and 0 times NaN is NaN.
DEVICE void clear_values(u8 (*boxes)[Config::KEY_BOX_BYTES], const Segment& seg, int block, int group) {
  const int first_row = seg.prefix + seg.nodes - block * Config::BLOCK_KEYS;
  if (first_row >= Config::BLOCK_KEYS) return;
  const int thread = threadIdx.x % 128;
#pragma unroll 1
  for (int i = first_row * 8 + thread; i < Config::BLOCK_KEYS * 8; i += 128) {
#pragma unroll
    for (int box = 0; box < 4; ++box) reinterpret_cast<uint4*>(boxes[4 * group + box])[i] = uint4{0, 0, 0, 0};
  }
  async_proxy_fence();
  named_barrier(GROUP0 + group, 128);
}

// What a thread remembers from segment to segment, in one register.
enum Phases : u32 {
  K0_PARITY = 1, K1_PARITY = 2, Q_PARITY = 4,  // of the next use of k[0], k[1], q
  TURN = 8,                                    // which of plan.segment is under way
  STARTED = 16,
  CHAINED = 32,                                // its queries and keys came ahead
  SINGLE = 64,                                 // the segment under way is the block's only one
};
DEVICE u32 turn_of(u32 phases) { return phases / TURN & 1; }

// What a group knows while it works on a segment.
struct Work {
  const Params& p;
  Plan& plan;
  const TensorMap& query_map;
  const TensorMap& key_map;
  const Segment& seg;
  const Segment& next;   // where plan.next_row says that its queries and keys come ahead
  const u32 (&q_rope)[16];
  int begin, end;        // key blocks
  int first_masked;      // key block from which on some rows do not see all
  int row;               // of the thread within the tile
  u32 mask;              // of the block whose scores come next, where it is a masked one
  u32& phases;
  u32 place;             // of plan, in units of 16 bytes: an argument, so in a uniform register, where wgmma wants it
  bool first;            // the group's first pair of the segment
  bool leader;           // one thread of every warp: each fetches its part of the boxes
};

// Where the table has the page of a stream's key block.
DEVICE const i32* page_of(const Params& p, const Segment& seg, int block) {
  return p.block_table + i64(seg.stream) * p.table_width + block * Config::BLOCK_KEYS / Config::PAGE;
}
// The cache's row with the first key of a block in this page. A page that is none of the cache's becomes the one behind
// the last, which TMA reads as zeros.
DEVICE int key_row(const Params& p, int page, int block) {
  return int(min(u32(page), u32(p.num_pages))) * Config::PAGE + block * Config::BLOCK_KEYS % Config::PAGE;
}

// Asks for the page of a key block of this segment, into shared memory; leaders only.
DEVICE void ask_page(const Work& w, int slot, int block) {
  if (!w.leader || block >= w.end) return;
  copy_async4(shared_address(&w.plan.page[warp_id()][slot]), page_of(w.p, w.seg, block));
}

// The row of what was asked for; where the segment has no such block, that of the next segment's first (0) or second
// (1) block, -1 for none.
DEVICE int take_row(const Work& w, int slot, int block, int which) {
  if (block >= w.end) return w.plan.next_row[which];
  copy_async_wait_all();
  return key_row(w.p, w.plan.page[warp_id()][slot], block);
}

// One half of a block of keys, once its readers are through: a box a warp of the group. A wait at a barrier costs as
// much as two boxes' products, so that a half has one; its bytes may come before they are expected.
template <int BUFFER, int HALF>
DEVICE void fetch_half(Plan& plan, const TensorMap& map, int row) {
  const u32 full = shared_address(&plan.k_full[BUFFER][HALF]);
  const int warp = warp_id() % 4, box = 4 * HALF + warp;
  if (warp == 0) mbarrier_expect(full, (BUFFER == HALF ? 5 : 4) * Config::KEY_BOX_BYTES);
  copy_box(shared_address(plan.k[BUFFER][box]), map, box * 64, row, full);
  if (BUFFER == HALF && warp == 3) {
    const int rope = Config::ROPE_BOX;
    copy_box(shared_address(plan.k[BUFFER][rope]), map, rope * 64, row, full);
  }
}

DEVICE void fetch_query(Plan& plan, const TensorMap& map, const Segment& seg, int box) {
  const u32 to = shared_address(box == Config::ROPE_BOX ? plan.p[0] : plan.q[box]);
  copy_box(to, map, box * 64, seg.first_pair, seg.stream, shared_address(&plan.q_full));
}

// A warp's part of all but the rope box, whose bytes are expected too. Rows of nobody are not copied where a stream
// has less than a tile: what stands there meets no other row, and a copy takes its time by rows.
DEVICE void fetch_queries(const Params& p, Plan& plan, const TensorMap& map, const Segment& seg) {
  const int warp = warp_id() % 4, rows = min(round_up(p.num_rows * p.num_heads, 8), Config::TILE);  // as the map's box
  if (warp == 0) mbarrier_expect(shared_address(&plan.q_full), Config::K_BOXES * rows * 128);
  for (int box = warp; box < Config::Q_BOXES; box += 4) fetch_query(plan, map, seg, box);
}

template <int BUFFER, int BOX>
DEVICE void score_box(Work& w, float (&s)[SCORES], int accumulate) {
  // The half with the rope box comes first.
  if (BOX == 4 * BUFFER) mbarrier_wait(shared_address(&w.plan.k_full[BUFFER][BUFFER]), w.phases >> BUFFER & 1);
  if (BOX == 4 - 4 * BUFFER) mbarrier_wait(shared_address(&w.plan.k_full[BUFFER][1 - BUFFER]), w.phases >> BUFFER & 1);
  wgmma_fence();
  constexpr u32 K = Config::K_OFFSET + (BUFFER * Config::K_BOXES + BOX) * Config::KEY_BOX_BYTES;
  constexpr u32 Q = Config::Q_OFFSET + BOX * BOX_BYTES;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u64 k = descriptor_k_major(w.place + (K + 32 * step) / 16);
    if constexpr (BOX == Config::ROPE_BOX) {
      wgmma_narrow(s, w.q_rope + 4 * step, k, accumulate || step > 0);
    } else {
      wgmma_narrow(s, descriptor_k_major(w.place + (Q + 32 * step) / 16), k, accumulate || step > 0);
    }
  }
}

// O += P V of one block: P of the group's own block from registers, the other's from shared memory.
template <int BUFFER, int GROUP>
DEVICE void add_values(const Work& w, float (&o)[128], const u32 (&prob)[SCORES / 2]) {
  constexpr u32 V = Config::K_OFFSET + (BUFFER * Config::K_BOXES + 4 * GROUP) * Config::KEY_BOX_BYTES;
#pragma unroll
  for (int step = 0; step < Config::BLOCK_KEYS / 16; ++step) {
    wgmma_n256(o, prob + 4 * step, descriptor_n_major(w.place + (V + 2048 * step) / 16, Config::KEY_BOX_BYTES));
  }
  wgmma_commit();
}
template <int BUFFER, int GROUP>
DEVICE void add_values(const Work& w, float (&o)[128]) {
  constexpr u32 V = Config::K_OFFSET + (BUFFER * Config::K_BOXES + 4 * GROUP) * Config::KEY_BOX_BYTES;
  constexpr u32 P = Config::P_OFFSET + BUFFER * BOX_BYTES;
#pragma unroll
  for (int step = 0; step < Config::BLOCK_KEYS / 16; ++step) {
    wgmma_n256(o, descriptor_k_major(w.place + (P + 32 * step) / 16),
               descriptor_n_major(w.place + (V + 2048 * step) / 16, Config::KEY_BOX_BYTES));
  }
  wgmma_commit();
}

DEVICE void group_0(Work& w, float (&o)[128], Rows& rows) {
  Plan& plan = w.plan;
  float s[SCORES], new_max[2];
  u32 prob[SCORES / 2];
  for (int block = w.begin; block < w.end; block += 2) {
    const bool paired = block + 1 < w.end, masked = block >= w.first_masked;
    if (masked && !w.first) w.mask = load_mask(w.p, w.seg, block, w.row);  // while those values are under way
    wgmma_wait<0>(o);  // the values of the pair before
    if (w.leader && paired && !w.first) {
      fetch_half<1, 0>(plan, w.key_map, take_row(w, 1, block + 1, 0));
    }
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
    if (paired) named_barrier_arrive(S0_ISSUED, Config::THREADS);
    ask_page(w, 0, block + 2);
    ask_page(w, 1, block + 3);
    w.first = false;
    w.phases ^= K0_PARITY;
    if (masked) clear_values(plan.k[0], w.seg, block, 0);
    wgmma_wait<0>(s);
    if (masked) mask_scores(w.mask, s);
    next_max(w.p, s, rows.max, new_max);
    rescale(o, rows, new_max);
    exponentials(w.p, s, rows.max, rows.sum, prob);
    publish(plan.p[0], prob, plan.max[0], rows.max, w.row);
    named_barrier_arrive(P0_READY, Config::THREADS);
    wgmma_fence();
    add_values<0, 0>(w, o, prob);
    wgmma_wait<0>(o);
    if (w.leader) {
      const int row = take_row(w, 0, block + 2, 0);
      if (row >= 0) fetch_half<0, 0>(plan, w.key_map, row);
    }
    if (paired) {
      if (block + 1 >= w.first_masked) {
        mbarrier_wait(shared_address(&plan.k_full[1][0]), w.phases / K1_PARITY & 1);
        clear_values(plan.k[1], w.seg, block + 1, 0);
      }
      named_barrier(P1_READY, Config::THREADS);
      load_max(plan.max[1], w.row, new_max);
      rescale(o, rows, new_max);
      wgmma_fence();
      add_values<1, 0>(w, o);
      w.phases ^= K1_PARITY;
    }
  }
  wgmma_wait<0>(o);
  if (w.leader && plan.next_row[1] >= 0) fetch_half<1, 0>(plan, w.key_map, plan.next_row[1]);
}

DEVICE void group_1(Work& w, float (&o)[128], Rows& rows) {
  Plan& plan = w.plan;
  float s[SCORES], new_max[2];
  u32 prob[SCORES / 2];
  for (int block = w.begin; block < w.end; block += 2) {
    const bool paired = block + 1 < w.end, first = w.first;
    if (paired) {
      if (block + 1 >= w.first_masked && !first) w.mask = load_mask(w.p, w.seg, block + 1, w.row);
      named_barrier(S0_ISSUED, Config::THREADS);  // side by side both would end late, and no softmax run under products
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
      w.first = false;
      w.phases ^= K1_PARITY;
      ask_page(w, 0, block + 2);
      ask_page(w, 1, block + 3);
      if (block + 1 >= w.first_masked) clear_values(plan.k[1], w.seg, block + 1, 1);
      wgmma_wait<0>(s);  // ptxas would put it before the first touch of o anyway
    }
    if (block >= w.first_masked) {
      mbarrier_wait(shared_address(&plan.k_full[0][1]), w.phases & K0_PARITY);
      clear_values(plan.k[0], w.seg, block, 1);
    }
    w.phases ^= K0_PARITY;
    named_barrier(P0_READY, Config::THREADS);
    load_max(plan.max[0], w.row, new_max);
    rescale(o, rows, new_max);
    wgmma_fence();
    add_values<0, 1>(w, o);
    const bool ahead = w.leader && block + 2 >= w.end && plan.next_row[0] >= 0;
    if (ahead) fetch_queries(w.p, plan, w.query_map, w.next);  // the scores of both groups are there
    float sum[2] = {0.0f, 0.0f};
    if (paired) {
      if (block + 1 >= w.first_masked) mask_scores(w.mask, s);
      next_max(w.p, s, rows.max, new_max);
      exponentials(w.p, s, new_max, sum, prob);
      publish(plan.p[1], prob, plan.max[1], new_max, w.row);
      named_barrier_arrive(P1_READY, Config::THREADS);
    }
    wgmma_wait<0>(o);
    if (ahead && warp_id() % 4 == 3) fetch_query(plan, w.query_map, w.next, Config::ROPE_BOX);
    if (w.leader) {
      const int row = take_row(w, 0, block + 2, 0);
      if (row >= 0) fetch_half<0, 1>(plan, w.key_map, row);
    }
    if (paired) {
      rescale(o, rows, new_max);
      rows.sum[0] += sum[0], rows.sum[1] += sum[1];
      wgmma_fence();
      add_values<1, 1>(w, o, prob);
      wgmma_wait<0>(o);
    }
    // After a pair; a segment of one block never used k[1].
    if (w.leader && (paired || first)) {
      const int row = take_row(w, 1, block + 3, 1);
      if (row >= 0) fetch_half<1, 1>(plan, w.key_map, row);
    }
  }
}

// What a segment begins with: the leaders of group 1 ask for its queries, those of either group for a block of keys.
DEVICE void fetch_first_queries(const Params& p, Plan& plan, const TensorMap& map, const Segment& seg, int group) {
  if (group == 0) return;
  fetch_queries(p, plan, map, seg);
  if (warp_id() % 4 == 3) fetch_query(plan, map, seg, Config::ROPE_BOX);
}

// The page of a group's first block of keys; where there is no such block, some page of the table.
DEVICE const i32* first_page(const Params& p, const Segment& seg, int group) {
  return page_of(p, seg, min(seg.begin + group, (p.table_width - 1) * (Config::PAGE / Config::BLOCK_KEYS)));
}
DEVICE void fetch_first_keys(const Params& p, Plan& plan, const TensorMap& map, const Segment& seg, int group,
                             int page) {
  if (seg.begin + group >= seg.end) return;
  const int row = key_row(p, page, seg.begin + group);
  if (group == 0) {
    fetch_half<0, 0>(plan, map, row);
    fetch_half<0, 1>(plan, map, row);
  } else {
    fetch_half<1, 1>(plan, map, row);
    fetch_half<1, 0>(plan, map, row);
  }
}

// The rope box of the queries, as A fragments.
DEVICE void load_rope(Plan& plan, u32 (&q_rope)[16], u32 parity) {
  mbarrier_wait(shared_address(&plan.q_full), parity);
  const int box_row = warp_id() % 4 * 16 + lane_id() % 16;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int chunk = (2 * step + lane_id() / 16) ^ (box_row % 8);
    u32 fragment[4];
    load_matrices(fragment, shared_address(plan.p[0]) + box_row * 128 + chunk * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) q_rope[4 * step + i] = fragment[i];
  }
}

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
    verify_attention_wgmma(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                           const i32* block_table, const i32* prefix_len, const u32* ancestors, const i32* num_nodes,
                           Scalar* o_out, float* lse_out, uint4* partial, float* partial_lse, u32* counters,
                           int num_streams, int num_rows, int num_heads, int num_words, int table_width, int num_pages,
                           int fixed_split, int plan_place, float scale_log2) {
  extern __shared__ __align__(1024) u8 memory[];
  Plan& plan = *reinterpret_cast<Plan*>(memory);
  const Params p = {block_table, prefix_len, ancestors,   num_nodes, o_out,     lse_out,
                    partial,     partial_lse, counters,   num_streams, num_rows, num_heads,
                    num_words,   table_width, num_pages,  fixed_split, scale_log2};
  const int group = __shfl_sync(FULL_MASK, threadIdx.x / 128, 0);
  const bool leader = lane_id() == 0;
  const int row = warp_id() % 4 * 16 + lane_id() / 4;
  if ((shared_address(memory) & 0x3ffff) != 16 * plan_place) __trap();
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    named_barrier_init(P0_READY, Config::THREADS), named_barrier_init(P1_READY, Config::THREADS);
    named_barrier_init(GROUP0, 128), named_barrier_init(GROUP1, 128);
    named_barrier_init(S0_ISSUED, Config::THREADS);
  }
  if (threadIdx.x < Config::BARRIERS) {
    mbarrier_init(shared_address(&plan.q_full) + 8 * threadIdx.x, 1);
    mbarrier_init_fence();
  }
  prefetch_inputs(p);
  // Lengths by every lane, those of a stream, or of the only one.
  const int stream = PARTS ? blockIdx.z : num_streams > 1 ? lane_id() : 0;
  const auto load_length = [&](const i32* of) { return stream < num_streams ? load_fresh(of + stream) : 0; };
  const int end_row = PARTS ? last_row(blockIdx.y, num_heads) : 0;
  const auto find_part = [&](int prefix, int nodes) {
    return part_of_tile(p, stream, blockIdx.y, block_index(), gridDim.x, end_row, prefix, nodes);
  };
  // What stands there before the wait may be old: a guess, from which the part is found while kernels ahead run.
  const int guessed_length = PARTS ? load_length(prefix_len) : 0, guessed_rows = PARTS ? load_length(num_nodes) : 0;
  Segment first = PARTS ? find_part(guessed_length, guessed_rows) : Segment{};
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();
  const bool ahead = PARTS && first.begin < first.end;  // a block without work must copy nothing
  if (ahead && leader) fetch_first_queries(p, plan, query_map, first, group);
  const int length = load_length(prefix_len), rows = load_length(num_nodes);
  int page = PARTS ? load_fresh(first_page(p, first, group)) : 0;
  warm_inputs(p, plan);
  const Stream streams = PARTS ? Stream{} : make_stream(p, stream, length, rows, 0);
  const List list = PARTS ? List{} : make_list(p, streams);
  u32 phases = CHAINED;
  bool more = true;
  if (PARTS || is_single(p, list)) {
    if (PARTS) {
      if (length != guessed_length || rows != guessed_rows) {
        first = find_part(length, rows);
        page = load_fresh(first_page(p, first, group));
      }
      more = first.begin < first.end;
      if (more && !ahead && leader) fetch_first_queries(p, plan, query_map, first, group);
      if (ahead && !more) mbarrier_wait(shared_address(&plan.q_full), 0);  // they must not come after the block's end
      if (first.parts == 0 && block_index() == 0) clear_tile(p, stream, first.first_pair);
    } else {
      more = single_segment(p, streams, first);
      if (more && leader) fetch_first_queries(p, plan, query_map, first, group), page = *first_page(p, first, group);
    }
    if (more && leader) fetch_first_keys(p, plan, key_map, first, group, page);
    if (more && threadIdx.x == 0) {
      plan.segment[0] = first;
      plan.valid[1] = false;
      plan.next_row[0] = plan.next_row[1] = -1;
    }
    phases = CHAINED | STARTED | SINGLE;
    copy_async_wait_all();
    __syncthreads();
  } else if (threadIdx.x == 0) {
    plan.list = list, plan.cursor = make_cursor(list);
  }
  // Else the first round has no segment: it only looks for the first one.
  for (; more; phases ^= TURN, more = plan.valid[turn_of(phases)]) {
    const Segment& seg = plan.segment[turn_of(phases)];
    Segment& next = plan.segment[turn_of(phases) ^ 1];
    if (!PARTS && leader && !(phases & CHAINED)) {
      fetch_first_queries(p, plan, query_map, seg, group);
      fetch_first_keys(p, plan, key_map, seg, group, *first_page(p, seg, group));
    }
    if (!PARTS && threadIdx.x < WARP && !(phases & SINGLE)) {
      __syncwarp();
      const bool valid = next_segment(p, plan.list, plan.cursor, next);
      __syncwarp();
      if (threadIdx.x == 0) {
        const bool ahead = valid && phases & STARTED;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int block = next.begin + i;
          plan.next_row[i] = ahead && block < next.end ? key_row(p, *page_of(p, next, block), block) : -1;
        }
        plan.valid[turn_of(phases) ^ 1] = valid;
      }
    }
    if (!(phases & STARTED)) {
      phases = STARTED;
      copy_async_wait_all();
      __syncthreads();
      continue;
    }
    const int begin = seg.begin, end = seg.end;
    float o[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    Rows rows = {{NO_KEY, NO_KEY}, {0.0f, 0.0f}};
    // While the queries are under way.
    const int first_masked = seg.prefix / Config::BLOCK_KEYS;
    const bool masked = begin + group < end && begin + group >= first_masked;
    const u32 mask = masked ? load_mask(p, seg, begin + group, row) : 0;
    u32 q_rope[16];
    load_rope(plan, q_rope, phases / Q_PARITY & 1);
    __syncthreads();  // p[0] is free, and plan.segment can be read
    Work work = {p,   plan, query_map, key_map,         seg,  next,  q_rope, begin, end, first_masked,
                 row, mask, phases,    u32(plan_place), true, leader};
    if (group == 0) {
      group_0(work, o, rows);
    } else {
      group_1(work, o, rows);
    }
    phases ^= Q_PARITY;
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = warp_sum<4>(rows.sum[r]);
      if (lane_id() % 4 == 0) plan.sum[group][row + 8 * r] = sum[r];
    }
    __syncthreads();  // both groups are through with q, p and k
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = plan.sum[0][row + 8 * r] + plan.sum[1][row + 8 * r];
    phases = plan.next_row[0] >= 0 ? phases | CHAINED : phases & ~CHAINED;
    if (seg.parts == 1) {
      write_tile(p, seg, o, rows.max, sum, row);
    } else if (PARTS) {
      const int slot = part_slot(blockIdx.z * gridDim.y + blockIdx.y, block_index(), gridDim.x);
      hand_in(p, seg, slot, o, rows.max, sum, row);
    } else {
      hand_in(p, seg, part_slot(seg, block_index() - seg.first_block), o, rows.max, sum, row);
      if (is_last(p, plan, seg)) merge_tile(p, seg, row);
    }
    __syncthreads();  // plan.segment was read
  }
  if (!PARTS && list.unused) clear_unused(p);
}

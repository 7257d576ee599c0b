// csrc/tree_build.cu: the best draft tree of a node budget, from the draft's candidates to all arrays of a DraftTree.
//   in   log_probs [S,L,K] f32, nats | token_ids [S,L,K] i32; rows in any order, equal entries keep theirs
//   out  token, parent, depth, rank, first_child, next_sibling [S,N] i32 | logp [S,N] f32
//        ancestors [S,N,ceil(N/32)] u32 | num_nodes, nonfinite_rows [S] i32 | missed_mass [S,L] f32 | truncated [S] u8
//   math score = sum of log-probabilities from the root, f64; rows = the best B = N - 1 rank tuples by (score
//        descending, tuple ascending), a heap's pop order, without its B dependent pops. The best path stands in the
//        pool from the start. Half of the block expands many nodes at once, as they were found: node (..,r) offers
//        (..,r,0), (..,r,0,0), .., (..,2r+1), (..,2r+2), a thread an offer, so that every other tuple has one finder,
//        which precedes it. An offer is dropped where B others surely precede it: B known nodes lie in better bins of
//        a histogram of scores, or B tuples are smaller in every rank. The rest, little more than B nodes, is sorted
//        by bins. A full pool is cut to its best B in this way, and the search goes on.
//   bad  a bad row (tree_build.cuh) ends the tree above it
//   cost 8 LK bytes in, N (28 + N / 8) out a stream; the time is some L / 2 + log(K) steps, a sort, a walk up
//   -D   FINE 1 for budgets whose bins hold many entries (tree_order.cuh), else 0: less code starts sooner
//   ref  kdlab/tree/build.py, the CPU's heap | test tests/kernels/test_tree_build.py | archs all
#include "named_barriers.cuh"
#include "tree_order.cuh"

// What a node offers, a thread an offer: its first child, that one's first child and so on; siblings.
constexpr int GENERATIONS = 2, SIBLINGS = 2, OFFERS = GENERATIONS + SIBLINGS;
static_assert(2 * 1024 >= 1 + MAX_BUDGET + 1024 / 2, "a pool that was cut has room for a step");
enum Barrier { GROWERS = 1, WRITERS };  // half of the block each, or WRITERS all of it
static_assert(WARP % OFFERS == 0, "the offers of a node lie in one warp");

// ---- bins --------------------------------------------------------------------------------------------------------

// Two families of B nodes that reach down to depth lane + 1: the `stair` best ranks of each depth behind the best path,
// and the `side` best ranks of all depths.
struct Family {
  int stair, side;
  DEVICE explicit Family(int budget) {
    const int depths = lane_id() + 1, nodes = max(budget, 1);
    stair = cdiv(nodes, depths);
    side = int(ceilf(exp2f(log2f(float(nodes)) / depths)));
  }
};

// A score that B nodes reach for sure, or -inf: the lowest of the best of these families. `path` becomes the score of
// the best path's node at depth lane + 1.
DEVICE float floor_of(const Params& p, const Plan& plan, const Family& family, int usable, double& path) {
  constexpr int AT_ONCE = 8;  // depths whose loads are under way together
  const int depths = lane_id() + 1;
  path = 0;
  const bool has_stair = depths <= usable && family.stair <= p.width;
  const bool has_box = depths <= usable && family.side <= p.width;
  const float *row = plan.log_probs, *stair_end = row + (has_stair ? family.stair - 1 : 0);
  const float* box_end = row + (has_box ? family.side - 1 : 0);
  float best_path = 0, low_stair = has_stair ? 0 : -INFINITY_F32, low_box = has_box ? 0 : -INFINITY_F32;
  for (int first = 0; first < usable; first += AT_ONCE) {
    float best[AT_ONCE], stair[AT_ONCE], box[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int d = min(first + i, usable - 1) * p.width;
      best[i] = row[d], stair[i] = stair_end[d], box[i] = box_end[d];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const bool counts = first + i < min(depths, usable);
      low_stair = counts ? fminf(low_stair, best_path + stair[i]) : low_stair;
      low_box += counts ? box[i] : 0.0f;
      path += counts ? double(fminf(best[i], 0.0f)) : 0.0;
      best_path += best[i];
    }
  }
  // Lower is always allowed: these sums are rounded, and log-probabilities above 0 count as 0 in scores.
  const float cost = fabsf(fminf(fmaxf(low_stair, low_box), 0.0f));
  const float lowest = __uint_as_float(__reduce_min_sync(FULL_MASK, __float_as_uint(cost)));
  return -lowest * (1 + 4e-6f) - MAX_DEPTH * POSITIVE_TOLERANCE;
}

// The pool before it grows: the root and the best path, as far as it reaches the floor. A whole warp calls.
DEVICE void plant(const Params& p, const Plan& plan, Common& common, int usable, double path) {
  const int depth = lane_id() + 1, bin = bin_of(path, common.floor, common.scale);
  const u32 stays = __ballot_sync(FULL_MASK, depth <= min(usable, p.budget) && bin >= 0);
  const int length = __ffs(~stays) - 1;  // scores fall, so these are the first
  if (depth <= length) {
    plan.score[depth] = path;
    plan.order[depth] = 0;
    plan.link[depth] = pack_link(depth - 1, 0, depth) | (depth < length ? NO_CHILD : 0);
    plan.bound[depth] = depth | 1 << 16;
    atomicAdd(&plan.histogram[bin], 1);
  }
  if (lane_id() > 0) return;
  plan.score[0] = 0;
  plan.order[0] = 0;
  plan.link[0] = pack_link(0, 0, 0) | (length > 0 ? NO_CHILD : 0) | (p.budget > 0 ? 0 : EXPANDED);
  plan.bound[0] = 0 | 1 << 16;  // the root stands for its own parent, so that it counts itself
  common.count = common.tail = 1 + length;
}

// The highest bin that holds the B best entries together with those above it, 0 if there is none. A whole warp calls.
DEVICE int find_cut(const Params& p, const Plan& plan) {
  constexpr int OWN = BINS / WARP;  // bins of a lane
  int own[OWN], sum = 0, cut = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) sum += own[i] = const_cast<volatile i32*>(plan.histogram)[lane_id() * OWN + i];
  int reached = sum_upwards(sum);
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    cut = reached >= p.budget ? lane_id() * OWN + i : cut;
    reached -= own[i];
  }
  return __reduce_max_sync(FULL_MASK, cut);
}

// One warp raises the cut while others push. NOTE: races by design, each of one aligned word. It reads counts that only
// grow, so B entries do lie at or above any cut that it finds; growers read a cut that only rises, so an old one drops
// less and never too much, and each sees `grown` in this turn or in the next. What the sort finds does not depend on
// any of them: it counts anew after a barrier. What is written is written atomically, so that racecheck, too, takes it
// for what it is.
DEVICE void watch_bins(const Params& p, const Plan& plan, Common& common) {
  while (!__shfl_sync(FULL_MASK, *const_cast<volatile int*>(&common.grown), 0)) {
    const int cut = find_cut(p, plan);
    if (lane_id() == 0) atomicMax(&common.cut, cut);
  }
}

// ---- growth ------------------------------------------------------------------------------------------------------

struct Offer {
  bool valid;
  double score;
  u32 link, bound;
  u64 order;
};

// Offer number `kind` of entry `at`; the index of a later generation's parent is not known yet.
DEVICE Offer make_offer(const Params& p, const Plan& plan, const Common& common, int at, int kind) {
  // No branches: the warp's lanes have different kinds, and all loads shall be under way together.
  const u32 link = plan.link[at], bound = plan.bound[at];
  const u64 order = plan.order[at];
  const int depth = depth_of(link), rank = rank_of(link), parent = parent_of(link);
  const int before = bound & 0xffff, product = bound >> 16, own = product * (rank + 1);  // of the parent; of the entry
  const bool down = kind < GENERATIONS;
  const int row = depth - 1, next = SIBLINGS * rank + 1 + kind - GENERATIONS;
  const int bounded = before + (down ? (kind + 2) * own : product * (next + 1));  // nodes at or before the offer
  const int finite = common.num_finite[max(row, 0)];
  const bool deeper = depth + kind < common.usable && !(link & NO_CHILD), wider = depth > 0 && next < finite;
  Offer offer;
  offer.valid = !(link & EXPANDED) && bounded <= p.budget + 1 && (down ? deeper : wider);
  const int from = offer.valid ? (down ? depth * p.width : row * p.width + next) : 0;
  offer.score = plan.score[down ? at : parent] + double(fminf(plan.log_probs[from], 0.0f));
#pragma unroll
  for (int g = 1; g < GENERATIONS; ++g) {
    const bool further = down && offer.valid && g <= kind;
    const double step = double(fminf(plan.log_probs[further ? from + g * p.width : 0], 0.0f));
    offer.score += further ? step : 0.0;
  }
  const u32 child = pack_link(at, 0, depth + kind + 1) | (kind < GENERATIONS - 1 ? NO_CHILD : 0);
  offer.link = down ? child : pack_link(parent, next, depth);
  offer.bound = down ? (before + (kind + 1) * own) | own << 16 : bound;
  const bool ordered = !down && row < ORDER_DEPTHS;
  offer.order = order + (ordered ? u64(next - rank) << (8 * (ORDER_DEPTHS - 1 - row) & 63) : 0);
  return offer;
}

// Lane 0 takes `some` places at the end of the pool. Of one address for all lanes the compiler would first add up what
// they add.
DEVICE int take_places(int* tail, int some) {
  int place = 0;
  asm volatile("{ .reg .pred p; setp.eq.s32 p, %3, 0; @p atom.shared.add.u32 %0, [%1], %2; }"
               : "+r"(place) : "r"(shared_address(tail + lane_id())), "r"(some), "r"(lane_id()) : "memory");
  return __shfl_sync(FULL_MASK, place, 0);
}

// The first half of the block: expand entries until none is left or the pool has no room for a step.
DEVICE void grow(const Params& p, const Plan& plan, Common& common) {
  const int threads = blockDim.x / 2, kind = threadIdx.x % OFFERS, lane = lane_id();
  const float floor = common.floor, scale = common.scale;
  int count = common.count, head = 0;
  while (head < count && count + threads <= p.capacity) {
    const int at = head + threadIdx.x / OFFERS;
    const int cut = *const_cast<volatile int*>(&common.cut);
    Offer offer = make_offer(p, plan, common, min(at, count - 1), kind);
    const int bin = bin_of(offer.score, floor, scale);
    const bool valid = offer.valid && at < count && bin >= cut;
    const u32 takers = __ballot_sync(FULL_MASK, valid);
    const int place = take_places(&common.tail, __popc(takers)) + __popc(takers & ((1u << lane) - 1));
    if (valid) {
      // A later generation's parent took the place before its own.
      if (kind > 0 && kind < GENERATIONS) offer.link += place - 1 - at;
      plan.score[place] = offer.score;
      plan.link[place] = offer.link;
      plan.bound[place] = offer.bound;
      plan.order[place] = offer.order;
      atomicAdd(&plan.histogram[bin], 1);
    }
    head = min(head + threads / OFFERS, count);
    count += named_barrier_count(GROWERS, threads, valid);
  }
  if (threadIdx.x > 0) return;
  common.count = count;
  common.head = head;
  common.finished = head >= count;
  atomicExch(&common.grown, 1);
}

// ---- arrays ------------------------------------------------------------------------------------------------------

// Rows by parent and rank: a hash table that is half empty at least, so that every search ends.
struct Children {
  static constexpr u32 FREE = ~0u;
  static constexpr int ROW_BITS = 11, NEXT_BITS = RANK_BITS + 1;  // a search may be for one rank more than there are
  static_assert(MAX_BUDGET < 1 << ROW_BITS && 2 * ROW_BITS + NEXT_BITS < 32, "parent, rank and row in a word");
  u32* table;  // [slots]: parent, rank, row
  u32 slots;   // a power of two

  DEVICE static u32 key_of(int parent, int rank) { return parent << NEXT_BITS | rank; }
  DEVICE static u32 start_of(u32 key) { return (key * 0x9e3779b1u) >> 16; }
  DEVICE void insert(int parent, int rank, int row) const {
    const u32 key = key_of(parent, rank), entry = key << ROW_BITS | row;
    for (u32 slot = start_of(key); atomicCAS(&table[slot & (slots - 1)], FREE, entry) != FREE;) ++slot;
  }
  DEVICE i32 find(int parent, int rank) const {
    const u32 key = key_of(parent, rank);
    for (u32 slot = start_of(key);; ++slot) {
      const u32 entry = table[slot & (slots - 1)];
      if (entry == FREE) return -1;
      if (entry >> ROW_BITS == key) return entry & ((1 << ROW_BITS) - 1);
    }
  }
};

DEVICE i32 token_of(const Params& p, const Plan& plan, const Common& common, u32 link) {
  const int row = depth_of(link) - 1, rank = rank_of(link);
  const int place = common.unsorted_rows >> row & 1 ? plan.unsorted[row * p.width + rank] : rank;
  return p.token_ids[(i64(blockIdx.x) * p.num_depths + row) * p.width + place];
}

// Thread t writes row t + 1, thread 0 the root besides.
DEVICE void write_rows(const Params& p, const Plan& plan, const Common& common, int num_rows) {
  u16* row_of = reinterpret_cast<u16*>(plan.order);  // [capacity], of an entry
  const u32 slots = 2u << (31 - __clz(max((p.budget > 256 ? 2 : 4) * p.budget - 1, 1)));
  const Children children = {reinterpret_cast<u32*>(row_of + p.capacity), slots};
  const int thread = threadIdx.x, row = thread + 1;
  const bool exists = row <= p.budget, used = row < num_rows;
  const i64 out = i64(blockIdx.x) * (p.budget + 1);
  const int index = used ? plan.list[thread] : 0;
  const u32 link = used ? plan.link[index] : 0;
  const int rank = rank_of(link);
  const i32 token = used ? token_of(p, plan, common, link) : -1;
  const float logp = used ? float(plan.score[index]) : 0.0f;
  for (u32 i = thread; i < slots; i += blockDim.x) children.table[i] = Children::FREE;
  if (thread == 0) row_of[0] = 0;
  if (used) row_of[index] = u16(row);
  __syncthreads();
  const int parent = used ? row_of[parent_of(link)] : -1;
  if (used) children.insert(parent, rank, row);
  if (used) plan.up[row] = u16(parent);
  __syncthreads();
  if (exists) {
    p.token[out + row] = token;
    p.parent[out + row] = parent;
    p.depth[out + row] = depth_of(link);
    p.rank[out + row] = rank;
    p.logp[out + row] = logp;
    p.first_child[out + row] = used ? children.find(row, 0) : -1;
    p.next_sibling[out + row] = used ? children.find(parent, rank + 1) : -1;
  }
  if (thread > 0) return;
  p.token[out] = p.depth[out] = p.rank[out] = 0;
  p.parent[out] = p.next_sibling[out] = -1;
  p.logp[out] = 0;
  p.first_child[out] = children.find(0, 0);
  p.num_nodes[blockIdx.x] = num_rows;
  const bool whole = p.whole >= 0 ? p.whole : common.looks_whole;
  p.truncated[blockIdx.x] = p.width < p.budget && p.num_depths > 0 && !whole;
}

// Ancestor bits by the threads from `first` on, a thread a row, as many rows at once as `bytes` of the pool hold.
DEVICE void write_ancestors(const Params& p, const Plan& plan, int num_rows, int first, int bytes) {
  const int rows = p.budget + 1, words = cdiv(rows, 32);
  const int thread = int(threadIdx.x) - first, threads = int(blockDim.x) - first;
  if (thread < 0) return;
  u32* tile = reinterpret_cast<u32*>(plan.score);
  const int at_once = min(bytes / 4 / words, threads);
  u32* out = p.ancestors + i64(blockIdx.x) * rows * words;
  for (int start = 0; start < rows; start += at_once) {
    const int some = min(at_once, rows - start), row = start + thread;
    if (thread < some) {
      u32* bits = tile + thread * words;
      for (int w = 0; w < words; ++w) bits[w] = 0;
      for (int at = row; at < num_rows; at = at > 0 ? plan.up[at] : num_rows) atomicOr(&bits[at / 32], 1u << (at % 32));
    }
    named_barrier(WRITERS, threads);
    for (int i = thread; i < some * words; i += threads) out[start * words + i] = tile[i];
    if (start + at_once < rows) named_barrier(WRITERS, threads);
  }
}

// Grid S; a block has 512 or 1,024 threads, at least B; the pool has at most MAX_PER_THREAD entries a thread.
extern "C" __global__ void __launch_bounds__(1024, 1)
    tree_build(const float* log_probs, const i32* token_ids, i32* token, i32* parent, i32* depth, float* logp,
               i32* rank, i32* num_nodes, u32* ancestors, i32* first_child, i32* next_sibling, float* missed_mass,
               u8* truncated, i32* nonfinite_rows, int num_depths, int width, int budget, int capacity, int last_id,
               int whole) {
  extern __shared__ u64 shared_memory[];
  Common& common = *reinterpret_cast<Common*>(shared_memory);
  const Params p = {log_probs,    token_ids, token,     parent,    depth,          rank,        first_child,
                    next_sibling, logp,      ancestors, num_nodes, nonfinite_rows, missed_mass, truncated,
                    num_depths,   width,     budget,    capacity,  last_id,        whole};
  const Plan plan(shared_memory + COMMON_BYTES / 8, capacity, num_depths, width, budget + 1);
  if (threadIdx.x < MAX_DEPTH) common.num_finite[threadIdx.x] = 0;
  if (threadIdx.x < sizeof(common.seen) / 4) (&common.seen[0][0])[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < BINS; i += blockDim.x) plan.histogram[i] = 0;
  if (threadIdx.x == 0) {
    common.bad_rows = common.unsorted_rows = 0;
    common.looks_whole = 1;
    common.cut = 0;
    common.grown = 0;
    named_barrier_init(GROWERS, blockDim.x / 2);
    named_barrier_init(WRITERS, budget < blockDim.x / 2 ? blockDim.x / 2 : blockDim.x);
  }
  const Family family(budget);
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_launch();
  load_candidates(p, plan, common);
  __syncthreads();
  if (common.unsorted_rows) {
    sort_rows(p, plan, common);
    __syncthreads();
  }
  if (warp_id() == 0) {
    const int usable = __ffs(~good_rows(p, common)) - 1;
    double path;
    const float floor = floor_of(p, plan, family, usable, path);
    if (lane_id() == 0) {
      common.usable = usable;
      common.floor = floor;
      common.scale = scale_of(plan, floor);
    }
    __syncwarp();
    plant(p, plan, common, usable, path);
  }
  __syncthreads();
  const int growers = blockDim.x / WARP / 2, warp = warp_id();
  for (bool first = true;; first = false) {
    if (warp < growers) grow(p, plan, common);
    else if (warp == growers) watch_bins(p, plan, common);
    else if (first) weigh_rows(p, plan, common, warp - growers - 1, growers - 1);
    __syncthreads();
    sort_entries(p, plan, common);
    if (common.finished) break;
    cut_pool(p, plan, common);
  }
  const int num_rows = 1 + min(common.num_sorted, budget);
  write_rows(p, plan, common, num_rows);
  // Where half of the block has a thread a row, the other half writes the bits meanwhile, where the scores were.
  const bool halves = budget < blockDim.x / 2;
  if (!halves) __syncthreads();
  write_ancestors(p, plan, num_rows, halves ? blockDim.x / 2 : 0, capacity * (halves ? 8 : PLAN_BYTES));
}

// csrc/tree_build.cu: the best draft tree of a node budget, from the draft's candidates to all arrays of a DraftTree.
//   in   log_probs [S,L,K] f32, nats | token_ids [S,L,K] i32; rows in any order, equal entries keep theirs
//   out  token, parent, depth, rank, first_child, next_sibling [S,N] i32 | logp [S,N] f32
//        ancestors [S,N,ceil(N/32)] u32 | num_nodes, nonfinite_rows [S] i32 | missed_mass [S,L] f32 | truncated [S] u8
//   math score = sum of log-probabilities from the root, f64; rows = the best B = N - 1 rank tuples by (score
//        descending, tuple ascending), a heap's pop order, without its B dependent pops: warp 0 expands up to 64 known
//        nodes at once, as they were found. Node (..,r) offers (..,r,0), often (..,r,0,0), (..,2r+1) and (..,2r+2), so
//        every tuple has one finder, which precedes it. An offer is dropped where B others surely precede it: B known
//        nodes lie in better bins of a histogram of scores, or B tuples are smaller in every rank. The rest, little
//        more than B nodes, is sorted. A full pool is cut to its best B in the same way, and the search goes on.
//   bad  a bad row (tree_build.cuh) ends the tree above it
//   cost 8 LK bytes in, N (28 + N / 8) out a stream; the time is some L + log2(K) dependent steps, a sort, a walk up
//   ref  kdlab/tree/build.py, the CPU's heap | test tests/kernels/test_tree_build.py | archs all
#include "tree_build.cuh"

constexpr int ITEMS = 2;                       // nodes that a lane expands at once
constexpr int MOST_OFFERS = 4 * ITEMS * WARP;  // of one step
constexpr int PAIR_BUDGET = 128;  // up to here steps are many for their nodes: a node offers its first two generations
constexpr int LAZY = 32;          // nodes above the budget before the histogram is looked at again

constexpr int PARENT_BITS = 12, RANK_BITS = 8, DEPTH_BITS = 5;
constexpr u32 EXPANDED = 1u << 31;  // its offers have been made
constexpr u32 NO_CHILD = 1u << 30;  // its child was found along with it
static_assert(MAX_PER_THREAD * 1024 <= 1 << PARENT_BITS && MAX_WIDTH <= 1 << RANK_BITS && MAX_DEPTH < 1 << DEPTH_BITS,
              "each field holds what it may have to");
static_assert(PARENT_BITS + RANK_BITS + DEPTH_BITS <= 30 && MAX_DEPTH < WARP, "a link in one word, a lane a depth");
static_assert(2 * 1024 >= 1 + MAX_BUDGET + MOST_OFFERS, "a pool that was cut has room for a step");
static_assert(MAX_BUDGET + 1 < 1 << 16, "rows and bounds in 16 bits");

DEVICE u32 pack_link(int parent, int rank, int depth) {
  return parent | rank << PARENT_BITS | depth << (PARENT_BITS + RANK_BITS);
}
DEVICE int parent_of(u32 link) { return link & ((1 << PARENT_BITS) - 1); }
DEVICE int rank_of(u32 link) { return link >> PARENT_BITS & ((1 << RANK_BITS) - 1); }
DEVICE int depth_of(u32 link) { return link >> (PARENT_BITS + RANK_BITS) & ((1 << DEPTH_BITS) - 1); }

// Monotone in the score: the nodes of a bin precede those of the bins below. -1 below the floor.
DEVICE int bin_of(double score, float floor, float scale) {
  const float place = (float(score) - floor) * scale;
  return place < 0 ? -1 : int(fminf(place, BINS - 1));
}

DEVICE float scale_of(const Plan& plan, float floor) {
  const float best = fminf(plan.log_probs[0], 0.0f);
  return best > floor ? BINS / (best - floor) : 1.0f;
}

// ---- growth ------------------------------------------------------------------------------------------------------

// An entry with all that its offers need.
struct Entry {
  u32 link, bound;  // link 0 with bound 0 offers nothing
  double score, parent_score;
  float child, grandchild, sibling[2];  // log-probabilities; +inf where there is no candidate
};

// Warp 0's view of the pool, the same in every lane but `lowest`.
struct Growth {
  int count, cut, kept;
  bool has_bins;
  float floor, scale;
  float lowest;  // of the scores that this lane pushed

  DEVICE Entry load(const Params& p, const Plan& plan, const Common& common, int at) const {
    Entry entry = {0, 0, 0, 0, INFINITY_F32, INFINITY_F32, {INFINITY_F32, INFINITY_F32}};
    const u32 link = at < count ? plan.link[at] : EXPANDED;
    if (link & EXPANDED) return entry;
    entry.score = plan.score[at];
    plan.link[at] = link | EXPANDED;
    if (has_bins && bin_of(entry.score, floor, scale) < cut) return entry;
    entry.link = link;
    entry.bound = plan.bound[at];
    entry.parent_score = plan.score[parent_of(link)];
    const int depth = depth_of(link), next = 2 * rank_of(link) + 1;
    const float* row = plan.log_probs + depth * p.width;  // the children's
    if (depth < common.usable && !(link & NO_CHILD)) entry.child = fminf(row[0], 0.0f);
    if (depth + 1 < common.usable && p.budget <= PAIR_BUDGET) entry.grandchild = fminf(row[p.width], 0.0f);
    const int finite = depth > 0 ? common.num_finite[depth - 1] : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (next + i < finite) entry.sibling[i] = fminf(row[next + i - p.width], 0.0f);
    return entry;
  }

  // Append one offer a lane, where it is one; returns its index, or -1.
  DEVICE int push(const Plan& plan, bool valid, double score, u32 link, u32 bound) {
    const int bin = has_bins ? bin_of(score, floor, scale) : 0;
    valid = valid && bin >= cut;
    const u32 takers = __ballot_sync(FULL_MASK, valid);
    const int at = valid ? count + __popc(takers & ((1u << lane_id()) - 1)) : -1;
    if (valid) {
      plan.score[at] = score;
      plan.link[at] = link;
      plan.bound[at] = bound;
      lowest = fminf(lowest, float(score));
      if (has_bins) atomicAdd(&plan.histogram[bin], 1);
    }
    count += __popc(takers);
    kept += __popc(takers);
    return at;
  }

  // The first child, its first child, and the two siblings that no other entry finds.
  DEVICE void push_offers(const Plan& plan, const Entry& entry, int at, int budget) {
    const int rank = rank_of(entry.link), depth = depth_of(entry.link);
    const int before = entry.bound & 0xffff, product = entry.bound >> 16;  // of the parent
    const int own = product * (rank + 1);
    const double child_score = entry.score + double(entry.child);
    const bool pair = entry.child <= 0 && entry.grandchild <= 0;
    const int child = push(plan, entry.child <= 0 && before + 2 * own <= budget + 1, child_score,
                           pack_link(at, 0, depth + 1) | (pair ? NO_CHILD : 0), (before + own) | own << 16);
    if (budget <= PAIR_BUDGET) {
      push(plan, pair && child > 0 && before + 3 * own <= budget + 1, child_score + double(entry.grandchild),
           pack_link(child, 0, depth + 2), (before + 2 * own) | own << 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int next = 2 * rank + 1 + i;
      push(plan, entry.sibling[i] <= 0 && before + product * (next + 1) <= budget + 1,
           entry.parent_score + double(entry.sibling[i]), pack_link(parent_of(entry.link), next, depth), entry.bound);
    }
  }

  // The first nodes that fill the budget span the bins: none that is worse can be among the best.
  DEVICE void make_bins(const Plan& plan) {
    floor = warp_min(lowest);
    scale = scale_of(plan, floor);
    has_bins = true;
    for (int i = lane_id(); i < BINS; i += WARP) plan.histogram[i] = 0;
    __syncwarp();
#pragma unroll 4
    for (int i = 1 + lane_id(); i < count; i += WARP) {
      atomicAdd(&plan.histogram[bin_of(plan.score[i], floor, scale)], 1);
    }
    __syncwarp();
  }

  // Give up the lowest bins as long as the others hold the budget.
  DEVICE void raise_cut(const Plan& plan, int budget) {
    for (int given_up = WARP; given_up == WARP; cut += given_up) {
      int sum = cut + lane_id() < BINS ? plan.histogram[cut + lane_id()] : kept + 1;
#pragma unroll
      for (int offset = 1; offset < WARP; offset *= 2) {
        const int below = __shfl_up_sync(FULL_MASK, sum, offset);
        if (lane_id() >= offset) sum += below;
      }
      given_up = __popc(__ballot_sync(FULL_MASK, kept - sum >= budget));
      const int gone = __shfl_sync(FULL_MASK, sum, (given_up - 1) & (WARP - 1));
      if (given_up > 0) kept -= gone;
    }
  }
};

// Warp 0: expand entries until none is left or the pool has no room for a step.
DEVICE void grow(const Params& p, const Plan& plan, Common& common) {
  Growth pool = {common.count, common.cut, common.kept, common.has_bins, common.floor, common.scale, 0};
  int head = 0;
  while (head < pool.count && pool.count + MOST_OFFERS <= p.capacity) {
    const int first = head + lane_id();
    Entry entries[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) entries[i] = pool.load(p, plan, common, first + i * WARP);
    head = min(head + ITEMS * WARP, pool.count);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) pool.push_offers(plan, entries[i], first + i * WARP, p.budget);
    __syncwarp();
    const bool full = pool.kept >= p.budget + (pool.has_bins ? LAZY : 0);
    if (full && !pool.has_bins) pool.make_bins(plan);
    if (full) pool.raise_cut(plan, p.budget);
  }
  if (pool.has_bins) pool.raise_cut(plan, p.budget);
  if (lane_id() > 0) return;
  common.count = pool.count;
  common.cut = pool.cut;
  common.has_bins = pool.has_bins;
  common.floor = pool.floor;
  common.scale = pool.scale;
  common.finished = head >= pool.count;
  common.num_sorted = 0;
}

// ---- order -------------------------------------------------------------------------------------------------------

// Of two different entries: whether a's tuple of ranks is the smaller one; a prefix is smaller than what it begins.
DEVICE bool tuple_before(const u32* links, int a, int b) {
  u32 x = links[a], y = links[b];
  const bool shorter = depth_of(x) < depth_of(y);
  while (depth_of(x) > depth_of(y)) x = links[a = parent_of(x)];
  while (depth_of(y) > depth_of(x)) y = links[b = parent_of(y)];
  if (a == b) return shorter;
  while (parent_of(x) != parent_of(y)) {
    x = links[parent_of(x)];
    y = links[parent_of(y)];
  }
  return rank_of(x) < rank_of(y);
}

DEVICE bool precedes(const u32* links, double score, int index, double other_score, int other) {
  return score > other_score || (score == other_score && tuple_before(links, index, other));
}

// Put what is still of interest into the list, in any order.
DEVICE void list_entries(const Plan& plan, Common& common) {
  for (int start = 1; start < common.count; start += blockDim.x) {
    const int i = start + threadIdx.x;
    const double score = i < common.count ? plan.score[i] : 0;
    const bool in = i < common.count && (!common.has_bins || bin_of(score, common.floor, common.scale) >= common.cut);
    const u32 takers = __ballot_sync(FULL_MASK, in);
    int at = lane_id() == 0 && takers ? atomicAdd(&common.num_sorted, __popc(takers)) : 0;
    at = __shfl_sync(FULL_MASK, at, 0) + __popc(takers & ((1u << lane_id()) - 1));
    if (!in) continue;
    plan.key[at] = score;
    plan.list[at] = u16(i);
  }
  __syncthreads();
}

// Place of list element i within its group of 32: the number of those before it. Whole warps call.
DEVICE int place_in_group(const Plan& plan, int i, int total, double key, int index) {
  const int start = i - lane_id();
  int place = start;
  for (int j = 0; j < min(WARP, total - start); ++j) {
    const double other = __shfl_sync(FULL_MASK, key, j);
    const int other_index = __shfl_sync(FULL_MASK, index, j);
    if (i < total && j != lane_id()) place += precedes(plan.link, other, other_index, key, index);
  }
  return place;
}

// Place of list element i once its sorted run and the neighbouring one are merged: binary search in the other.
DEVICE int place_in_merge(const Plan& plan, int i, int total, int run, double key, int index) {
  const int own = i / run * run, other = own ^ run, start = min(other, total);
  int low = start, high = min(other + run, total);
  while (low < high) {
    const int middle = (low + high) / 2;
    if (precedes(plan.link, plan.key[middle], plan.list[middle], key, index)) low = middle + 1;
    else high = middle;
  }
  return min(own, other) + (i - own) + (low - start);
}

// Merge sort of the list in place; `run` is the length of what is sorted already.
DEVICE void sort_list(const Plan& plan, int total) {
  double key[MAX_PER_THREAD];
  int index[MAX_PER_THREAD], place[MAX_PER_THREAD];
  for (int run = 1; run < total; run = run == 1 ? WARP : 2 * run) {
#pragma unroll
    for (int e = 0; e < MAX_PER_THREAD; ++e) {
      const int i = threadIdx.x + e * blockDim.x;
      if (i - lane_id() >= total) continue;
      key[e] = i < total ? plan.key[i] : 0;
      index[e] = i < total ? plan.list[i] : 0;
      if (run == 1) place[e] = place_in_group(plan, i, total, key[e], index[e]);
      else if (i < total) place[e] = place_in_merge(plan, i, total, run, key[e], index[e]);
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < MAX_PER_THREAD; ++e) {
      if (int(threadIdx.x + e * blockDim.x) >= total) continue;
      plan.key[place[e]] = key[e];
      plan.list[place[e]] = u16(index[e]);
    }
    __syncthreads();
  }
}

// Keep the best B entries only, in order, with bins that span them. A finder precedes what it finds, so none is lost.
DEVICE void cut_pool(const Params& p, const Plan& plan, Common& common) {
  const int thread = threadIdx.x;
  const bool stays = thread < p.budget;
  const int old = stays ? plan.list[thread] : 0;
  const double score = plan.score[old];
  const u32 link = plan.link[old], bound = plan.bound[old];
  const float floor = float(plan.key[p.budget - 1]), scale = scale_of(plan, floor);
  u16* renamed = reinterpret_cast<u16*>(plan.key);  // [capacity]
  __syncthreads();
  for (int i = thread; i < BINS; i += blockDim.x) plan.histogram[i] = 0;
  if (stays) renamed[old] = u16(thread + 1);
  if (thread == 0) {
    renamed[0] = 0;
    common.count = p.budget + 1;
    common.kept = p.budget;
    common.cut = 0;
    common.floor = floor;
    common.scale = scale;
  }
  __syncthreads();
  if (stays) {
    plan.score[thread + 1] = score;
    const u32 made = link & (EXPANDED | NO_CHILD);
    plan.link[thread + 1] = made | pack_link(renamed[parent_of(link)], rank_of(link), depth_of(link));
    plan.bound[thread + 1] = bound;
    atomicAdd(&plan.histogram[bin_of(score, floor, scale)], 1);
  }
  __syncthreads();
}

// ---- arrays ------------------------------------------------------------------------------------------------------

// Sum of `value` over the threads before this one.
DEVICE int exclusive_scan(int value, int* totals) {
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) {
    const int below = __shfl_up_sync(FULL_MASK, sum, offset);
    if (lane_id() >= offset) sum += below;
  }
  if (lane_id() == WARP - 1) totals[warp_id()] = sum;
  __syncthreads();
  for (int w = 0; w < warp_id(); ++w) sum += totals[w];
  return sum - value;
}

DEVICE i32 token_of(const Params& p, const Plan& plan, const Common& common, u32 link) {
  const int row = depth_of(link) - 1, rank = rank_of(link);
  const int place = common.unsorted_rows >> row & 1 ? plan.order[row * p.width + rank] : rank;
  return p.token_ids[(i64(blockIdx.x) * p.num_depths + row) * p.width + place];
}

// Thread t writes row t + 1, thread 0 the root besides. The children of a row have ranks 0, 1, .. without a gap, so
// they stand side by side in a list of all rows by parent and rank.
DEVICE void write_rows(const Params& p, const Plan& plan, Common& common, int num_rows) {
  u16* row_of = reinterpret_cast<u16*>(plan.key);                 // [capacity], of an entry
  u32* children = reinterpret_cast<u32*>(row_of + p.capacity);    // [N]: number | start in `sorted` << 16
  u16* sorted = reinterpret_cast<u16*>(children + p.budget + 1);  // [N]: rows by parent and rank
  const int thread = threadIdx.x, row = thread + 1;
  const bool exists = row <= p.budget, used = row < num_rows;
  const i64 out = i64(blockIdx.x) * (p.budget + 1);
  const int index = used ? plan.list[thread] : 0;
  const u32 link = used ? plan.link[index] : 0;
  const int rank = rank_of(link);
  const i32 token = used ? token_of(p, plan, common, link) : -1;
  const float logp = used ? float(plan.score[index]) : 0.0f;
  if (exists) children[row] = 0;
  if (thread == 0) row_of[0] = children[0] = 0;
  if (used) row_of[index] = u16(row);
  __syncthreads();
  const int parent = used ? row_of[parent_of(link)] : 0;
  if (used) atomicAdd(&children[parent], 1);
  if (exists) plan.up[row] = u16(parent);
  __syncthreads();
  const int num_children = used ? children[row] : 0, of_root = children[0];
  const int start = of_root + exclusive_scan(num_children, common.scan);
  if (used) children[row] = num_children | start << 16;
  __syncthreads();
  const int place = (children[parent] >> 16) + rank, siblings = children[parent] & 0xffff;
  if (used) sorted[place] = u16(row);
  __syncthreads();
  if (exists) {
    p.token[out + row] = token;
    p.parent[out + row] = used ? parent : -1;
    p.depth[out + row] = depth_of(link);
    p.rank[out + row] = rank;
    p.logp[out + row] = logp;
    p.first_child[out + row] = num_children > 0 ? sorted[start] : -1;
    p.next_sibling[out + row] = used && rank + 1 < siblings ? sorted[place + 1] : -1;
  }
  if (thread > 0) return;
  p.token[out] = p.depth[out] = p.rank[out] = 0;
  p.parent[out] = p.next_sibling[out] = -1;
  p.logp[out] = 0;
  p.first_child[out] = of_root > 0 ? sorted[0] : -1;
  p.num_nodes[blockIdx.x] = num_rows;
  const bool whole = p.whole >= 0 ? p.whole : common.looks_whole;
  p.truncated[blockIdx.x] = p.width < p.budget && p.num_depths > 0 && !whole;
}

// The row's own bit and those of the rows above it, from the last word to the first.
DEVICE void walk_up(const u16* up, int row, u32* bits) {
  int word = row / 32;
  u32 value = 1u << (row % 32);
  while (row > 0) {
    row = up[row];
    if (row / 32 != word) {
      bits[word] = value;
      word = row / 32;
      value = 0;
    }
    value |= 1u << (row % 32);
  }
  bits[word] = value;
}

// Ancestor bits, a thread a row, as many rows at once as fit where the pool was.
DEVICE void write_ancestors(const Params& p, const Plan& plan, int num_rows) {
  const int rows = p.budget + 1, words = cdiv(rows, 32);
  u32* tile = reinterpret_cast<u32*>(plan.score);
  const int at_once = min(p.capacity * 26 / 4 / words, int(blockDim.x));
  u32* out = p.ancestors + i64(blockIdx.x) * rows * words;
  for (int start = 0; start < rows; start += at_once) {
    const int some = min(at_once, rows - start), row = start + threadIdx.x;
    __syncthreads();
    if (int(threadIdx.x) < some) {
      u32* bits = tile + threadIdx.x * words;
      for (int w = 0; w < words; ++w) bits[w] = 0;
      if (row < num_rows) walk_up(plan.up, row, bits);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < some * words; i += blockDim.x) out[start * words + i] = tile[i];
  }
}

// Grid S; a block has at least two warps and at least B threads, the pool at most MAX_PER_THREAD entries a thread.
extern "C" __global__ void __launch_bounds__(1024)
    tree_build(const float* log_probs, const i32* token_ids, i32* token, i32* parent, i32* depth, float* logp,
               i32* rank, i32* num_nodes, u32* ancestors, i32* first_child, i32* next_sibling, float* missed_mass,
               u8* truncated, i32* nonfinite_rows, int num_depths, int width, int budget, int capacity, int last_id,
               int whole) {
  extern __shared__ u64 shared_memory[];
  __shared__ Common common;
  const Params p = {log_probs,    token_ids, token,     parent,    depth,          rank,        first_child,
                    next_sibling, logp,      ancestors, num_nodes, nonfinite_rows, missed_mass, truncated,
                    num_depths,   width,     budget,    capacity,  last_id,        whole};
  const Plan plan(shared_memory, capacity, num_depths, width, budget + 1);
  if (threadIdx.x < MAX_DEPTH) common.num_finite[threadIdx.x] = width;
  if (threadIdx.x == 0) {
    common.bad_rows = common.unsorted_rows = 0;
    common.looks_whole = 1;
    common.count = 1;
    common.cut = common.kept = 0;
    common.has_bins = false;
    plan.score[0] = 0;
    plan.link[0] = pack_link(0, 0, 0) | (budget > 0 ? 0 : EXPANDED);
    plan.bound[0] = 0 | 1 << 16;  // the root stands for its own parent, so that it counts itself
  }
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
    const u32 good = good_rows(p, plan, common);
    if (lane_id() == 0) common.usable = __ffs(~good) - 1;
    __syncwarp();
    grow(p, plan, common);
  } else {
    weigh_rows(p, plan, common);
  }
  __syncthreads();
  for (;;) {
    list_entries(plan, common);
    sort_list(plan, common.num_sorted);
    if (common.finished) break;
    cut_pool(p, plan, common);
    if (warp_id() == 0) grow(p, plan, common);
    __syncthreads();
  }
  const int num_rows = 1 + min(common.num_sorted, budget);
  write_rows(p, plan, common, num_rows);
  write_ancestors(p, plan, num_rows);
}

// csrc/tree_order.cuh: entries of tree_build.cu's pool: what a word says of one, bins of scores, the exact order.
//   An entry's place is the number of entries in better bins, and of those in its own bin that precede it. Where bins
//   hold many (FINE: with a flat draft and a budget of 1,024 a hundred, and 27,000 cycles went there), they are cut
//   once more.
//   test tests/kernels/test_tree_build.py
#pragma once

#include "tree_build.cuh"

constexpr int PARENT_BITS = 12, RANK_BITS = 8, DEPTH_BITS = 5;
constexpr u32 EXPANDED = 1u << 31;  // its offers had been made when the pool was cut
constexpr u32 NO_CHILD = 1u << 30;  // its child was offered along with it
static_assert(MAX_PER_THREAD * 1024 <= 1 << PARENT_BITS && MAX_WIDTH <= 1 << RANK_BITS && MAX_DEPTH < 1 << DEPTH_BITS,
              "each field holds what it may have to");
static_assert(PARENT_BITS + RANK_BITS + DEPTH_BITS <= 30 && MAX_DEPTH < WARP, "a link in one word, a lane a depth");
static_assert(MAX_BUDGET + 1 < 1 << 16, "rows and bounds in 16 bits");

DEVICE u32 pack_link(int parent, int rank, int depth) {
  return parent | rank << PARENT_BITS | depth << (PARENT_BITS + RANK_BITS);
}
DEVICE int parent_of(u32 link) { return link & ((1 << PARENT_BITS) - 1); }
DEVICE int rank_of(u32 link) { return link >> PARENT_BITS & ((1 << RANK_BITS) - 1); }
DEVICE int depth_of(u32 link) { return link >> (PARENT_BITS + RANK_BITS) & ((1 << DEPTH_BITS) - 1); }

// ---- bins --------------------------------------------------------------------------------------------------------

// Monotone in the score: the nodes of a bin precede those of the bins below. -1 below the floor.
DEVICE int bin_of(double score, float floor, float scale) {
  const float place = (float(score) - floor) * scale;
  return place < 0 ? -1 : int(fminf(place, BINS - 1));
}

DEVICE float scale_of(const Plan& plan, float floor) {
  const float best = fminf(plan.log_probs[0], 0.0f);  // unused memory without candidates, and then no score is binned
  return best > floor ? BINS / (best - floor) : 1.0f;
}

// Sum of `value` over this lane and those above.
DEVICE int sum_upwards(int value) {
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) {
    const int higher = __shfl_down_sync(FULL_MASK, value, offset);
    if (lane_id() + offset < WARP) value += higher;
  }
  return value;
}

// The same cut once nobody pushes, the number of entries from it upwards, and of every bin its place in the list.
DEVICE void place_bins(const Params& p, const Plan& plan, Common& common) {
  const int bin = threadIdx.x;
  if (bin >= BINS) return;
  int higher = 0;
  for (int i = round_up(bin + 1, WARP) + lane_id(); i < BINS; i += WARP) higher += plan.histogram[i];
  const int own = plan.histogram[bin], above = __reduce_add_sync(FULL_MASK, higher) + sum_upwards(own) - own;
  plan.next[bin] = above;
  const int wanted = max(p.budget, 1);
  if (above < wanted && (above + own >= wanted || bin == 0)) {
    common.cut = bin;
    common.num_sorted = above + own;
  }
}

// ---- order -------------------------------------------------------------------------------------------------------

// Of two different entries: whether a's tuple of ranks is the smaller one; a prefix is smaller than what it begins.
DEVICE bool tuple_before(const Plan& plan, int a, int b) {
  if (plan.order[a] != plan.order[b]) return plan.order[a] < plan.order[b];
  u32 x = plan.link[a], y = plan.link[b];
  const bool shorter = depth_of(x) < depth_of(y);
  while (depth_of(x) > depth_of(y)) x = plan.link[a = parent_of(x)];
  while (depth_of(y) > depth_of(x)) y = plan.link[b = parent_of(y)];
  if (a == b) return shorter;
  while (parent_of(x) != parent_of(y)) {
    x = plan.link[parent_of(x)];
    y = plan.link[parent_of(y)];
  }
  return rank_of(x) < rank_of(y);
}

// Bins that hold many entries, cut finely: an entry's slot is its place in the list, taken from its place in its bin
// as if scores lay evenly there. Slots are monotone in the score as bins are. Two counters of 16 bits in a word.
struct Slots {
  u32* words;  // where write_rows puts `up` later
  int count;   // even
  const Plan& plan;
  const Common& common;

  DEVICE Slots(const Params& p, const Plan& plan, const Common& common)
      : words(reinterpret_cast<u32*>(plan.up)), count(p.budget & ~1), plan(plan), common(common) {}

  // Found twice for each entry, so its roundings are written out.
  DEVICE int of(double score) const {
    const float place = fminf(__fmul_rn(float(score) - common.floor, common.scale), BINS);
    const int bin = min(int(place), BINS - 1);
    const float before = fmaf(bin + 1 - place, plan.histogram[bin], plan.next[bin]);
    return min(int(before * count / common.num_sorted), count - 1);
  }
  DEVICE int start(int slot) const {
    return slot == count ? common.num_sorted : words[slot / 2] >> (16 * (slot % 2)) & 0xffff;
  }
};

// Each entry into the part of the list that belongs to its bin, in any order; `next` becomes the part's end.
DEVICE void list_by_bins(const Plan& plan, const Common& common) {
  for (int i = 1 + threadIdx.x; i < common.count; i += blockDim.x) {
    const int bin = bin_of(plan.score[i], common.floor, common.scale);
    if (bin >= common.cut) plan.list[atomicAdd(&plan.next[bin], 1)] = u16(i);
  }
}

// The same by slots, whose words, zero before, become the slots' starts.
DEVICE void list_by_slots(const Plan& plan, Common& common, const Slots& slots) {
  int slot[MAX_PER_THREAD], place[MAX_PER_THREAD];
#pragma unroll
  for (int e = 0; e < MAX_PER_THREAD; ++e) {
    const int i = 1 + threadIdx.x + e * blockDim.x;
    const double score = plan.score[min(i, common.count - 1)];
    slot[e] = -1;
    if (i >= common.count || bin_of(score, common.floor, common.scale) < common.cut) continue;
    slot[e] = slots.of(score);
    const int shift = 16 * (slot[e] % 2);
    place[e] = atomicAdd(&slots.words[slot[e] / 2], 1u << shift) >> shift & 0xffff;
  }
  __syncthreads();
  const int word = threadIdx.x;
  const u32 counts = word < slots.count / 2 ? slots.words[word] : 0;
  const int own = (counts & 0xffff) + (counts >> 16), through = warp_sum_through(own);
  if (lane_id() == WARP - 1) common.seen[warp_id()][0] = through;
  __syncthreads();
  const int lower = lane_id() < warp_id() ? common.seen[lane_id()][0] : 0;
  const u32 before = __reduce_add_sync(FULL_MASK, lower) + through - own;
  if (word < slots.count / 2) slots.words[word] = before | (before + (counts & 0xffff)) << 16;
  __syncthreads();
#pragma unroll
  for (int e = 0; e < MAX_PER_THREAD; ++e) {
    if (slot[e] >= 0) plan.list[slots.start(slot[e]) + place[e]] = u16(1 + threadIdx.x + e * blockDim.x);
  }
}

// Fill `list` with the entries that are still of interest, best first.
DEVICE void sort_entries(const Params& p, const Plan& plan, Common& common) {
  const Slots slots(p, plan, common);
  place_bins(p, plan, common);
  for (int i = threadIdx.x; FINE && i < slots.count / 2; i += blockDim.x) slots.words[i] = 0;
  __syncthreads();
  if constexpr (FINE) list_by_slots(plan, common, slots);
  else list_by_bins(plan, common);
  __syncthreads();
  // Its place in there is the number of those that precede it.
  const int total = common.num_sorted;
  int index[MAX_PER_THREAD], place[MAX_PER_THREAD];
#pragma unroll
  for (int e = 0; e < MAX_PER_THREAD; ++e) {
    const int i = threadIdx.x + e * blockDim.x;
    if (i >= total) continue;
    index[e] = plan.list[i];
    const double score = plan.score[index[e]];
    const int part = FINE ? slots.of(score) : bin_of(score, common.floor, common.scale);
    const int begin = FINE ? slots.start(part) : plan.next[part] - plan.histogram[part];
    const int end = FINE ? slots.start(part + 1) : plan.next[part];
    place[e] = begin;
    int equal = 0, twin = i;
#pragma unroll 4
    for (int j = begin; j < end; ++j) {
      const double theirs = plan.score[plan.list[j]];
      place[e] += theirs > score;
      equal += theirs == score;
      twin = theirs == score && j != i ? j : twin;
    }
    if (equal == 2) place[e] += tuple_before(plan, plan.list[twin], index[e]);
    for (int j = begin; equal > 2 && j < end; ++j) {
      const int other = plan.list[j];
      if (plan.score[other] == score && other != index[e]) place[e] += tuple_before(plan, other, index[e]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < MAX_PER_THREAD; ++e) {
    if (int(threadIdx.x + e * blockDim.x) < total) plan.list[place[e]] = u16(index[e]);
  }
  __syncthreads();
}

// Keep the best B entries only, in order, with bins that span them. A finder precedes what it finds, so none is lost.
DEVICE void cut_pool(const Params& p, const Plan& plan, Common& common) {
  const int thread = threadIdx.x;
  const bool stays = thread < p.budget;
  const int head = common.head;
  const int old = stays ? plan.list[thread] : 0;
  const double score = plan.score[old];
  const u32 link = plan.link[old], bound = plan.bound[old];
  const u64 order = plan.order[old];
  const float floor = float(plan.score[plan.list[p.budget - 1]]), scale = scale_of(plan, floor);
  u16* renamed = plan.list;
  __syncthreads();
  for (int i = thread; i < BINS; i += blockDim.x) plan.histogram[i] = 0;
  if (stays) renamed[old] = u16(thread + 1);
  if (thread == 0) {
    renamed[0] = 0;
    plan.link[0] |= EXPANDED;
    common.count = common.tail = p.budget + 1;
    common.cut = 0;
    common.grown = 0;
    common.floor = floor;
    common.scale = scale;
  }
  __syncthreads();
  if (stays) {
    const u32 made = (old < head ? EXPANDED : 0) | (link & (EXPANDED | NO_CHILD));
    plan.score[thread + 1] = score;
    plan.link[thread + 1] = made | pack_link(renamed[parent_of(link)], rank_of(link), depth_of(link));
    plan.bound[thread + 1] = bound;
    plan.order[thread + 1] = order;
    atomicAdd(&plan.histogram[bin_of(score, floor, scale)], 1);
  }
  __syncthreads();
}

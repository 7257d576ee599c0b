// csrc/tree_accept.cu: follow the target's tokens down each draft tree, after looking at every link of the tree.
//   in   token, parent, depth, first_child, next_sibling [S,N] i32 | num_nodes [S] i32 | target_tokens [S,N] i32
//        whatever they hold: a cycle, a link to nowhere, a wrong num_nodes give a status, never a bad address or a hang
//   out  path [S,L+1] i32, rows, root first, -1 padded | length, bonus, status [S] i32
//   math row i continues its parent when token[i] = target_tokens[parent[i]]; siblings differ, so at most one of them
//        does. All rows are checked and matched at once; then one thread follows the matches from the root.
//   bad  status = the first fault in the order of kdlab.tree.AcceptStatus, path and bonus -1, length 0
//   cost 24 N bytes in, 4 L out a stream; the time is a launch, one round of loads and the walk
//   ref  kdlab/tree/accept.py | test tests/kernels/test_tree_accept.py | archs all
#include "common.cuh"

constexpr int MAX_ROWS = 1025, ROWS_A_THREAD = 2;
static_assert(ROWS_A_THREAD * 1024 >= MAX_ROWS, "a block holds a tree");

// Bits of the faults, as AcceptStatus numbers them.
enum Fault { BAD_SIZE = 1, BAD_PARENT, BAD_ORDER, BAD_DEPTH, BAD_TOKEN, BAD_LINK, DUPLICATE_CHILD };

constexpr u64 FREE = ~0ull;  // parent and token -1: such a row has been found bad before

struct Plan {
  i32 *parent, *depth, *target, *links_in, *next;  // [N]; next: the child that the target agrees with
  u64* table;  // [slots]: (parent, token) of each row; a power of two of at least 2 (N - 1)
  DEVICE Plan(u64* base, int rows, int slots) {
    table = base;
    parent = reinterpret_cast<i32*>(base + slots);
    depth = parent + rows;
    target = depth + rows;
    links_in = target + rows;
    next = links_in + rows;
  }
};

// Whether another row has put the same parent and token into the table. Half of it stays free, so the search ends.
DEVICE bool seen_before(u64* table, int slots, i32 parent, i32 token) {
  const u64 key = u64(u32(parent)) << 32 | u32(token);
  u32 slot = u32((key * 0x9e3779b97f4a7c15ull) >> 40);
  for (;; ++slot) {
    const u64 old = atomicCAS(&table[slot & (slots - 1)], FREE, key);
    if (old == FREE) return false;
    if (old == key) return true;
  }
}

// Whether a link of `row` leads to a later row of the tree, whose parent is `family`; counts the links that lead in.
DEVICE bool good_link(const Plan& plan, i32 link, int row, int size, i32 family) {
  if (link == -1) return true;
  if (link <= row || link >= size) return false;
  atomicAdd(&plan.links_in[link], 1);
  return plan.parent[link] == family;
}

// Faults of one row, as bits; the root's first. `size` is at most N.
DEVICE u32 faults_of(const Plan& plan, int row, int size, int slots, int depth_limit, i32 token, i32 first_child,
                     i32 next_sibling) {
  const i32 parent = plan.parent[row], depth = plan.depth[row];
  u32 faults = good_link(plan, first_child, row, size, row) ? 0 : 1u << BAD_LINK;
  if (row == 0) {
    if (parent != -1) faults |= 1u << BAD_PARENT;
    if (depth != 0) faults |= 1u << BAD_DEPTH;
    if (next_sibling != -1) faults |= 1u << BAD_LINK;
    return faults;
  }
  if (!good_link(plan, next_sibling, row, size, parent)) faults |= 1u << BAD_LINK;
  if (token < 0) faults |= 1u << BAD_TOKEN;
  if (parent < 0 || parent >= size) return faults | 1u << BAD_PARENT;
  if (parent >= row) faults |= 1u << BAD_ORDER;
  if (depth != i32(u32(plan.depth[parent]) + 1) || depth > depth_limit) faults |= 1u << BAD_DEPTH;
  if (seen_before(plan.table, slots, parent, token)) faults |= 1u << DUPLICATE_CHILD;
  if (token == plan.target[parent]) plan.next[parent] = row;
  return faults;
}

// Grid S, block at least N / ROWS_A_THREAD threads, whole warps.
extern "C" __global__ void __launch_bounds__(1024)
    tree_accept(const i32* token,         // [S, N], and so on
                const i32* parent, const i32* depth, const i32* first_child, const i32* next_sibling,
                const i32* num_nodes,     // [S]
                const i32* target_tokens, // [S, N]
                i32* path,                // [S, L + 1]
                i32* length, i32* bonus, i32* status,  // [S]
                int rows, int slots, int depth_limit) {
  extern __shared__ u64 shared_memory[];
  __shared__ u32 all_faults;
  __shared__ int last_row, num_accepted;
  const Plan plan(shared_memory, rows, slots);
  const int stream = blockIdx.x, thread = threadIdx.x;
  const i64 first = i64(stream) * rows;
  if (thread == 0) all_faults = 0;
  for (int i = thread; i < slots; i += blockDim.x) plan.table[i] = FREE;
  for (int i = thread; i < rows; i += blockDim.x) {
    plan.links_in[i] = 0;
    plan.next[i] = -1;
  }
  grid_dependency_wait();
  grid_dependency_launch();
  const int size = num_nodes[stream];
  i32 my_token[ROWS_A_THREAD], my_child[ROWS_A_THREAD], my_sibling[ROWS_A_THREAD];
#pragma unroll
  for (int e = 0; e < ROWS_A_THREAD; ++e) {
    const int row = thread + e * blockDim.x;
    if (row >= rows) continue;
    my_token[e] = token[first + row];
    my_child[e] = first_child[first + row];
    my_sibling[e] = next_sibling[first + row];
    plan.parent[row] = parent[first + row];
    plan.depth[row] = depth[first + row];
    plan.target[row] = target_tokens[first + row];
  }
  __syncthreads();
  const bool good_size = size >= 1 && size <= rows;
  u32 faults = good_size ? 0 : 1u << BAD_SIZE;
#pragma unroll
  for (int e = 0; e < ROWS_A_THREAD; ++e) {
    const int row = thread + e * blockDim.x;
    if (!good_size || row >= size) continue;
    faults |= faults_of(plan, row, size, slots, depth_limit, my_token[e], my_child[e], my_sibling[e]);
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < ROWS_A_THREAD; ++e) {
    const int row = thread + e * blockDim.x;
    if (good_size && row > 0 && row < size && plan.links_in[row] != 1) faults |= 1u << BAD_LINK;
  }
  faults = __reduce_or_sync(FULL_MASK, faults);
  if (lane_id() == 0 && faults) atomicOr(&all_faults, faults);
  __syncthreads();
  i32* rows_of_path = plan.links_in;  // [N], which nobody reads any more
  const bool good = all_faults == 0;
  if (thread == 0 && good) {
    int row = 0, accepted = 0;
    rows_of_path[0] = 0;
    for (const int most = min(depth_limit, rows - 1); accepted < most && plan.next[row] >= 0;) {
      row = plan.next[row];
      rows_of_path[++accepted] = row;
    }
    last_row = row;
    num_accepted = accepted;
  }
  __syncthreads();
  const int accepted = good ? num_accepted : -1;
  for (int d = thread; d <= depth_limit; d += blockDim.x) {
    path[i64(stream) * (depth_limit + 1) + d] = d <= accepted ? rows_of_path[d] : -1;
  }
  if (thread > 0) return;
  length[stream] = max(accepted, 0);
  bonus[stream] = good ? max(plan.target[last_row], -1) : -1;
  status[stream] = good ? 0 : __ffs(all_faults) - 1;
}

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

// Bits of the faults, as AcceptStatus numbers them.
enum Fault { BAD_SIZE = 1, BAD_PARENT, BAD_ORDER, BAD_DEPTH, BAD_TOKEN, BAD_LINK, DUPLICATE_CHILD };

constexpr u64 FREE = ~0ull;  // parent and token -1, which is never looked up

constexpr int PLACES = 4;

// Dynamic shared memory, `_shared_bytes` in tree_accept.py.
struct Plan {
  u64* table;                                                 // [slots]: (parent, token) of rows that met another
  i32* last;                                                  // [PLACES * slots]: a row, by hash
  i32 *token, *parent, *depth, *child, *sibling, *target;     // [N], as in global memory
  i32 *links_in;                                              // [N]: how many links lead to a row
  i32 *next;                                                  // [N]: the child that the target agrees with
  i32 *path;                                                  // [N]
  DEVICE Plan(u64* base, int rows, int slots) {
    table = base;
    last = reinterpret_cast<i32*>(base + slots);
    token = last + PLACES * slots;
    parent = token + rows;
    depth = parent + rows;
    child = depth + rows;
    sibling = child + rows;
    target = sibling + rows;
    links_in = target + rows;
    next = links_in + rows;
    path = next + rows;
  }
};

DEVICE u32 hash_of(u32 parent, u32 token) {
  const u32 hash = parent * 0x9e3779b1u + token * 0x85ebca6bu;
  return hash ^ hash >> 15;
}

// Whether another row has put the same parent and token into the table. Half of it stays free, so the search ends.
DEVICE bool seen_before(u64* table, int slots, u32 parent, u32 token) {
  const u64 key = u64(parent) << 32 | token;
  for (u32 slot = hash_of(parent, token);; ++slot) {
    const u64 old = atomicCAS(&table[slot & (slots - 1)], FREE, key);
    if (old == FREE) return false;
    if (old == key) return true;
  }
}

// Whether a row has the parent and token of another. Nearly every row finds itself at its place and is done; of rows
// with equal keys one is found by the others, or none is, and then all of them meet in the table.
DEVICE bool is_twin(const Plan& plan, int row, int size, int slots) {
  const i32 parent = plan.parent[row], token = plan.token[row];
  if (parent < 0 || parent >= size) return false;
  const int other = plan.last[hash_of(parent, token) & (PLACES * slots - 1)];
  if (other == row) return false;
  if (plan.parent[other] == parent && plan.token[other] == token) return true;
  return seen_before(plan.table, slots, parent, token);
}

// Whether a link of `row` leads to a later row of the tree, whose parent is `family`; counts the links that lead in.
DEVICE bool good_link(const Plan& plan, i32 link, int row, int size, i32 family) {
  if (link == -1) return true;
  if (link <= row || link >= size) return false;
  atomicAdd(&plan.links_in[link], 1);
  return plan.parent[link] == family;
}

// Faults of one row of a tree of `size` <= N rows, as bits.
DEVICE u32 faults_of(const Plan& plan, int row, int size, int slots, int depth_limit) {
  const i32 token = plan.token[row], parent = plan.parent[row], depth = plan.depth[row];
  u32 faults = good_link(plan, plan.child[row], row, size, row) ? 0 : 1u << BAD_LINK;
  if (row == 0) {
    if (parent != -1) faults |= 1u << BAD_PARENT;
    if (depth != 0) faults |= 1u << BAD_DEPTH;
    if (plan.sibling[0] != -1) faults |= 1u << BAD_LINK;
    return faults;
  }
  if (!good_link(plan, plan.sibling[row], row, size, parent)) faults |= 1u << BAD_LINK;
  if (token < 0) faults |= 1u << BAD_TOKEN;
  if (parent < 0 || parent >= size) return faults | 1u << BAD_PARENT;
  if (parent >= row) faults |= 1u << BAD_ORDER;
  if (depth != i32(u32(plan.depth[parent]) + 1) || depth > depth_limit) faults |= 1u << BAD_DEPTH;
  // Exchanges, because twins write to one place; which of them stays does not matter.
  if (token == plan.target[parent]) atomicExch(&plan.next[parent], row);
  atomicExch(&plan.last[hash_of(parent, token) & (PLACES * slots - 1)], row);
  return faults;
}

// Follow the matches from the root and return how many there are. The tree may be malformed, then nobody uses the path,
// but `next` holds rows or -1 and the number of steps is bounded.
DEVICE int walk(const Plan& plan, int most) {
  int accepted = 0;
  plan.path[0] = 0;
  for (int row = plan.next[0]; row >= 0 && accepted < most; row = plan.next[row]) plan.path[++accepted] = row;
  return accepted;
}

// Grid S, block of whole warps, a thread a row where 1,024 suffice.
extern "C" __global__ void __launch_bounds__(1024, 1)
    tree_accept(const i32* token,  // [S, N], and so on
                const i32* parent, const i32* depth, const i32* first_child, const i32* next_sibling,
                const i32* num_nodes,                  // [S]
                const i32* target_tokens,              // [S, N]
                i32* path,                             // [S, L + 1]
                i32* length, i32* bonus, i32* status,  // [S]
                int rows, int slots, int depth_limit) {
  extern __shared__ u64 shared_memory[];
  __shared__ u32 all_faults;
  __shared__ int num_accepted;
  const Plan plan(shared_memory, rows, slots);
  const int stream = blockIdx.x, thread = threadIdx.x;
  const i64 first = i64(stream) * rows;
  if (thread == 0) all_faults = 0;
  for (int i = thread; i < slots; i += blockDim.x) plan.table[i] = FREE;
  for (int row = thread; row < rows; row += blockDim.x) {
    plan.links_in[row] = row == 0;  // as if a link led to the root
    plan.next[row] = -1;
  }
  grid_dependency_wait();
  grid_dependency_launch();
  const int size = num_nodes[stream];
  for (int row = thread; row < rows; row += blockDim.x) {
    const i32 values[6] = {token[first + row],       parent[first + row],       depth[first + row],
                           first_child[first + row], next_sibling[first + row], target_tokens[first + row]};
    plan.token[row] = values[0];
    plan.parent[row] = values[1];
    plan.depth[row] = values[2];
    plan.child[row] = values[3];
    plan.sibling[row] = values[4];
    plan.target[row] = values[5];
  }
  __syncthreads();
  const int used = size >= 1 && size <= rows ? size : 0;
  u32 faults = used > 0 ? 0 : 1u << BAD_SIZE;
  for (int row = thread; row < used; row += blockDim.x) faults |= faults_of(plan, row, used, slots, depth_limit);
  __syncthreads();
  for (int row = thread; row < used; row += blockDim.x) {
    if (plan.links_in[row] != 1) faults |= 1u << BAD_LINK;
    if (row > 0 && is_twin(plan, row, used, slots)) faults |= 1u << DUPLICATE_CHILD;
  }
  faults = __reduce_or_sync(FULL_MASK, faults);
  if (lane_id() == 0 && faults) atomicOr(&all_faults, faults);
  if (thread == 0) num_accepted = walk(plan, min(depth_limit, rows - 1));
  __syncthreads();
  const bool good = all_faults == 0;
  const int accepted = good ? num_accepted : -1;
  for (int d = thread; d <= depth_limit; d += blockDim.x) {
    path[i64(stream) * (depth_limit + 1) + d] = d <= accepted ? plan.path[d] : -1;
  }
  if (thread > 0) return;
  length[stream] = max(accepted, 0);
  bonus[stream] = good ? max(plan.target[plan.path[accepted]], -1) : -1;
  status[stream] = good ? 0 : __ffs(all_faults) - 1;
}

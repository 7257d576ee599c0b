// csrc/kv_commit.cu: after a round, the accepted tree rows move behind the prefix, in place, in all layers at once;
//   the tapped hidden rows of the same path are gathered for the drafter.
//   in   pages [layers,P,64,W] any dtype | block_table [S,M] i32 | prefix_len [S] i32
//        path [S,L+1] i32, rows of the tree, root first, -1 padded | up to 8 taps [S,N,F] any dtype, or none
//   out  pages, row prefix_len + d = what row prefix_len + path[d] was, d = 1..L; a row keeps its rotation, because a
//        node at depth d was rotated for position prefix_len + d | gathered [S,L+1,taps*F], 0 where path is -1
//   math a copy with overlap: row 3 may be read for depth 2 and written for depth 3. A block owns ALL rows of a column
//        slice of one layer and stream: every thread reads its unit, a barrier, then every thread writes.
//   bad  a path, prefix or page that leads out of the block table or out of `pages`: that stream does not move at all
//   cost 2 W bytes a layer and moved row, 2 F a gathered row; at the size of a round the time is four dependent reads
//   ref  kernels/reference/ops.py:kv_commit | test tests/kernels/test_kv_commit.py | archs all
#include "common.cuh"

#ifndef UNIT
#error "UNIT is 16, 8, 4, 2 or 1: bytes that one thread moves; divides the bytes of a row of pages and of taps"
#endif

constexpr int PAGE = 64;
constexpr int GATHER_AT_ONCE = 4;  // units in flight a thread
constexpr int MAX_TAPS = 8;

template <int BYTES>
struct UnitOf;
template <> struct UnitOf<16> { using Type = uint4; };
template <> struct UnitOf<8> { using Type = uint2; };
template <> struct UnitOf<4> { using Type = u32; };
template <> struct UnitOf<2> { using Type = u16; };
template <> struct UnitOf<1> { using Type = u8; };
using Unit = UnitOf<UNIT>::Type;
static_assert(sizeof(Unit) == UNIT, "one memory instruction");

// Row `index` of a stream as a row of pages.flatten(0, 1), or -1 where there is none.
DEVICE i64 place_of(i64 index, const i32* table, int table_width, int num_pages) {
  if (index < 0 || index >= i64(table_width) * PAGE) return -1;
  const i32 page = table[index / PAGE];
  return page < 0 || page >= num_pages ? -1 : i64(page) * PAGE + index % PAGE;
}

// threadIdx.y + 1 is the depth, threadIdx.x the column.
DEVICE void move_rows(Unit* __restrict__ layer, const i32* table, i64 first, const i32* path, int table_width,
                      int num_pages, int row_units) {
  const int depth = threadIdx.y + 1, column = blockIdx.x * blockDim.x + threadIdx.x;
  const i32 row = path[depth];
  bool good = true, moves = false;
  i64 source = 0, destination = 0;
  if (row >= 0) {
    source = place_of(first + row, table, table_width, num_pages);
    destination = place_of(first + depth, table, table_width, num_pages);
    good = first >= 0 && source >= 0 && destination >= 0;
    moves = good && source != destination && column < row_units;
  }
  Unit value = {};
  if (moves) value = layer[source * row_units + column];
  // The barrier stands between all reads and all writes, and lets one bad row hold back its whole stream.
  if (!__syncthreads_and(good)) return;
  if (moves) layer[destination * row_units + column] = value;
}

// Rows of several tensors that stand side by side once they are gathered.
struct Taps {
  const Unit* from[MAX_TAPS];  // [S, num_rows, units] each
  int count, units, num_rows;

  DEVICE Unit load(i64 row, int column) const {
    const int which = column / units;
    const Unit* tap = from[0];
#pragma unroll
    for (int i = 1; i < MAX_TAPS; ++i) tap = which == i ? from[i] : tap;
    return tap[row * units + column - which * units];
  }
};

// Blocks of a stream share (L + 1) * taps.count * taps.units units; `part` is this one's place among them.
DEVICE void gather_taps(const Taps& taps, Unit* gathered, const i32* path, int path_len, i64 stream, int part) {
  const int tap_units = taps.count * taps.units;
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const u32 end = u32(path_len) * tap_units, begin = u32(part) * threads * GATHER_AT_ONCE + thread;
  Unit value[GATHER_AT_ONCE];
#pragma unroll
  for (int i = 0; i < GATHER_AT_ONCE; ++i) {
    const u32 unit = begin + i * threads;
    const i32 row = unit < end ? path[unit / tap_units] : -1;
    const bool known = row >= 0 && row < taps.num_rows;
    value[i] = Unit{};
    if (known) value[i] = taps.load(stream * taps.num_rows + row, unit % tap_units);
  }
#pragma unroll
  for (int i = 0; i < GATHER_AT_ONCE; ++i) {
    const u32 unit = begin + i * threads;
    if (unit < end) gathered[unit] = value[i];
  }
}

// Grid (slices, num_layers + layers' worth of gathering blocks, S), block (columns of a slice, max(L, 1)).
extern "C" __global__ void __launch_bounds__(1024)
    kv_commit(Unit* pages,             // [num_layers, num_pages, PAGE, row_units]
              const i32* block_table,  // [S, table_width]
              const i32* prefix_len,   // [S]
              const i32* path,         // [S, path_len]
              const Unit* tap_0,       // [S, num_rows, tap_units]; not read when no block gathers
              const Unit* tap_1, const Unit* tap_2, const Unit* tap_3, const Unit* tap_4, const Unit* tap_5,
              const Unit* tap_6, const Unit* tap_7,
              Unit* gathered,          // [S, path_len, num_taps * tap_units]
              int num_taps, int num_layers, int num_pages, int table_width, int row_units,
              int path_len, int num_rows, int tap_units) {
  grid_dependency_wait();
  const i64 stream = blockIdx.z;
  path += stream * path_len;
  if (int(blockIdx.y) < num_layers) {
    const i64 layer_units = i64(num_pages) * PAGE * row_units;
    move_rows(pages + blockIdx.y * layer_units, block_table + stream * table_width, prefix_len[stream], path,
              table_width, num_pages, row_units);
  } else {
    const int part = (blockIdx.y - num_layers) * gridDim.x + blockIdx.x;
    const Taps taps = {{tap_0, tap_1, tap_2, tap_3, tap_4, tap_5, tap_6, tap_7}, num_taps, tap_units, num_rows};
    gather_taps(taps, gathered + stream * path_len * num_taps * tap_units, path, path_len, stream, part);
  }
}

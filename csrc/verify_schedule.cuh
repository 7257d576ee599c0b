// csrc/verify_schedule.cuh: how the blocks of a persistent grid divide verify_attention, from lengths on the device.
//   A tile is TILE_ROWS neighbouring (row, head) pairs of a stream; a key block is BLOCK_KEYS keys; a part is a range
//   of key blocks of one tile, done by one block of the grid. A tile of one part is written at once; the others go to a
//   workspace as normalised float sums with their log2-sum-exp and are merged by verify_merge.cu.
//   balanced: all tiles stand in one line of units (a key block each, and TILE_UNITS for a tile's start and end), which
//     is cut into equal shares, one a grid block. A grid block then has at most two parts that need the workspace.
//   fixed: a tile is cut into equal parts whose number follows from its stream's prefix alone, so a row's bits do not
//     depend on the batch; parts go round the grid.
//   tail: only the key blocks that hold tree rows, one part a tile, for merging with another kernel's prefix.
//   test tests/kernels/test_verify_attention_gpu.py
#pragma once

#include "common.cuh"

struct Sizes {
  const i32* __restrict__ prefix_len;  // [S]
  const i32* __restrict__ num_nodes;   // [S]
  int num_streams, num_rows, num_heads, capacity;  // capacity: keys that the block table holds
  int grid;         // blocks that share the work
  int fixed_parts;  // 0: balanced; else the most parts of a tile; 1 with tail_only
  bool tail_only;
};

struct StreamWork {
  int prefix, nodes;  // made legal: within the block table and the tree's capacity
  int tiles, blocks;  // blocks: of the whole stream; its first tiles need fewer
};

struct Part {
  int stream, tile, first_block, end_block;
  int slot;  // place in the workspace, -1 where this is the whole tile
};

// A tile that was cut; its parts have the slots first_slot, next_slot, next_slot + slot_step, ... The balanced division
// writes a table of them: entry b is the tile whose first part grid block b has; num_parts 0 for none.
struct Cut {
  int stream, tile, num_parts, first_slot, next_slot, slot_step;
  int pairs;  // (row, head) pairs of the tile that are in use
  int unused;
};
static_assert(sizeof(Cut) == 32, "rows of the table");

template <int TILE_ROWS, int BLOCK_KEYS, int TILE_UNITS, int MIN_UNITS, int FIXED_KEYS>
struct Schedule {
  Sizes sizes;
  int share;  // units a grid block, balanced

  DEVICE explicit Schedule(const Sizes& s) : sizes(s), share(0) {
    if (sizes.fixed_parts) return;
    int total = 0;
    for (int i = 0; i < sizes.num_streams; ++i) total += units(stream_work(i));
    share = max(MIN_UNITS, cdiv(total, sizes.grid));
  }

  DEVICE StreamWork stream_work(int stream) const { return stream_work(sizes, stream); }

  DEVICE static StreamWork stream_work(const Sizes& sizes, int stream) {
    StreamWork work;
    work.prefix = min(max(sizes.prefix_len[stream], 0), sizes.capacity);
    work.nodes = min(min(max(sizes.num_nodes[stream], 0), sizes.num_rows), sizes.capacity - work.prefix);
    work.tiles = cdiv(work.nodes * sizes.num_heads, TILE_ROWS);
    work.blocks = cdiv(work.prefix + work.nodes, BLOCK_KEYS);
    return work;
  }

  DEVICE static int units(const StreamWork& work) { return work.tiles * (work.blocks + TILE_UNITS); }

  // Key blocks that a tile needs: no row sees rows behind itself.
  DEVICE int tile_blocks(const StreamWork& work, int tile) const {
    const int last_row = (tile * TILE_ROWS + TILE_ROWS - 1) / sizes.num_heads;
    return cdiv(work.prefix + min(work.nodes, last_row + 1), BLOCK_KEYS);
  }

  // Parts of a tile in the fixed division; the last one takes the tree too.
  DEVICE int fixed_parts(const StreamWork& work) const {
    return min(max(work.prefix / FIXED_KEYS, 1), sizes.fixed_parts);
  }

  // Fills `part` with the next part of grid block `block` and moves `cursor` on; false when there is none. The cursor
  // starts at 0; it counts units within the share (balanced) or rounds of the grid (fixed). `cut` is filled when a
  // balanced part is the first of several.
  DEVICE bool next(int block, int& cursor, Part& part, Cut& cut) const {
    return sizes.fixed_parts ? next_fixed(block, cursor, part) : next_balanced(block, cursor, part, cut);
  }

  DEVICE bool next_balanced(int block, int& cursor, Part& part, Cut& cut) const {
    const int begin = block * share, end = begin + share;
    int origin = 0;  // first unit of the stream
    for (int stream = 0; stream < sizes.num_streams; ++stream) {
      const StreamWork work = stream_work(stream);
      const int tile_units = work.blocks + TILE_UNITS;
      while (begin + cursor < end && begin + cursor < origin + units(work)) {
        const int tile = (begin + cursor - origin) / tile_units, tile_begin = origin + tile * tile_units;
        const int first = begin + cursor - tile_begin;
        cursor = min(end, tile_begin + tile_units) - begin;
        const int blocks = tile_blocks(work, tile);
        if (first >= blocks) continue;  // nothing but the units of its end
        const int last = min(blocks, end - tile_begin);
        const bool whole = first == 0 && last == blocks;
        part = Part{stream, tile, first, last, whole ? -1 : 2 * block + (first == 0)};
        if (first == 0 && !whole) {
          const int parts = 1 + cdiv(blocks - last, share);
          cut = Cut{stream, tile, parts, 2 * block + 1, 2 * (block + 1), 2, used_pairs(work, tile), 0};
        }
        return true;
      }
      origin += units(work);
    }
    return false;
  }

  DEVICE bool next_fixed(int block, int& cursor, Part& part) const {
    int index = block + cursor * sizes.grid;
    for (int stream = 0; stream < sizes.num_streams; ++stream) {
      const StreamWork work = stream_work(stream);
      const int parts = fixed_parts(work);
      if (index < work.tiles * parts) {
        const int tile = index / parts, number = index % parts;
        const int each = cdiv(cdiv(work.prefix, BLOCK_KEYS), parts);
        const int first = sizes.tail_only ? work.prefix / BLOCK_KEYS : number * each;
        const int last = number == parts - 1 ? tile_blocks(work, tile) : (number + 1) * each;
        const bool whole = parts == 1 && !sizes.tail_only;
        part = Part{stream, tile, first, last, whole ? -1 : fixed_slot(stream, tile, number)};
        ++cursor;
        return true;
      }
      index -= work.tiles * parts;
    }
    return false;
  }

  DEVICE int max_tiles() const { return cdiv(sizes.num_rows * sizes.num_heads, TILE_ROWS); }

  DEVICE int fixed_slot(int stream, int tile, int number) const {
    return (stream * max_tiles() + tile) * sizes.fixed_parts + number;
  }

  DEVICE int used_pairs(const StreamWork& work, int tile) const {
    return min(TILE_ROWS, work.nodes * sizes.num_heads - tile * TILE_ROWS);
  }

  // Tile `tile` of stream `stream` in the fixed division; num_parts 0 where it is not cut, or not used.
  DEVICE Cut fixed_cut(int stream, int tile) const {
    const StreamWork work = stream_work(stream);
    const int parts = fixed_parts(work), slot = fixed_slot(stream, tile, 0);
    const bool is_cut = tile < work.tiles && parts > 1;
    return Cut{stream, tile, is_cut ? parts : 0, slot, slot + 1, 1, used_pairs(work, tile), 0};
  }
};

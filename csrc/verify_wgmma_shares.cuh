// csrc/verify_wgmma_shares.cuh: which key blocks of which tiles a block works on, and what the wgmma kernel's files
//   have in common. Part of csrc/verify_attention_wgmma.cu and csrc/verify_parts.cu.
//   A block's work is found from the lengths in global memory, so the host need not know them.
//   -DPARTS=1  block (x, y, z) has part x of tile y of stream z; a tile has at most gridDim.x parts, all equal.
//   -DPARTS=0  a persistent grid; one segment at most by every warp for itself, several by warp 0, one after the other.
//     Of the used tiles
//     whole  tile i * grid + block in round i, or
//     list   the tiles of the last full round and of the incomplete one as one list, in which a tile of n key blocks is
//            n + OVERHEAD places long: every block gets an equal share of it
//   by what is likely to be fastest. Blocks side by side walk over the same keys at the same time in each of them, so
//   that a key is read from device memory once and from the L2 cache by the others.
#pragma once

#include "hopper.cuh"
#include "mma.cuh"

struct Config {
  static constexpr int LATENT = 512, PAGE = 64, TILE = 64, THREADS = 256;
  static constexpr int BLOCK_KEYS = KEYS;  // of a block of keys, within one page
  static constexpr int Q_BOXES = LATENT / 64, K_BOXES = Q_BOXES + 1, ROPE_BOX = Q_BOXES;  // of 64 columns
  // Where q, p and k begin in Plan (NVRTC knows no offsetof).
  static constexpr u32 KEY_BOX_BYTES = BLOCK_KEYS * 128;
  static constexpr u32 Q_OFFSET = 0, P_OFFSET = Q_BOXES * BOX_BYTES, K_OFFSET = P_OFFSET + 2 * BOX_BYTES;
  static constexpr int WORDS = 16;  // of 16 bytes: a thread's 128 sums, rounded
  static constexpr int BARRIERS = 5;
  static constexpr int OVERHEAD = 3, MERGE = 3, MIN_SHARE = 2;  // in key blocks: start and end of a segment; a merge
                                                                // over blocks; least work of a block
  static constexpr int PARTS_ENOUGH = 66, LONG_PART = 6;  // more parts only where each still has so many key blocks
  static constexpr float STALE = 8.0f;  // log2 by which a row's maximum may grow before its sums are rescaled
};
static_assert(Config::PAGE % Config::BLOCK_KEYS == 0 && Config::TILE == 64, "blocks of keys within pages");
static_assert(Config::STALE < 15.0f, "probabilities up to 2^STALE must fit half");

// One block's share of a tile.
struct Segment {
  int stream, prefix, nodes;  // of the stream
  int first_pair;             // of the tile, row * H + head
  int begin, end;             // key blocks
  int first_block, parts;     // of a list: so many blocks of the grid share the tile, from first_block on
};

struct List {
  int rounds;         // of tiles that are not in the list: tile i * grid + block in round i
  int dealt, length;  // tiles in them, and length of the list of the rest
  int sharers;        // blocks that share the list
  bool unused;        // there are tiles without a used row
};

// Where a block stands.
struct Cursor {
  int round;
  int place, end;  // of its share of the list
};

struct Plan {                                      // shared memory
  alignas(1024) u8 q[Config::Q_BOXES][BOX_BYTES];
  u8 p[2][BOX_BYTES];                              // P of either block of a pair; p[0] first brings the rope box of q
  u8 k[2][Config::K_BOXES][Config::KEY_BOX_BYTES];  // keys of either block of a pair
  float max[2][Config::TILE], sum[2][Config::TILE];  // a word a thread
  // mbarriers, Config::BARRIERS of them
  u64 q_full;
  u64 k_full[2][2];  // of both blocks of a pair the columns of either group, and the rope box with the first to go
  Segment segment[2];   // under way and next, in turns
  bool valid[2];        // there is such a segment
  int page[8][2];       // that the leaders asked for
  int next_row[2];      // in the cache, of the next segment's first two key blocks where they come ahead, else -1
  List list;
  Cursor cursor;
  int arrived;
};
static_assert(Config::P_OFFSET == sizeof(Plan::q), "p stands behind q");
static_assert(Config::K_OFFSET == sizeof(Plan::q) + sizeof(Plan::p), "k stands behind p");
static_assert(sizeof(Plan) <= SHARED_BYTES, "dynamic shared memory");

struct Params {
  const i32* block_table;  // [S, M]
  const i32* prefix_len;   // [S]
  const u32* ancestors;    // [S, N, W]
  const i32* num_nodes;    // [S]
  Scalar* o;               // [S, N, H, 512]
  float* lse;              // [S, N, H]
  uint4* partial;          // [slots, WORDS, THREADS] of 8 values each, normalised; slots: `part_slot`
  float* partial_lse;      // [slots, 64], log2
  u32* counters;           // [grid], zero before and after; not with -DPARTS=1
  int num_streams, num_rows, num_heads, num_words, table_width, num_pages;
  int fixed_split;         // -DPARTS=1: the prefix alone decides the parts
  float scale_log2;
};

enum Barrier { P0_READY = 1, P1_READY, GROUP0, GROUP1, S0_ISSUED };  // numbers; 0 is __syncthreads

constexpr float NO_KEY = -1e30f;  // a row's maximum before its first key

// blockIdx.x, read where it is used: one register less to keep.
DEVICE int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// A lane's stream: 32 of them are looked at at a time.
struct Stream {
  u32 prefix, nodes;
  u32 tiles;          // used ones, 0 behind the last stream
  u32 size;           // places of one of them in a list: all count as long as the last
  u32 tiles_before;   // of the streams before
};

// Lengths of a stream, within what the block table and the tree hold.
DEVICE int legal_prefix(const Params& p, int prefix) { return min(max(prefix, 0), p.table_width * Config::PAGE); }
DEVICE int legal_nodes(const Params& p, int nodes, int prefix) {
  return min(min(max(nodes, 0), p.num_rows), p.table_width * Config::PAGE - prefix);
}

DEVICE u32 key_blocks(u32 prefix, u32 rows) { return (prefix + rows + Config::BLOCK_KEYS - 1) / Config::BLOCK_KEYS; }

// Sum over the lanes before.
DEVICE u32 sum_before(u32 value) { return warp_sum_through(value) - value; }

// Of stream `stream`, of which `tiles_before` and what the lanes before have are before it.
DEVICE Stream make_stream(const Params& p, int stream, int prefix, int nodes, u32 tiles_before) {
  Stream s = {0, 0, 0, 0, tiles_before};
  if (stream < p.num_streams) {
    s.prefix = legal_prefix(p, prefix);
    s.nodes = legal_nodes(p, nodes, s.prefix);
    s.tiles = (s.nodes * p.num_heads + Config::TILE - 1) / Config::TILE;
    s.size = key_blocks(s.prefix, s.nodes) + Config::OVERHEAD;
  }
  if (p.num_streams > 1) s.tiles_before += sum_before(s.tiles);
  return s;
}
DEVICE Stream load_stream(const Params& p, int first_stream, u32 tiles_before) {
  const int stream = first_stream + lane_id();
  const bool there = stream < p.num_streams;
  return make_stream(p, stream, there ? p.prefix_len[stream] : 0, there ? p.num_nodes[stream] : 0, tiles_before);
}

// Brings lengths, table and tree into the L2 cache, before they may be read.
DEVICE void prefetch_inputs(const Params& p) {
  const auto prefetch = [](const void* start, i64 bytes) {
    const i64 offset = threadIdx.x * 128;
    if (offset < bytes) asm volatile("prefetch.global.L2 [%0];" : : "l"(static_cast<const u8*>(start) + offset));
  };
  prefetch(p.prefix_len, p.num_streams * sizeof(i32));
  prefetch(p.num_nodes, p.num_streams * sizeof(i32));
  prefetch(p.block_table, i64(p.num_streams) * p.table_width * sizeof(i32));
  prefetch(p.ancestors, i64(p.num_streams) * p.num_rows * p.num_words * sizeof(u32));
}

// Brings the block table and the tree into L1: a segment's first page is on the way to its first key. As copies to
// where nobody looks (free again after copy_async_wait_all and a barrier): ptxas drops a load whose value is not used.
DEVICE void warm_inputs(const Params& p, Plan& plan) {
  const auto warm = [](const void* start, i64 bytes, void* words) {
    const i64 offset = threadIdx.x * 128;  // of a cache line
    if (offset >= bytes) return;
    copy_async4(shared_address(words) + 4 * threadIdx.x, static_cast<const u8*>(start) + offset);
  };
  warm(p.block_table, i64(p.num_streams) * p.table_width * sizeof(i32), plan.max);
  warm(p.ancestors, i64(p.num_streams) * p.num_rows * p.num_words * sizeof(u32), plan.p[1]);
}

// `s`: the first streams, or in every lane the only one. Every warp makes the list for itself.
DEVICE List make_list(const Params& p, Stream s) {
  u32 tiles = s.tiles, longest = s.tiles > 0 ? s.size : 0;
  if (p.num_streams > 1) tiles = longest = 0;
#pragma unroll 1
  for (int first = 0; p.num_streams > 1 && first < p.num_streams; first += WARP) {
    if (first > 0) s = load_stream(p, first, 0);
    tiles += __reduce_add_sync(FULL_MASK, s.tiles);
    longest = max(longest, __reduce_max_sync(FULL_MASK, s.tiles > 0 ? s.size : 0));
  }
  const bool unused = tiles < p.num_streams * cdiv(u32(p.num_rows * p.num_heads), u32(Config::TILE));
  const u32 rounds = tiles < gridDim.x ? 0 : tiles / gridDim.x, rest = tiles - rounds * gridDim.x;
  const List whole = {int(rest == 0 ? rounds : rounds + 1), int(tiles), 0, 1, unused};
  if (rest == 0 || longest <= Config::OVERHEAD + Config::MERGE) return whole;
  // The last full round is in the list too, so that a tile has few parts.
  const u32 dealt = (max(rounds, 1u) - 1) * gridDim.x;
  u32 length = 0;
#pragma unroll 1
  for (int first = 0, before = 0; first < p.num_streams; first += WARP) {
    const Stream s = load_stream(p, first, before);
    const u32 listed = s.tiles - min(s.tiles, max(dealt, s.tiles_before) - s.tiles_before);
    length += __reduce_add_sync(FULL_MASK, listed * s.size);
    before += __reduce_add_sync(FULL_MASK, s.tiles);
  }
  const u32 sharers = min(gridDim.x, max(length / (Config::MIN_SHARE + Config::OVERHEAD), 1u));
  const u32 cost = cdiv(length, sharers) + Config::OVERHEAD + Config::MERGE;
  if (longest * (rounds > 0 ? 2 : 1) <= cost) return whole;
  return {int(max(rounds, 1u) - 1), int(dealt), int(length), int(sharers), unused};
}

DEVICE Cursor make_cursor(const List& list) {
  if (list.length == 0) return {0, 0, 0};
  const auto start = [&](u32 i) { return int(min(i, u32(list.sharers)) * u32(list.length) / u32(list.sharers)); };
  return {0, start(block_index()), start(block_index() + 1)};
}

// Key blocks of a tile, and the tree rows of its stream that it needs.
DEVICE u32 tile_blocks(const Params& p, u32 prefix, u32 nodes, u32 tile) {
  return key_blocks(prefix, min(nodes, (tile * Config::TILE + Config::TILE - 1) / p.num_heads + 1));
}

// a / b rounded up, in a third of the time of an exact division; right for a + b below 2^21.
DEVICE u32 cdiv_fast(u32 a, u32 b) { return u32(__fdividef(float(a + b) - 0.5f, float(b))); }

// -DPARTS=1: part `part` of at most `most` equal ones of a tile, none of it where there are fewer; verify_parts.cu
// divides in the same way. With fixed_split the prefix alone is cut, and the last part gets the tree.
DEVICE Segment part_of_tile(const Params& p, int stream, int tile, int part, int most, int last_row, int prefix,
                            int nodes) {
  Segment seg = {stream, legal_prefix(p, prefix), 0, tile * Config::TILE, 0, 0, 0, 0};
  seg.nodes = legal_nodes(p, nodes, seg.prefix);
  if (seg.first_pair >= seg.nodes * p.num_heads) return seg;
  const u32 blocks = key_blocks(seg.prefix, min(seg.nodes, last_row + 1));
  const u32 divided = p.fixed_split ? seg.prefix / Config::BLOCK_KEYS : blocks;
  const u32 limit = min(min(max(divided, 1u), u32(most)), max(u32(Config::PARTS_ENOUGH), divided / Config::LONG_PART));
  const u32 longest = cdiv_fast(max(divided, 1u), limit);
  const u32 parts = cdiv_fast(max(divided, 1u), longest);  // no more than it needs: all are written and read
  const auto cut = [&](u32 i) { return divided <= parts ? i : i * divided / parts; };
  seg.parts = parts;
  if (part >= seg.parts) return seg;
  seg.begin = cut(part), seg.end = part + 1 < seg.parts ? cut(part + 1) : blocks;
  return seg;
}
DEVICE int last_row(int tile, int num_heads) { return (tile * Config::TILE + Config::TILE - 1) / num_heads; }

// No block has more than one segment, and a warp knows all streams: every warp finds it for itself, which takes half
// the time of handing it on.
DEVICE bool is_single(const Params& p, const List& list) {
  return p.num_streams <= WARP && list.length == 0 && list.rounds <= 1;
}
DEVICE bool single_segment(const Params& p, const Stream& s, Segment& segment) {
  u32 prefix = s.prefix, nodes = s.nodes, tile = block_index() - s.tiles_before;
  const u32 ballot = __ballot_sync(FULL_MASK, tile < s.tiles);  // wraps round where it is before
  if (ballot == 0) return false;
  const int stream = __ffs(ballot) - 1;
  if (p.num_streams > 1) {
    prefix = __shfl_sync(FULL_MASK, prefix, stream), nodes = __shfl_sync(FULL_MASK, nodes, stream);
    tile = __shfl_sync(FULL_MASK, tile, stream);
  }
  const u32 blocks = tile_blocks(p, prefix, nodes, tile);
  segment = {stream, int(prefix), int(nodes), int(tile * Config::TILE), 0, int(blocks), 0, 1};
  return true;
}

// The block's next segment; false where there is none. A share is taken from its end, the beginning of a tile before
// the end of the tile before it: so all blocks walk over the same keys at a time.
DEVICE bool next_segment(const Params& p, const List& list, Cursor& cursor, Segment& segment) {
  Cursor at = cursor;
#pragma unroll 1
  while (at.round < list.rounds || at.place < at.end) {
    const bool whole = at.round < list.rounds;
    const u32 tile_wanted = at.round * gridDim.x + block_index();  // of all used tiles
    bool found = false, nothing = true;
    u32 before = 0, places_before = 0;
#pragma unroll 1
    for (int first = 0; first < p.num_streams && nothing; first += WARP) {
      const Stream s = load_stream(p, first, before);
      u32 tile = tile_wanted - s.tiles_before, start = 0, next_end = at.end;
      bool mine = tile < s.tiles;  // wraps round where the tile is before
      if (!whole) {
        const u32 dealt = min(s.tiles, max(u32(list.dealt), s.tiles_before) - s.tiles_before);
        const u32 span = (s.tiles - dealt) * s.size;
        start = places_before + (p.num_streams > 1 ? sum_before(span) : 0);
        mine = at.end - 1 - start < span;
        const u32 number = mine ? (at.end - 1 - start) / s.size : 0;
        tile = dealt + number, start += number * s.size;
        next_end = start;
        places_before += __reduce_add_sync(FULL_MASK, span);
      }
      before += __reduce_add_sync(FULL_MASK, s.tiles);
      const u32 ballot = __ballot_sync(FULL_MASK, mine);
      if (ballot == 0) continue;
      nothing = false;
      if (mine) {
        const u32 blocks = tile_blocks(p, s.prefix, s.nodes, tile), zero = start + Config::OVERHEAD;
        u32 begin = 0, end = blocks, first_block = 0, parts = 1;
        if (!whole) {
          const auto sharer_of = [&](u32 block) { return ((zero + block + 1) * list.sharers - 1) / list.length; };
          begin = max(u32(at.place), zero) - zero, end = min(max(u32(at.end), zero) - zero, blocks);
          first_block = sharer_of(0), parts = sharer_of(blocks - 1) - first_block + 1;
        }
        found = begin < end;
        segment = {first + lane_id(), int(s.prefix), int(s.nodes), int(tile * Config::TILE),
                   int(begin),        int(end),      int(first_block), int(parts)};
      }
      const int lane = __ffs(ballot) - 1;
      found = __shfl_sync(FULL_MASK, found, lane);
      at.end = __shfl_sync(FULL_MASK, int(next_end), lane);
    }
    if (nothing && !whole) at.end = at.place;
    at.round += whole ? 1 : 0;
    if (found) {
      __syncwarp();
      if (lane_id() == 0) cursor = at;
      return true;
    }
  }
  return false;
}

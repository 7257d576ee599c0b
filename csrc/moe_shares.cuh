// csrc/moe_shares.cuh: which of a launch's units of work a block has: as many slabs as the others, so units may be cut.
//   The block that has a cut unit's first slabs hands its sums over to the one that goes on, which waits for them. That
//   is always a block of a higher number: whichever blocks of a launch are there, the first of them waits for nobody.
//   So a launch comes to its end wherever its blocks begin in the order of their numbers, on any number of
//   multiprocessors and beside other launches. (CUDA does not promise that order; every GPU so far keeps it.)
//   Blocks are spread over the multiprocessors first: those of neighbouring numbers do not share one.
//   test tests/kernels/test_moe_shares.py
#pragma once

#include "common.cuh"

// What a block takes of all units' slabs: those from `first` on and before `end`; those behind are block `next`'s.
struct Share {
  i64 first, end;
  int next;
};

// Of units that all blocks divide alike, whole ones: the first blocks have one more where they do not come out even.
template <typename S>
DEVICE Share equal_share(i64 units) {
  const i64 block = blockIdx.x, blocks = gridDim.x;
  const auto before = [&](i64 n) { return units / blocks * n + min(n, units % blocks); };
  return {before(block) * S::SLABS, before(block + 1) * S::SLABS, int(block) + 1};
}

// Of `units` where all blocks have divided `others` alike, each of which counts as `eighths` of a slab. Units of which
// there are fewer than half a one a block stay whole, on the last blocks, where others are fewest.
template <typename S>
DEVICE Share rest_share(i64 units, i64 others, i64 eighths) {
  const i64 block = blockIdx.x, blocks = gridDim.x, slabs = units * S::SLABS;
  const i64 late = others % blocks, early = blocks - late;  // the first blocks begin later, by one of the others
  // Blocks that begin late have nothing else where that were less than three quarters of a unit: the next one would
  // wait for their sums.
  const bool few = 8 * slabs < (eighths + 6 * S::SLABS) * early;
  const auto before = [&](i64 n) {
    if (2 * units < blocks) return max(units - (blocks - n), i64(0)) * S::SLABS;
    if (few) return slabs * max(n - late, i64(0)) / early;
    return ((8 * slabs + eighths * late) * n - eighths * blocks * min(n, late)) / (8 * blocks);
  };
  const i64 end = before(block + 1);
  i64 next = block + 1;
  while (end % S::SLABS != 0 && before(next + 1) == end) ++next;  // a cut unit: there is somebody behind
  return {before(block), end, int(next)};
}

// A share as units, from the last one to the first: what is handed over is made first, and what is taken wanted last.
struct Span {
  int units = 0, last = 0;
  int last_end = 0, first_begin = 0;  // slabs of the last unit, which comes first, and those that the first one lacks

  DEVICE Span(const Share& share, int slabs) {
    if (share.first >= share.end) return;
    last = (share.end - 1) / slabs;
    units = last + 1 - static_cast<int>(share.first / slabs);
    last_end = share.end - static_cast<i64>(last) * slabs;
    first_begin = share.first % slabs;
  }
  // Of the n-th unit.
  DEVICE int begin(int n) const { return n + 1 == units ? first_begin : 0; }
  DEVICE int end(int n, int slabs) const { return n == 0 ? last_end : slabs; }
};

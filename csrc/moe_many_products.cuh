// csrc/moe_many_products.cuh: what a step of moe_many_rows.cu is, and its products: INT4 words become 16-bit weights in
//   registers, the A side of mma.sync or, of wide tiles, of wgmma; rows of x in shared memory are the B side.
//   test tests/kernels/test_moe_many_rows.py
#pragma once

#include "hopper.cuh"
#include "int4_pairs.cuh"
#include "mma.cuh"

constexpr int WORKERS = 16, COPIERS = 4;  // warps
constexpr int THREADS = (WORKERS + COPIERS) * WARP;
constexpr int TILE_PICKS = 8 * TILE_EIGHTS;
constexpr int PANEL_ROWS = 16 * WORKERS, COPIED_ROWS = PANEL_ROWS / COPIERS;  // of a panel; of it, a copier's
constexpr bool WIDE = TILE_EIGHTS > 3;  // by wgmma; else by mma.sync
constexpr int WORKER_REGISTERS = 104, COPIER_REGISTERS = 56;  // of wide tiles; 96 at the launch
constexpr int LEAST_PANELS = 4;  // of an item of work, where there are as many features
static_assert(SCALE_DTYPE == DTYPE, "a scale multiplies pairs of weights");

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

// A step: a slab of SLAB inputs of a tile's weight rows, and the same inputs of the picks' rows of x. The rows stand in
// one or two panels of PANEL_ROWS, and a worker has 16 of each, so that it reads x once for 32 rows.
template <int INPUTS, int FEATURES_, bool GATED_>
struct Stage {
  static constexpr int K = INPUTS, FEATURES = FEATURES_;
  static constexpr bool GATED = GATED_;
  static constexpr int SLAB = power_of_two_divisor(K, SLAB_INPUTS), SLABS = K / SLAB, GROUPS = SLAB / GROUP;
  static constexpr int PANEL_FEATURES = GATED ? PANEL_ROWS / 2 : PANEL_ROWS;
  static constexpr int PANELS = FEATURES / PANEL_FEATURES % 2 ? 1 : 2;
  static constexpr int TILE_FEATURES = PANELS * PANEL_FEATURES, TILES = FEATURES / TILE_FEATURES;
  static constexpr int RUN = min_of(TILES, cdiv(LEAST_PANELS, SLABS * PANELS)), RUNS = cdiv(TILES, RUN);
  static constexpr int MATRIX_ROWS = GATED ? 2 * FEATURES : FEATURES;
  // A row's chunks of 16 bytes, one a group, are swapped so that those of one group of 8 rows lie in different banks.
  static constexpr int PITCH = GROUPS * 16, PANEL_BYTES = PANEL_ROWS * PITCH;
  // Scales of two slabs come together where they fill a sector of 32 bytes.
  static constexpr int SCALE_BYTES = GROUPS * sizeof(Scalar), SPAN = SLABS % 2 == 0 && SCALE_BYTES == 16 ? 2 : 1;
  static constexpr int SCALE_PITCH = SPAN * SCALE_BYTES, SCALES_BYTES = PANELS * PANEL_ROWS * SCALE_PITCH;
  // Eight rows of x: a box of 64 inputs (hopper.cuh) after the other. One slab serves all tiles of an item.
  static constexpr int X_UNITS = SLAB * 2 / 16, EIGHT_BYTES = 8 * SLAB * 2, X_BYTES = TILE_EIGHTS * EIGHT_BYTES;
  static constexpr bool X_STAYS = SLABS == 1;
  static_assert(SLAB >= 128 && PANEL_FEATURES % GROUP == 0 && FEATURES % PANEL_FEATURES == 0, "see many_build");
  static_assert(PANEL_BYTES % 1024 == 0 && SCALES_BYTES % 1024 == 0, "x begins where boxes may");
};

using UpStage = Stage<MODEL_WIDTH, INNER_WIDTH, true>;
using DownStage = Stage<INNER_WIDTH, MODEL_WIDTH, false>;

// The rows of a panel that lane group g of a worker has in rows g and g + 8 of its fragments. Those of one g and those
// of one `half` lie in different banks.
template <bool GATED>
DEVICE u32 fragment_row(int worker, u32 g, u32 half) {
  if (GATED) return half * (PANEL_ROWS / 2) + 8 * worker + g / 2 + g % 2 * 4;  // gate, up; features t, t + 4 pair up
  return 16 * worker + 4 * (g / 2) + 2 * (half ^ (g / 4)) + g % 2;
}

// Chunk c of a panel's row stands at chunk c ^ this.
template <typename S>
DEVICE u32 swapped(u32 row) {
  return row * S::GROUPS / 8 % S::GROUPS;
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------

#define F8(d, i) F4(d, i), F4(d, i + 4)
#define A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// d [64 x 8 EIGHTS] += A B, A in registers, B K-major in shared memory.
template <int EIGHTS>
DEVICE void product(float (&d)[4 * EIGHTS], const u32 (&a)[4], u64 b) {
  static_assert(EIGHTS == 4 || EIGHTS == 6, "forms that are written here");
  if constexpr (EIGHTS == 4) {
    asm volatile(WGMMA("m64n32k16") "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
                 : F8(d, 0), F8(d, 8) : A4(a), "l"(b));
  } else {
    asm volatile(WGMMA("m64n48k16") "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"
                 "%21,%22,%23}, {%24,%25,%26,%27}, %28, 1, 1, 1, 0;"
                 : F8(d, 0), F8(d, 8), F8(d, 16) : A4(a), "l"(b));
  }
}

// Waits until at most PENDING groups of products are under way.
template <int PENDING, int COUNT>
DEVICE void products_wait(float (&d)[COUNT]) {
  wgmma_wait<PENDING>();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i]) : : "memory");
}

// ---- products ----------------------------------------------------------------------------------------------------

// What a worker's lane knows of a step: offsets of its first row of words in a panel and of scales, and of its row and
// chunk of 8 rows of x.
template <typename S>
struct Lane {
  u32 words, scales, x;

  DEVICE Lane() {
    const u32 row = fragment_row<S::GATED>(warp_id(), lane_id() / 4, 0);
    words = row * S::PITCH + swapped<S>(row) * 16 + lane_id() % 4 * 4;
    scales = row * S::SCALE_PITCH;
    x = lane_id() % 8 * 128 + (lane_id() / 8 ^ lane_id() % 8) * 16;
  }
};

// From a place in fragment_row 0 of a lane to the one in row `half`.
template <typename S>
DEVICE u32 in_row(u32 at, u32 half, u32 pitch) {
  return half == 0 ? at : S::GATED ? at + PANEL_ROWS / 2 * pitch : at ^ 2 * pitch;
}

DEVICE u32 multiply_pair(u32 a, u32 b) {
  u32 d;
#if DTYPE == 1
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
  return d;
}

// The lower or the upper value of a pair, twice.
DEVICE u32 twice(u32 pair, int upper) {
  u32 d;
  if (upper) asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(pair));
  else asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(pair));
  return d;
}

// The weights of a word in pairs, as value / INT4_VALUE, each rounded once.
DEVICE void scaled_word(u32 (&pair)[4], u32 word, u32 scale) {
  widen<true>(pair, word);
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = multiply_pair(pair[i], scale);
}

// Loads whose order the compiler keeps.
DEVICE u32 load_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// Where a lane's operands of a step stand: addresses in shared memory.
template <typename S>
struct Operands {
  u32 panel[S::PANELS], scales, x;
};

// Adds a slab's products of the worker's rows with the first 8 EIGHTS picks: total[panel][4 n + ..] as they leave them.
template <typename S, int EIGHTS>
DEVICE void multiply(float (&total)[S::PANELS][4 * EIGHTS], const Operands<S>& step) {
  u32 a[2][2][4], words[S::PANELS][2], scales[S::PANELS][2];  // scales: of two groups
  const auto load_words = [&](int p, int j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 chunk = (j ^ (h && !S::GATED ? swapped<S>(2) : 0)) * 16;
      words[p][h] = load_word(in_row<S>(step.panel[p] ^ chunk, h, S::PITCH));
      if (j % 2) continue;
      const u32 its = in_row<S>(step.scales, h, S::SCALE_PITCH) + p * PANEL_ROWS * S::SCALE_PITCH;
      scales[p][h] = load_word(its + j * sizeof(Scalar));
    }
  };
#pragma unroll
  for (int p = 0; p < S::PANELS; ++p) load_words(p, 0);
#pragma unroll
  for (int j = 0; j < S::GROUPS; ++j) {
#pragma unroll
    for (int p = 0; p < S::PANELS; ++p) {
      u32(&own)[2][4] = a[(j * S::PANELS + p) % 2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 pairs[4];
        scaled_word(pairs, words[p][h], twice(scales[p][h], j % 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i / 2][i % 2 * 2 + h] = pairs[i];
      }
      if (j + 1 < S::GROUPS) load_words(p, j + 1);
      if constexpr (WIDE) {
        const u64 b = descriptor(step.x >> 4, 16, S::EIGHT_BYTES) + j / 2 * (1024 / 16) + j % 2 * 4;
        wgmma_fence();
        product<EIGHTS>(total[p], own[0], b);
        product<EIGHTS>(total[p], own[1], b + 2);
        wgmma_commit();
        products_wait<1>(total[p]);  // for those before: their registers are next
      }
    }
    if constexpr (!WIDE) {
      const auto multiply_eight = [&](int n) {
        u32 b[4];
        load_matrices(b, (step.x ^ j % 2 * 64) + n * S::EIGHT_BYTES + j / 2 * 1024);
#pragma unroll
        for (int p = 0; p < S::PANELS; ++p) {
          float(&sums)[4] = *reinterpret_cast<float(*)[4]>(&total[p][4 * n]);
          u32(&own)[2][4] = a[(j * S::PANELS + p) % 2];
          multiply_add<Scalar>(sums, own[0], b[0], b[1]);
          multiply_add<Scalar>(sums, own[1], b[2], b[3]);
        }
      };
      multiply_eight(0);  // a loop of one turn would take the outer one's unrolling with it
#pragma unroll
      for (int n = 1; n < EIGHTS; ++n) multiply_eight(n);
    }
  }
  if constexpr (WIDE) {
#pragma unroll
    for (int p = 0; p < S::PANELS; ++p) products_wait<0>(total[p]);
  }
}

// All warps of a warpgroup: from here on a thread has so many registers, more or fewer than at the launch.
template <int COUNT>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(COUNT));
}
template <int COUNT>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(COUNT));
}

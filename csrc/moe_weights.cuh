// csrc/moe_weights.cuh: one stage of expert weights in shared memory, INT4 or dense, and its product with a few rows.
//   A stage is TILE_ROWS rows of a weight matrix by SLAB inputs, cut among the warps: M_WARPS along the rows and
//   K_WARPS along the inputs. The same inputs of up to PICKS rows of x stand behind the weights (read from L2 when
//   needed they took a fifth of the time). Weights are the M side of mma.sync and rows of x the N side, so that one row
//   and eight cost the same. Which input a fragment's register stands for is free, as long as both sides agree: lane
//   (g, t) of a warp holds inputs 8t..8t+7 of a group of 32, which is one INT4 word, or 16 bytes of x.
//   INT4: nibbles become 16-bit floats exactly, one or two instructions a pair; every other pair with a surplus, which
//   a matrix product takes off that starts the accumulator; the group's scale multiplies the accumulator, in float32.
//   float32 rows: no tensor cores; a lane holds one weight row, in the same stage and with the same partial sums.
//   test tests/kernels/test_moe_int4.py
#pragma once

#include "int4_pairs.cuh"
#include "mma.cuh"
#include "moe_groups.cuh"

constexpr bool STAGED_X = DTYPE != 0;

// ROWS weight rows of a warp (twice as many read each x half as often) and the picks that meet them at once.
template <int ROWS, int PICKS_>
struct Format {
  static constexpr int M_ROWS = ROWS, PICKS = PICKS_;
  static constexpr int TOTALS = ROWS * PICKS / WARP;  // sums of a lane
  static constexpr int EIGHTS = ROWS / 8;             // rows that a lane of 16-bit products has sums of
  static constexpr int PAD = ROWS + 4;  // floats a column of partial sums: rows g, columns 2t of a warp meet 32 banks
  static constexpr int SUM_BYTES = WARPS * PICKS * PAD * sizeof(float);
  static_assert(PICKS % TILE_PICKS == 0 && LISTED % PICKS == 0, "a list holds whole tiles");
};
template <int ROWS>
struct Packed : Format<ROWS, TILE_PICKS> {
  static constexpr bool INT4 = true;
  static constexpr int MOST_WARP_K = 64, UNIT_K = 32;  // inputs of a warp, inputs in 16 bytes
  using Scale = PackedScale;
};
template <int ROWS, int PICKS = TILE_PICKS>
struct Dense : Format<ROWS, PICKS> {
  static constexpr bool INT4 = false;
  static constexpr int MOST_WARP_K = 32, UNIT_K = 16 / sizeof(Scalar);
  using Scale = Scalar;  // there are none
};

// GATED: the matrix is FEATURES gate rows over FEATURES up rows, and a warp takes as many of each.
// WHOLE: a warp has all inputs of its rows, and adds them up as warps that share them would: in CHAINS running sums.
template <typename Format_, int INPUTS, int FEATURES_, bool GATED_, int MOST_K_WARPS, bool WHOLE_ = false>
struct Stage : Format_ {
  using typename Format_::Scale;
  using Format_::INT4, Format_::M_ROWS, Format_::PICKS, Format_::UNIT_K;
  static constexpr int K = INPUTS, FEATURES = FEATURES_;
  static constexpr bool GATED = GATED_, WHOLE = WHOLE_;
  static constexpr float VALUE = INT4 ? INT4_VALUE : 1.0f;  // what 1 in a sum stands for
  static constexpr int CHAIN_K = power_of_two_divisor(K, Format_::MOST_WARP_K);
  static constexpr int CHAINS = WHOLE ? power_of_two_divisor(K / CHAIN_K, MOST_K_WARPS) : 1;
  static constexpr int WARP_K = CHAIN_K * CHAINS;
  static constexpr int K_WARPS = WHOLE ? 1 : power_of_two_divisor(K / WARP_K, MOST_K_WARPS);
  static constexpr int M_WARPS = WARPS / K_WARPS;
  static constexpr int SLAB = WARP_K * K_WARPS, SLABS = K / SLAB;
  static constexpr int TILE_ROWS = M_ROWS * M_WARPS;
  static constexpr int TILE_FEATURES = GATED ? TILE_ROWS / 2 : TILE_ROWS;
  static constexpr int TILES = cdiv(FEATURES, TILE_FEATURES);
  static constexpr bool FULL = TILES * TILE_FEATURES == FEATURES;
  static constexpr int MATRIX_ROWS = GATED ? 2 * FEATURES : FEATURES;
  static constexpr int WARP_GROUPS = WARP_K / GROUP;
  static constexpr int UNITS = SLAB / UNIT_K;  // 16-byte units of a row
  static constexpr int SCALE_BYTES = SLAB / GROUP * sizeof(Scale);
  // 16 more bytes a row put the scales of eight rows into different banks.
  static constexpr int SCALE_STRIDE = SCALE_BYTES + (SCALE_BYTES >= 32 ? 16 : 0);
  static constexpr int WEIGHT_BYTES = TILE_ROWS * UNITS * 16;
  static constexpr int X_AT = WEIGHT_BYTES + (INT4 ? round_up(TILE_ROWS * SCALE_STRIDE, 128) : 0);
  static constexpr int X_UNITS = SLAB * sizeof(Scalar) / 16;
  static constexpr int X_END = X_AT + (STAGED_X ? PICKS * X_UNITS * 16 : 0);
  static constexpr int BYTES = round_up(X_END, 128);
  static_assert(K % GROUP == 0 && WARP_K >= GROUP, "inputs come in groups of 32");
  static_assert(!WHOLE || (SLABS == 1 && !GATED), "rows of few inputs, whose results go straight from the warps");
  static_assert(UNITS * TILE_ROWS % THREADS == 0, "every thread copies as many units");

  // Row of the matrix that stands in row r of a stage from tile `tile` on; rows past the end repeat the last one.
  static DEVICE int matrix_row(int tile, u32 r) {
    constexpr u32 HALF = M_ROWS / 2;
    const int inside = GATED ? r / M_ROWS * HALF + r % HALF : r;
    const int feature = tile * TILE_FEATURES + inside;
    const int row = FULL ? feature : min(feature, FEATURES - 1);
    return GATED && r % M_ROWS >= HALF ? FEATURES + row : row;
  }

  // Byte where unit `unit` of row r lies. The exclusive or keeps what a warp reads at once in different banks: one word
  // of eight rows (INT4, tensor cores), two rows of four units (dense, tensor cores), or one unit of eight rows.
  static __host__ DEVICE constexpr u32 place(u32 r, u32 unit) {
    constexpr u32 SPAN = UNITS < 8 ? UNITS : 8;
    const u32 turn = INT4 || DTYPE == 0 ? r / (8 / SPAN) % SPAN : (r % 2 * 4) % SPAN;
    return (r * UNITS + (unit ^ turn)) * 16;
  }

  // The same for rows of x, of which a warp reads two by four units at once.
  static DEVICE u32 place_x(u32 r, u32 unit) { return X_AT + (r * X_UNITS + (unit ^ (r % 2 * 4 % X_UNITS))) * 16; }
};

DEVICE void copy_weights(u32 shared, const u8* global) {
  // Of narrow models' copies with a policy ptxas (13.0) made ones that an H200 refuses as illegal instructions.
  if constexpr (MODEL_WIDTH % 256) copy_async(shared, global);
  else copy_once(shared, global);
}
DEVICE void copy_weights(u8* shared, const u8* global) { copy_weights(shared_address(shared), global); }

template <int BYTES>
DEVICE void copy_few(u32 shared, const u8* global) {
  if constexpr (BYTES == 16) copy_weights(shared, global);
  else copy_less<BYTES>(shared, global);
}
template <int BYTES>
DEVICE void copy_few(u8* shared, const u8* global) {
  copy_few<BYTES>(shared_address(shared), global);
}

// What one thread copies of a stage: the same 16-byte unit of every ROW_STEP-th row, and a piece of one row's scales.
template <typename S>
struct Copies {
  static constexpr int SLAB_BYTES = S::UNITS * 16;
  static constexpr int COUNT = S::UNITS * S::TILE_ROWS / THREADS, ROW_STEP = THREADS / S::UNITS;
  static constexpr int PIECE = S::SCALE_BYTES < 16 ? S::SCALE_BYTES : 16, PIECES = S::SCALE_BYTES / PIECE;
  static constexpr int SCALE_COPIES = cdiv(S::TILE_ROWS * PIECES, THREADS);
  // Then a thread's rows lie equally far apart in the matrix and in the stage, whatever its first one.
  static constexpr bool EVEN = S::FULL && ROW_STEP % 8 == 0;
  const u8 *weights, *scales;  // first unit and piece of the next slab
  u32 to = S::place(first_row(), unit());  // in a stage, like the next
  u32 scales_to = S::WEIGHT_BYTES + piece_row() * S::SCALE_STRIDE + piece() * PIECE;

  DEVICE void find(const u8* matrix, const u8* matrix_scales, int tile, int slab) {
    weights = matrix + row_bytes(tile, first_row()) + unit() * 16 + slab * SLAB_BYTES;
    if constexpr (S::INT4) {
      scales = matrix_scales + S::matrix_row(tile, piece_row()) * SCALE_ROW + piece() * PIECE + slab * S::SCALE_BYTES;
    }
  }

  DEVICE void next(u32 stage, int tile) {
    const u8* from = weights;
    weights += SLAB_BYTES;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if constexpr (EVEN) {
        constexpr int STAGE_STEP = ROW_STEP * S::UNITS * 16;
        copy_weights(stage + to + i * STAGE_STEP, from + (row_bytes(0, i * ROW_STEP) - row_bytes(0, 0)));
      } else {
        const u32 r = first_row() + i * ROW_STEP;
        const i64 rows = row_bytes(tile, r) - row_bytes(tile, first_row());
        copy_weights(stage + S::place(r, unit()), from + rows);
      }
    }
    if constexpr (S::INT4) {
#pragma unroll
      for (int i = 0; i < SCALE_COPIES; ++i) {
        const u32 r = piece_row() + i * (THREADS / PIECES);
        if (r >= S::TILE_ROWS) break;
        const i64 rows = i ? S::matrix_row(tile, r) - S::matrix_row(tile, piece_row()) : 0;
        copy_few<PIECE>(stage + scales_to + i * (THREADS / PIECES * S::SCALE_STRIDE), scales + rows * SCALE_ROW);
      }
      scales += S::SCALE_BYTES;
    }
  }

 private:
  static constexpr i64 SCALE_ROW = S::K / GROUP * sizeof(typename S::Scale);
  static DEVICE u32 first_row() { return threadIdx.x / S::UNITS; }
  static DEVICE u32 unit() { return threadIdx.x % S::UNITS; }
  static DEVICE u32 piece_row() { return threadIdx.x / PIECES; }
  static DEVICE u32 piece() { return threadIdx.x % PIECES; }
  static DEVICE i64 row_bytes(int tile, u32 r) {
    return static_cast<i64>(S::matrix_row(tile, r)) * (S::K / S::UNIT_K * 16);
  }
};

// What one thread copies of the rows of x: the same unit of one row or more. Rows past the last pick are not copied:
// what they hold reaches only columns that nobody reads.
template <typename S>
struct RowCopies {
  static constexpr int COUNT = cdiv(S::PICKS * S::X_UNITS, THREADS);
  // Then a thread's rows lie equally far apart in the stage, whatever its first one.
  static constexpr bool EVEN = THREADS % S::X_UNITS == 0 && THREADS / S::X_UNITS % 2 == 0;
  const Scalar* from[COUNT];
  int size = 0;
  u32 to = S::place_x(r(0), unit(0));

  DEVICE void find(const Scalar* x, const int* row, int num_rows, int slab) {  // num_rows <= PICKS
    size = num_rows;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const i64 first = static_cast<i64>(row[min(r(i), size - 1)]) * S::K + slab * S::SLAB;
      from[i] = x + first + unit(i) * (16 / sizeof(Scalar));
    }
  }

  DEVICE void next(u32 stage) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const u32 at = EVEN ? to + i * (THREADS * 16) : S::place_x(r(i), unit(i));
      if (r(i) < size) copy_async(stage + at, from[i]);
      from[i] += S::SLAB;
    }
  }

 private:
  static DEVICE int r(int i) { return (threadIdx.x + i * THREADS) / S::X_UNITS; }
  static DEVICE int unit(int i) { return (threadIdx.x + i * THREADS) % S::X_UNITS; }
};

template <typename S>
DEVICE const typename S::Scale* scale_row(const u8* stage, int row, int k_warp) {
  const u8* scales = stage + S::WEIGHT_BYTES + row * S::SCALE_STRIDE;
  return reinterpret_cast<const typename S::Scale*>(scales) + k_warp * S::WARP_GROUPS;
}

// Bytes of a stage where a lane of INT4 products finds the first of its words, of its scales and of its inputs.
template <typename S>
struct Places {
  u32 words, scales, x;

  DEVICE Places() {
    const int row = warp_id() / S::K_WARPS * S::M_ROWS + lane_id() / 4, k_warp = warp_id() % S::K_WARPS;
    words = S::place(row, k_warp * S::WARP_GROUPS) + lane_id() % 4 * 4;
    scales = S::WEIGHT_BYTES + row * S::SCALE_STRIDE + k_warp * S::WARP_GROUPS * sizeof(typename S::Scale);
    x = S::place_x(lane_id() / 4, k_warp * S::WARP_GROUPS * 4 + lane_id() % 4);
  }
};

#if DTYPE == 0
// ---- float32 rows: column c of the warp's 32 rows stands in total[c], one row a lane -------------------------------

template <typename S, typename Rows>
DEVICE void multiply(float (&total)[S::TOTALS], const u8* stage, const Places<S>&, const float* all, Rows rows_of,
                     int slab) {
  const int* rows = rows_of();
  const int m_warp = warp_id() / S::K_WARPS, k_warp = warp_id() % S::K_WARPS;
  const int row = m_warp * S::M_ROWS + lane_id();
  const int first_k = slab * S::SLAB + k_warp * S::WARP_K;
  constexpr int STEP = S::INT4 ? 8 : S::UNIT_K;  // inputs at a time: a word, or 16 bytes
#pragma unroll 1
  for (int j = 0; j < S::WARP_K; j += STEP) {
    const u8* from = stage + S::place(row, (k_warp * S::WARP_K + j) / S::UNIT_K);
    float weight[STEP];
    if constexpr (S::INT4) {
      const u32 word = *reinterpret_cast<const u32*>(from + j % S::UNIT_K / STEP * 4);
      const float scale = to_float(scale_row<S>(stage, row, k_warp)[j / GROUP]);
#pragma unroll
      for (int i = 0; i < STEP; ++i) weight[i] = static_cast<float>(static_cast<int>(word >> (4 * i) & 15) - 8) * scale;
    } else {
      const Vec<float, 4> values = *reinterpret_cast<const Vec<float, 4>*>(from);
#pragma unroll
      for (int i = 0; i < STEP; ++i) weight[i] = values[i];
    }
#pragma unroll
    for (int c = 0; c < S::PICKS; ++c) {
      const float* x = all + static_cast<i64>(rows[c]) * S::K + first_k + j;
      float sum = 0;  // short sums that are added up round less than one long one
#pragma unroll
      for (int i = 0; i < STEP; i += 4) {
        const Vec<float, 4> v = load_vec<float, 4>(x + i);
#pragma unroll
        for (int l = 0; l < 4; ++l) sum = fmaf(weight[i + l], v[l], sum);
      }
      total[c] += sum;
    }
  }
}

template <typename S, typename Put>
DEVICE void each_value(const float (&total)[S::TOTALS], Put put) {
#pragma unroll
  for (int c = 0; c < S::PICKS; ++c) put(lane_id(), c, total[c]);
}

#else
// ---- 16-bit rows: tensor cores; 16 rows m by 8 picks n stand in total[4 (M n + m) ..] as an mma leaves them ------

// The lane's eight inputs of a group of its warp, in its row of the n-th eight.
template <typename S>
DEVICE uint4 load_x(const u8* stage, int k_warp, int group, int n = 0) {
  const int unit = (k_warp * S::WARP_GROUPS + group) * 4 + lane_id() % 4;
  return *reinterpret_cast<const uint4*>(stage + S::place_x(8 * n + lane_id() / 4, unit));
}

template <typename S>
DEVICE void multiply_packed(float (&total)[S::TOTALS], const u8* stage, const Places<S>& at) {
  constexpr int TOTALS = S::TOTALS, EIGHTS = S::EIGHTS;
  static_assert(S::UNITS % S::WARP_GROUPS == 0 && S::place(8, 0) == 8 * S::UNITS * 16, "see the use of `words`");
  static_assert(S::X_AT % (64 * S::WARP_GROUPS) == 0, "see the use of `x`");
  using RowScales = Scales<S::WARP_GROUPS>;
  RowScales scales[EIGHTS];
#pragma unroll
  for (int i = 0; i < EIGHTS; ++i) {
    scales[i] = *reinterpret_cast<const RowScales*>(stage + at.scales + i * (8 * S::SCALE_STRIDE));
  }
  constexpr int CHAIN_GROUPS = S::WARP_GROUPS / S::CHAINS;
  float chain[TOTALS] = {};
  float(&sum)[TOTALS] = S::CHAINS > 1 ? chain : total;
#pragma unroll
  for (int j = 0; j < S::WARP_GROUPS; ++j) {
    u32 a[EIGHTS][4];  // of rows row + 8 i
#pragma unroll
    for (int i = 0; i < EIGHTS; ++i) {
      // Units lie in a row by exclusive or: the place of unit j is the one of unit 0 with j's bits turned.
      widen<false>(a[i], *reinterpret_cast<const u32*>(stage + ((j * 16) ^ at.words) + i * (8 * S::UNITS * 16)));
    }
    u32 b[4];
    pair_up(b, *reinterpret_cast<const uint4*>(stage + ((j * 64) ^ at.x)));
    const float zero[4] = {0, 0, 0, 0};
    float half_start[4], start[4];
    multiply_from(half_start, SURPLUS, SURPLUS, 0, 0, b[0], b[1], zero);
    multiply_from(start, SURPLUS, SURPLUS, 0, 0, b[2], b[3], half_start);
#pragma unroll
    for (int m = 0; m < EIGHTS / 2; ++m) {
      const u32(&low)[4] = a[2 * m], (&high)[4] = a[2 * m + 1];
      float half_d[4], d[4];
      multiply_from(half_d, low[0], high[0], low[1], high[1], b[0], b[1], start);
      multiply_from(d, low[2], high[2], low[3], high[3], b[2], b[3], half_d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[4 * m + i] = fmaf(scales[2 * m + i / 2].of(j), d[i], sum[4 * m + i]);
      }
    }
    if (S::CHAINS > 1 && (j + 1) % CHAIN_GROUPS == 0) {
#pragma unroll
      for (int i = 0; i < TOTALS; ++i) {
        total[i] += chain[i];
        chain[i] = 0;
      }
    }
  }
}

template <typename S>
DEVICE void multiply_dense(float (&total)[S::TOTALS], const u8* stage) {
  constexpr int M = S::EIGHTS / 2, N = S::PICKS / 8;
  const int m_warp = warp_id() / S::K_WARPS, k_warp = warp_id() % S::K_WARPS;
  const int g = lane_id() / 4, t = lane_id() % 4;
  const int row = m_warp * S::M_ROWS + g;
#pragma unroll
  for (int j = 0; j < S::WARP_GROUPS; ++j) {
    const int unit = (k_warp * S::WARP_GROUPS + j) * 4 + t;
    uint4 x[N];
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = load_x<S>(stage, k_warp, j, n);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const uint4 low = *reinterpret_cast<const uint4*>(stage + S::place(row + 16 * m, unit));
      const uint4 high = *reinterpret_cast<const uint4*>(stage + S::place(row + 16 * m + 8, unit));
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float(&d)[4] = *reinterpret_cast<float(*)[4]>(&total[4 * (M * n + m)]);
        multiply_add<Scalar>(d, {low.x, high.x, low.y, high.y}, x[n].x, x[n].y);
        multiply_add<Scalar>(d, {low.z, high.z, low.w, high.w}, x[n].z, x[n].w);
      }
    }
  }
}

template <typename S, typename Rows>
DEVICE void multiply(float (&total)[S::TOTALS], const u8* stage, const Places<S>& at, const Scalar*, Rows, int) {
  if constexpr (S::INT4) multiply_packed<S>(total, stage, at);
  else multiply_dense<S>(total, stage);
}

// Calls put(row of the warp, column, value) for the lane's sums.
template <typename S, typename Put>
DEVICE void each_value(const float (&total)[S::TOTALS], Put put) {
  constexpr int M = S::EIGHTS / 2;
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int tile = 0; tile < M * S::PICKS / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      put(tile % M * 16 + g + i / 2 * 8, tile / M * 8 + 2 * t + i % 2, total[4 * tile + i]);
    }
  }
}
#endif

// Stores what a WHOLE stage's warps have of the first `size` picks: store(pick, feature, value, 0).
template <typename S, typename Store>
DEVICE void finish_whole(const float (&total)[S::TOTALS], int size, Store store) {
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (2 * t + c >= size) break;
#pragma unroll
    for (int i = 0; i < S::EIGHTS; ++i) {
      store(2 * t + c, warp_id() * S::M_ROWS + 8 * i + g, total[2 * i + c] * S::VALUE, 0.0f);
    }
  }
}

// Adds the warps' partial sums of the first `size` picks and stores them: store(pick, feature, gate or value, up).
// `sums_at` holds SUM_BYTES that nobody has read since the last __syncthreads.
template <typename S, typename Store>
DEVICE void finish(u8* sums_at, const float (&total)[S::TOTALS], int size, Store store) {
  constexpr int HALF = S::M_ROWS / 2, WARP_FEATURES = S::GATED ? HALF : S::M_ROWS;
  auto sums = reinterpret_cast<float(*)[S::PICKS][S::PAD]>(sums_at);  // [WARPS]
  each_value<S>(total, [&](int row, int column, float value) {
    if (column < size) sums[warp_id()][column][row] = value;
  });
  __syncthreads();
#pragma unroll 1
  for (int o = threadIdx.x; o < S::TILE_FEATURES * size; o += THREADS) {
    const int feature = o % S::TILE_FEATURES, column = o / S::TILE_FEATURES;
    const int warp = feature / WARP_FEATURES * S::K_WARPS, row = feature % WARP_FEATURES;
    float value = 0, up = 0;
#pragma unroll
    for (int w = 0; w < S::K_WARPS; ++w) {
      value += sums[warp + w][column][row];
      if (S::GATED) up += sums[warp + w][column][row + HALF];
    }
    store(column, feature, value * S::VALUE, up * S::VALUE);
  }
}

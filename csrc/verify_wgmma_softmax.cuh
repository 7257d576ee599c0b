// csrc/verify_wgmma_softmax.cuh: what lies between scores and probabilities: the mask, the running maximum, exp2, and P
//   to shared memory. Part of csrc/verify_attention_wgmma.cu.
//   A thread has 32 scores (16 with blocks of 32 keys) of two rows, g and g + 8 of its warp's 16: s[4 j + 2 r + e] is
//   of row g + 8 r and key 8 j + 2 t + e.
#pragma once

#include "mma.cuh"
#include "verify_wgmma_shares.cuh"

constexpr int SCORES = Config::BLOCK_KEYS / 2;  // of a thread and a block of keys

// Bit c: the row sees key c of a block whose key 0 is tree row `first` (negative: still in the prefix).
DEVICE u64 visible_keys(const u32* words, int num_words, int first, int num_nodes) {
  const int word = max(first, 0) / 32;
  const u32 w0 = word < num_words ? words[word] : 0, w1 = word + 1 < num_words ? words[word + 1] : 0;
  const u32 w2 = word + 2 < num_words ? words[word + 2] : 0;
  u64 bits = u64(w1) << 32 | w0;
  if (first < 0) {
    bits = first > -64 ? bits << -first | ((u64(1) << -first) - 1) : ~u64(0);
  } else if (first % 32 != 0) {
    bits = bits >> first % 32 | u64(w2) << (64 - first % 32);
  }
  return num_nodes - first < 64 ? bits & ((u64(1) << (num_nodes - first)) - 1) : bits;
}

// A thread's two rows of the tile, g and g + 8 of its warp: softmax state.
struct Rows {
  float max[2];  // log2; of what was summed, at most STALE below the true maximum
  float sum[2];  // of this thread's columns of this group's blocks
};

DEVICE void rescale(float (&o)[128], Rows& rows, const float (&new_max)[2]) {
  // Before a row's first key its sums are zero, whatever its maximum.
  const bool some = (new_max[0] != rows.max[0] && rows.max[0] > NO_KEY) ||
                    (new_max[1] != rows.max[1] && rows.max[1] > NO_KEY);
  if (!__any_sync(FULL_MASK, some)) {
    rows.max[0] = new_max[0], rows.max[1] = new_max[1];
    return;
  }
  const float factor[2] = {exp2_fast(rows.max[0] - new_max[0]), exp2_fast(rows.max[1] - new_max[1])};
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= factor[i / 2 % 2];
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.sum[r] *= factor[r], rows.max[r] = new_max[r];
}

// Which of its scores a thread keeps, asked for while the products run: bit 16 r + 2 j + e for s[4 j + 2 r + e].
DEVICE u32 load_mask(const Params& p, const Segment& seg, int block, int row) {
  u32 mask = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int node = min((seg.first_pair + row + 8 * r) / p.num_heads, p.num_rows - 1);
    const u32* words = p.ancestors + (i64(seg.stream) * p.num_rows + node) * p.num_words;
    const u64 bits = visible_keys(words, p.num_words, block * Config::BLOCK_KEYS - seg.prefix, seg.nodes);
    u32 halves[2] = {u32(bits), u32(bits >> 32)};
#pragma unroll
    for (int i = 0; i < Config::BLOCK_KEYS / 32; ++i) {  // two bits of every byte
      u32 x = halves[i] >> 2 * (lane_id() % 4) & 0x03030303;
      x = (x | x >> 6) & 0x000f000f;
      mask |= ((x | x >> 12) & 0xff) << (16 * r + 8 * i);
    }
  }
  return mask;
}

DEVICE void mask_scores(u32 mask, float (&s)[SCORES]) {
#pragma unroll
  for (int i = 0; i < SCORES; ++i) {
    if (!(mask >> (16 * (i / 2 % 2) + 2 * (i / 4) + i % 2) & 1)) s[i] = -INFINITY_F32;
  }
}

// The maximum that the sums go on with once this block's scores are in.
DEVICE void next_max(const Params& p, const float (&s)[SCORES], const float (&old_max)[2], float (&new_max)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = s[2 * r];
#pragma unroll
    for (int j = 0; j < SCORES / 4; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    top = warp_reduce<4>(top, [](float a, float b) { return fmaxf(a, b); }) * p.scale_log2;
    new_max[r] = top > old_max[r] + Config::STALE ? top : old_max[r];
  }
}

// s becomes exp2(scale s - max) as A fragments of 16 keys each.
DEVICE void exponentials(const Params& p, float (&s)[SCORES], const float (&max)[2], float (&sum)[2],
                         u32 (&prob)[SCORES / 2]) {
#pragma unroll
  for (int i = 0; i < SCORES; ++i) {
    s[i] = exp2_fast(fmaf(s[i], p.scale_log2, -max[i / 2 % 2]));
    sum[i / 2 % 2] += s[i];
  }
#pragma unroll
  for (int i = 0; i < SCORES / 2; ++i) prob[i] = pack_pair<Scalar>(s[2 * i], s[2 * i + 1]);
}

// P to shared memory, for the other group.
DEVICE void publish(u8* box, const u32 (&prob)[SCORES / 2], float* max_out, const float (&max)[2], int row) {
  const int lane = lane_id(), matrix = lane / 8;
  const int box_row = row - lane / 4 + lane % 8 + 8 * (matrix % 2);
#pragma unroll
  for (int k = 0; k < Config::BLOCK_KEYS / 16; ++k) {
    const int chunk = (2 * k + matrix / 2) ^ (box_row % 8);
    store_matrices(shared_address(box) + box_row * 128 + chunk * 16, prob[4 * k], prob[4 * k + 1], prob[4 * k + 2],
                   prob[4 * k + 3]);
  }
  if (lane % 4 == 0) max_out[row] = max[0], max_out[row + 8] = max[1];
  async_proxy_fence();
}

DEVICE void load_max(const float* max, int row, float (&value)[2]) { value[0] = max[row], value[1] = max[row + 8]; }

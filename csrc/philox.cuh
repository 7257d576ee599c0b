// csrc/philox.cuh: Philox4x32-10 and standard Gumbel noise, word for word kernels/philox.py.
//   Noise is a function of (seed, stream, position, global token id): the same on every rank and in every batch.
//   Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
//   test through csrc/target_sample.cu
#pragma once

#include "common.cuh"

struct NoiseKey {
  u32 seed_low, seed_high, position, stream;
};

// All 64 bits; from a plain 64-bit product the compiler makes an addition more.
DEVICE u64 multiply_wide(u32 a, u32 b) {
  u64 product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// The four random words of tokens 4 * block .. 4 * block + 3.
DEVICE uint4 philox(const NoiseKey& key, u32 block) {
  u32 c0 = block, c1 = key.position, c2 = key.stream, c3 = 0, k0 = key.seed_low, k1 = key.seed_high;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = multiply_wide(c0, 0xD2511F53u), p1 = multiply_wide(c2, 0xCD9E8D57u);
    c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0, c1 = static_cast<u32>(p1);
    c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1, c3 = static_cast<u32>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// -log(-log(u)), u = (word + 1/2) / 2^32: between -3.14 and 22.88.
DEVICE double gumbel_exact(u32 word) { return -log(-log((word + 0.5) * 0x1p-32)); }

// log2(e) times an upper bound of the noise, near it where the noise is large: -log(u) is at least 1 - u.
// The hardware's log2 is within 2^-22 of its value (absolute between 0.5 and 2: PTX ISA, lg2.approx), so the bound may
// be too small by BOUND_ERROR.
constexpr float BOUND_ERROR = 33 * 0x1p-22f + 0x1p-22f;

DEVICE float gumbel_bound_log2(u32 word) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(static_cast<float>(~word), 0x1p-32f, 0x1p-33f)));
  return -y;
}

// log2(e) times a lower bound of the noise: -log(u) is at most (1 - u) / u. It may be too large by 2 BOUND_ERROR.
DEVICE float gumbel_least_log2(u32 word) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(static_cast<float>(word), 0x1p-32f, 0x1p-33f)));
  return y + gumbel_bound_log2(word);
}

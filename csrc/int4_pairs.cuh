// csrc/int4_pairs.cuh: packed expert weights, 8 nibbles u a word, each (u - 8) times the scale of its 32 inputs: how a
//   word becomes pairs of 16-bit floats, exactly and in one or two instructions a pair, and what else the kernels of
//   few rows (moe_weights.cuh, moe_slices.cu) and of many (moe_many_rows.cu) have in common.
//   test tests/kernels/test_moe_int4.py, test_moe_slices.py, test_moe_many_rows.py
#pragma once

#include "common.cuh"

constexpr int GROUP = 32;                               // inputs that share a scale
constexpr float INT4_VALUE = DTYPE == 1 ? 4.0f : 1.0f;  // what 1 in a pair stands for
#if SCALE_DTYPE == 0
using PackedScale = float;
#elif SCALE_DTYPE == 1
using PackedScale = bf16;
#else
using PackedScale = half;
#endif

__host__ __device__ constexpr int power_of_two_divisor(int n, int most) {
  int d = 1;
  while (d < most && n % (2 * d) == 0) d *= 2;
  return d;
}

// Scales of a row's neighbouring groups, which one load brings.
template <int GROUPS>
struct alignas(power_of_two_divisor(GROUPS * sizeof(PackedScale), 16)) Scales {
  PackedScale of_group[GROUPS];

  DEVICE float of(int group) const {
#if SCALE_DTYPE == 1
    if constexpr (GROUPS % 2 == 0) {  // one instruction each; what the compiler makes of a word's upper half is two
      const u32 pair = reinterpret_cast<const u32*>(of_group)[group / 2];
      return __uint_as_float(group % 2 ? pair & 0xffff0000 : pair << 16);
    }
#endif
    return to_float(of_group[group]);
  }
};

// A copy of 16 bytes, past L1. Few picks an expert read weights once: L2 shall rather keep rows and sums, which are
// read again. As a constant the policy (what createpolicy.fractional.L2::evict_first makes of 1.0) costs no registers.
DEVICE void copy_once(u32 shared, const u8* global) {
  constexpr u64 EVICT_FIRST = 0x12F0000000000000;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared), "l"(global), "l"(EVICT_FIRST)
               : "memory");
}

// A copy of 2, 4 or 8 bytes, through L1; cp.async has none of 2.
template <int BYTES>
DEVICE void copy_less(u32 shared, const u8* global) {
  static_assert(BYTES == 2 || BYTES == 4 || BYTES == 8, "16 go past L1");
  if constexpr (BYTES >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(shared), "l"(global), "n"(BYTES) : "memory");
  } else {
    asm volatile("st.shared.u16 [%0], %1;" : : "r"(shared), "h"(*reinterpret_cast<const u16*>(global)) : "memory");
  }
}

#if DTYPE != 0
#if DTYPE == 1
constexpr u32 MAGIC = 0x42004200;    // 32 twice: the last bit of its mantissa is 1/4
constexpr u32 SURPLUS = 0xC208C208;  // -(32 + 8/4) twice
constexpr u32 ONE = 0x3F803F80;
#else
constexpr u32 MAGIC = 0x64006400;    // 1024
constexpr u32 SURPLUS = 0xE408E408;  // -(1024 + 8)
constexpr u32 ONE = 0x3C003C00;
#endif

// (word & mask) | MAGIC, in one instruction: the compiler makes two, as only one of the constants fits into one.
DEVICE u32 mask_or_magic(u32 word, u32 mask) {
  u32 pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(mask), "r"(MAGIC));
  return pair;
}

// a b + c for two 16-bit floats at once.
DEVICE u32 multiply_add_pair(u32 a, u32 b, u32 c) {
  u32 d;
#if DTYPE == 1
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
  return d;
}

// The eight values of a word in pairs (0, 4), (1, 5), (2, 6), (3, 7), as value / INT4_VALUE; without EXACT the even
// pairs have a surplus, which -SURPLUS is. The integer pipe, where logic and shifts go, is the narrow place: the odd
// pairs are finished by the float pipe.
template <bool EXACT>
DEVICE void widen(u32 (&pair)[4], u32 word) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 part = word >> (4 * i);
    pair[i] = mask_or_magic(part, 0x000f000f);
    if (EXACT) pair[i] = multiply_add_pair(pair[i], ONE, SURPLUS);
#if DTYPE == 1
    // A nibble u at bits 4..7 is the number u 2^-129 (below and just above the smallest normal one, bits are linear):
    // times 2^127, less 2.
    pair[i + 1] = multiply_add_pair(part & 0x00f000f0, 0x7F007F00, 0xC000C000);
#else
    // (1024 + 16 u) / 16 - 72
    pair[i + 1] = multiply_add_pair(mask_or_magic(part, 0x00f000f0), 0x2C002C00, 0xD480D480);
#endif
  }
}

// Eight inputs, as they lie, in the order of a word's pairs.
DEVICE void pair_up(u32 (&b)[4], const uint4& v) {
  b[0] = __byte_perm(v.x, v.z, 0x5410);
  b[1] = __byte_perm(v.x, v.z, 0x7632);
  b[2] = __byte_perm(v.y, v.w, 0x5410);
  b[3] = __byte_perm(v.y, v.w, 0x7632);
}

// d = A B + c.
DEVICE void multiply_from(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float (&c)[4]) {
#if DTYPE == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
#endif

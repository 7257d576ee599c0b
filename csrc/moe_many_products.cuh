// csrc/moe_many_products.cuh: products of moe_many_rows.cu: wgmma with A in registers, of 8 columns and more.
//   test tests/kernels/test_moe_many_rows.py
#pragma once

#include "hopper.cuh"

#define F8(d, i) F4(d, i), F4(d, i + 4)
#define A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// d [64 x 8 EIGHTS] += A B, A in registers, B K-major in shared memory.
template <int EIGHTS>
DEVICE void product(float (&d)[4 * EIGHTS], const u32 (&a)[4], u64 b) {
  static_assert(EIGHTS <= 4 || EIGHTS == 6, "forms that are written here");
  if constexpr (EIGHTS == 1) {
    asm volatile(WGMMA("m64n8k16") "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
                 : F4(d, 0) : A4(a), "l"(b));
  } else if constexpr (EIGHTS == 2) {
    asm volatile(WGMMA("m64n16k16") "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
                 : F8(d, 0) : A4(a), "l"(b));
  } else if constexpr (EIGHTS == 3) {
    asm volatile(WGMMA("m64n24k16") "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, 1, 1, 1, 0;"
                 : F8(d, 0), F4(d, 8) : A4(a), "l"(b));
  } else if constexpr (EIGHTS == 4) {
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

// csrc/fresh.cuh: loads for kernels that begin before the kernel ahead of them ends (programmatic dependent launch).
//   A kernel may begin while the one TWO ahead still runs, if the one between lets it start before its own wait. Then
//   - L1 of a multiprocessor may hold old lines (none was seen on an H200, docs/racecheck.md): torch gives the memory
//     of an input that a kernel ahead still reads to the kernel behind it, and `const T* __restrict__` reads by
//     ld.global.nc, which CUDA allows only for what nobody writes as long as the kernel runs;
//   - the compiler moves such reads before grid_dependency_wait, or reads of weights behind it, as it likes.
//   test tests/kernels/test_compile.py (what is read before the wait), and through the kernels that include it
#pragma once

#include "common.cuh"

// One load of 1 to 16 bytes past L1, that stays where it is written: behind the wait for what kernels ahead have made,
// before it for weights, which then come while the kernel ahead ends.
template <typename T>
DEVICE T load_fresh(const T* p) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "one load");
  if constexpr (sizeof(T) == 16) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return *reinterpret_cast<T*>(&v);
  } else if constexpr (sizeof(T) == 8) {
    u64 v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return *reinterpret_cast<T*>(&v);
  } else if constexpr (sizeof(T) == 4) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return *reinterpret_cast<T*>(&v);
  } else {
    u16 v;
    if constexpr (sizeof(T) == 2) {
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
    } else {
      asm volatile("ld.global.cg.u8 %0, [%1];" : "=h"(v) : "l"(p));
    }
    return *reinterpret_cast<T*>(&v);
  }
}

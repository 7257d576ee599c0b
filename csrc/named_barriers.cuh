// csrc/named_barriers.cuh: barriers of some warps of a block, under numbers 1..15; 0 is __syncthreads.
//   racecheck loses track of the hardware's named barriers (docs/racecheck.md). -DRACECHECK=1 carries each out by an
//   mbarrier in shared memory: the same threads arrive at it in the same places and the same ones wait. Everything else
//   of a kernel is the same text in both builds, so what racecheck then says is about the kernel's own order.
//   test tests/kernels/test_sanitizer_gpu.py, and through the kernels that include it
#pragma once

#include "common.cuh"

#ifdef RACECHECK
__shared__ u64 named_barriers[16];
__shared__ u32 named_totals[16];  // of all threads that said yes so far
#endif

// One thread makes each number that the kernel uses, with all threads that arrive in a phase, those that only arrive
// included; a __syncthreads follows.
DEVICE void named_barrier_init(int number, int threads) {
#ifdef RACECHECK
  asm volatile("mbarrier.init.shared.b64 [%0], %1;"
               :
               : "r"(shared_address(&named_barriers[number])), "r"(threads)
               : "memory");
  named_totals[number] = 0;
#endif
}

// Waits for all `threads`.
DEVICE void named_barrier(int number, int threads) {
#ifdef RACECHECK
  const u32 barrier = shared_address(&named_barriers[number]);
  u64 phase;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(phase) : "r"(barrier) : "memory");
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "l"(phase)
                 : "memory");
  } while (!done);
  __syncwarp();
#else
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
#endif
}

// Counts as arrived and does not wait.
DEVICE void named_barrier_arrive(int number, int threads) {
#ifdef RACECHECK
  asm volatile("{ .reg .b64 phase; mbarrier.arrive.shared.b64 phase, [%0]; }"
               :
               : "r"(shared_address(&named_barriers[number]))
               : "memory");
#else
  asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
#endif
}

// Waits for all `threads`, and says how many of them say yes.
DEVICE int named_barrier_count(int number, int threads, bool yes) {
#ifdef RACECHECK
  const u32 before = named_totals[number];
  named_barrier(number, threads);  // all have read it
  if (yes) atomicAdd(&named_totals[number], 1);
  named_barrier(number, threads);
  return named_totals[number] - before;
#else
  int count;
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; bar.red.popc.u32 %0, %1, %2, p; }"
               : "=r"(count)
               : "r"(number), "r"(threads), "r"(int(yes))
               : "memory");
  return count;
#endif
}

// The same, and says whether any does.
DEVICE bool named_barrier_or(int number, int threads, bool yes) {
#ifdef RACECHECK
  return named_barrier_count(number, threads, yes) > 0;
#else
  u32 any;
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(number), "r"(threads), "r"(u32(yes))
               : "memory");
  return any;
#endif
}

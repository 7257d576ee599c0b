// csrc/mma.cuh: tensor cores by mma.sync (m16n8k16, bf16 or half in, f32 out), and the loads that feed them: ldmatrix
//   from shared memory, cp.async from global to shared memory. sm_80 and up, with one meaning on all of them.
//   Fragments of a warp, lane = 4 g + t, g = 0..7, t = 0..3 (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//     A [16 x 16]  a[0] row g, k 2t..2t+1 | a[1] row g + 8 | a[2] row g, k 2t+8..2t+9 | a[3] row g + 8, k 2t+8..2t+9
//     B [16 x 8]   b0 column g, k 2t..2t+1 | b1 column g, k 2t+8..2t+9
//     D [16 x 8]   d[0..1] row g, columns 2t..2t+1 | d[2..3] row g + 8
//   test through every kernel that includes it
#pragma once

#include "common.cuh"

// ---- ldmatrix ----------------------------------------------------------------------------------------------------
// Four 8 x 8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8, a multiple of 16.

// r[m] = row g, columns 2t..2t+1 of matrix m.
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// r[m] = rows 2t..2t+1, column g of matrix m.
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ---- plain accesses by 32-bit address --------------------------------------------------------------------------

DEVICE float load_shared(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

DEVICE float4 load_shared4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

DEVICE void load_shared(u32 address, u32& a, u32& b) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}

DEVICE void store_shared(u32 address, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};"
               :
               : "r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

DEVICE void store_shared(u32 address, u32 a, u32 b) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" : : "r"(address), "r"(a), "r"(b) : "memory");
}

// ---- mma ---------------------------------------------------------------------------------------------------------

// d += A B. T is bf16 or half.
template <typename T>
DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
DEVICE void multiply_add<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
DEVICE void multiply_add<half>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as one register of a fragment, `low` at the lower column; rounds to nearest even.
template <typename T>
DEVICE u32 pack_pair(float low, float high);

template <>
DEVICE u32 pack_pair<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

template <>
DEVICE u32 pack_pair<half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&pair);
}

// 2^x of the special function unit: 2 ulp, 0 below 2^-126.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- cp.async ----------------------------------------------------------------------------------------------------

// 16 bytes from global to shared memory, both addresses multiples of 16, past L1; zeros are written, and nothing is
// read, where `valid` is false.
DEVICE void copy_async(u32 shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// 4 bytes, through L1.
DEVICE void copy_async4(u32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(shared), "l"(global) : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are still under way. Other threads' copies need a barrier too.
template <int PENDING>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// Has the memory barrier count this thread once all its copies so far have landed; its count includes these arrivals.
DEVICE void copy_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(barrier) : "memory");
}

// ---- mbarriers ---------------------------------------------------------------------------------------------------

// A barrier of 8 bytes in shared memory: a phase ends when `count` arrivals have come, and the next begins. One thread
// makes it, and a __syncthreads follows.
DEVICE void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" : : "r"(barrier) : "memory");
}

// Waits for the end of a phase; phases have the parities 0, 1, 0, ... so waiting for parity 1 first returns at once.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#endif
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

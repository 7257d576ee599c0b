// csrc/logits.cuh: what the kernels over rows of logits share: reading a row in chunks, keys that order like values,
//   exchange between the blocks of a row.
//   A row is cut into chunks that depend on its length alone, never on its address or on the batch: every sum is taken
//   in the same order whatever else is in the batch. The blocks of a row form a cluster (sm_90 and up) and write their
//   results into each other's shared memory; before sm_90 one block takes all chunks of its row.
//   test through csrc/draft_topk.cu and csrc/target_sample.cu
#pragma once

#include "common.cuh"

#ifndef CHUNK_BYTES
#error "BLOCK_THREADS, CHUNK_BYTES: threads of a block, bytes that it reads of a row at once"
#endif

constexpr int THREADS = BLOCK_THREADS;
constexpr int WARPS = THREADS / WARP;
constexpr int PER_VECTOR = 16 / sizeof(Scalar);            // logits of one 16-byte read
constexpr int VECTORS = CHUNK_BYTES / (16 * THREADS);      // reads of a thread and chunk, all in flight at once
constexpr int CHUNK_VECTORS = VECTORS * THREADS;
constexpr int CHUNK = CHUNK_VECTORS * PER_VECTOR;          // logits
constexpr int MAX_CLUSTER = 8;
constexpr float NAN_F32 = __builtin_bit_cast(float, 0x7fc00000);
static_assert(VECTORS * 16 * THREADS == CHUNK_BYTES && THREADS % WARP == 0, "a chunk is whole reads of every thread");

// ---- keys --------------------------------------------------------------------------------------------------------

// Unsigned integers that order like the values; +0 and -0 are equal, as they are to a comparison. Only a NaN's can
// be 0.
DEVICE u32 order_key(float x) {
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}
DEVICE float value_of(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }

DEVICE u64 order_key(double x) {
  const u64 bits = static_cast<u64>(__double_as_longlong(x + 0.0));
  return bits ^ (static_cast<u64>(static_cast<i64>(bits) >> 63) | (u64(1) << 63));
}

// Value first, then the smaller id: no two tokens of a row have the same rank. 0 stands for no token.
DEVICE u64 rank_key(float x, u32 id) { return u64(order_key(x)) << 32 | (0xffffffffu - id); }
DEVICE u32 id_of(u64 rank) { return 0xffffffffu - static_cast<u32>(rank); }
DEVICE float value_of(u64 rank) { return value_of(static_cast<u32>(rank >> 32)); }

// ---- rows --------------------------------------------------------------------------------------------------------

struct Row {
  const Scalar* logits;  // [num_ids], the next value at the next address
  i32 num_ids;
  i32 shift;             // vectors start at PER_VECTOR * i - shift
  bool aligned;          // those addresses are multiples of 16
};

DEVICE Row row_of(const Scalar* logits, i64 offset, i32 num_ids, i32 shift) {
  logits += offset;
  return {logits, num_ids, shift, is_aligned(reinterpret_cast<const void*>(reinterpret_cast<u64>(logits) -
                                                                         shift * sizeof(Scalar)), 16)};
}

struct Logits {
  Vec16<Scalar> data;
  DEVICE float operator[](int i) const { return to_float(data[i]); }
};

// A 16-byte read that stays in L1; volatile, so that the compiler does not mix it with the other way to read a row.
DEVICE uint4 load_16(const Scalar* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Vector `index` of the row; what lies outside the row reads as -inf.
DEVICE Logits load_vector(const Row& row, i32 index) {
  const i32 start = index * PER_VECTOR - row.shift;
  Logits logits;
  if (row.aligned && start >= 0 && start + PER_VECTOR <= row.num_ids) {
    reinterpret_cast<uint4&>(logits.data) = load_16(row.logits + start);
    return logits;
  }
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) {
    const bool inside = start + i >= 0 && start + i < row.num_ids;
    logits.data[i] = inside ? row.logits[start + i] : from_float<Scalar>(-INFINITY_F32);
  }
  return logits;
}

// A thread's vectors first, first + THREADS, ... of the row, all in flight at once.
DEVICE void load_chunk(const Row& row, i32 first, Logits (&logits)[VECTORS]) {
  const i32 start = first * PER_VECTOR - row.shift, end = start + (CHUNK - THREADS * PER_VECTOR) + PER_VECTOR;
  if (row.aligned && start >= 0 && end <= row.num_ids) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      reinterpret_cast<uint4&>(logits[v].data) = load_16(row.logits + start + v * THREADS * PER_VECTOR);
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      const i32 id = start + v * THREADS * PER_VECTOR + i;
      const bool inside = id >= 0 && id < row.num_ids;
      logits[v].data[i] = inside ? row.logits[id] : from_float<Scalar>(-INFINITY_F32);
    }
  }
}

#if DTYPE == 1
using Pair = __nv_bfloat162;
#elif DTYPE == 2
using Pair = __half2;
#endif

DEVICE float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The largest of a vector: NaN if any is, or (max_of) NaN counted as -inf.
DEVICE float max_or_nan(const Logits& logits) {
#if DTYPE == 0
  return max_or_nan(max_or_nan(logits[0], logits[1]), max_or_nan(logits[2], logits[3]));
#else
  const Pair* p = reinterpret_cast<const Pair*>(&logits.data);
  const Pair top = __hmax2_nan(__hmax2_nan(p[0], p[1]), __hmax2_nan(p[2], p[3]));
  return to_float(__hmax_nan(top.x, top.y));
#endif
}
DEVICE float max_of(const Logits& logits) {
#if DTYPE == 0
  return fmaxf(fmaxf(fmaxf(logits[0], logits[1]), fmaxf(logits[2], logits[3])), -INFINITY_F32);
#else
  const Pair* p = reinterpret_cast<const Pair*>(&logits.data);
  const Pair top = __hmax2(__hmax2(p[0], p[1]), __hmax2(p[2], p[3]));
  return fmaxf(to_float(__hmax(top.x, top.y)), -INFINITY_F32);
#endif
}

// ---- warps -------------------------------------------------------------------------------------------------------

DEVICE u32 warp_max_key(u32 key) { return __reduce_max_sync(FULL_MASK, key); }
DEVICE u32 warp_min_key(u32 key) { return __reduce_min_sync(FULL_MASK, key); }
DEVICE u64 warp_max_key(u64 key) {
  const u32 high = __reduce_max_sync(FULL_MASK, static_cast<u32>(key >> 32));
  const u32 low = __reduce_max_sync(FULL_MASK, static_cast<u32>(key >> 32) == high ? static_cast<u32>(key) : 0u);
  return u64(high) << 32 | low;
}
DEVICE u64 warp_min_key(u64 key) { return ~warp_max_key(~key); }

DEVICE float exp_scaled(float x, float log2_scale) {  // exp2(x * log2_scale), x <= 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * log2_scale));
  return y;
}

// ---- clusters ----------------------------------------------------------------------------------------------------

// Blocks of one row; without clusters every function below is about this block alone.
// Says that this block runs: others may write into its shared memory after cluster_wait. Nothing is published.
DEVICE void cluster_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Writes into the shared memory of block `block` of the cluster, at the place that `p` has in this block's.
DEVICE void store_remote_u32(u32* p, int block, u32 value) {
#if __CUDA_ARCH__ >= 900
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(block));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#else
  *p = value;
#endif
}
DEVICE void store_remote(u64* p, int block, u64 value) {
#if __CUDA_ARCH__ >= 900
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(block));
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
#else
  *p = value;
#endif
}

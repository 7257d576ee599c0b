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

struct Rows {  // all rows of a launch, and the one that this block works on
  const Scalar* logits;
  i64 stream_stride, row_stride;  // in values
  i32 rows_per_stream;            // N
  i32 num_ids, first_id, cluster;
  DEVICE i64 index() const { return blockIdx.x / cluster; }
  DEVICE i32 block() const { return blockIdx.x % cluster; }
  DEVICE i64 stream() const { return index() / rows_per_stream; }
  // Shifted so that the four tokens of one Philox block never stand in two vectors.
  DEVICE Row row() const {
    const i64 offset = stream() * stream_stride + (index() - stream() * rows_per_stream) * row_stride;
    return row_of(logits, offset, num_ids, first_id % 4);
  }
  DEVICE i32 num_chunks() const { return max(cdiv(num_ids + first_id % 4, CHUNK), 1); }
};

// A 16-byte read that stays in L1; volatile, so that the compiler does not mix it with the other ways to read a row.
DEVICE uint4 load_16(u64 address) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// 16 bytes from anywhere, out of the two 16-byte words that hold them.
DEVICE uint4 load_16_unaligned(u64 address) {
  const uint4 a = load_16(address & ~u64(15)), b = load_16((address & ~u64(15)) + 16);
  u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  if (address & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (address & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  const u32 bits = address % 4 * 8;
  return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits),
          __funnelshift_r(w[3], w[4], bits)};
}

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE u32 bits_of(bf16 x) { return __bfloat16_as_ushort(x); }
DEVICE u32 bits_of(half x) { return __half_as_ushort(x); }

// The vector at a row's edge, one value after the other.
DEVICE uint4 load_edge(const Row& row, i32 start) {
  u64 low = 0, high = 0;
#pragma unroll 1
  for (int i = 0; i < PER_VECTOR; ++i) {
    const bool inside = start + i >= 0 && start + i < row.num_ids;
    const Scalar value = inside ? row.logits[start + i] : from_float<Scalar>(-INFINITY_F32);
    const u64 bits = bits_of(value);
    const int place = i * 8 * sizeof(Scalar);
    if (place < 64) low |= bits << place;
    else high |= bits << (place - 64);
  }
  return {static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high), static_cast<u32>(high >> 32)};
}

// Vector `index` of the row; what lies outside the row reads as -inf.
DEVICE Logits load_vector(const Row& row, i32 index) {
  const i32 start = index * PER_VECTOR - row.shift;
  const u64 address = reinterpret_cast<u64>(row.logits + start);
  Logits logits;
  uint4& bits = reinterpret_cast<uint4&>(logits.data);
  const i32 beside = row.aligned ? 0 : PER_VECTOR - 1;  // of the row, in the words that hold the vector
  if (start < beside || start + PER_VECTOR + beside > row.num_ids) bits = load_edge(row, start);
  else if (row.aligned) bits = load_16(address);
  else bits = load_16_unaligned(address);
  return logits;
}

// All vectors of the chunk are whole and aligned, for all threads alike: the chunks that the fast way is for.
DEVICE bool is_plain(const Row& row, i32 chunk) {
  const i32 start = chunk * CHUNK - row.shift;
  return row.aligned && start >= 0 && start + CHUNK <= row.num_ids;
}

DEVICE void load_plain(const Row& row, i32 chunk, int v, Logits& logits) {
  const u64 address = reinterpret_cast<u64>(row.logits + (chunk * CHUNK - row.shift)) + threadIdx.x * 16;
  reinterpret_cast<uint4&>(logits.data) = load_16(address + v * (THREADS * 16));
}

// A thread's vectors of a plain chunk, all in flight at once.
DEVICE void load_plain(const Row& row, i32 chunk, Logits (&logits)[VECTORS]) {
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) load_plain(row, chunk, v, logits[v]);
}

// use(vector, its number among the thread's vectors of the chunk), in the order of their ids.
template <typename Use>
DEVICE void for_vectors(const Row& row, i32 chunk, Use use) {
  if (is_plain(row, chunk)) {
    Logits logits[VECTORS];
    load_plain(row, chunk, logits);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) use(logits[v], v);
  } else {
#pragma unroll 1
    for (int v = 0; v < VECTORS; ++v) use(load_vector(row, chunk * CHUNK_VECTORS + v * THREADS + threadIdx.x), v);
  }
}

// The same for all chunks of this block: use(vector, chunk, number). The next chunk's reads follow one by one as this
// one's vectors are used up.
template <typename Use>
DEVICE void for_row(const Row& row, i32 block, i32 num_chunks, i32 cluster, Use use) {
  Logits logits[VECTORS];
  bool plain = block < num_chunks && is_plain(row, block);
  if (plain) load_plain(row, block, logits);
#pragma unroll 1
  for (i32 chunk = block; chunk < num_chunks; chunk += cluster) {
    const i32 next = chunk + cluster;
    const bool next_plain = next < num_chunks && is_plain(row, next);
    if (plain) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        use(logits[v], chunk, v);
        if (next_plain) load_plain(row, next, v, logits[v]);
      }
    } else {
#pragma unroll 1
      for (int v = 0; v < VECTORS; ++v) {
        use(load_vector(row, chunk * CHUNK_VECTORS + v * THREADS + threadIdx.x), chunk, v);
      }
      if (next_plain) load_plain(row, next, logits);
    }
    plain = next_plain;
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
DEVICE void store_remote(u32* p, int block, u32 value) {
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

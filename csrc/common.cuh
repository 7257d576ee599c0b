// csrc/common.cuh: what every kernel file shares: integer types, scalars, vector memory access, reductions, PDL.
//   The code is compiled by NVRTC, which has no host headers: no <cstdint>, no <cooperative_groups.h>.
//   -DDTYPE=0|1|2 makes `Scalar` float | bf16 | half; without DTYPE there is no `Scalar`.
//   test tests/kernels/test_jit_common.py, and through every kernel
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using bf16 = __nv_bfloat16;
// `half` is cuda_fp16.h's own name.

static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(void*) == 8, "widths");

#define DEVICE __device__ __forceinline__

constexpr int WARP = 32;
constexpr u32 FULL_MASK = 0xffffffffu;
constexpr float INFINITY_F32 = __builtin_bit_cast(float, 0x7f800000);  // NVRTC knows no INFINITY
constexpr float LOG2_E = 1.4426950408889634f;  // exp(x) = exp2(x * LOG2_E)
constexpr float LN_2 = 0.6931471805599453f;    // log(x) = log2(x) * LN_2

template <typename T>
__host__ __device__ constexpr T cdiv(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
__host__ __device__ constexpr T round_up(T a, T b) {
  return cdiv(a, b) * b;
}

DEVICE int lane_id() { return threadIdx.x % WARP; }  // for blocks whose x extent is a multiple of 32 or that are 1-D
DEVICE int warp_id() { return threadIdx.x / WARP; }

// ---- scalars -----------------------------------------------------------------------------------------------------

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __bfloat162float(x); }
DEVICE float to_float(half x) { return __half2float(x); }

// Rounds to nearest even, as torch's `.to()` does.
template <typename T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) { return x; }
template <>
DEVICE bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <>
DEVICE half from_float<half>(float x) { return __float2half_rn(x); }

#ifdef DTYPE
#if DTYPE == 0
using Scalar = float;
#elif DTYPE == 1
using Scalar = bf16;
#elif DTYPE == 2
using Scalar = half;
#else
#error "DTYPE is 0 (float), 1 (bf16) or 2 (half)"
#endif
#endif

// ---- 16 bytes at once --------------------------------------------------------------------------------------------

// N values that move as one 16-byte word (or 8 or 4 bytes for smaller N): the address must be a multiple of that size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(sizeof(T) * N == 4 || sizeof(T) * N == 8 || sizeof(T) * N == 16, "one memory instruction");
  T data[N];
  DEVICE T& operator[](int i) { return data[i]; }
  DEVICE const T& operator[](int i) const { return data[i]; }
};

// As many values of T as 16 bytes hold.
template <typename T>
using Vec16 = Vec<T, 16 / sizeof(T)>;

template <typename T, int N>
DEVICE Vec<T, N> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

template <typename T, int N>
DEVICE void store_vec(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// A 16-byte read through the read-only path that does not stay in L1: for data that is read once.
DEVICE uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

DEVICE bool is_aligned(const void* p, u32 bytes) { return (reinterpret_cast<u64>(p) % bytes) == 0; }

// The 32-bit address of shared memory that PTX instructions take.
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// ---- reductions --------------------------------------------------------------------------------------------------

struct Sum {
  template <typename T>
  DEVICE T operator()(T a, T b) const { return a + b; }
};
// NaN is not carried through: a kernel that must flag NaN looks for it itself.
struct Max {
  template <typename T>
  DEVICE T operator()(T a, T b) const { return a > b ? a : b; }
};

// Every lane of each group of WIDTH neighbours gets the result, always in the same order of operations.
// All 32 lanes must call.
template <int WIDTH = WARP, typename T, typename Op>
DEVICE T warp_reduce(T value, Op op) {
  static_assert(WIDTH == 2 || WIDTH == 4 || WIDTH == 8 || WIDTH == 16 || WIDTH == 32, "a power of two within a warp");
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(FULL_MASK, value, offset));
  return value;
}

template <int WIDTH = WARP, typename T>
DEVICE T warp_sum(T value) { return warp_reduce<WIDTH>(value, Sum{}); }
template <int WIDTH = WARP, typename T>
DEVICE T warp_max(T value) { return warp_reduce<WIDTH>(value, Max{}); }

// A lane gets the sum of its own value and those of the lanes before it. All 32 lanes must call.
template <typename T>
DEVICE T warp_sum_through(T value) {
#pragma unroll
  for (int offset = 1; offset < WARP; offset *= 2) {
    const T before = __shfl_up_sync(FULL_MASK, value, offset);
    if (lane_id() >= offset) value += before;
  }
  return value;
}

// Every thread of a 1-D block of THREADS gets the result. `scratch` holds one T a warp; it may be used again at once,
// because the first barrier waits for readers of the call before.
template <int THREADS, typename T, typename Op>
DEVICE T block_reduce(T value, Op op, T* scratch) {
  static_assert(THREADS % WARP == 0 && THREADS <= 1024, "whole warps of one block");
  constexpr int WARPS = THREADS / WARP;
  value = warp_reduce(value, op);
  if constexpr (WARPS == 1) return value;
  __syncthreads();
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  value = scratch[0];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) value = op(value, scratch[w]);
  return value;
}

template <int THREADS, typename T>
DEVICE T block_sum(T value, T* scratch) { return block_reduce<THREADS>(value, Sum{}, scratch); }
template <int THREADS, typename T>
DEVICE T block_max(T value, T* scratch) { return block_reduce<THREADS>(value, Max{}, scratch); }

// ---- programmatic dependent launch -------------------------------------------------------------------------------

// Waits until the kernels before this one in the stream have ended and their writes can be seen; call it before the
// first read of what they wrote AND before the first write of what they may still read. No effect without overlap=True.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start (they still wait in grid_dependency_wait for this kernel's end).
DEVICE void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

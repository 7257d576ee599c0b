"""CUDA sources that the tests of the JIT compile, in a folder of their own."""

import shutil

from kdlab.paths import CSRC

PLAIN = """
#include "common.cuh"
#include "factor.cuh"
extern "C" __global__ void scale(float* y, const float* x, float a, i32 n) {
  i32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = FACTOR * a * x[i];
}
"""
FACTOR = "#define FACTOR 2\n"
LAUNCH = """
#include "common.cuh"
// Writes what each kind of argument came as.
extern "C" __global__ void kinds(double* out, const float* none, i32 i, float f, i64 l, u64 u, double d) {
  out[0] = none == nullptr; out[1] = i; out[2] = f; out[3] = l; out[4] = double(u); out[5] = d;
}
extern "C" __global__ void nothing() {}
extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1.f; }
extern "C" __global__ void big_shared(float* out, i32 floats) {
  extern __shared__ float buffer[];
  __shared__ float fixed[256];
  fixed[threadIdx.x] = float(threadIdx.x);
  for (i32 i = threadIdx.x; i < floats; i += blockDim.x) buffer[i] = float(i);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = buffer[floats - 1] + fixed[255];
}
extern "C" __global__ void __launch_bounds__(32) narrow(float* x) { x[threadIdx.x] = 1.f; }
// A chain of these counts up: each waits for the one before it.
extern "C" __global__ void chain(i32* counter, i32 n) {
  grid_dependency_wait();
  grid_dependency_launch();
  for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) counter[i] = counter[i] + 1;
}
"""
CLUSTER = """
#include "common.cuh"
extern "C" __global__ void ranks(i32* out) {
  u32 rank, size;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) { out[2 * blockIdx.x] = rank; out[2 * blockIdx.x + 1] = size; }
  if (threadIdx.x == 0 && blockIdx.x == 0) out[2 * gridDim.x] = gridDim.x;
}
"""


def write_sources(folder):
    """Write the sources above and the repository's common.cuh into `folder`."""
    texts = {"plain.cu": PLAIN, "factor.cuh": FACTOR, "launch.cu": LAUNCH, "cluster.cu": CLUSTER}
    for name, text in texts.items():
        (folder / name).write_text(text)
    shutil.copy(CSRC / "common.cuh", folder)
    return folder

// csrc/mma_peak.cu: the rate of mma.sync alone, without any memory: what kernels built on it are measured against.
//   in   nothing
//   out  sums [threads] f32, so that no product can be left out
//   math CHAINS independent sums of m16n8k16 products a warp, `rounds` of each
//   cost 4096 CHAINS rounds FLOP a warp
//   ref  none: a ceiling has no right answer | test tests/kernels/test_mma_peak.py | sm_80 and up
#include "mma.cuh"

struct Config {
  static constexpr int THREADS = 256, CHAINS = 16;
};

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1) mma_peak(float* __restrict__ sums, int rounds) {
  // Values of changing sign around 1: zeros would draw less power, and the clock would stay higher than in real work.
  u32 a[2][4], b[4][2], seed = threadIdx.x * 2654435761u + 1;
  const auto next = [&] {
    seed = seed * 1664525u + 1013904223u;
    const float low = float(int(seed) >> 8) * 0x1p-23f, high = float(int(seed * 5u) >> 8) * 0x1p-23f;
    return pack_pair<Scalar>(low, high);
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = next(), b[i / 2][i % 2] = next();
  float d[Config::CHAINS][4] = {};
  for (int round = 0; round < rounds; ++round)
#pragma unroll
    for (int chain = 0; chain < Config::CHAINS; ++chain)
      multiply_add<Scalar>(d[chain], a[chain % 2], b[chain / 2 % 4][0], b[chain / 2 % 4][1]);
  float sum = 0.0f;
#pragma unroll
  for (int chain = 0; chain < Config::CHAINS; ++chain) sum += d[chain][0] + d[chain][1] + d[chain][2] + d[chain][3];
  sums[blockIdx.x * Config::THREADS + threadIdx.x] = sum;
}

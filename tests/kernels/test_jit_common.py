"""csrc/common.cuh: conversions, reductions, vector access, against torch on the GPU."""

import pytest
import torch

from kdlab.kernels.jit import PORTABLE, Build, compile_all, kernel

SOURCE = """
#include "common.cuh"
constexpr i32 N = 16 / sizeof(Scalar);
// One block of 128 threads: y = x through 16-byte loads, float and back; out = sum and max of all x, then of 8 lanes.
extern "C" __global__ void __launch_bounds__(128) common(const Scalar* x, Scalar* y, float* out, i32 words) {
  __shared__ float scratch[4];
  grid_dependency_wait();
  float sum = 0.f, most = -INFINITY_F32;
  for (i32 i = threadIdx.x; i < words; i += 128) {
    Vec16<Scalar> v = load_vec<Scalar, N>(x + i * N);
    for (i32 j = 0; j < N; ++j) {
      float f = to_float(v[j]);
      sum += f; most = Max{}(most, f);
      v[j] = from_float<Scalar>(f);
    }
    store_vec(y + i * N, v);
  }
  sum = block_sum<128>(sum, scratch);
  most = block_max<128>(most, scratch);
  float eight = warp_sum<8>(float(threadIdx.x)), all = warp_max(float(threadIdx.x));
  if (threadIdx.x == 37) {
    out[0] = sum; out[1] = most; out[2] = eight; out[3] = all;
    out[4] = lane_id() + 100 * warp_id(); out[5] = cdiv(7, 3) + 10 * round_up(7, 4);
    uint4 word = load_streaming(x);
    out[6] = __uint_as_float(word.w);
    out[7] = is_aligned(x, 16) + 2 * is_aligned(x + 1, 16);
  }
  grid_dependency_launch();
}
// Float to Scalar, one value a thread.
extern "C" __global__ void rounding(const float* x, Scalar* y, i32 n) {
  i32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_float<Scalar>(x[i]);
}
"""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def build(code):
    return Build("common_test.cu", (("DTYPE", code),))


def test_it_compiles_for_every_architecture_without_a_warning(csrc):
    (csrc / "common_test.cu").write_text(SOURCE)
    for cubin in compile_all([(build(code), arch) for code in range(3) for arch in PORTABLE], workers=2).values():
        assert set(cubin.kernels) == {"common", "rounding"}
        assert "warning" not in cubin.log


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_and_vector_access(csrc, dtype):
    (csrc / "common_test.cu").write_text(SOURCE)
    device = torch.device("cuda", 0)
    x = torch.randint(-8, 9, (4000,), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[1234] = 100
    y, out = torch.zeros_like(x), torch.zeros(8, device=device)
    words = x.numel() * x.element_size() // 16
    kernel(build(DTYPES.index(dtype)), "common", device).launch(1, 128, x, y, out, words, overlap=True)
    assert torch.equal(x, y)
    fourth = x.view(torch.float32)[3].item()
    sums = [x.double().sum().item(), 100.0, float(sum(range(32, 40))), 63.0, 105.0, 83.0, fourth, 1.0]
    assert out.tolist() == pytest.approx(sums, nan_ok=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_torchs(csrc, dtype):
    (csrc / "common_test.cu").write_text(SOURCE)
    device = torch.device("cuda", 0)
    x = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    x = x.view(torch.float32).to(device)  # every kind of float: subnormal, infinite, NaN
    y = torch.zeros(x.numel(), dtype=dtype, device=device)
    kernel(build(DTYPES.index(dtype)), "rounding", device).launch(x.numel() // 256, 256, x, y, x.numel())
    number = ~x.isnan()
    assert torch.equal(y[number], x.to(dtype)[number])
    assert y[~number].isnan().all()

"""The builds of moe_int4: shared memory that the smallest card has, and sizes of a small model."""

import pytest
import torch

from kdlab.kernels.jit import HOPPER
from kdlab.kernels.jit.build import compile_build
from kdlab.kernels.moe_builds import BUILDS, MANY_ROWS, WIDE_ROWS, moe_path, rows_build

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def test_shared_memory_fits_the_smallest_card():
    builds = [build for build in BUILDS if "sm_89" in build.archs]
    builds += [rows_build(F16, F32, 64, 1024, 5, large=False), rows_build(F32, None, 4096, 4096, 8, large=False)]
    for build in builds:
        assert max(size for _, size in build.shared_bytes) <= 88_000  # of 101,376, the rest is static
        assert all(count >= 2 for name, count in build.defines if name.endswith("STAGES"))


@pytest.mark.parametrize("rows", [1, 5, MANY_ROWS, WIDE_ROWS])
def test_the_sizes_of_a_small_model_compile(rows):
    """Other branches of the code than K2.6's: a row's scales are 8 bytes there, not 16 and more."""
    for build in moe_path(rows, 4, BF16, BF16, 256, 128, 24, 128)[1]:
        for kernel in compile_build(build, *HOPPER)[0].kernels:
            assert kernel.startswith("moe_")

"""The builds of moe_int4: shared memory that the smallest card has."""

import torch

from kdlab.kernels.moe_builds import BUILDS, rows_build

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def test_shared_memory_fits_the_smallest_card():
    builds = [build for build in BUILDS if "sm_89" in build.archs]
    builds += [rows_build(F16, F32, 64, 1024, 5, large=False), rows_build(F32, None, 4096, 4096, 8, large=False)]
    for build in builds:
        assert max(size for _, size in build.shared_bytes) <= 88_000  # of 101,376, the rest is static
        assert all(count >= 2 for name, count in build.defines if name.endswith("STAGES"))

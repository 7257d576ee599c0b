"""The builds of moe_int4: which source a shape gets, and shared memory that the smallest card has."""

import pytest
import torch

from kdlab.kernels.moe_builds import BUILDS, row_build, row_features, rows_build

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "scale", "width", "inner", "fits"),
    [
        (BF16, BF16, 7168, 256, True),  # one rank of 8
        (F16, F32, 256, 128, True),
        (BF16, BF16, 7168, 2048, False),  # wide experts keep every multiprocessor busy as they are
        (F32, BF16, 7168, 256, False),
        (BF16, BF16, 7168, 96, False),
        (BF16, BF16, 96, 64, False),
        (BF16, F32, 7168, 512, False),  # more shared memory than the smallest card has
    ],
)
def test_a_single_row_has_its_own_kernels_where_experts_are_narrow(dtype, scale, width, inner, fits):
    build = row_build(dtype, scale, width, inner, 384)
    assert (build is not None) == fits
    if build is not None:
        assert build.file == "moe_one_row.cu"


def test_every_output_of_a_row_has_a_block():
    assert row_features(7168, gated=True) == 16  # 32 rows of weights a warp, gate and up, all warps along the inputs
    assert row_features(256, gated=False) == 64  # four warps along the inputs
    assert row_features(64, gated=False) == 256


def test_shared_memory_fits_the_smallest_card():
    builds = [*BUILDS, rows_build(F16, F32, 64, 1024, 5), rows_build(F32, None, 4096, 4096, 8)]
    for build in builds:
        most = 100_000 if build.file == "moe_many_rows.cu" else 90_000  # of 101,376, the rest is static
        assert max(size for _, size in build.shared_bytes) <= most
        assert all(count >= 2 for name, count in build.defines if name.endswith("STAGES"))

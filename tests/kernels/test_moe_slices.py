"""moe_slices: `down` and the sums over picks in one kernel: the bits of moe_down and moe_sum, and nobody's old ids."""

import pytest
import torch

from kdlab.kernels import moe_int4 as module
from kdlab.kernels.moe_builds import MANY_ROWS, moe_path, rows_build
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.moe_slices import slices_build, slices_bytes, slices_grid
from tests.kernels.moe_cases import BF16, F16, F32, assert_right, new_case, skipping

gpu = pytest.mark.gpu
K26 = {"width": 7168, "inner": 256, "num_experts": 384, "top_k": 8}
RANK = (7168, 256, 384, 256)


def test_which_rows_have_the_kernel():
    paths = {rows: moe_path(rows, 8, BF16, BF16, *RANK)[0] for rows in (4, 5, MANY_ROWS - 1, MANY_ROWS)}
    assert list(paths.values()) == ["few", "slices", "slices", "many"]
    assert moe_path(9, 8, BF16, BF16, *RANK, arch="sm_80")[0] == "rows"
    assert moe_path(9, 8, BF16, None, *RANK)[0] == "rows"
    assert moe_path(9, 8, F32, BF16, *RANK)[0] == "rows"
    assert moe_path(9, 8, BF16, BF16, 7168, 2048, 384, 2048)[0] == "rows"  # a pick's inputs are too many for registers
    assert moe_path(9, 4, BF16, BF16, 96, 128, 24)[0] == "slices"
    assert moe_path(9, 4, BF16, BF16, 32 * 229, 128, 24)[0] == "rows"  # no equal slices


@pytest.mark.parametrize("rows", [5, 67])
def test_every_feature_has_a_block_and_every_pick_room(rows):
    build = slices_build(rows, 8, BF16, BF16, *RANK)
    constants = dict(build.defines)
    blocks, threads = slices_grid(build)
    assert (constants["PASSES"], blocks, threads) == (1, 128, 384)
    assert blocks * constants["FEATURES"] == 7168
    weights = 11 * constants["FEATURES"] * 256 // 2
    assert weights + rows * 9 * constants["FEATURES"] * 4 < slices_bytes(build, rows, 8) <= 227 * 1024
    assert slices_bytes(build, rows + 1, 8) > slices_bytes(build, rows, 8)


def by_other_kernels(monkeypatch, case):
    """The case by moe_down and moe_sum."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "moe_path", lambda num_rows, top_k, *shape, **_: ("rows", (rows_build(*shape),)))
        return moe_int4(**case)


@gpu
@pytest.mark.parametrize("rows", [5, 8, 9, 17, 33, 64, 67])
def test_a_rank_has_the_bits_of_the_kernels_that_it_replaces(rows, monkeypatch):
    case = skipping(new_case(rows, shared=True, device="cuda", **K26))
    case["expert_ids"][:, 1] = 5  # up to 9 tiles of picks for one expert
    out = moe_int4(**case)
    assert torch.equal(out, by_other_kernels(monkeypatch, case))
    turned = case | {"weights": case["weights"].roll(1, dims=1)}
    assert not torch.equal(moe_int4(**turned), out)


@gpu
@pytest.mark.parametrize(
    ("dtype", "scale", "sizes"),
    [
        (BF16, BF16, {"width": 256, "inner": 64}),
        (F16, F32, {"width": 256, "inner": 128, "shared": True}),
        (F16, BF16, {"width": 96, "inner": 256}),
        (BF16, F16, {"width": 7168, "inner": 128, "shared": True}),
        (BF16, F32, {"width": 2560, "inner": 256, "num_experts": 300, "top_k": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [5, 33, 130])
def test_formats_and_widths(dtype, scale, sizes, rows, monkeypatch):
    case = new_case(rows, dtype=dtype, scale=scale, device="cuda", **sizes)
    out = moe_int4(**case)
    assert_right(case, out)
    assert torch.equal(out, by_other_kernels(monkeypatch, case))


@gpu
@pytest.mark.parametrize("rows", [9, 40, 67])
def test_rows_alone_and_in_a_batch_are_the_same(rows):
    case = new_case(rows, shared=True, device="cuda", **K26)
    case["expert_ids"][:, 0] = 7
    together = moe_int4(**case)
    for some in (slice(0, 5), slice(1, 7), slice(3, rows)):
        few = {name: case[name][some] for name in ("x", "expert_ids", "weights")}
        assert torch.equal(moe_int4(**(case | few)), together[some])
    assert not torch.equal(moe_int4(**(case | {"x": case["x"].roll(1, dims=0)})), together)

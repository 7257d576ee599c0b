"""moe_int4 of one to four rows of narrow INT4 experts, which has kernels of its own."""

import re
import subprocess

import pytest
import torch
from cuda import pathfinder

from kdlab.kernels import jit
from kdlab.kernels.moe_builds import FEW_ROWS, few_build, moe_path, rows_build
from kdlab.kernels.moe_int4 import moe_int4
from kdlab.kernels.moe_slices import slices_build
from tests.kernels.compare import assert_within_budget, guarded_allocations
from tests.kernels.moe_cases import BF16, F16, F32, assert_right, new_case, one_pick_at_a_time, skipping

gpu = pytest.mark.gpu
FORMATS = [(BF16, BF16), (BF16, F16), (F16, F32), (F16, F16)]
WIDTHS = [(256, 128), (512, 256), (768, 64), (1024, 128)]
K26 = {"width": 7168, "inner": 256, "num_experts": 384, "top_k": 8}
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["routed", "shared"])


# ---- on the CPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ({}, "few"),
        ({"num_rows": FEW_ROWS + 1}, "slices"),
        ({"top_k": 9}, "slices"),  # a lane a pick
        ({"arch": "sm_80"}, "rows"),  # less shared memory
        ({"inner": 2048}, "rows"),  # wide experts keep every multiprocessor busy as they are
        ({"inner": 96}, "rows"),
        ({"width": 96}, "slices"),
        ({"width": 8448}, "slices"),  # more than 16 warps
        ({"shared": 512}, "slices"),
        ({"dtype": F32}, "rows"),
        ({"scale": None}, "rows"),
        ({"dtype": F16, "scale": F32, "width": 256, "inner": 128, "shared": 128}, "few"),
    ],
)
def test_few_rows_of_narrow_experts_have_their_own_kernels(shape, path):
    k26 = {"num_rows": FEW_ROWS, "dtype": BF16, "scale": BF16, "shared": 256} | K26
    found, (build, *_) = moe_path(**(k26 | shape))
    assert found == path
    assert (build.file == "moe_few_rows.cu") == (path == "few")


def test_copies_are_no_illegal_instructions(tmp_path):
    tool = pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is missing (package nvidia-cuda-nvdisasm)")
    shapes = [(F16, F32, 256, 128, 24, 128), (BF16, BF16, 512, 256, 24, 0), (BF16, BF16, 7168, 256, 384, 0)]
    builds = [few_build(*shape) for shape in shapes] + [rows_build(F16, F32, 64, 1024, 5)]
    builds += [slices_build(33, 8, *shape) for shape in (shapes[0], (BF16, BF16, 7168, 256, 384, 256))]
    for cubin in jit.compile_all([(build, "sm_90a") for build in builds], workers=2).values():
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubin.content)
        code = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
        assert "LDGSTS" in code
        assert not re.search(r"LDGSTS\S* \[R\d+\+UR", code)  # see Slots in the source


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile what these tests launch side by side: one after another takes longer than all the rest."""
    if not torch.cuda.is_available():
        return
    shapes = [(*form, 256, 128, 24) for form in FORMATS] + [(BF16, BF16, *width, 24) for width in WIDTHS]
    shapes.append((BF16, BF16, 7168, 256, 384))
    builds = {few_build(*shape, shared) for shape in shapes for shared in (0, max(128, shape[3]))} - {None}
    jit.compile_all([(build, jit.arch_of(torch.device("cuda"))) for build in builds], workers=8)


def rows_of(case, rows):
    return case | {name: case[name][rows] for name in ("x", "expert_ids", "weights")}


def assert_rows_stand_alone(case, windows):
    """Rows together have the bits of each alone; with another row's picks they would not."""
    alone = [moe_int4(**rows_of(case, [row])) for row in range(len(case["x"]))]
    for rows in windows:
        assert torch.equal(moe_int4(**rows_of(case, rows)), torch.cat([alone[row] for row in rows]))
    turned = case | {"expert_ids": case["expert_ids"].roll(1, dims=0)}
    assert not torch.equal(moe_int4(**rows_of(turned, [0, 1])), torch.cat(alone[:2]))


@gpu
@SHARED
@pytest.mark.parametrize(("dtype", "scale"), FORMATS, ids=str)
def test_formats(dtype, scale, shared):
    for num_rows in range(1, FEW_ROWS + 1):
        assert_right(new_case(num_rows, dtype=dtype, scale=scale, shared=shared, device="cuda"))


@gpu
@pytest.mark.parametrize(("width", "inner"), WIDTHS)
def test_widths(width, inner):
    case = new_case(FEW_ROWS, width=width, inner=inner, shared=inner > 64, device="cuda")
    assert_right(case)
    assert_rows_stand_alone(case, [[3, 1], [0, 1, 2, 3]])


@gpu
@SHARED
def test_one_rank_of_k26(shared):
    case = new_case(8, shared=shared, device="cuda", **K26)
    case["expert_ids"][1, :4] = case["expert_ids"][0, 4:]  # an expert of several rows, in other slots
    assert_rows_stand_alone(case, [[7, 3], [0, 1], [1, 0, 2], [4, 5, 6, 7]])
    assert_right(rows_of(case, [0]))
    assert_right(rows_of(case, [0, 1, 2, 3]))


@gpu
@SHARED
def test_skipped_picks_and_an_expert_picked_twice(shared):
    case = skipping(new_case(9, shared=shared, device="cuda"))
    assert_rows_stand_alone(case, [[row, row + 1, row + 2, row + 3] for row in range(6)] + [[2, 2], [0, 0, 2]])
    if not shared:
        for rows in ([0, 1, 2, 3], [4], [2]):
            some = rows_of(case, rows)
            out = moe_int4(**some)
            assert_within_budget(out, one_pick_at_a_time(some), moe_int4(**some, impl="reference"))
        assert torch.equal(out, torch.zeros_like(out))  # of a row whose picks are all skipped


@gpu
def test_unknown_values_stay_in_their_row():
    case = new_case(FEW_ROWS, shared=True, device="cuda")
    case["expert_ids"][:] = case["expert_ids"][0]  # all rows are columns of the same products
    clean = moe_int4(**case)
    case["x"][2] = torch.nan
    out = moe_int4(**case)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])
    # Weights of experts that nobody picked, and of skipped picks, are never looked at.
    case = rows_of(skipping(new_case(9, device="cuda")), [1, 2, 3, 4])
    clean, ids = moe_int4(**case), case["expert_ids"]
    skipped = (ids < 0) | (ids >= 24)
    unpicked = torch.ones(24, dtype=torch.bool, device="cuda")
    unpicked[ids[~skipped].long()] = False
    case["experts"].gate_up_scale[unpicked] = torch.nan
    case["experts"].down_scale[unpicked] = torch.nan
    case["weights"][skipped] = torch.nan
    assert torch.equal(moe_int4(**case), clean)
    case["experts"].down_scale[int(ids[3, 0])] = torch.nan
    assert moe_int4(**case).isnan().any()


@gpu
def test_nothing_is_written_beside_the_outputs():
    for num_rows in (1, 3):
        case = new_case(num_rows, shared=True, device="cuda")
        with guarded_allocations() as check:
            out = moe_int4(**case)
        check()
        assert_right(case, out)

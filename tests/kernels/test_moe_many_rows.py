"""moe_int4 of many rows: how many picks an expert has decides its tiles, and changes nobody's result."""

import pytest
import torch

from kdlab.kernels import jit
from kdlab.kernels.moe_builds import MANY_ROWS, MANY_ROWS_WHOLE, WIDE_ROWS, many_build, moe_path, most_tiles
from kdlab.kernels.moe_int4 import moe_int4
from tests.kernels.compare import assert_within_budget, guarded_allocations
from tests.kernels.moe_cases import BF16, F16, F32, assert_right, new_case, one_pick_at_a_time, skipping

gpu = pytest.mark.gpu
FORMATS = [(BF16, BF16), (F16, F16)]
WIDTHS = [(512, 128), (256, 384), (768, 128)]
COUNTS = (0, 1, 7, 8, 9, 16, 17, 23, 24, 25, 40, 41, 47, 48, 49, 71, 72, 73, 95, 96, 97, 145)
"""Picks of an expert around every edge of eights and tiles."""
BOTH = pytest.mark.parametrize("num_rows", [MANY_ROWS, WIDE_ROWS])
# ---- on the CPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_rows",
    [2, MANY_ROWS - 1, MANY_ROWS, MANY_ROWS_WHOLE - 1, MANY_ROWS_WHOLE, WIDE_ROWS - 1, WIDE_ROWS, 2080],
)
def test_the_path_of_int4_experts_depends_on_the_number_of_rows(num_rows):
    for shape in ((7168, 256, 384), (7168, 2048, 48), (256, 384, 5), (256, 128, 24)):
        path, (build, *_) = moe_path(num_rows, 8, BF16, BF16, *shape)
        assert (path == "many") == (num_rows >= (MANY_ROWS if shape[1] <= 256 else MANY_ROWS_WHOLE))
        assert (build.file == "moe_many_rows.cu") == (path == "many")
        if path == "many":
            assert build == many_build(BF16, BF16, *shape, wide=num_rows >= WIDE_ROWS)
        assert moe_path(num_rows, 8, BF16, BF16, *shape, arch="sm_80")[0] == "rows"
        assert moe_path(num_rows, 8, BF16, None, *shape)[0] == "rows"
        assert moe_path(num_rows, 8, F32, BF16, *shape)[0] == "rows"


@pytest.mark.parametrize(
    "shape", [(BF16, BF16, 96, 128), (BF16, BF16, 256, 96), (BF16, F16, 256, 128), (F16, F32, 256, 128)]
)
def test_other_widths_and_scales_take_the_path_of_few_rows(shape):
    assert many_build(*shape, 24, wide=True) is None
    assert moe_path(MANY_ROWS, 8, *shape, 24)[0] != "many"


@pytest.mark.parametrize("eights", [3, 6])
def test_the_table_has_room_for_every_tile(eights):
    for seed in range(50):
        counts = torch.randint(0, 1 + 3 * seed, (24,), generator=torch.Generator().manual_seed(seed))
        tiles = [-(-n // (8 * eights)) for n in counts.tolist()]
        assert sum(tiles) <= most_tiles(int(counts.sum()), 24, 8 * eights)
    assert most_tiles(24 * (8 * eights + 1), 24, 8 * eights) >= 48  # a full tile and one more pick for everyone


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile what these tests launch side by side."""
    if not torch.cuda.is_available():
        return
    shapes = [(dtype, scale, 256, 128, 24) for dtype, scale in FORMATS] + [(BF16, BF16, 7168, 256, 96)]
    shapes += [(F16, F16, *widths, 5) for widths in WIDTHS]
    builds = [many_build(*shape, wide=wide) for shape in shapes for wide in (False, True)]
    jit.compile_all([(build, jit.arch_of(torch.device("cuda"))) for build in builds], workers=8)


def counted(case, counts=COUNTS):
    """Give expert e counts[e] picks, in slot 0 and 1 of rows drawn at random; what is left is nobody's."""
    ids = case["expert_ids"]
    assert ids.numel() >= sum(counts)
    picked = torch.cat([torch.full((n,), expert) for expert, n in enumerate(counts)])
    flat = torch.full((ids.numel(),), -1)
    flat[: len(picked)] = picked
    order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(3))
    ids.copy_(flat[order].view(ids.shape).int())
    return case


@gpu
@pytest.mark.parametrize("num_rows", [MANY_ROWS, MANY_ROWS + 1, 264, WIDE_ROWS - 1, WIDE_ROWS, 2080])
def test_many_rows(num_rows):
    assert_right(new_case(num_rows, device="cuda"))
    assert_right(new_case(num_rows, shared=True, device="cuda"))


@gpu
@pytest.mark.parametrize("num_rows", [309, WIDE_ROWS])
def test_experts_with_any_number_of_picks(num_rows):
    case = counted(new_case(num_rows, device="cuda"))
    found = torch.bincount(case["expert_ids"].flatten().long() + 1, minlength=25)[1:]
    assert found.tolist()[: len(COUNTS)] == list(COUNTS)
    out = moe_int4(**case)
    assert_within_budget(out, one_pick_at_a_time(case), moe_int4(**case, impl="reference"))


@gpu
@BOTH
def test_all_rows_with_one_expert(num_rows):
    case = new_case(num_rows, device="cuda")
    case["expert_ids"][:] = 23
    assert_right(case)


@gpu
@BOTH
@pytest.mark.parametrize(("dtype", "scale"), FORMATS, ids=str)
def test_every_format(dtype, scale, num_rows):
    assert_right(new_case(num_rows, dtype=dtype, scale=scale, device="cuda"))


@gpu
@pytest.mark.parametrize("num_rows", [MANY_ROWS_WHOLE, WIDE_ROWS])
@pytest.mark.parametrize(("width", "inner"), WIDTHS, ids=str)
def test_other_slabs_and_tiles(width, inner, num_rows):
    assert_right(new_case(num_rows, dtype=F16, scale=F16, width=width, inner=inner, num_experts=5, device="cuda"))


@gpu
@pytest.mark.parametrize("num_rows", [264, WIDE_ROWS])
def test_k26_width_of_one_rank(num_rows):
    assert_right(new_case(num_rows, width=7168, inner=256, num_experts=96, top_k=8, shared=True, device="cuda"))


def in_company(case, total, seed, **extra):
    """What the case's rows give as rows 37.. of `total`: expert 5 has full tiles beside narrow ones."""
    others, rows = new_case(total, seed=seed, device="cuda", **extra), slice(37, 37 + MANY_ROWS)
    others["expert_ids"][:, 0] = 5
    others["expert_ids"][:, 1] += (others["expert_ids"][:, 1] == 5).int()
    for name in ("x", "expert_ids", "weights"):
        others[name][rows] = case[name]
    return moe_int4(**(others | {name: case[name] for name in ("experts", "shared") if name in case}))[rows]


@gpu
@pytest.mark.parametrize("extra", [{}, {"dtype": F16, "scale": F16}, {"shared": True}], ids=str)
def test_a_row_does_not_depend_on_the_others(extra):
    case = new_case(MANY_ROWS, device="cuda", **extra)
    first = in_company(case, 2 * MANY_ROWS, 1, **extra)
    assert torch.equal(in_company(case, 2 * MANY_ROWS, 2, **extra), first)
    if "shared" not in extra:  # the bits of that one may depend on the number of rows
        assert torch.equal(moe_int4(**case), first)
    wide = in_company(case, WIDE_ROWS, 3, **extra)
    assert torch.equal(in_company(case, WIDE_ROWS, 4, **extra), wide)
    swapped = case | {"expert_ids": case["expert_ids"].roll(1, dims=0)}
    assert not torch.equal(in_company(swapped, 2 * MANY_ROWS, 1, **extra), first)


@gpu
def test_inert_rows_and_ids_outside():
    case = skipping(new_case(MANY_ROWS, device="cuda"))
    case["expert_ids"][50:60] = -1
    out = moe_int4(**case)
    assert_within_budget(out, one_pick_at_a_time(case), moe_int4(**case, impl="reference"))
    assert not out[50:60].any()
    picked = torch.zeros(25, dtype=torch.bool, device="cuda")
    picked[case["expert_ids"].clamp(-1, 24).long()[case["expert_ids"] >= 0]] = True
    case["experts"].gate_up_scale[~picked[:24]] = torch.nan
    case["weights"][(case["expert_ids"] < 0) | (case["expert_ids"] >= 24)] = torch.nan
    case["x"][50:60] = torch.nan
    clean = out.clone()
    assert torch.equal(moe_int4(**case), clean)
    nobody = case | {"expert_ids": torch.full_like(case["expert_ids"], -1)}
    assert not moe_int4(**nobody).any()


@gpu
def test_unknown_values_stay_in_their_row():
    case = new_case(MANY_ROWS, device="cuda")
    clean = moe_int4(**case)
    case["x"][7], case["x"][20, 3] = torch.nan, torch.inf
    out = moe_int4(**case)
    bad = torch.zeros(MANY_ROWS, dtype=torch.bool, device="cuda")
    bad[7] = bad[20] = True
    assert not out[bad].isfinite().all(-1).any()
    assert torch.equal(out[~bad], clean[~bad])


@gpu
@BOTH
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15])
def test_extreme_values_and_scales(size, num_rows):
    case = new_case(num_rows, device="cuda")
    experts = case["experts"]
    experts.gate_up_packed[:8] = 0  # -8 throughout
    experts.gate_up_packed[8:16] = -1  # 7 throughout
    experts.down_scale.mul_(size)
    case["x"][::3] *= 1e-3
    assert_right(case)


@gpu
def test_nothing_is_written_beside_the_outputs():
    for extra in ({}, {"width": 512, "dtype": F16, "scale": F16, "num_experts": 5}):
        case = new_case(MANY_ROWS, device="cuda", **extra)
        with guarded_allocations() as check:
            out = moe_int4(**case)
        check()
        assert_right(case, out)


@gpu
@pytest.mark.parametrize("shared", [False, True])
def test_a_graph_follows_its_inputs(shared):
    case, other = (new_case(MANY_ROWS, seed=seed, shared=shared, device="cuda") for seed in (0, 9))
    moe_int4(**case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = moe_int4(**case)
        second = moe_int4(**(case | {"x": first}))
    for name in ("x", "expert_ids", "weights"):
        case[name].copy_(other[name])
    case["expert_ids"][3:9, 0] = -1
    for _ in range(2):
        first.fill_(torch.nan)
        graph.replay()
        assert torch.equal(first, moe_int4(**case))
        assert torch.equal(second, moe_int4(**(case | {"x": first})))


@gpu
@BOTH
def test_the_shared_expert_runs_beside_the_others_on_any_stream(num_rows):
    case = new_case(num_rows, shared=True, device="cuda")
    want = moe_int4(**case)
    assert not torch.equal(moe_int4(**{name: value for name, value in case.items() if name != "shared"}), want)
    torch.cuda.synchronize()
    outs, streams = [], [torch.cuda.Stream() for _ in range(2)]
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(moe_int4(**case))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)


@gpu
def test_the_host_does_not_wait_and_no_memory_is_taken():
    case = new_case(MANY_ROWS, shared=True, device="cuda")
    for _ in range(2):
        moe_int4(**case)
    taken = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            moe_int4(**case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_reserved() == taken

"""moe_int4 against float64: every tile edge, every weight format, skipped picks, rows that know nothing of others."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdlab.errors import ArgumentError, NotSupported, ShapeError, UnsupportedDevice
from kdlab.kernels import jit
from kdlab.kernels import moe_int4 as module
from kdlab.kernels.experts import PackedExperts
from kdlab.kernels.moe_builds import few_build, rows_build
from kdlab.kernels.moe_int4 import expected_experts, moe_int4, moe_int4_cost
from kdlab.kernels.reference import moe_experts
from tests.kernels.compare import assert_within_budget, guarded_allocations
from tests.kernels.moe_cases import BF16, F16, F32, assert_right, new_case, new_experts, one_pick_at_a_time, skipping

gpu = pytest.mark.gpu
WIDTHS = [(96, 32, BF16), (160, 96, None), (64, 1024, F32)]
FORMATS = [(BF16, BF16), (BF16, F16), (F16, F32), (F32, BF16), (BF16, None), (F16, None), (F32, None)]
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512)
# ---- on the CPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [BF16, None])
def test_the_reference_runs_on_the_cpu(scale):
    case = new_case(9, scale=scale)
    assert torch.equal(moe_int4(**case), moe_experts(**case))
    assert_right(case, moe_int4(**case))
    shared = new_case(9, scale=scale, shared=True)
    everyone = torch.zeros(9, 1, dtype=torch.int32)
    alone = moe_experts(shared["x"], everyone, torch.ones(9, 1), shared["shared"])
    assert torch.equal(moe_int4(**shared), moe_int4(**case) + alone)


def test_ids_outside_are_no_experts():
    case = skipping(new_case(9, dtype=F32))
    out = moe_int4(**case)
    assert_within_budget(out, one_pick_at_a_time(case), out)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    nobody = case | {"expert_ids": torch.full_like(case["expert_ids"], -1)}
    assert torch.equal(moe_int4(**nobody), torch.zeros_like(out))


def test_no_rows():
    case = new_case(0, shared=True)
    assert moe_int4(**case).shape == (0, 256)


def test_arguments_that_do_not_fit():
    case = new_case(3, shared=True)
    good = case["experts"]

    def bad_experts(**fields):
        named = {name: getattr(good, name) for name in PackedExperts.__dataclass_fields__}
        return PackedExperts(**(named | fields))

    faults = {
        "x": {"x": case["x"][0]},
        "expert_ids": {"expert_ids": case["expert_ids"][:2]},
        "weights": {"weights": case["weights"][:, :3]},
        "experts": {"experts": good.gate_up_packed},
        "shared": {"shared": new_experts(2, 256, 128, BF16, None, torch.Generator())},
        "shared.gate_up": {"shared": new_experts(1, 256, 128, F16, None, torch.Generator())},
        "experts.gate_up_packed": {"experts": bad_experts(gate_up_packed=good.gate_up_packed.view(torch.uint8))},
        "experts.gate_up_scale": {"experts": bad_experts(gate_up_scale=good.gate_up_scale[..., :7])},
        "experts.down_packed": {"experts": bad_experts(down_packed=good.down_packed[:, :, :8])},
        "experts.down_scale": {"experts": bad_experts(down_scale=good.down_scale.half())},
    }
    for name, fault in faults.items():
        with pytest.raises(ShapeError) as caught:
            moe_int4(**(case | fault))
        assert caught.value.argument == name
    with pytest.raises(ShapeError, match="integer"):
        moe_int4(**(case | {"expert_ids": case["weights"]}))
    with pytest.raises(ArgumentError, match="impl"):
        moe_int4(**case, impl="triton")
    with pytest.raises(UnsupportedDevice):
        moe_int4(**case, impl="cuda")


def operands(case):
    """The arguments of the operator."""
    experts, shared = case["experts"], case.get("shared")
    routed = (experts.gate_up_packed, experts.gate_up_scale, experts.down_packed, experts.down_scale)
    alone = (None, None) if shared is None else (shared.gate_up, shared.down)
    return (case["x"], case["expert_ids"], case["weights"], *routed, *alone)


def test_fake_tensors_have_the_kernels_shape():
    with FakeTensorMode():
        out = module._moe_int4(*operands(new_case(5, shared=True)))
        assert (out.shape, out.dtype) == ((5, 256), BF16)


def test_cost_counts_distinct_experts():
    ids = torch.tensor([[0, 1], [1, -1], [7, 0]])
    expert = 3 * 7168 * 2048 // 2 + 3 * 7168 * 2048 // 32 * 2
    assert expert == 24_772_608  # without the 24 bytes of three weight_shape tensors
    one = moe_int4_cost(ids, 7168, 2048)
    rows = 2 * 3 * 7168 * 2 + 8 * 6
    assert (one.bytes, one.flops) == (3 * expert + rows, 5 * 6 * 7168 * 2048)
    assert moe_int4_cost(ids, 7168, 2048, distinct=1.5).bytes == expert * 3 // 2 + rows
    with_shared = moe_int4_cost(ids, 7168, 2048, shared=True)
    assert with_shared.bytes - one.bytes == 6 * 7168 * 2048
    assert with_shared.flops - one.flops == 3 * 6 * 7168 * 2048


def test_expected_experts_of_independent_rows():
    published = {1: 8, 2: 15.8, 8: 59.5, 17: 115.5, 33: 192.3, 65: 286.3}
    assert {rows: round(expected_experts(rows, 8, 384), 1) for rows in published} == published
    assert expected_experts(33, 8, 384, correlation=0.7) < expected_experts(33, 8, 384) / 2
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(200, 33, 384, generator=generator).topk(8).indices.flatten(1)
    mean = torch.tensor([float(ids.unique().numel()) for ids in drawn]).mean().item()
    assert mean == pytest.approx(expected_experts(33, 8, 384), rel=0.01)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile what these tests launch side by side: one after another takes longer than all the rest."""
    if not torch.cuda.is_available():
        return
    builds = {rows_build(dtype, scale, 256, 128, 24, shared) for dtype, scale in FORMATS for shared in (0, 128)}
    builds |= {rows_build(dtype, None, 256, 128, 1) for dtype in (BF16, F16, F32)}
    builds |= {rows_build(F16, scale, width, inner, 5) for width, inner, scale in WIDTHS}
    builds |= {rows_build(BF16, BF16, 7168, 256, 384, 256), rows_build(BF16, None, 7168, 256, 1)}
    builds |= {few_build(dtype, scale, 256, 128, 24) for dtype, scale in FORMATS if scale} - {None}
    builds |= {few_build(BF16, BF16, 7168, 256, 384, 256)} - {None}
    jit.compile_all([(build, jit.arch_of(torch.device("cuda"))) for build in builds], workers=8)


@gpu
@pytest.mark.parametrize("num_rows", ROWS)
def test_rows_around_every_tile_edge(num_rows):
    assert_right(new_case(num_rows, shared=True, device="cuda"))


@gpu
@pytest.mark.parametrize("num_rows", [1, 16, 17, 129, 1025])
def test_all_rows_with_one_expert(num_rows):
    case = new_case(num_rows, device="cuda")
    case["expert_ids"][:] = 23
    assert_right(case)


@gpu
@pytest.mark.parametrize(("dtype", "scale"), FORMATS, ids=str)
def test_every_format(dtype, scale):
    for num_rows in (1, 33):
        assert_right(new_case(num_rows, dtype=dtype, scale=scale, shared=scale is None, device="cuda"))


@gpu
@pytest.mark.parametrize(("width", "inner", "scale"), WIDTHS, ids=str)
def test_widths_that_fill_no_tile(width, inner, scale):
    assert_right(new_case(33, dtype=F16, scale=scale, width=width, inner=inner, num_experts=5, device="cuda"))


@gpu
@pytest.mark.parametrize("num_rows", [1, 8, 33, 128])
def test_k26_width_of_one_rank(num_rows):
    sizes = {"width": 7168, "inner": 256, "num_experts": 384, "top_k": 8}
    assert_right(new_case(num_rows, shared=True, device="cuda", **sizes))


@gpu
@pytest.mark.parametrize("scale", [BF16, None])
def test_ids_outside_are_no_experts_on_the_gpu(scale):
    case = skipping(new_case(9, scale=scale, device="cuda"))
    out = moe_int4(**case)
    assert_within_budget(out, one_pick_at_a_time(case), moe_int4(**case, impl="reference"))
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    wide = case | {"expert_ids": case["expert_ids"].long() + 2**33 * (case["expert_ids"] < 0)}
    assert torch.equal(moe_int4(**wide), out)  # i64 ids do not wrap round into the range
    nobody = case | {"expert_ids": torch.full_like(case["expert_ids"], -1)}
    assert torch.equal(moe_int4(**nobody), torch.zeros_like(out))
    assert moe_int4(**new_case(0, scale=scale, device="cuda")).shape == (0, 256)


@gpu
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15])
def test_extreme_values_and_scales(size):
    case = new_case(17, device="cuda")
    experts = case["experts"]
    experts.gate_up_packed[:8] = 0  # -8 throughout
    experts.gate_up_packed[8:16] = -1  # 7 throughout
    experts.down_packed[::2] = 0
    experts.down_scale.mul_(size)
    case["x"][::3] *= 1e-3
    assert_right(case)


@gpu
def test_a_row_does_not_depend_on_the_others():
    for extra in ({}, {"shared": True}, {"scale": None}, {"dtype": F32}):
        case = new_case(65, device="cuda", **extra)
        case["expert_ids"][:, 0] = 5  # more than one tile of rows, and narrow tiles elsewhere
        case["expert_ids"][:, 1] += (case["expert_ids"][:, 1] == 5).int()
        together = moe_int4(**case)
        for row in (0, 31, 60):
            five = {name: case[name][row : row + 5] for name in ("x", "expert_ids", "weights")}  # too many for "few"
            assert torch.equal(moe_int4(**(case | five)), together[row : row + 5])
        swapped = case | {"expert_ids": case["expert_ids"].roll(1, dims=0)}
        assert not torch.equal(moe_int4(**swapped), together)  # the comparison can fail


@gpu
def test_unknown_values_stay_in_their_row():
    case = new_case(33, shared=True, device="cuda")
    clean = moe_int4(**case)
    case["x"][7], case["x"][20, 3] = torch.nan, torch.inf
    out = moe_int4(**case)
    bad = torch.zeros(33, dtype=torch.bool, device="cuda").index_fill_(0, torch.tensor([7, 20], device="cuda"), True)
    assert not out[bad].isfinite().all(-1).any()
    assert torch.equal(out[~bad], clean[~bad])
    # Weights of experts that nobody picked, and of skipped picks, are never looked at.
    case = skipping(new_case(9, device="cuda"))
    clean = moe_int4(**case)
    picked = torch.zeros(25, dtype=torch.bool, device="cuda")
    picked[case["expert_ids"].clamp(-1, 24).long()[case["expert_ids"] >= 0]] = True
    case["experts"].gate_up_scale[~picked[:24]] = torch.nan
    case["weights"][(case["expert_ids"] < 0) | (case["expert_ids"] >= 24)] = torch.nan
    assert torch.equal(moe_int4(**case), clean)
    case["experts"].gate_up_scale[int(case["expert_ids"][8, 0])] = torch.nan
    assert moe_int4(**case).isnan().any()


@gpu
def test_nothing_is_written_beside_the_outputs():
    for extra in ({}, {"width": 96, "inner": 32, "dtype": F16, "num_experts": 5}):
        case = new_case(33, shared=True, device="cuda", **extra)
        with guarded_allocations() as check:
            out = moe_int4(**case)
        check()
        assert_right(case, out)


@gpu
def test_a_graph_follows_its_inputs():
    case, other = new_case(17, shared=True, device="cuda"), new_case(17, seed=9, device="cuda")
    moe_int4(**case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_int4(**case)
    for name in ("x", "expert_ids", "weights"):
        case[name].copy_(other[name])
    case["expert_ids"][3:9, 0] = -1
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, moe_int4(**case))
    assert_right(case, out)


@gpu
def test_the_host_does_not_wait():
    case = new_case(17, shared=True, device="cuda")
    moe_int4(**case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe_int4(**case)
        with pytest.raises(RuntimeError, match="synchroniz"):
            moe_int4(**case, impl="reference")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_operator_is_well_formed():
    for shared in (True, False):
        torch.library.opcheck(torch.ops.kdlab.moe_int4.default, operands(new_case(5, shared=shared, device="cuda")))


@gpu
def test_rows_and_weights_at_odd_places():
    case = new_case(17, device="cuda")
    wide = torch.zeros(17, 300, dtype=BF16, device="cuda")
    wide[:, 3:259] = case["x"]
    assert torch.equal(moe_int4(**(case | {"x": wide[:, 3:259]})), moe_int4(**case))
    flat = torch.zeros(17 * 256 + 1, dtype=BF16, device="cuda")
    flat[1:] = case["x"].flatten()
    assert torch.equal(moe_int4(**(case | {"x": flat[1:].view(17, 256)})), moe_int4(**case))
    experts = case["experts"]
    turned = experts.down_packed.transpose(0, 1).contiguous().transpose(0, 1)
    rows = PackedExperts(experts.gate_up_packed, experts.gate_up_scale, turned, experts.down_scale)
    with pytest.raises(ShapeError, match="contiguous"):
        moe_int4(**(case | {"experts": rows}))
    shifted = torch.zeros(experts.down_packed.numel() + 1, dtype=torch.int32, device="cuda")[1:]
    rows = PackedExperts(
        experts.gate_up_packed, experts.gate_up_scale, shifted.view_as(experts.down_packed), experts.down_scale
    )
    with pytest.raises(ShapeError, match="multiple of 16"):
        moe_int4(**(case | {"experts": rows}))
    with pytest.raises(NotSupported, match="float64"):
        moe_int4(**(case | {"x": case["x"].double()}))
